"""What stands between the convolutions of a video autoencoder, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from ._ops import ops
from .fakes import fake


def add_norm_silu_pad(
    x: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 1e-8,
    norm: bool = True,
    silu: bool = True,
    front: int = 0,
    back: int = 0,
    channels_last: bool = False,
) -> Tensor:
    """Sum, root mean square norm over the channels of each position, modulation, SiLU, and padding in time, in float32.

    ``silu(rms_norm(x + bias + residual) · (1 + scale) + shift)``, with copies of the outer frames around it.

    Args:
        x: Input of shape ``[B, C, T, H, W]``, any strides; float32, float16 or bfloat16.
        bias: Shape ``[C]``, or None.
        residual: The shape of ``x``, any strides, or None.
        scale: Shape ``[B, C]``, any strides, or None.
        shift: Like ``scale``, or None.
        eps: Added to the mean of squares.
        norm: False leaves the norm out.
        silu: False leaves the SiLU out.
        front: How many copies of the first frame come before it.
        back: How many copies of the last frame come after it.
        channels_last: Lays the result out as ``torch.channels_last_3d``; otherwise contiguously.

    Returns:
        A new tensor ``[B, C, front + T + back, H, W]`` of the dtype of ``x``.
    """
    return ops.add_norm_silu_pad(x, bias, residual, scale, shift, eps, norm, silu, front, back, channels_last)


def register_fakes() -> None:
    """Tells tracing what the op returns."""

    @fake("add_norm_silu_pad")
    def _(x, bias, residual, scale, shift, eps, norm, silu, front, back, channels_last):
        batch, channels, frames, height, width = x.shape
        memory_format = torch.channels_last_3d if channels_last else torch.contiguous_format
        size = (batch, channels, front + frames + back, height, width)
        return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=memory_format)
