"""diffkern: fused kernels for Hugging Face diffusers pipelines, with one call and a way back.

Example:
    >>> from diffkern import inject_optimized_kernels
    >>> report = inject_optimized_kernels(pipe)
    >>> print(report)
    >>> report.restore()
"""

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
