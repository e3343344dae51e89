r"""RMS and layer normalisation, with every rounding order that diffusion and language models use.

Numerical contract (``docs/numerics.md`` has the table):

* input, weight and bias in float32, float16 or bfloat16, in any mix; float64 by the eager provider;
* the sum of squares, the mean and all arithmetic in float32;
* rounds once, to the output dtype; with ``round_dtype`` also right after the normalisation and before the
  bias is added, as the classes do that normalise, cast, and only then multiply.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffkern.ops.contract import CENTRED, ContractRow
from diffkern.ops.norm_gradients import Modulation, metas, modulation_grads, needs_grad
from diffkern.ops.registration import Op
from diffkern.providers.eager.modulate import LAYER, RMS
from diffkern.providers.eager.precision import empty_output

_HALF = (torch.float16, torch.bfloat16)


CONTRACT = (
    ContractRow("rms_norm", "plain"),
    ContractRow("rms_norm", "offset weight", arithmetic="float32, weight + offset included"),
    ContractRow(
        "rms_norm",
        "round_dtype",
        "half round_dtype",
        rounds="the normalised value to round_dtype, the product to the output dtype, the sum with the bias again",
    ),
    ContractRow("rms_norm", "clamp_eps"),
    ContractRow("layer_norm", "plain", arithmetic=CENTRED),
)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    dim: int = -1,
    weight_offset: float = 0.0,
    round_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    clamp_eps: bool = False,
    memory_format: torch.memory_format = torch.contiguous_format,
    provider: str | None = None,
) -> Tensor:
    r"""Root mean square normalisation.

    .. math:: y = x \cdot \left(\tfrac1D \sum_i x_i^2 + \epsilon\right)^{-1/2} \cdot (w + o) + b

    Args:
        x: Input of any rank from 1 up, any strides; float32, float16, bfloat16 or float64.
        weight: ``w`` of shape ``[D]``, or of the shape of the last dimensions of ``x`` to normalise over
            all of those at once, or None. With ``dim != -1`` anything with ``D`` elements, e.g. ``[C,1,1]``.
        bias: ``b``, like ``weight``; needs no weight.
        eps: ``ε``; None means the machine epsilon of the precision computed in (float32's for half
            inputs), as in :class:`torch.nn.RMSNorm`.
        dim: The dimension to normalise over, of size ``D``. Nothing is copied for a channel dimension.
        weight_offset: ``o``, added to the weight in float32; 1 for the zero-centred weights of Gemma.
        round_dtype: Rounds ``x · rsqrt(...)`` to this dtype before it is multiplied (and the product to
            ``out_dtype`` before ``b`` is added); None rounds only the result.
        out_dtype: Dtype of the result; None means that of ``x``.
        clamp_eps: ``x / max(‖x‖₂, ε) · √D`` instead: ε bounds the length and is not added.
        memory_format: ``torch.contiguous_format``, as ``F.rms_norm`` writes, or ``torch.preserve_format``
            for the strides a pointwise op would give.
        provider: ``"compiled"``, ``"triton"`` or ``"eager"``; None chooses the first that can.

    Returns:
        A new tensor of the shape of ``x``. Differentiable in ``x``, ``weight`` and ``bias``.

    Raises:
        TypeError: ``x`` is not floating point.
        ValueError: shapes or devices do not fit together.
        diffkern.providers.NoProviderError: the provider that was asked for cannot serve the call.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    rows, preserve = x, memory_format is torch.preserve_format
    if dim != -1 or (weight is not None and weight.ndim != 1) or (bias is not None and bias.ndim != 1):
        rows, weight, bias = _as_rows(x, weight, bias, dim, memory_format)
        preserve = preserve or dim not in (-1, x.ndim - 1)
    options = eps, weight_offset, round_dtype, out_dtype, clamp_eps, preserve
    y = _rms_norm.call((rows, weight, bias), options, provider)
    return y if rows is x else _from_rows(y, x, dim, memory_format)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dim: int = -1,
    out_dtype: torch.dtype | None = None,
    memory_format: torch.memory_format = torch.contiguous_format,
    provider: str | None = None,
) -> Tensor:
    r"""Layer normalisation.

    .. math:: y = \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} \cdot w + b,
        \quad \mu = \tfrac1D \sum_i x_i, \quad \sigma^2 = \tfrac1D \sum_i (x_i - \mu)^2

    Args:
        x: Input of any rank from 1 up, any strides; float32, float16, bfloat16 or float64.
        weight: ``w``, as in :func:`rms_norm`, or None.
        bias: ``b``, like ``weight``, or None; each may be given without the other.
        eps: ``ε``, added to the variance.
        dim: The dimension to normalise over, of size ``D``.
        out_dtype: Dtype of the result; None means that of ``x``.
        memory_format: As in :func:`rms_norm`.
        provider: As in :func:`rms_norm`.

    Returns:
        A new tensor of the shape of ``x``. Differentiable in ``x``, ``weight`` and ``bias``.

    Raises:
        TypeError: ``x`` is not floating point.
        ValueError: shapes or devices do not fit together.
        diffkern.providers.NoProviderError: the provider that was asked for cannot serve the call.

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016.
    """
    rows, preserve = x, memory_format is torch.preserve_format
    if dim != -1 or (weight is not None and weight.ndim != 1) or (bias is not None and bias.ndim != 1):
        rows, weight, bias = _as_rows(x, weight, bias, dim, memory_format)
        preserve = preserve or dim not in (-1, x.ndim - 1)
    y = _layer_norm.call((rows, weight, bias), (eps, out_dtype, preserve), provider)
    return y if rows is x else _from_rows(y, x, dim, memory_format)


