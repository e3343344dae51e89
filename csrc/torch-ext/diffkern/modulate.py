"""Modulated norms and gated residuals, as the blocks of diffusion transformers are made of them."""

from __future__ import annotations

import torch
from torch import Tensor

from ._ops import ops
from .fakes import fake, rows_of_8_bits


def norm_modulate(
    x: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    norm: int = 1,
    scale_offset: float = 1.0,
    round_each: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Normalises over the last dimension and modulates, ``(norm(x) · weight + bias) · (scale_offset + scale) + shift``.

    Args:
        x: Input of any rank from 1 up and any strides; float32, float16 or bfloat16.
        scale: Broadcasts against ``x``; any strides. None leaves the factor out.
        shift: Like ``scale``; None leaves the term out.
        weight: Shape ``[D]``, or None.
        bias: Shape ``[D]``, or None.
        eps: Added to the mean square or the variance.
        norm: 0 for none, 1 for the root mean square, 2 for layer normalisation.
        scale_offset: Added to ``scale``.
        round_each: Rounds where a chain of torch ops would; otherwise only the result is rounded.
        out_dtype: Dtype of the result; None means what the chain would promote to.

    Returns:
        A new contiguous tensor of the shape that all broadcast to.
    """
    return ops.norm_modulate(x, scale, shift, weight, bias, eps, norm, scale_offset, round_each, out_dtype)


def gate_residual(
    residual: Tensor,
    x: Tensor,
    gate: Tensor | None = None,
    gate_activation: int = 0,
    round_each: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Gated residual connection, ``residual + act(gate) · x``, in a new contiguous tensor.

    ``gate_activation`` is 0 for none, 1 for tanh, 2 for sigmoid; without a gate it is the plain sum. The other
    arguments are as in :func:`norm_modulate`.
    """
    return ops.gate_residual(residual, x, gate, gate_activation, round_each, out_dtype)


def gate_residual_norm_modulate(
    residual: Tensor,
    x: Tensor,
    gate: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    norm: int = 1,
    gate_activation: int = 0,
    scale_offset: float = 1.0,
    round_each: bool = False,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`gate_residual` and :func:`norm_modulate` of its result, in one pass; returns both.

    ``residual_dtype`` is the dtype of the new residual, to which it is rounded before the norm reads it.
    """
    return ops.gate_residual_norm_modulate(
        residual, x, gate, scale, shift, weight, bias, eps,
        norm, gate_activation, scale_offset, round_each, residual_dtype, out_dtype,
    )  # fmt: skip


def register_fakes() -> None:
    """Tells tracing what the ops return."""

    @fake("norm_modulate")
    def norm_modulate(x, scale, shift, weight, bias, eps, norm, scale_offset, round_each, out_dtype):
        return _empty(x, (x, scale, shift), out_dtype or _promoted(x.dtype, scale, shift))

    @fake("gate_residual")
    def _(residual, x, gate, gate_activation, round_each, out_dtype):
        return _empty(residual, (residual, x, gate), out_dtype or _promoted(residual.dtype, x, gate))

    @fake("gate_residual_norm_modulate")
    def gate_residual_norm_modulate(
        residual, x, gate, scale, shift, weight, bias, eps,
        norm, gate_activation, scale_offset, round_each, residual_dtype, out_dtype,
    ):  # fmt: skip
        residual_dtype = residual_dtype or _promoted(residual.dtype, x, gate)
        new_residual = _empty(residual, (residual, x, gate), residual_dtype)
        out_dtype = out_dtype or _promoted(residual_dtype, scale, shift)
        return new_residual, _empty(residual, (new_residual, scale, shift), out_dtype)

    @fake("norm_modulate_fp8")
    def _(x, scale, shift, weight, bias, eps, norm):
        return rows_of_8_bits(x, _shape(x, scale, shift))

    @fake("gate_residual_norm_modulate_fp8")
    def _(residual, x, gate, scale, shift, weight, bias, eps, norm):
        new_residual = _empty(residual, (residual, x, gate), _promoted(residual.dtype, x, gate))
        return new_residual, *rows_of_8_bits(residual, _shape(new_residual, scale, shift))

    @fake("norm_modulate_and_fp8")
    def _(*given):
        y = norm_modulate(*given)
        return y, *rows_of_8_bits(y, y.shape)

    @fake("gate_residual_norm_modulate_and_fp8")
    def _(*given):
        new_residual, y = gate_residual_norm_modulate(*given)
        return new_residual, y, *rows_of_8_bits(y, y.shape)


def _empty(like: Tensor, operands: tuple[Tensor | None, ...], dtype: torch.dtype) -> Tensor:
    return like.new_empty(_shape(*operands), dtype=dtype)


def _shape(*operands: Tensor | None) -> torch.Size:
    return torch.broadcast_shapes(*(operand.shape for operand in operands if operand is not None))


def _promoted(dtype: torch.dtype, *operands: Tensor | None) -> torch.dtype:
    for operand in operands:
        if operand is not None and operand.ndim > 0:
            dtype = torch.promote_types(dtype, operand.dtype)
    return dtype
