"""The norms of convolutional networks, with the SiLU that follows them."""

from __future__ import annotations

import torch
from torch import Tensor

from ._ops import ops
from .fakes import fake


def group_norm_silu(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    add: Tensor | None = None,
    eps: float = 1e-5,
    silu: bool = True,
    per_frame: bool = False,
    preserve_strides: bool = False,
) -> Tensor:
    """Group normalisation and SiLU of it, computed in float32.

    Args:
        x: Input of shape ``[B, C, ...]``, any strides; float32, float16 or bfloat16.
        num_groups: Number of groups, a divisor of ``C``.
        weight: Shape ``[C]``, or None.
        bias: Shape ``[C]``, or None.
        add: Added to ``x`` before the norm; shape ``[B, C]``, any strides, or None.
        eps: Added to the variance.
        silu: False leaves the SiLU out.
        per_frame: For ``[B, C, T, H, W]``: every frame has its own statistics.
        preserve_strides: Lays the result out like ``torch.empty_like(x)``; otherwise contiguously.

    Returns:
        A new tensor of the shape and dtype of ``x``.
    """
    return ops.group_norm_silu(x, num_groups, weight, bias, add, eps, silu, per_frame, preserve_strides)


def channel_rms_norm_silu(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 1e-6,
    clamp_eps: bool = False,
    silu: bool = True,
    round_dtype: torch.dtype | None = None,
) -> Tensor:
    """Root mean square normalisation over the channels of each position, modulation, and SiLU, in float32.

    ``silu((x / sqrt(mean(x²) + eps) · weight + bias) · (1 + scale) + shift)``

    Args:
        x: Input of shape ``[B, C, ...]``, any strides; float32, float16 or bfloat16.
        weight: Shape ``[C]``, or None.
        bias: Shape ``[C]``, or None.
        scale: Shape ``[B, C]``, any strides, or None.
        shift: Like ``scale``, or None.
        eps: Added to the mean of squares.
        clamp_eps: ``x / max(‖x‖₂, eps) · √C`` in place of the first factor.
        silu: False leaves the SiLU out.
        round_dtype: Rounds the normalised value to this dtype before it is multiplied, and the product to the
            dtype of ``x`` before the bias is added; None rounds only the result.

    Returns:
        A new tensor of the shape and dtype of ``x``, laid out like ``torch.empty_like(x)``.
    """
    return ops.channel_rms_norm_silu(x, weight, bias, scale, shift, eps, clamp_eps, silu, round_dtype)


def register_fakes() -> None:
    """Tells tracing what the ops return."""

    @fake("group_norm_silu")
    def _(x, num_groups, weight, bias, add, eps, silu, per_frame, preserve_strides):
        memory_format = torch.preserve_format if preserve_strides else torch.contiguous_format
        return torch.empty_like(x, memory_format=memory_format)

    @fake("channel_rms_norm_silu")
    def _(x, weight, bias, scale, shift, eps, clamp_eps, silu, round_dtype):
        return torch.empty_like(x)
