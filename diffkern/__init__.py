"""diffkern: fused kernels for Hugging Face diffusers pipelines, with one call and a way back.

Example:
    >>> from diffkern import inject_optimized_kernels
    >>> report = inject_optimized_kernels(pipe)
    >>> print(report)
    >>> report.restore()
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffkern.hub import KernelConfig
    from diffkern.injection import (
        InjectionError,
        InjectionReport,
        StrictModeError,
        forget,
        inject_optimized_kernels,
        optimized,
        plan,
        restore,
    )
    from diffkern.providers import NoProviderError, use_provider

__version__ = "0.1.0"

__all__ = [
    "InjectionError",
    "InjectionReport",
    "KernelConfig",
    "NoProviderError",
    "StrictModeError",
    "forget",
    "inject_optimized_kernels",
    "optimized",
    "plan",
    "restore",
    "use_provider",
]


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use: the command line shows its help without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from diffkern import hub, injection, providers

    globals().update(
        {name: getattr(part, name) for part in (injection, hub, providers) for name in set(__all__) & set(part.__all__)}
    )
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
