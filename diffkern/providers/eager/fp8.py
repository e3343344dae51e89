"""Rows in fp8 with one scale each, in plain PyTorch: how they are made, and their product with such a weight."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from diffkern.providers.eager.activation import activation, glu
from diffkern.providers.eager.modulate import gate_residual_norm_modulate, norm_modulate

E4M3 = torch.float8_e4m3fn
#: The largest number of e4m3.
LARGEST = 448.0
#: A row whose largest magnitude is below this is divided by what this gives.
SMALLEST_PEAK = 1e-12

#: Terms of a sum up to which it may stay in the accumulators of the tensor cores, of about 14 bits. Each addition
#: there rounds towards zero: a sum of K terms of one sign comes out too small by 1.6e-5 K on an H100 (7 % here, 13 %
#: at 8192), one of both signs is off by 0.2 % of its root mean square. Below it lie the products that read a norm or
#: attention, whose terms have both signs; above it those that read a GELU. At 3072 terms it takes 13 % less time.
LONGEST_SHORT_SUM = 4096

#: Bytes to which cuBLAS wants every operand of a product in fp8 aligned.
ALIGNMENT = 16

#: Compute capability of the first NVIDIA GPUs that multiply e4m3: Ada, then Hopper.
CAPABILITY = (8, 9)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each row in e4m3, its peak brought to 448, and the scale in float32 that takes it back."""
    x = x.float().contiguous()
    peak = x.abs().amax(dim=-1, keepdim=True).clamp_min(SMALLEST_PEAK)
    return (x * (LARGEST / peak)).to(E4M3), peak / LARGEST


def activation_fp8(x: Tensor, front: Tensor | None, function: str) -> tuple[Tensor, Tensor]:
    """Computes :func:`diffkern.ops.activation_fp8`."""
    y = x if function == "identity" else activation(x.float(), function)
    return quantize_rows(y if front is None else torch.cat([front.to(y.dtype), y], -1))


def norm_modulate_fp8(
    x: Tensor, scale: Tensor | None, shift: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float,
    norm: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes :func:`diffkern.ops.norm_modulate_fp8`."""
    return quantize_rows(norm_modulate(x, scale, shift, weight, bias, eps, norm, 1.0, False, torch.float32))


def gate_residual_norm_modulate_fp8(
    residual: Tensor, x: Tensor, gate: Tensor | None, scale: Tensor | None, shift: Tensor | None,
    weight: Tensor | None, bias: Tensor | None, eps: float, norm: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes :func:`diffkern.ops.gate_residual_norm_modulate_fp8`."""
    new, y = gate_residual_norm_modulate(
        residual, x, gate, scale, shift, weight, bias, eps, norm, 0, 1.0, False, None, torch.float32
    )
    return (new, *quantize_rows(y))


def _and_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose last result comes in rows of fp8, too."""

    @wraps(function)
    def and_rows(*args: Any) -> tuple[Tensor, ...]:
        results = function(*args)
        results = results if isinstance(results, tuple) else (results,)
        return (*results, *quantize_rows(results[-1]))

    return and_rows


glu_and_fp8 = _and_rows(glu)
norm_modulate_and_fp8 = _and_rows(norm_modulate)
gate_residual_norm_modulate_and_fp8 = _and_rows(gate_residual_norm_modulate)


def linear_fp8(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Computes :func:`diffkern.ops.linear_fp8`: in hardware, or on the numbers that the bytes stand for."""
    return multiply_rows(x, x_scale, weight, weight_scale, bias, out_dtype, None)


def multiply_rows(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype,
    out: Tensor | None,
) -> Tensor:  # fmt: skip
    """:func:`linear_fp8`, of a matrix maybe into ``out``, which is contiguous."""
    *leading, width = x.shape
    if len(leading) != 1:
        x_scale = x_scale.reshape(-1, 1)
        x = x.reshape(x_scale.shape[0], width)
    if out_dtype is torch.bfloat16 and fp8_unavailable_reason(x.device) is None and x.numel() > 0:
        short = width <= LONGEST_SHORT_SUM
        if bias is not None:
            # torch takes no bias in float32, and reads one with strides as if it had none.
            bias = aligned(bias.to(torch.bfloat16).contiguous())
        x, x_scale, weight, weight_scale = map(aligned, (x, x_scale, weight, weight_scale))
        y = torch._scaled_mm(
            x, weight.t(), x_scale, weight_scale.t(), bias=bias, out_dtype=out_dtype, use_fast_accum=short, out=out
        )
    else:
        with torch.autocast(x.device.type, enabled=False):  # it would multiply in its own dtype
            y = (x.float() * x_scale) @ (weight.float() * weight_scale).t()
        y = (y if bias is None else y + bias.float()).to(out_dtype)
        y = y if out is None else out.copy_(y)
    return y if len(leading) == 1 else y.view(*leading, y.shape[-1])


def aligned(x: Tensor) -> Tensor:
    """Returns ``x``, or a copy where its memory begins at an address that cuBLAS refuses."""
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


@cache
def fp8_unavailable_reason(device: torch.device) -> str | None:
    """Returns why the hardware of ``device`` has no numbers in e4m3 that torch multiplies, or None."""
    if device.type != "cuda" or torch.version.hip:
        return f"fp8 needs an NVIDIA GPU of compute capability 8.9 or newer, and this is {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        return f"fp8 needs compute capability 8.9 or newer, and this GPU has {capability[0]}.{capability[1]}"
    return None
