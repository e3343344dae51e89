"""Which platform is served by whom, and what is known of that: one table for the docs and ``diffkern doctor``."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Platform:
    """A kind of device.

    Attributes:
        name: What it is called.
        served: The providers that serve it, in order; ``"Hub"`` where a kernel is known for it, if it is asked for.
        evidence: What was run on the hardware, what was only compiled, and what is a mapping alone.
    """

    name: str
    served: str
    evidence: str


_NOT_RUN = "never run on such a card"

NVIDIA_HOPPER = Platform(
    "NVIDIA Hopper (compute capability 9.0)",
    "compiled, Triton, Hub",
    "run on the hardware: compiled and Triton kernels on H100 and H200, tests and benchmarks; the Hub's were not",
)
NVIDIA = Platform(
    "NVIDIA Turing to Blackwell (7.5, 8.0, 8.6, 8.9, 10.0, 12.0)",
    "compiled, Triton, Hub",
    f"only compiled, by the tests: nvcc for 7.5 and 8.0, Triton for 7.5 and 12.0 and, norms, 10.0; {_NOT_RUN}",
)
NVIDIA_VOLTA = Platform(
    "NVIDIA Volta (7.0)",
    "Triton, Hub; compiled with a CUDA 12 toolkit alone (`diffkern build --cuda --arch sm_70`)",
    f"only compiled, by the tests: Triton's norms; nvcc 13 does not know sm_70; {_NOT_RUN}",
)
NVIDIA_OLDER = Platform("NVIDIA before Volta", "plain PyTorch", "mapping alone")
AMD = Platform(
    "AMD CDNA 2 to 4 and RDNA 3 and 4, ROCm",
    "compiled, Triton, Hub",
    "only compiled, by the tests: hipcc for gfx90a and gfx1030, Triton for gfx942, gfx950, gfx1100 and gfx1201; "
    f"{_NOT_RUN}",
)
APPLE = Platform("Apple M-series, Metal (`mps`)", "Hub, plain PyTorch", "mapping alone")
INTEL_XPU = Platform("Intel GPU (`xpu`)", "Triton, Hub, plain PyTorch", "mapping alone")
X86 = Platform(
    "x86-64 CPU",
    "compiled (AVX-512, AVX2 or neither), Hub",
    "run on the hardware: compiled kernels, all tests; of the Hub's, re-creations of their interfaces",
)
ARM = Platform("Arm 64-bit CPU", "compiled, Hub", "mapping alone: meant to build, not tried")
OTHER = Platform("anything else that PyTorch runs on", "plain PyTorch", "mapping alone")

PLATFORMS = (NVIDIA_HOPPER, NVIDIA, NVIDIA_VOLTA, NVIDIA_OLDER, AMD, APPLE, INTEL_XPU, X86, ARM, OTHER)

_BY_TYPE = {"mps": APPLE, "xpu": INTEL_XPU}
_BY_MACHINE = {"x86_64": X86, "amd64": X86, "aarch64": ARM, "arm64": ARM}


def platform_of(device: torch.device) -> Platform:
    """Returns the line of the table that speaks of ``device``, which must be on this machine."""
    if device.type == "cpu":
        return _BY_MACHINE.get(platform.machine().lower(), OTHER)
    if device.type != "cuda":
        return _BY_TYPE.get(device.type, OTHER)
    if torch.version.hip is not None:
        return AMD
    capability = torch.cuda.get_device_capability(device)
    if capability == (9, 0):
        return NVIDIA_HOPPER
    return NVIDIA if capability >= (7, 5) else NVIDIA_VOLTA if capability >= (7, 0) else NVIDIA_OLDER
