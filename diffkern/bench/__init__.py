"""Comparing a pipeline with and without kernels: the arms, the clocks, the errors, the results.

The examples and ``diffkern bench`` are written with these pieces. Nothing here is imported by
``import diffkern``.
"""
