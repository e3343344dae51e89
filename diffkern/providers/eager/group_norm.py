"""The norms of convolutional networks in plain PyTorch: group_norm_silu, channel_rms_norm_silu, add_norm_silu_pad.

Half inputs are computed in float32 and rounded once, or where ``round_dtype`` says. Torch's own group norm is not used:
on the CPU it takes the variance of a channels-last input from the mean square, which loses it far from zero, and on
CUDA it rounds mean and deviation to the half dtype.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from diffkern.providers.eager.precision import compute_dtype, finish


def group_norm_silu(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    add: Tensor | None,
    eps: float,
    silu: bool,
    per_frame: bool,
    preserve_strides: bool,
) -> Tensor:
    """Computes :func:`diffkern.ops.group_norm_silu`."""
    upcast = x.to(compute_dtype(x))
    upcast = upcast if add is None else upcast + _channels(add, upcast)
    groups = upcast.unflatten(1, (num_groups, x.shape[1] // num_groups))
    dims = (2, *range(4 if per_frame else 3, groups.ndim))
    centred = groups - groups.mean(dims, keepdim=True)
    # Torch's mean over many strided elements is off by several roundings, which a small deviation magnifies.
    centred = centred - centred.mean(dims, keepdim=True)
    y = (centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)).flatten(1, 2)
    if weight is not None:
        y = y * _channels(weight, y)
    if bias is not None:
        y = y + _channels(bias, y)
    return finish(F.silu(y) if silu else y, x, x.dtype, preserve_strides)


def _channels(parameter: Tensor, y: Tensor) -> Tensor:
    """``[C]`` or ``[B, C]`` in the dtype of ``y``, so that it broadcasts against it."""
    return parameter.to(y.dtype).reshape(*parameter.shape, *(1,) * (y.ndim - 2))


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

    if clamp_eps:
        length = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
        y = wide / length.clamp_min(eps) * math.sqrt(x.shape[1])
    else:
        y = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + eps)
    if round_dtype is not None:
        y = y.to(round_dtype).to(wide.dtype)
    if weight is not None:
        y = y * _channels(weight, y)
    if bias is not None:
        if round_dtype is not None:
            y = y.to(x.dtype).to(wide.dtype)
        y = y + _channels(bias, y)
    if scale is not None:
        y = y * (1 + _channels(scale, y))
    if shift is not None:
        y = y + _channels(shift, y)
    return finish(F.silu(y) if silu else y, x, x.dtype, True)


def add_norm_silu_pad(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, scale: Tensor | None, shift: Tensor | None, eps: float,
    norm: bool, silu: bool, front: int, back: int, channels_last: bool,
) -> Tensor:  # fmt: skip
    """Computes :func:`diffkern.ops.add_norm_silu_pad`."""
    y = x.to(compute_dtype(x))
    if bias is not None:
        y = y + _channels(bias, y)
    if residual is not None:
        y = y + residual.to(y.dtype)
    if norm:
        y = y * torch.rsqrt(y.square().mean(1, keepdim=True) + eps)
    if scale is not None:
        y = y * (1 + _channels(scale, y))
    if shift is not None:
        y = y + _channels(shift, y)
    y = (F.silu(y) if silu else y).to(x.dtype)
    # Always a new tensor, also of one part.
    y = torch.cat([y[:, :, :1]] * front + [y] + [y[:, :, -1:]] * back, dim=2)
    return y.contiguous(memory_format=torch.channels_last_3d if channels_last else torch.contiguous_format)
