"""Differential fuzzing of every public op; see ``scripts/fuzz_ops.py`` for more of it than a test runs."""
