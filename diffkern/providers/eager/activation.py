"""Activations and gated units in plain PyTorch, and the derivatives that every provider's backward uses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from diffkern.providers.eager.precision import compute_dtype, laid_out_like

#: The names that :func:`diffkern.ops.glu` takes.
FUNCTIONS = ("gelu", "gelu_tanh", "silu", "quick_gelu")

_QUICK_GELU_SLOPE = 1.702


def activation(x: Tensor, function: str) -> Tensor:
    """Computes :func:`diffkern.ops.gelu`, ``silu`` and ``quick_gelu``."""
    return laid_out_like(x, apply(x, function))


def glu(value: Tensor, gate: Tensor, function: str, round_activation: bool) -> Tensor:
    """Computes :func:`diffkern.ops.glu`."""
    out_dtype = torch.promote_types(value.dtype, gate.dtype)
    if not round_activation:
        dtype = compute_dtype(value, gate)
        value, gate = value.to(dtype), gate.to(dtype)
    return laid_out_like(value, (value * apply(gate, function)).to(out_dtype))


def channel_glu(x: Tensor, bias: Tensor | None, function: str, round_each: bool) -> Tensor:
    """Computes :func:`diffkern.ops.channel_glu`."""
    dtype = x.dtype if round_each else compute_dtype(x, bias)
    y = x.to(dtype)
    if bias is not None:
        y = (y + bias.to(compute_dtype(x, bias)).view(-1, *(1,) * (x.ndim - 2))).to(dtype)
    value, gate = y.chunk(2, 1)
    like, _ = x.chunk(2, 1)
    return laid_out_like(like, (value * apply(gate, function)).to(x.dtype))


def apply(x: Tensor, function: str) -> Tensor:
    """The activation of that name: float32 arithmetic for half inputs, rounded once to the dtype of ``x``."""
    if function == "silu":
        return F.silu(x)
    if function == "quick_gelu":
        wide = x.to(compute_dtype(x))
        return (wide * torch.sigmoid(_QUICK_GELU_SLOPE * wide)).to(x.dtype)
    return F.gelu(x, approximate=_approximation(function))


def apply_backward(grad: Tensor, x: Tensor, function: str) -> Tensor:
    """The gradient in ``x``, of its dtype, with float32 arithmetic for half inputs; itself differentiable."""
    if function == "silu" and not torch.is_grad_enabled():  # torch's own has no second derivative
        return torch.ops.aten.silu_backward(grad, x)  # type: ignore[no-any-return]
    if function in ("silu", "quick_gelu"):
        wide = x.to(compute_dtype(x))
        scaled = wide if function == "silu" else _QUICK_GELU_SLOPE * wide
        sigmoid = torch.sigmoid(scaled)
        return (grad.to(wide.dtype) * sigmoid * (1 + scaled * (1 - sigmoid))).to(x.dtype)
    return torch.ops.aten.gelu_backward(grad, x, approximate=_approximation(function))  # type: ignore[no-any-return]


def _approximation(function: str) -> str:
    return "tanh" if function == "gelu_tanh" else "none"
