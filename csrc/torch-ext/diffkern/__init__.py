"""Fused kernels for diffusion and language models, as torch ops of one binary build.

This package stands alone: it is what ``kernels.get_local_kernel`` and ``kernels.get_kernel`` import, and
what diffkern's own provider imports.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import layers
from ._ops import ops
from .activation import activation, glu
from .activation import register_fakes as _register_activation_fakes
from .add_norm_silu_pad import add_norm_silu_pad
from .add_norm_silu_pad import register_fakes as _register_add_norm_silu_pad_fakes
from .fakes import fake
from .group_norm import channel_rms_norm_silu, group_norm_silu
from .group_norm import register_fakes as _register_group_norm_fakes
from .modulate import gate_residual, gate_residual_norm_modulate, norm_modulate
from .modulate import register_fakes as _register_modulate_fakes
from .rope import joint_qk_norm_rope, qk_norm_rope, rope, rope_3d
from .rope import register_fakes as _register_rope_fakes

__all__ = [
    "activation",
    "add_norm_silu_pad",
    "channel_rms_norm_silu",
    "gate_residual",
    "gate_residual_norm_modulate",
    "glu",
    "group_norm_silu",
    "joint_qk_norm_rope",
    "layer_norm",
    "layers",
    "norm_modulate",
    "qk_norm_rope",
    "rms_norm",
    "rope",
    "rope_3d",
]


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    round_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    clamp_eps: bool = False,
    preserve_strides: bool = False,
) -> Tensor:
    """Root mean square normalisation over the last dimension, computed in float32.

    ``x / sqrt(mean(x²) + eps) · (weight + weight_offset) + bias``

    Args:
        x: Input of any rank from 1 up and any strides; float32, float16 or bfloat16.
        weight: Shape ``[D]``, or None.
        bias: Shape ``[D]``, or None.
        eps: Added to the mean of squares.
        weight_offset: Added to the weight in float32.
        round_dtype: Rounds the normalised value to this dtype before it is multiplied, and the product to
            ``out_dtype`` before the bias is added; None rounds only the result.
        out_dtype: Dtype of the result; None means that of ``x``.
        clamp_eps: ``x / max(‖x‖₂, eps) · √D`` in place of the first factor.
        preserve_strides: Lays the result out like ``torch.empty_like(x)``; otherwise contiguously.

    Returns:
        A new tensor of the shape of ``x``.
    """
    return ops.rms_norm(x, weight, bias, eps, weight_offset, round_dtype, out_dtype, clamp_eps, preserve_strides)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    out_dtype: torch.dtype | None = None,
    preserve_strides: bool = False,
) -> Tensor:
    """Layer normalisation over the last dimension, computed in float32.

    ``(x - mean) / sqrt(variance + eps) · weight + bias``; the arguments are those of :func:`rms_norm`.
    """
    return ops.layer_norm(x, weight, bias, eps, out_dtype, preserve_strides)


def _empty_output(x: Tensor, out_dtype: torch.dtype | None, preserve_strides: bool) -> Tensor:
    memory_format = torch.preserve_format if preserve_strides else torch.contiguous_format
    return torch.empty_like(x, dtype=out_dtype or x.dtype, memory_format=memory_format)


def _register_fakes() -> None:
    """Tells tracing what the ops return; once per process, though two copies of this build be imported."""
    if vars(ops).get("has_fakes", False):
        return

    @fake("rms_norm")
    def _(x, weight, bias, eps, weight_offset, round_dtype, out_dtype, clamp_eps, preserve_strides):
        return _empty_output(x, out_dtype, preserve_strides)

    @fake("layer_norm")
    def _(x, weight, bias, eps, out_dtype, preserve_strides):
        return _empty_output(x, out_dtype, preserve_strides)

    _register_modulate_fakes()
    _register_rope_fakes()
    _register_activation_fakes()
    _register_add_norm_silu_pad_fakes()
    _register_group_norm_fakes()
    ops.has_fakes = True


_register_fakes()
