"""Kernels of the Hub: which one serves what, where it comes from, and how ours get there."""

from diffkern.hub.config import KernelConfig
from diffkern.hub.mode import Mode

__all__ = ["KernelConfig", "Mode"]
