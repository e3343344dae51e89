"""Gradients of modulated norms and gated residuals, of the unrounded formulas.

What can be computed again is not kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffkern.providers.eager import compute_dtype
from diffkern.providers.eager.modulate import LAYER, NO_ACTIVATION, NO_NORM, RMS, SIGMOID, activate

# Shape and dtype of an argument, which is all that some gradients need to know of it.
_Meta = tuple[torch.Size, torch.dtype]


@dataclass(frozen=True)
class Modulation:
    """A modulated norm, but for the values of its tensors."""

    eps: float
    norm: int
    scale_offset: float
    x: _Meta
    scale: _Meta
    shift: _Meta
    weight: _Meta
    bias: _Meta


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


def _normalised(wide: Tensor, eps: float, norm: int) -> tuple[Tensor, Tensor]:
    """The normalised value and the factor that made it."""
    if norm == LAYER:
        wide = wide - wide.mean(-1, keepdim=True)
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide * factor, factor


def modulation_grads(
    options: Modulation, needs: tuple[bool, ...], grad: Tensor, x: Tensor | None, scale: Tensor | None,
    weight: Tensor | None, bias: Tensor | None,
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of x, scale, shift, weight and bias, where ``needs`` says so. That of x is not rounded."""
    dtype = compute_dtype(x, scale, weight, bias, grad)
    grad = grad.to(dtype)
    needs_x, needs_scale, needs_shift, needs_weight, needs_bias = needs
    grads: list[Tensor | None] = [None] * 5
    if needs_shift:
        grads[2] = _reduced(grad, *options.shift)
    grad_normed = grad if scale is None else grad * (scale.to(dtype) + options.scale_offset)
    normed = factor = None
    if x is not None:
        normed = x.to(dtype)
        if options.norm != NO_NORM:
            normed, factor = _normalised(normed, options.eps, options.norm)
    if needs_scale:
        assert normed is not None
        affine = normed if weight is None else normed * weight.to(dtype)
        affine = affine if bias is None else affine + bias.to(dtype)
        grads[1] = _reduced(grad * affine, *options.scale)
    if needs_weight:
        assert normed is not None
        grads[3] = _reduced(grad_normed * normed, *options.weight)
    if needs_bias:
        grads[4] = _reduced(grad_normed, *options.bias)
    if needs_x:
        grad_x = grad_normed if weight is None else grad_normed * weight.to(dtype)
        grad_x = grad_x.sum_to_size(options.x[0])
        if normed is not None and factor is not None:
            along = normed * (grad_x * normed).mean(-1, keepdim=True)
            grad_x = grad_x - along if options.norm == RMS else grad_x - grad_x.mean(-1, keepdim=True) - along
            grad_x = grad_x * factor
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
