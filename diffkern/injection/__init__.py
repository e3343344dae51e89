"""plan -> verify -> apply -> report -> restore."""

from diffkern.injection.inject import InjectionError, inject_optimized_kernels, optimized, plan, restore
from diffkern.injection.report import InjectionReport, Measurement, Site
from diffkern.injection.state import StrictModeError

__all__ = [
    "InjectionError",
    "InjectionReport",
    "Measurement",
    "Site",
    "StrictModeError",
    "inject_optimized_kernels",
    "optimized",
    "plan",
    "restore",
]
