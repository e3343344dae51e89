"""Tiny pipelines with random weights, one per architecture, built in memory without a download.

The classes are the real ones of diffusers and transformers, tokenizers included; only the sizes are small.
"""
