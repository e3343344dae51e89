"""The ops as Triton kernels: one source for NVIDIA, AMD and Intel GPUs, compiled at first use.

Triton itself is imported the first time this provider is asked for, and the kernels the
first time one of them is called. In here ``import triton`` means the real Triton, not this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module

import torch

from diffkern.providers.base import ROPE_DTYPES, Kernel, Request, Support, mark_file_errors
from diffkern.providers.eager.fp8 import fp8_unavailable_reason
from diffkern.providers.triton.availability import unavailable_reason

#: Every op, and the module of this package whose function of the same name computes it.
MODULES: Mapping[str, str] = {
    "activation": "activation",
    "activation_fp8": "fp8",
    "add_norm_silu_pad": "add_norm_silu_pad",
    "channel_glu": "activation",
    "channel_rms_norm_silu": "norm",
    "gate_residual": "norm",
    "gate_residual_norm_modulate": "norm",
    "gate_residual_norm_modulate_fp8": "norm",
    "glu": "activation",
    "glu_and_fp8": "fp8",
    "group_norm_silu": "group_norm",
    "joint_qk_norm_rope": "rope",
    "layer_norm": "norm",
    "linear_attention": "linear_attention",
    "norm_modulate": "norm",
    "norm_modulate_fp8": "norm",
    "qk_norm_rope": "rope",
    "rms_norm": "norm",
    "rope": "rope",
    "rope_3d": "rope",
}

# The CPU is listed for Triton's interpreter; without the interpreter `unavailable_reason` says no.
_DEVICES = frozenset({"cpu", "cuda", "xpu"})


def _fp8_refusal(request: Request) -> str | None:
    """Triton has e4m3 where the hardware has it."""
    return fp8_unavailable_reason(request.device) if request.device.type == "cuda" else None


@cache
def _kernel(op: str) -> Kernel:
    return mark_file_errors(getattr(import_module(f"{__name__}.{MODULES[op]}"), op))


class TritonProvider:
    """Triton kernels for GPUs, and for the CPU when Triton's interpreter is on."""

    name = "triton"
    support: Mapping[str, Support] = (
        {op: Support(_DEVICES) for op in MODULES}
        | {op: Support(_DEVICES, ROPE_DTYPES) for op in ("rope", "rope_3d")}
        | {op: Support(_DEVICES, further=_fp8_refusal) for op in MODULES if op.endswith("_fp8")}
    )

    def unavailable_reason(self, device: torch.device) -> str | None:
        """Returns why Triton cannot run on ``device`` and what to do about it, or None."""
        return unavailable_reason(device)

    def kernel(self, op: str, device: torch.device) -> Kernel:
        """Returns the function that is named like the op."""
        return _kernel(op)


PROVIDER = TritonProvider()