# --- from the caller's layout to rows along the last dimension, and back -------------------------------


def _as_rows(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, dim: int, memory_format: torch.memory_format
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Views ``x`` with the normalised dimension last and flattens the parameters to ``[D]``."""
    if not x.is_floating_point():
        raise TypeError(f"a norm needs a floating point input, got {x.dtype}")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim {dim} is out of range for an input of {x.ndim} dimensions")
    if dim not in (-1, x.ndim - 1):
        if memory_format is not torch.preserve_format:
            x = x.contiguous()
        x = x.movedim(dim, -1)
    else:
        shape = weight.shape if weight is not None else None if bias is None else bias.shape
        if shape is None or len(shape) < 2:
            return x, weight, bias
        if x.shape[-len(shape) :] != shape:
            raise ValueError(f"the weight of shape {tuple(shape)} does not fit an input of shape {tuple(x.shape)}")
        x = x.flatten(-len(shape))
    return x, None if weight is None else weight.reshape(-1), None if bias is None else bias.reshape(-1)


def _from_rows(y: Tensor, x: Tensor, dim: int, memory_format: torch.memory_format) -> Tensor:
    y = y.movedim(-1, dim) if dim not in (-1, x.ndim - 1) else y.view(x.shape)
    if memory_format is not torch.preserve_format or x.is_contiguous():
        return y
    # Where dimensions overlap in memory, or were merged by a copy, the order of the rows is not that of x.
    wanted = torch.empty_like(x, device="meta").stride()
    if y.stride() == wanted:
        return y
    order = sorted(range(x.ndim), key=lambda axis: -wanted[axis])
    return y.permute(order).contiguous().permute([order.index(axis) for axis in range(x.ndim)])


def check_parameters(size: int, weight: Tensor | None, bias: Tensor | None, owner: str = "") -> None:
    """Checks that the parameters of a norm over ``size`` elements fit them."""
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.shape != (size,):
            raise ValueError(
                f"the {name}{owner} has shape {tuple(parameter.shape)}, but {size} elements are normalised together"
            )


def machine_eps(dtype: torch.dtype) -> float:
    """The machine epsilon of the precision that inputs of a dtype are computed in."""
    return torch.finfo(torch.float32 if dtype in _HALF else dtype).eps


# --- the torch ops -------------------------------------------------------------------------------------


def _prepare(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float | None, *options: Any
) -> tuple[Any, ...]:
    if x.ndim == 0:
        raise ValueError("a norm needs an input of at least one dimension, got a scalar")
    check_parameters(x.shape[-1], weight, bias)
    return x, weight, bias, machine_eps(x.dtype) if eps is None else eps, *options


def _fake(x: Tensor, out_dtype: torch.dtype | None, preserve_strides: bool, **options: Any) -> Tensor:
    return empty_output(x, out_dtype, preserve_strides)


def _rms_norm_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, eps, weight_offset, _, _, clamp_eps, _, _ = inputs
    ctx.options = Modulation(eps, RMS, 0.0, metas(x, None, None, weight, bias), weight_offset, clamp_eps)
    ctx.save_for_backward(x, weight)


def _layer_norm_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, eps, _, _, _ = inputs
    ctx.options = Modulation(eps, LAYER, 0.0, metas(x, None, None, weight, bias))
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of x, weight and bias, of the unrounded formula; statistics are computed again rather than kept."""
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = needs_grad(ctx, 3)
    needs = needs_x, False, False, needs_weight, needs_bias
    grad_x, _, _, *parameters = modulation_grads(ctx.options, needs, grad, x, None, weight, None)
    return (None if grad_x is None else grad_x.to(x.dtype), *parameters)


_rms_norm = Op("rms_norm", _prepare, _fake, _backward, setup_context=_rms_norm_setup_context)
_layer_norm = Op("layer_norm", _prepare, _fake, _backward, setup_context=_layer_norm_setup_context)
