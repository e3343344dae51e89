"""Activations and gated units, as feed-forwards are made of them."""

from __future__ import annotations

import torch
from torch import Tensor

from ._ops import ops
from .fakes import fake, rows_of_8_bits


def activation(x: Tensor, function: str) -> Tensor:
    """An activation, computed in float32 and rounded once.

    Args:
        x: Input of any shape and strides; float32, float16 or bfloat16.
        function: ``"gelu"`` (erf), ``"gelu_tanh"``, ``"silu"`` or ``"quick_gelu"`` (``x · σ(1.702 x)``).

    Returns:
        A new tensor of the shape and dtype of ``x``, laid out like ``torch.empty_like(x)``.
    """
    return ops.activation(x, function)


def glu(value: Tensor, gate: Tensor, function: str = "gelu", round_activation: bool = False) -> Tensor:
    """Gated linear unit, ``value · function(gate)``, computed in float32.

    Args:
        value: Of any shape and strides, for instance half of a packed projection; it is read in place.
        gate: Of the shape of ``value``.
        function: As in :func:`activation`.
        round_activation: Rounds ``function(gate)`` to the dtype of ``gate`` before the product, as two ops in a
            row do.

    Returns:
        A new tensor of the shape of ``value`` and the promoted dtype, laid out like ``torch.empty_like(value)``.
    """
    return ops.glu(value, gate, function, round_activation)


def register_fakes() -> None:
    """Tells tracing what the ops return."""

    @fake("activation")
    def _(x, function):
        return torch.empty_like(x)

    @fake("activation_fp8")
    def _(x, front, function):
        ahead = 0 if front is None else front.shape[-1]
        return rows_of_8_bits(x, (*x.shape[:-1], ahead + x.shape[-1]))

    @fake("glu")
    def glu(value, gate, function, round_activation):
        return torch.empty_like(value, dtype=torch.promote_types(value.dtype, gate.dtype))

    @fake("glu_and_fp8")
    def _(*given):
        y = glu(*given)
        return y, *rows_of_8_bits(y, y.shape)
