"""The ops as Triton kernels: one source for NVIDIA, AMD and Intel GPUs, compiled at first use.

Triton itself is imported the first time somebody asks whether this provider is there, and the kernels the
first time one of them is called. In here ``import triton`` means the real Triton, not this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

import torch

from diffkern.providers.base import Kernel, Support
from diffkern.providers.triton.availability import unavailable_reason

# The CPU is listed since Triton's interpreter serves it; without the interpreter `unavailable_reason` says no.
_SUPPORT = Support(frozenset({"cpu", "cuda", "xpu"}))


class TritonProvider:
    """Triton kernels for GPUs, and for the CPU when Triton's interpreter is on."""

    name = "triton"
    support: Mapping[str, Support] = {op: _SUPPORT for op in ("rms_norm", "layer_norm")}

    def unavailable_reason(self, device: torch.device) -> str | None:
        """Returns why Triton cannot run on ``device`` and what to do about it, or None."""
        return unavailable_reason(device)

    def kernel(self, op: str, device: torch.device) -> Kernel:
        """Returns the function of :mod:`diffkern.providers.triton.norm` that is named like the op."""
        return getattr(import_module("diffkern.providers.triton.norm"), op)  # type: ignore[no-any-return]


PROVIDER = TritonProvider()
