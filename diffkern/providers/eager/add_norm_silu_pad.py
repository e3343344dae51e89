"""add_norm_silu_pad in plain PyTorch, computed in float32 and rounded once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from diffkern.providers.eager.precision import compute_dtype


def add_norm_silu_pad(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, scale: Tensor | None, shift: Tensor | None, eps: float,
    norm: bool, silu: bool, front: int, back: int, channels_last: bool,
) -> Tensor:  # fmt: skip
    """Computes :func:`diffkern.ops.add_norm_silu_pad`."""
    y = x.to(compute_dtype(x))

    def channels(parameter: Tensor) -> Tensor:
        """Takes ``[C]`` or ``[B, C]``; broadcasts against x."""
        return parameter.to(y.dtype)[..., None, None, None]

    if bias is not None:
        y = y + channels(bias)
    if residual is not None:
        y = y + residual.to(y.dtype)
    if norm:
        y = y * torch.rsqrt(y.square().mean(1, keepdim=True) + eps)
    if scale is not None:
        y = y * (1 + channels(scale))
    if shift is not None:
        y = y + channels(shift)
    y = (F.silu(y) if silu else y).to(x.dtype)
    # Always a new tensor, also of one part.
    y = torch.cat([y[:, :, :1]] * front + [y] + [y[:, :, -1:]] * back, dim=2)
    return y.contiguous(memory_format=torch.channels_last_3d if channels_last else torch.contiguous_format)
