"""WHO computes an op: eager, compiled, Triton. See :mod:`diffkern.providers.registry` for the choice."""

from diffkern.providers.base import KERNEL_DTYPES, Kernel, Provider, Request, Support
from diffkern.providers.registry import (
    OPS,
    ORDER,
    Choice,
    NoProviderError,
    explain,
    get_provider,
    requested,
    select,
    use_provider,
)

__all__ = [
    "KERNEL_DTYPES",
    "OPS",
    "ORDER",
    "Choice",
    "Kernel",
    "NoProviderError",
    "Provider",
    "Request",
    "Support",
    "explain",
    "get_provider",
    "requested",
    "select",
    "use_provider",
]
