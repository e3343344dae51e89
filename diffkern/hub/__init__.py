"""Configuration of what serves which op."""

from diffkern.hub.config import KernelConfig

__all__ = ["KernelConfig"]
