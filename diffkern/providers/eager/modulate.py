"""Modulated norms and gated residuals in plain PyTorch.

With ``round_each`` these are the chains that models write, op for op; without it the same in float32, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from diffkern.providers.eager.norm import layer_norm, rms_norm
from diffkern.providers.eager.precision import compute_dtype, finish

# Dicts, and not proxies of them: torch.compile breaks its graph at a proxy if the same frame writes to any dict.

#: How a norm is written in the schemas of the ops.
NORMS: Mapping[str | None, int] = {None: 0, "rms": 1, "layer": 2}
NO_NORM, RMS, LAYER = NORMS.values()

#: How the activation of a gate is written in the schemas of the ops.
GATE_ACTIVATIONS: Mapping[str | None, int] = {None: 0, "tanh": 1, "sigmoid": 2}
NO_ACTIVATION, TANH, SIGMOID = GATE_ACTIVATIONS.values()


def norm_modulate(
    x: Tensor, scale: Tensor | None, shift: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float,
    norm: int, scale_offset: float, round_each: bool, out_dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """Computes :func:`diffkern.ops.norm_modulate`."""
    modulated_shape(x.shape, scale, shift, norm)
    out_dtype = out_dtype or promoted_dtype(x.dtype, scale, shift)
    wide = compute_dtype(x, scale, shift)
    y = normalise(x, weight, bias, eps, norm, x.dtype if round_each else wide)
    if scale is not None:
        y = y * ((scale if round_each else scale.to(wide)) + scale_offset)
    if shift is not None:
        y = y + (shift if round_each else shift.to(wide))
    y = finish(y, x, out_dtype, False)
    # The result of an op must not be its input.
    return y.clone() if y is x else y


def gate_residual(
    residual: Tensor, x: Tensor, gate: Tensor | None, gate_activation: int, round_each: bool,
    out_dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """Computes :func:`diffkern.ops.gate_residual`."""
    out_dtype = out_dtype or promoted_dtype(residual.dtype, x, gate)
    if not round_each:
        wide = compute_dtype(residual, x, gate)
        residual, x, gate = residual.to(wide), x.to(wide), None if gate is None else gate.to(wide)
    y = residual + (x if gate is None else activate(gate, gate_activation) * x)
    return finish(y, residual, out_dtype, False)


def gate_residual_norm_modulate(
    residual: Tensor, x: Tensor, gate: Tensor | None, scale: Tensor | None, shift: Tensor | None, weight: Tensor | None,
    bias: Tensor | None, eps: float, norm: int, gate_activation: int, scale_offset: float, round_each: bool,
    residual_dtype: torch.dtype | None, out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes :func:`diffkern.ops.gate_residual_norm_modulate`."""
    gated_shape(residual, x, gate, scale, shift)
    new_residual = gate_residual(residual, x, gate, gate_activation, round_each, residual_dtype)
    y = norm_modulate(new_residual, scale, shift, weight, bias, eps, norm, scale_offset, round_each, out_dtype)
    return new_residual, y


def activate(gate: Tensor, activation: int) -> Tensor:
    """The gate after its activation, in its own dtype."""
    if activation == TANH:
        return gate.tanh()
    return gate.sigmoid() if activation == SIGMOID else gate


def promoted_dtype(dtype: torch.dtype, *operands: Tensor | None) -> torch.dtype:
    """The dtype of a chain of ops that begins with a tensor of ``dtype`` and takes in the operands one by one."""
    for operand in operands:
        # A scalar tensor does not widen a tensor of the same category.
        if operand is not None and operand.dtype != dtype and operand.ndim > 0:
            dtype = torch.promote_types(dtype, operand.dtype)
    return dtype


def modulated_shape(shape: torch.Size, scale: Tensor | None, shift: Tensor | None, norm: int) -> torch.Size:
    """The shape of a modulated tensor of ``shape``, as torch broadcasts.

    Raises:
        RuntimeError: the shapes cannot be broadcast, or a norm is asked for over a dimension that is.
    """
    return _modulated_shape(norm, shape, *[operand.shape for operand in (scale, shift) if operand is not None])


def gated_shape(residual: Tensor, x: Tensor, gate: Tensor | None, *modulation: Tensor | None) -> torch.Size:
    """The shape of a new residual, to which the modulation that follows must broadcast.

    Raises:
        RuntimeError: it does not, or the shapes of the gated residual do not.
    """
    sum_of = (residual.shape, x.shape) if gate is None else (residual.shape, x.shape, gate.shape)
    return _gated_shape(sum_of, *[operand.shape for operand in modulation if operand is not None])


def _remembered(rule: Callable[..., torch.Size]) -> Callable[..., torch.Size]:
    """A rule of shapes, found once: ``torch.broadcast_shapes`` takes longer than a kernel."""
    known = lru_cache(maxsize=4096)(rule)

    def remembered(*given: Any) -> torch.Size:
        if torch.compiler.is_dynamo_compiling():  # which would look past the memory, and warn of that
            return rule(*given)
        try:
            return known(*given)
        except TypeError:  # the sizes of a traced graph are symbols, which have no hash
            return rule(*given)

    return remembered


@_remembered
def _modulated_shape(norm: int, shape: torch.Size, *modulation: torch.Size) -> torch.Size:
    result: torch.Size = torch.broadcast_shapes(shape, *modulation)
    if norm != NO_NORM and result[-1] != shape[-1]:
        raise RuntimeError(
            f"the norm is over a last dimension of size {shape[-1]}, and the modulation has size {result[-1]} there"
        )
    return result


@_remembered
def _gated_shape(sum_of: tuple[torch.Size, ...], *modulation: torch.Size) -> torch.Size:
    result: torch.Size = torch.broadcast_shapes(*sum_of)
    for shape in modulation:
        if torch.broadcast_shapes(result, shape) != result:
            raise RuntimeError(
                f"a modulation of shape {tuple(shape)} is larger than the residual of shape {tuple(result)}: "
                "call gate_residual and norm_modulate one after the other"
            )
    return result


def normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, norm: int, dtype: torch.dtype,
    weight_offset: float = 0.0, round_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """The norm alone, if there is one, in a dtype."""
    if norm == RMS:
        return rms_norm(x, weight, bias, eps, weight_offset, round_dtype, dtype, False, False)
    if norm == LAYER:
        return layer_norm(x, weight, bias, eps, dtype, False)
    return x.to(dtype)
