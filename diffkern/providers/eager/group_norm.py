"""group_norm_silu and channel_rms_norm_silu in plain PyTorch.

Half inputs are computed in float32 and rounded once, or where ``round_dtype`` says. Without an activation that
is what torch's own group norm does on the CPU, which is faster than the chain. On CUDA it would round mean and
deviation to the half dtype.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from diffkern.providers.eager.precision import compute_dtype


def group_norm_silu(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    silu: bool,
    per_frame: bool,
    preserve_strides: bool,
) -> Tensor:
    """Computes :func:`diffkern.ops.group_norm_silu`."""
    uniform = all(parameter is None or parameter.dtype == x.dtype for parameter in (weight, bias))
    dtype = x.dtype if uniform and not silu and x.device.type == "cpu" else compute_dtype(x)
    wide = x.to(dtype)
    weight = None if weight is None else weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    if per_frame:
        frames = wide.transpose(1, 2)
        y = _group_norm(frames.flatten(0, 1), num_groups, weight, bias, eps).view(frames.shape).transpose(1, 2)
    else:
        y = _group_norm(wide, num_groups, weight, bias, eps)
    return _finish(F.silu(y) if silu else y, x, torch.preserve_format if preserve_strides else torch.contiguous_format)


def _group_norm(x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return F.group_norm(x, num_groups, weight, bias, eps) if x.numel() else torch.empty_like(x)


def channel_rms_norm_silu(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
    clamp_eps: bool,
    silu: bool,
    round_dtype: torch.dtype | None,
) -> Tensor:
    """Computes :func:`diffkern.ops.channel_rms_norm_silu`."""
    wide = x.to(compute_dtype(x))

    def channels(parameter: Tensor) -> Tensor:
        """Takes ``[C]`` or ``[B, C]``; broadcasts against x."""
        return parameter.to(wide.dtype).reshape(*parameter.shape, *(1,) * (x.ndim - 2))

    if clamp_eps:
        length = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
        y = wide / length.clamp_min(eps) * math.sqrt(x.shape[1])
    else:
        y = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + eps)
    if round_dtype is not None:
        y = y.to(round_dtype).to(wide.dtype)
    if weight is not None:
        y = y * channels(weight)
    if bias is not None:
        if round_dtype is not None:
            y = y.to(x.dtype).to(wide.dtype)
        y = y + channels(bias)
    if scale is not None:
        y = y * (1 + channels(scale))
    if shift is not None:
        y = y + channels(shift)
    return _finish(F.silu(y) if silu else y, x, torch.preserve_format)


def _finish(y: Tensor, x: Tensor, memory_format: torch.memory_format) -> Tensor:
    """``y`` in the dtype of ``x`` and laid out as asked."""
    out = torch.empty_like(x, memory_format=memory_format)
    return y.to(x.dtype) if y.stride() == out.stride() else out.copy_(y)
