"""Kernels of the Hub: which one serves what, where it comes from, and how ours get there."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffkern.hub.config import KernelConfig
    from diffkern.hub.rule import Mode

__all__ = ["KernelConfig", "Mode"]


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use: ``diffkern hub`` shows its help without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from diffkern.hub import config

    return getattr(config, name)
