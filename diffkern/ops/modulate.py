r"""Modulated norms and gated residuals: what stands between the attention and the feed-forward of every DiT block.

Numerical contract (``docs/numerics.md`` has the table):

* every tensor in float32, float16 or bfloat16, in any mix; float64 by the eager provider;
* all arithmetic in float32, products and sums one after the other (never a fused multiply-add);
* ``rounding="once"`` rounds each result once, to its dtype. ``rounding="each"`` rounds where the chain of torch ops
  does that a model writes: after the norm, after ``1 + scale``, after the product and after the sum. Without a norm it
  is bit-equal to that chain (scalar tensors apart, which torch rounds to the dtype of the others first).

Modulation tensors broadcast against the input as torch broadcasts, and are read in place, so that chunks of a larger
modulation tensor, one row per sample, per frame or per token, need no copy. Without a norm an image or a video in
channels last stays so, as in torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from diffkern.ops.contract import ContractRow
from diffkern.ops.group_norm import is_channels_last
from diffkern.ops.norm import check_parameters, machine_eps
from diffkern.ops.norm_gradients import (
    Gating,
    Modulation,
    gate_grads,
    keep,
    metas,
    modulation_grads,
    needs_grad,
)
from diffkern.ops.registration import Op
from diffkern.providers.eager.modulate import (
    GATE_ACTIVATIONS,
    NO_ACTIVATION,
    NO_NORM,
    NORMS,
    gated_shape,
    modulated_shape,
    promoted_dtype,
)

Norm = Literal["rms", "layer"]
GateActivation = Literal["tanh", "sigmoid"]
Rounding = Literal["once", "each"]

_ROUNDINGS: Mapping[str, bool] = {"once": False, "each": True}

_EACH = "the norm to the dtype of x, scale_offset + scale to that of scale, product and sum to the promoted dtype"

CONTRACT = (
    ContractRow("norm_modulate", "once"),
    ContractRow("norm_modulate", "each", rounds=_EACH),
    ContractRow("norm_modulate", "no norm, each", rounds=_EACH, exact="x * (scale_offset + scale) + shift"),
    ContractRow("gate_residual", "once"),
    ContractRow("gate_residual", "each", rounds="product and sum to the promoted dtype", exact="residual + gate * x"),
    ContractRow("gate_residual", "each, activation", rounds="act(gate) to the dtype of gate, then as above"),
    ContractRow("gate_residual", "no gate", exact="residual + x"),
    ContractRow(
        "gate_residual_norm_modulate",
        "once",
        rounds="the new residual to its dtype before the norm reads it, the modulated norm to the output dtype",
    ),
    ContractRow(
        "gate_residual_norm_modulate",
        "each",
        rounds="as gate_residual and norm_modulate one after the other",
        exact="the new residual: residual + gate * x",
    ),
)


def norm_modulate(
    x: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    norm: Norm | None = "rms",
    scale_offset: float = 1.0,
    rounding: Rounding = "once",
    out_dtype: torch.dtype | None = None,
    room: tuple[int, int] | None = None,
    provider: str | None = None,
) -> Tensor:
    r"""Normalisation over the last dimension and modulation of the result.

    .. math:: y = \bigl(\mathrm{norm}(x) \cdot w + b\bigr) \cdot (o + \mathrm{scale}) + \mathrm{shift}

    Args:
        x: Input ``[..., D]``, any strides; float32, float16, bfloat16 or float64.
        scale: Anything that broadcasts against ``x``: ``[D]``, ``[B,1,D]``, ``[B,S,D]``, ``[B,F,1,D]`` ..., any
            strides. None leaves the factor out.
        shift: Like ``scale``; None leaves the term out.
        weight: ``w`` of shape ``[D]``, or None.
        bias: ``b`` of shape ``[D]``, or None; needs no weight.
        eps: Added to the mean square or the variance; None means the machine epsilon of the precision computed in
            (float32's for half inputs).
        norm: ``"rms"``, ``"layer"``, or None to modulate ``x`` itself.
        scale_offset: ``o``; 0 for callers whose ``scale`` is the whole factor.
        rounding: ``"once"``, or ``"each"`` for the roundings of the chain of torch ops.
        out_dtype: Dtype of the result; None means what the chain of torch ops would promote to.
        room: How many rows ``[D]`` memory shall have in front of those of each sample, and behind them, for a stream
            that is concatenated with the result. There are none where a gradient is wanted or a graph is traced, nor
            of a provider other than ``"compiled"``; a result with room has it as ``_diffkern_room``.
        provider: ``"compiled"``, ``"triton"`` or ``"eager"``; None chooses the first that can.

    Returns:
        A new tensor of the shape to which ``x``, ``scale`` and ``shift`` broadcast, contiguous but for the room, or
        without a norm in channels last if ``x`` is. Differentiable in all tensors.

    Raises:
        TypeError: ``x`` is not floating point.
        ValueError: an option has none of its values, weight or bias do not fit, or devices differ.
        RuntimeError: the shapes do not broadcast.
        diffkern.providers.NoProviderError: the provider that was asked for cannot serve the call.

    Source: Peebles and Xie, "Scalable Diffusion Models with Transformers", 2022.
    """
    behind = _channels_behind(x, scale, shift) if norm is None else None
    operands = *(behind or (x, scale, shift)), weight, bias
    options = eps, norm, scale_offset, rounding, out_dtype
    if room is not None:
        memory = _norm_modulate.call_with_room(operands, options, provider, room)
        if memory is not None:
            return _between(memory, room)
    y = _norm_modulate.call(operands, options, provider)
    return y if behind is None else y.movedim(-1, 1)


def gate_residual(
    residual: Tensor,
    x: Tensor,
    gate: Tensor | None = None,
    *,
    gate_activation: GateActivation | None = None,
    rounding: Rounding = "once",
    out_dtype: torch.dtype | None = None,
    provider: str | None = None,
) -> Tensor:
    r"""Gated residual connection, ``residual + act(gate) * x``.

    Args:
        residual: ``[..., D]``, any strides; float32, float16, bfloat16 or float64.
        x: Output of the branch, like ``residual``.
        gate: Broadcasts against them as ``scale`` does in :func:`norm_modulate`; None for the plain sum.
        gate_activation: ``"tanh"`` or ``"sigmoid"``, applied to the gate; None for none.
        rounding: ``"once"``, or ``"each"`` for the roundings of the chain of torch ops.
        out_dtype: Dtype of the result; None means what the chain of torch ops would promote to.
        provider: As in :func:`norm_modulate`.

    Returns:
        A new tensor of the shape to which all broadcast, in channels last if ``residual`` is, else contiguous. Nothing
        is written in place.

    Raises:
        As :func:`norm_modulate`.
    """
    behind = _channels_behind(residual, x, gate)
    operands = behind or (residual, x, gate)
    y = _gate_residual.call(operands, (gate_activation, rounding, out_dtype), provider)
    return y if behind is None else y.movedim(-1, 1)


def gate_residual_norm_modulate(
    residual: Tensor,
    x: Tensor,
    gate: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    norm: Norm | None = "rms",
    gate_activation: GateActivation | None = None,
    scale_offset: float = 1.0,
    rounding: Rounding = "once",
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    room: tuple[int, int] | None = None,
    provider: str | None = None,
) -> tuple[Tensor, Tensor]:
    r"""The end of one branch and the beginning of the next, in one pass over memory.

    .. math:: r = \mathrm{residual} + \mathrm{act}(\mathrm{gate}) \cdot x, \qquad
        y = \bigl(\mathrm{norm}(r) \cdot w + b\bigr) \cdot (o + \mathrm{scale}) + \mathrm{shift}

    The norm reads ``r`` as it is written, rounded to its dtype, as the next op of a model would.

    Args:
        residual: As in :func:`gate_residual`.
        x: As there.
        gate: As there; None for the plain sum.
        scale: As in :func:`norm_modulate`; must broadcast to the shape of ``r``.
        shift: Like ``scale``.
        weight: As in :func:`norm_modulate`.
        bias: As there.
        eps: As there.
        norm: As there.
        gate_activation: As in :func:`gate_residual`.
        scale_offset: As in :func:`norm_modulate`.
        rounding: As in both.
        residual_dtype: Dtype of ``r``; None means what ``residual + gate * x`` would promote to.
        out_dtype: Dtype of ``y``; None means what the chain from ``r`` on would promote to.
        room: As in :func:`norm_modulate`, around ``y``.
        provider: As in :func:`norm_modulate`.

    Returns:
        ``(r, y)``, both new and contiguous, but for the room around ``y``; without a norm in channels last if
        ``residual`` is. ``residual`` itself is left as it is, so that a block whose next residual is its input, as
        AuraFlow's, simply ignores ``r``.

    Raises:
        As :func:`norm_modulate`.
    """
    options = eps, norm, gate_activation, scale_offset, rounding, residual_dtype, out_dtype
    behind = _channels_behind(residual, x, gate, scale, shift) if norm is None else None
    operands = *(behind or (residual, x, gate, scale, shift)), weight, bias
    if room is not None:
        found = _gate_residual_norm_modulate.call_with_room(operands, options, provider, room)
        if found is not None:
            return found[0], _between(found[1], room)
    r, y = _gate_residual_norm_modulate.call(operands, options, provider)
    return (r, y) if behind is None else (r.movedim(-1, 1), y.movedim(-1, 1))


def _channels_behind(x: Tensor, *others: Tensor | None) -> tuple[Tensor | None, ...] | None:
    """An image or a video in channels last, and what broadcasts against it, as rows of channels; None for any other."""
    if x.ndim < 4 or x.is_contiguous() or not is_channels_last(x):
        return None
    if any([y is not None and y.ndim > x.ndim for y in others]):
        return None
    return tuple(
        [y if y is None or not y.ndim else y[(None,) * (x.ndim - y.ndim)].movedim(1, -1) for y in (x, *others)]
    )


def _between(memory: Tensor, room: tuple[int, int]) -> Tensor:
    y = memory.narrow(-2, room[0], memory.shape[-2] - sum(room))
    y._diffkern_room = room  # type: ignore[attr-defined]
    return y


# --- checks --------------------------------------------------------------------------------------------


def _code(value: str | None, codes: Mapping[Any, Any], option: str) -> Any:
    try:
        return codes[value]
    except KeyError:
        raise ValueError(f"{option} is {value!r}: choose one of {', '.join(map(repr, codes))}") from None


def _check_row(x: Tensor) -> torch.device:
    if not x.dtype.is_floating_point:
        raise TypeError(f"modulation and residuals need floating point tensors, got {x.dtype}")
    if x.ndim == 0:
        raise ValueError("modulation and residuals need tensors of at least one dimension, got a scalar")
    return x.device


def _check_parameters(size: int, norm: int, weight: Tensor | None, bias: Tensor | None) -> None:
    """Checks the parameters of a norm over ``size`` elements."""
    if norm == NO_NORM and not (weight is bias is None):
        name = "bias" if weight is None else "weight"
        raise ValueError(f"a {name} belongs to a norm, and norm is None: multiply scale and shift with it instead")
    check_parameters(size, weight, bias)


def _scalar_to(device: torch.device, operand: Any) -> Any:
    """The operand, moved to the device of the input if it is a scalar on the CPU, as torch allows."""
    movable = operand is not None and operand.ndim == 0 and operand.device.type == "cpu"
    return operand.to(device) if movable else operand


def norm_modulate_prepare(
    x: Tensor, scale: Tensor | None, shift: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    eps: float | None, norm: str | None, scale_offset: float, rounding: str, out_dtype: torch.dtype | None,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of the kernel of :func:`norm_modulate`, checked."""
    norm_code, round_each = _code(norm, NORMS, "norm"), _code(rounding, _ROUNDINGS, "rounding")
    device = _check_row(x)
    _check_parameters(x.shape[-1], norm_code, weight, bias)
    scale, shift = _scalar_to(device, scale), _scalar_to(device, shift)
    eps = machine_eps(x.dtype) if eps is None else eps
    return x, scale, shift, weight, bias, eps, norm_code, scale_offset, round_each, out_dtype


def norm_modulate_fake(
    x: Tensor, scale: Tensor | None, shift: Tensor | None, norm: int, out_dtype: torch.dtype | None, **options: Any
) -> Tensor:
    """Its result without data."""
    shape = modulated_shape(x.shape, scale, shift, norm)
    return x.new_empty(shape, dtype=out_dtype or promoted_dtype(x.dtype, scale, shift))


def _norm_modulate_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, scale, shift, weight, bias, eps, norm, scale_offset, _, _, _ = inputs
    ctx.options = Modulation(eps, norm, scale_offset, metas(x, scale, shift, weight, bias))
    needs_x, needs_scale, _, needs_weight, needs_bias = needs_grad(ctx, 5)
    ctx.save_for_backward(
        *keep(
            (x, needs_scale or (norm != NO_NORM and (needs_x or needs_weight))),
            (scale, needs_x or needs_weight or needs_bias),
            (weight, needs_x or needs_scale),
            (bias, needs_scale),
        )
    )


def _norm_modulate_backward(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    grads = modulation_grads(ctx.options, needs_grad(ctx, 5), grad, *ctx.saved_tensors)
    if grads[0] is not None:
        grads[0] = grads[0].to(ctx.options.operands[0][1])
    return grads


_norm_modulate = Op(
    "norm_modulate",
    norm_modulate_prepare,
    norm_modulate_fake,
    _norm_modulate_backward,
    setup_context=_norm_modulate_setup_context,
)


def _gate_residual_prepare(
    residual: Tensor, x: Tensor, gate: Tensor | None, gate_activation: str | None, rounding: str,
    out_dtype: torch.dtype | None,
) -> tuple[Any, ...]:  # fmt: skip
    activation = _code(gate_activation, GATE_ACTIVATIONS, "gate_activation")
    round_each = _code(rounding, _ROUNDINGS, "rounding")
    device = _check_row(residual)
    x, gate = _scalar_to(device, x), _scalar_to(device, gate)
    return residual, x, gate, activation, round_each, out_dtype


def _gate_residual_fake(
    residual: Tensor, x: Tensor, gate: Tensor | None, out_dtype: torch.dtype | None, **options: Any
) -> Tensor:
    shape = gated_shape(residual, x, gate)
    return residual.new_empty(shape, dtype=out_dtype or promoted_dtype(residual.dtype, x, gate))


def _gate_residual_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    residual, x, gate, activation, _, _, _ = inputs
    ctx.options = Gating(activation, *metas(residual, x, gate))
    ctx.save_for_backward(*keep(*_gate_needs(needs_grad(ctx, 3), x, gate, activation)))


def _gate_needs(
    needs: tuple[bool, ...], x: Tensor, gate: Tensor | None, activation: int
) -> tuple[tuple[Tensor | None, bool], ...]:
    """What of x and gate the gradients depend on."""
    _, needs_x, needs_gate = needs
    return (x, needs_gate), (gate, needs_x or (needs_gate and activation != NO_ACTIVATION))


_gate_residual = Op(
    "gate_residual",
    _gate_residual_prepare,
    _gate_residual_fake,
    lambda ctx, grad: gate_grads(ctx.options, needs_grad(ctx, 3), grad, *ctx.saved_tensors),
    setup_context=_gate_residual_setup_context,
)


def gate_residual_norm_modulate_prepare(
    residual: Tensor, x: Tensor, gate: Tensor | None, scale: Tensor | None, shift: Tensor | None, weight: Tensor | None,
    bias: Tensor | None, eps: float | None, norm: str | None, gate_activation: str | None, scale_offset: float,
    rounding: str, residual_dtype: torch.dtype | None, out_dtype: torch.dtype | None,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of the kernel of :func:`gate_residual_norm_modulate`, checked."""
    norm_code, round_each = _code(norm, NORMS, "norm"), _code(rounding, _ROUNDINGS, "rounding")
    activation = _code(gate_activation, GATE_ACTIVATIONS, "gate_activation")
    device = _check_row(residual)
    _check_parameters(gated_shape(residual, x, gate)[-1], norm_code, weight, bias)
    x, gate = _scalar_to(device, x), _scalar_to(device, gate)
    scale, shift = _scalar_to(device, scale), _scalar_to(device, shift)
    if eps is None:
        eps = machine_eps(residual_dtype or promoted_dtype(residual.dtype, x, gate))
    return (
        residual, x, gate, scale, shift, weight, bias, eps,
        norm_code, activation, scale_offset, round_each, residual_dtype, out_dtype,
    )  # fmt: skip


def gate_residual_norm_modulate_fake(
    residual: Tensor, x: Tensor, gate: Tensor | None, scale: Tensor | None, shift: Tensor | None,
    residual_dtype: torch.dtype | None, out_dtype: torch.dtype | None, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Its results without data."""
    shape = gated_shape(residual, x, gate, scale, shift)
    residual_dtype = residual_dtype or promoted_dtype(residual.dtype, x, gate)
    out_dtype = out_dtype or promoted_dtype(residual_dtype, scale, shift)
    return residual.new_empty(shape, dtype=residual_dtype), residual.new_empty(shape, dtype=out_dtype)


def _gate_residual_norm_modulate_setup_context(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]
) -> None:
    residual, x, gate, scale, shift, weight, bias, eps, norm, activation, scale_offset = inputs[:11]
    new_residual = output[0]
    ctx.gating = Gating(activation, *metas(residual, x, gate))
    ctx.modulation = Modulation(eps, norm, scale_offset, metas(new_residual, scale, shift, weight, bias))
    needs = needs_grad(ctx, 7)
    needs_scale, _, needs_weight, needs_bias = needs[3:]
    needs_new = any(needs[:3])
    ctx.save_for_backward(
        *keep(
            *_gate_needs(needs[:3], x, gate, activation),
            (new_residual, needs_scale or (norm != NO_NORM and (needs_new or needs_weight))),
            (scale, needs_new or needs_weight or needs_bias),
            (weight, needs_new or needs_scale),
            (bias, needs_scale),
        )
    )


def _gate_residual_norm_modulate_backward(ctx: Any, grad_new: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, gate, *saved = ctx.saved_tensors
    needs = needs_grad(ctx, 7)
    needs_new = any(needs[:3])
    through_norm, *grads = modulation_grads(ctx.modulation, (needs_new, *needs[3:]), grad, *saved)
    if not needs_new:
        return (None, None, None, *grads)
    grad_new = grad_new if through_norm is None else grad_new + through_norm
    return (*gate_grads(ctx.gating, needs[:3], grad_new, x, gate), *grads)


_gate_residual_norm_modulate = Op(
    "gate_residual_norm_modulate",
    gate_residual_norm_modulate_prepare,
    gate_residual_norm_modulate_fake,
    _gate_residual_norm_modulate_backward,
    setup_context=_gate_residual_norm_modulate_setup_context,
)
