"""rms_norm and layer_norm in plain PyTorch.

Half inputs are computed in float32 and rounded once, or where ``round_dtype`` says. When a single native
torch function computes the very same thing, that one is called, since it is faster than the chain.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from diffkern.providers.eager.precision import compute_dtype, finish


def rms_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, weight_offset: float,
    round_dtype: torch.dtype | None, out_dtype: torch.dtype | None, clamp_eps: bool, preserve_strides: bool,
) -> Tensor:  # fmt: skip
    """Computes :func:`diffkern.ops.rms_norm` over the last dimension."""
    out_dtype = out_dtype or x.dtype
    plain = bias is None and weight_offset == 0.0 and round_dtype is None and not clamp_eps
    if plain and _native_fits(x, (weight,), out_dtype, preserve_strides):
        return F.rms_norm(x, x.shape[-1:], weight, eps).contiguous()  # on a CPU it is laid out as x

    wide = x.to(compute_dtype(x))
    if clamp_eps:
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        y = wide / length.clamp_min(eps) * math.sqrt(x.shape[-1])
    else:
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if round_dtype is not None:
        y = y.to(round_dtype).to(wide.dtype)
    if weight is not None:
        y = y * (weight.to(wide.dtype) + weight_offset)
    if bias is not None:
        if round_dtype is not None:
            y = y.to(out_dtype).to(wide.dtype)
        y = y + bias.to(wide.dtype)
    return finish(y, x, out_dtype, preserve_strides)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out_dtype: torch.dtype | None,
    preserve_strides: bool,
) -> Tensor:  # fmt: skip
    """Computes :func:`diffkern.ops.layer_norm` over the last dimension."""
    out_dtype = out_dtype or x.dtype
    if _native_fits(x, (weight, bias), out_dtype, preserve_strides):
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    wide = x.to(compute_dtype(x))
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(wide.dtype)
    if bias is not None:
        y = y + bias.to(wide.dtype)
    return finish(y, x, out_dtype, preserve_strides)


def _native_fits(x: Tensor, params: tuple[Tensor | None, ...], out_dtype: torch.dtype, preserve_strides: bool) -> bool:
    """Whether torch's own fused norm, which is uniform in dtype, gives the same."""
    uniform = out_dtype == x.dtype and all(p is None or p.dtype == x.dtype for p in params)
    return uniform and (not preserve_strides or x.is_contiguous())
