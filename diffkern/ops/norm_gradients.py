"""Gradients of norms, modulated or not, and of gated residuals, of the unrounded formulas.

What can be computed again is not kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffkern.providers.eager import compute_dtype
from diffkern.providers.eager.activation import apply_backward
from diffkern.providers.eager.modulate import LAYER, NO_ACTIVATION, NO_NORM, SIGMOID, activate

# Shape and dtype of an argument, which is all that some gradients need to know of it.
_Meta = tuple[torch.Size, torch.dtype]


@dataclass(frozen=True)
class Modulation:
    """A modulated norm over the last dimension, but for the values of x, scale, shift, weight and bias."""

    eps: float
    norm: int
    scale_offset: float
    operands: tuple[_Meta, ...]
    weight_offset: float = 0.0
    clamp_eps: bool = False
    silu: bool = False


@dataclass(frozen=True)
class Gating:
    """A gated residual, but for the values of its tensors."""

    activation: int
    residual: _Meta
    x: _Meta
    gate: _Meta


def metas(*tensors: Tensor | None) -> tuple[_Meta, ...]:
    """Shapes and dtypes; those of nothing for None."""
    nothing = torch.Size(), torch.float32
    return tuple(nothing if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors)


def _reduced(grad: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The gradient of a tensor that was broadcast."""
    return grad.sum_to_size(shape).to(dtype)


def keep(*tensors: tuple[Tensor | None, bool]) -> list[Tensor | None]:
    """The tensors that a backward reads, and None for the others."""
    return [tensor if kept else None for tensor, kept in tensors]


def _normalised(wide: Tensor, options: Modulation) -> tuple[Tensor, Tensor, Tensor | None]:
    """The normalised value, the factor that made it, and where that is no constant; None for everywhere."""
    if options.clamp_eps:
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        factor = wide.shape[-1] ** 0.5 / length.clamp_min(options.eps)
        return wide * factor, factor, length > options.eps
    if options.norm == LAYER:
        wide = wide - wide.mean(-1, keepdim=True)
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + options.eps)
    return wide * factor, factor, None


def modulation_grads(
    options: Modulation, needs: tuple[bool, ...], grad: Tensor, x: Tensor | None, scale: Tensor | None,
    weight: Tensor | None, bias: Tensor | None, shift: Tensor | None = None,
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of x, scale, shift, weight and bias, where ``needs`` says so. That of x is not rounded."""
    dtype = compute_dtype(x, scale, weight, bias, grad)
    grad = grad.to(dtype)
    needs_x, needs_scale, needs_shift, needs_weight, needs_bias = needs
    of_x, of_scale, of_shift, of_weight, of_bias = options.operands
    grads: list[Tensor | None] = [None] * 5
    normed = factor = varies = affine = None
    by_scale = None if scale is None else scale.to(dtype) + options.scale_offset
    by_weight = None if weight is None else weight.to(dtype) + options.weight_offset
    if x is not None:
        normed = x.to(dtype)
        if options.norm != NO_NORM:
            normed, factor, varies = _normalised(normed, options)
    if needs_scale or options.silu:
        assert normed is not None
        affine = normed if by_weight is None else normed * by_weight
        affine = affine if bias is None else affine + bias.to(dtype)
    if options.silu:
        assert affine is not None
        y = affine if by_scale is None else affine * by_scale
        grad = apply_backward(grad, y if shift is None else y + shift.to(dtype), "silu")
    if needs_shift:
        grads[2] = _reduced(grad, *of_shift)
    grad_normed = grad if by_scale is None else grad * by_scale
    if needs_scale:
        assert affine is not None
        grads[1] = _reduced(grad * affine, *of_scale)
    if needs_weight:
        assert normed is not None
        grads[3] = _reduced(grad_normed * normed, *of_weight)
    if needs_bias:
        grads[4] = _reduced(grad_normed, *of_bias)
    if needs_x:
        grad_x = grad_normed if by_weight is None else grad_normed * by_weight
        grad_x = grad_x.sum_to_size(of_x[0])
        if normed is not None and factor is not None:
            along = (grad_x * normed).mean(-1, keepdim=True)
            along = along if varies is None else torch.where(varies, along, 0.0)
            if options.norm == LAYER:
                grad_x = grad_x - grad_x.mean(-1, keepdim=True)
            grad_x = (grad_x - normed * along) * factor
        grads[0] = grad_x
    return grads


def gate_grads(
    options: Gating, needs: tuple[bool, ...], grad: Tensor, x: Tensor | None, gate: Tensor | None
) -> list[Tensor | None]:
    """The gradients of residual, x and gate, where ``needs`` says so."""
    dtype = compute_dtype(x, gate, grad)
    grad = grad.to(dtype)
    needs_residual, needs_x, needs_gate = needs
    grads: list[Tensor | None] = [None] * 3
    if needs_residual:
        grads[0] = _reduced(grad, *options.residual)
    active = None if gate is None else activate(gate.to(dtype), options.activation)
    if needs_x:
        grads[1] = _reduced(grad if active is None else grad * active, *options.x)
    if needs_gate:
        assert x is not None
        grad_active = (grad * x.to(dtype)).sum_to_size(options.gate[0])
        if options.activation != NO_ACTIVATION:
            assert active is not None
            slope = active * (1 - active) if options.activation == SIGMOID else 1 - active.square()
            grad_active = grad_active * slope
        grads[2] = grad_active.to(options.gate[1])
    return grads


def needs_grad(ctx: Any, count: int) -> tuple[bool, ...]:
    """Whether each of the first arguments wants a gradient; torch leaves trailing ones out when not given."""
    return (*ctx.needs_input_grad[:count], *(False,) * count)[:count]
