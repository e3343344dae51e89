"""The ops in plain PyTorch: the reference that defines what every other provider must compute.

It runs on any device and in float64, where it is the yardstick of the proofs and of the tests. The matrix products are
those of torch's library, to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from diffkern.providers.base import KERNEL_DTYPES, Kernel, Request, Support
from diffkern.providers.cublaslt import layers
from diffkern.providers.eager import (
    activation,
    fp8,
    group_norm,
    linear_attention,
    modulate,
    norm,
    rope,
)
from diffkern.providers.eager.precision import compute_dtype
from diffkern.providers.signatures import SIGNATURES

__all__ = ["PROVIDER", "compute_dtype"]

_MODULES = (
    activation,
    fp8,
    group_norm,
    layers,
    linear_attention,
    modulate,
    norm,
    rope,
)

#: Every op there is, computed by the function of that name.
_KERNELS: Mapping[str, Kernel] = {
    op: getattr(module, op) for module in _MODULES for op in SIGNATURES if hasattr(module, op)
}


class EagerProvider:
    """Plain PyTorch: always there, on every device."""

    name = "eager"
    support: Mapping[str, Support] = {
        op: Support(None, KERNEL_DTYPES | {fp8.E4M3 if op == "linear_fp8" else torch.float64}) for op in _KERNELS
    }

    def unavailable_reason(self, device: torch.device) -> str | None:
        """Returns None: plain PyTorch runs wherever the input tensor lives."""
        return None

    def fuses(self, request: Request) -> bool:
        """Whether the library that torch multiplies with computes at once what PyTorch has a chain of ops for."""
        return request.op == "linear_gelu" and layers.may_have_epilogue(request.device.type, *request.dtypes)

    def kernel(self, op: str, device: torch.device) -> Kernel:
        """Returns the function that is named like the op."""
        return _KERNELS[op]


PROVIDER = EagerProvider()
