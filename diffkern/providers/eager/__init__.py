"""The ops in plain PyTorch: the reference that defines what every other provider must compute.

It runs on any device and in float64, where it is the yardstick of the proofs and of the tests. The matrix products are
those of torch's library, to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import torch

from diffkern.providers.base import KERNEL_DTYPES, Kernel, Request, Support
from diffkern.providers.cublaslt import layers
from diffkern.providers.eager import (
    activation,
    add_norm_silu_pad,
    fp8,
    group_norm,
    linear_attention,
    modulate,
    norm,
    rope,
    rope_qk_norm,
)
from diffkern.providers.eager.precision import compute_dtype

__all__ = ["PROVIDER", "compute_dtype"]

#: Every op there is, and the module whose function of the same name computes it.
_MODULES: Mapping[str, ModuleType] = {
    "activation": activation,
    "activation_fp8": fp8,
    "add_norm_silu_pad": add_norm_silu_pad,
    "channel_glu": activation,
    "channel_rms_norm_silu": group_norm,
    "gate_residual": modulate,
    "gate_residual_norm_modulate": modulate,
    "gate_residual_norm_modulate_and_fp8": fp8,
    "gate_residual_norm_modulate_fp8": fp8,
    "glu": activation,
    "glu_and_fp8": fp8,
    "group_norm_silu": group_norm,
    "joint_qk_norm_rope": rope_qk_norm,
    "layer_norm": norm,
    "linear_attention": linear_attention,
    "linear_fp8": fp8,
    "linear_gelu": layers,
    "norm_modulate": modulate,
    "norm_modulate_and_fp8": fp8,
    "norm_modulate_fp8": fp8,
    "qk_norm_rope": rope_qk_norm,
    "rms_norm": norm,
    "rope": rope,
    "rope_3d": rope,
}


class EagerProvider:
    """Plain PyTorch: always there, on every device."""

    name = "eager"
    support: Mapping[str, Support] = {
        op: Support(None, KERNEL_DTYPES | {fp8.E4M3 if op == "linear_fp8" else torch.float64}) for op in _MODULES
    }

    def unavailable_reason(self, device: torch.device) -> str | None:
        """Returns None: plain PyTorch runs wherever the input tensor lives."""
        return None

    def fuses(self, request: Request) -> bool:
        """Whether the library that torch multiplies with computes at once what PyTorch has a chain of ops for."""
        return request.op == "linear_gelu" and layers.may_have_epilogue(request.device.type, *request.dtypes)

    def kernel(self, op: str, device: torch.device) -> Kernel:
        """Returns the function that is named like the op."""
        return getattr(_MODULES[op], op)  # type: ignore[no-any-return]


PROVIDER = EagerProvider()
