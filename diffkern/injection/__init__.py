"""select -> plan -> verify -> patch -> report -> restore."""

from diffkern.injection.inject import forget, inject_optimized_kernels, optimized, plan, restore
from diffkern.injection.proving import InjectionError
from diffkern.injection.report import InjectionReport, Site
from diffkern.injection.state import StrictModeError
from diffkern.verify.measures import Measurement

__all__ = [
    "InjectionError",
    "InjectionReport",
    "Measurement",
    "Site",
    "StrictModeError",
    "forget",
    "inject_optimized_kernels",
    "optimized",
    "plan",
    "restore",
]
