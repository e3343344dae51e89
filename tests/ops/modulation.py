"""Modulation tensors in every shape and layout that models use, and the ops of that family in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.reference import FLOAT32_SLACK, half_unit

Made = Callable[[tuple[int, ...]], tuple[tuple[int, ...], Callable[[Tensor], Tensor]]]

#: From the shape of x to the shape of a buffer, and from that to the view which modulates x.
MODULATIONS: dict[str, Made] = {
    "row": lambda s: ((s[-1],), lambda t: t),
    "ones": lambda s: ((*(1 for _ in s[:-1]), s[-1]), lambda t: t),
    "sample": lambda s: ((s[0], *(1 for _ in s[1:-1]), s[-1]) if len(s) > 1 else s, lambda t: t),
    "full": lambda s: (s, lambda t: t),
    "group": lambda s: ((*s[:-2], 1, s[-1]) if len(s) > 1 else s, lambda t: t),
    "token_unbind": lambda s: ((*s[:-1], 6, s[-1]), lambda t: t.unbind(-2)[3]),
    "sample_chunk": lambda s: (
        (s[0], *(1 for _ in s[1:-1]), 6 * s[-1]) if len(s) > 1 else (6 * s[-1],),
        lambda t: t.chunk(6, -1)[2],
    ),
    "column": lambda s: ((*s[:-1], 1), lambda t: t),
    "every_second": lambda s: ((2 * s[-1],), lambda t: t[::2]),
    "offset": lambda s: ((s[-1] + 1,), lambda t: t[1:]),
}


def make_modulation(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: str, *, seed: int = 0, scale: float = 0.5
) -> Tensor | None:
    """Returns ``scale * randn``, to modulate a tensor of ``shape``, inside a buffer of NaN; None for "none"."""
    if kind == "none":
        return None
    buffer_shape, view = MODULATIONS[kind](shape)
    modulation = view(torch.full(buffer_shape, torch.nan, dtype=dtype, device=device))
    values = torch.randn(modulation.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return modulation.copy_((scale * values).to(dtype))


def promoted(dtype: torch.dtype, *operands: Tensor | None) -> torch.dtype:
    """What a chain of torch ops promotes to."""
    for operand in operands:
        dtype = dtype if operand is None else torch.promote_types(dtype, operand.dtype)
    return dtype


# --- as models write it --------------------------------------------------------------------------------


def norm_modulate_chain(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    norm: str | None = "rms",
    scale_offset: float = 1.0,
) -> Tensor:
    """The stock ops, on the dtypes that they are given."""
    if norm == "layer":
        x = F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    elif norm == "rms":
        x = F.rms_norm(x, x.shape[-1:], weight, eps)
    if scale is not None:
        x = x * ((scale_offset + scale) if scale_offset else scale)
    return x if shift is None else x + shift


def gate_residual_chain(residual: Tensor, x: Tensor, gate: Tensor | None, gate_activation: str | None) -> Tensor:
    """The stock ops, on the dtypes that they are given."""
    return residual + (x if gate is None else activated(gate, gate_activation) * x)


def activated(gate: Tensor, activation: str | None) -> Tensor:
    return gate if activation is None else getattr(gate, activation)()


# --- in float64, and how far a right result may be from it ----------------------------------------------


def norm_modulate(
    x: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    norm: str | None = "rms",
    scale_offset: float = 1.0,
    rounding: str = "once",
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the unrounded result in float64 and the largest admissible error of each element."""
    each = rounding == "each"
    value, error = x.double(), torch.zeros((), dtype=torch.float64, device=x.device)
    if norm is not None:
        mean = value.mean(-1, keepdim=True) if norm == "layer" else torch.zeros_like(value[..., :1])
        factor = ((value - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
        # The mean is off by a rounding of the largest element; the division by the deviation magnifies that.
        cancellation = value.abs().amax(-1, keepdim=True) * factor if norm == "layer" else 0.0
        value = (value - mean) * factor
        error = FLOAT32_SLACK * (value.abs() + cancellation)
    if weight is not None:
        value, error = value * weight.double(), (error + FLOAT32_SLACK * value.abs()) * weight.double().abs()
    if bias is not None:
        value, error = value + bias.double(), error + FLOAT32_SLACK * (value.abs() + bias.double().abs())
    dtype = x.dtype
    error = error + _rounding(value, error, dtype, each)
    if scale is not None:
        factor = scale_offset + scale.double()
        factor_error = _rounding(factor, torch.zeros_like(factor), scale.dtype, each) + FLOAT32_SLACK * factor.abs()
        error = error * (factor.abs() + factor_error) + value.abs() * factor_error
        value, dtype = value * factor, promoted(dtype, scale)
        error = error + FLOAT32_SLACK * value.abs() + _rounding(value, error, dtype, each)
    if shift is not None:
        error = error + FLOAT32_SLACK * (value.abs() + shift.double().abs())
        value, dtype = value + shift.double(), promoted(dtype, shift)
        error = error + _rounding(value, error, dtype, each)
    return value, error + _rounding(value, error, out_dtype or dtype, True)


def gate_residual(
    residual: Tensor,
    x: Tensor,
    gate: Tensor | None = None,
    *,
    gate_activation: str | None = None,
    rounding: str = "once",
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the unrounded result in float64 and the largest admissible error of each element."""
    each = rounding == "each"
    value, error, dtype = x.double(), torch.zeros((), dtype=torch.float64, device=x.device), x.dtype
    if gate is not None:
        factor = activated(gate.double(), gate_activation)
        factor_error = _rounding(factor, torch.zeros_like(factor), gate.dtype, each) + FLOAT32_SLACK * factor.abs()
        error = value.abs() * factor_error
        value, dtype = factor * value, promoted(dtype, gate)
        error = error + _rounding(value, error, dtype, each)
    error = error + FLOAT32_SLACK * (value.abs() + residual.double().abs())
    value, dtype = residual.double() + value, promoted(residual.dtype, x, gate)
    error = error + _rounding(value, error, dtype, each)
    return value, error + _rounding(value, error, out_dtype or dtype, True)


def _rounding(value: Tensor, error: Tensor, dtype: torch.dtype, happens: bool) -> Tensor | float:
    return half_unit(dtype) * (value.abs() + error) + torch.finfo(dtype).smallest_normal if happens else 0.0
