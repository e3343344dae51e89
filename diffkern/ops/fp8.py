r"""Matrix products in fp8, and the steps before them that hand over rows of fp8.

A row of fp8 is a row in e4m3 and one scale in float32, found from the row itself: :math:`s = \max|x| / 448`,
:math:`q = \operatorname{e4m3}(x / s)`, so that the largest number of the format is used whatever the row holds. e4m3
has four significant binary digits: a rounding is off by up to 6 %, and a product of many by about 3.7 % of its root
mean square. Zeros stay zeros, and a row with an infinity or a NaN is none of numbers.

Numerical contract (``docs/numerics.md`` has the table): float32, float16 and bfloat16; all arithmetic before the
rounding to e4m3 in float32. These functions have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from diffkern.ops import activation, modulate
from diffkern.ops.contract import ContractRow
from diffkern.ops.modulate import GateActivation, Norm, Rounding
from diffkern.ops.registration import Op
from diffkern.providers.dispatch_modes import transforms_active
from diffkern.providers.eager.activation import FUNCTIONS
from diffkern.providers.eager.fp8 import E4M3

_BOUND = "each value at most one rounding of e4m3 from float64, each scale 1e-6"
_OF_PRODUCT = "of the product of the magnitudes of the same rows and weight in float64"
_OF_RESULT = "the result as without fp8; each value at most one rounding of e4m3 from it, each scale 1e-6"

CONTRACT = (
    ContractRow("norm_modulate_fp8", "any", rounds="once, to e4m3", bound=_BOUND),
    ContractRow(
        "gate_residual_norm_modulate_fp8",
        "any",
        rounds="the new residual to its dtype before the norm reads it, the modulated norm once, to e4m3",
        bound=_BOUND,
    ),
    ContractRow(
        "norm_modulate_and_fp8", "any", rounds="the result as norm_modulate, and that once to e4m3", bound=_OF_RESULT
    ),
    ContractRow(
        "gate_residual_norm_modulate_and_fp8",
        "any",
        rounds="both results as gate_residual_norm_modulate, and the second once to e4m3",
        bound=_OF_RESULT,
    ),
    ContractRow(
        "activation_fp8", f"identity, {', '.join(FUNCTIONS)}", "one dtype", rounds="once, to e4m3", bound=_BOUND
    ),
    ContractRow("glu_and_fp8", "any", rounds="the result as glu, and that once to e4m3", bound=_OF_RESULT),
    ContractRow(
        "linear_fp8",
        "K up to 4096",
        "e4m3 rows and weight",
        "float32 sums, of about 14 bits on NVIDIA's tensor cores",
        bound=f"2e-5 K (at least 3e-3) {_OF_PRODUCT}",
    ),
    ContractRow("linear_fp8", "K above 4096", "e4m3 rows and weight", "float32 sums", bound=f"3e-3 {_OF_PRODUCT}"),
)


def norm_modulate_fp8(
    x: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    norm: Norm | None = "rms",
    provider: str | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`diffkern.ops.norm_modulate` into rows of fp8.

    The arguments are those of that op, but for roundings and dtypes; for ``eps`` None means float32's machine epsilon.
    The provider is ``"compiled"``, ``"triton"`` or ``"eager"``; None chooses the first that can.

    Returns:
        Values in e4m3 of the shape to which ``x``, ``scale`` and ``shift`` broadcast, contiguous, and scales in
        float32 of that shape with a last dimension of 1.

    Raises:
        ValueError: ``norm`` is unknown, weight or bias do not fit, operands are on several devices, or a row has no
            elements.
        RuntimeError: the shapes do not broadcast, or a gradient is wanted.
        diffkern.providers.NoProviderError: the provider that was asked for cannot serve the call.
    """
    return _norm_modulate.call((x, scale, shift, weight, bias), (eps, norm), provider)


def gate_residual_norm_modulate_fp8(
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
    provider: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`diffkern.ops.gate_residual_norm_modulate` whose modulated norm comes in rows of fp8.

    The arguments are those of that op, but for activated gates, roundings and dtypes; the provider is that of
    :func:`norm_modulate_fp8`.

    Returns:
        The new residual in the promoted dtype, and values and scales as :func:`norm_modulate_fp8` gives them.

    Raises:
        As :func:`norm_modulate_fp8`.
    """
    operands = residual, x, gate, scale, shift, weight, bias
    return _gate_residual_norm_modulate.call(operands, (eps, norm), provider)


def norm_modulate_and_fp8(
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
    provider: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`diffkern.ops.norm_modulate`, and its result in rows of fp8: what :func:`activation_fp8` makes of it.

    It writes both in one pass, where some readers take fp8 and others may not. The arguments are those of that op; the
    provider is that of :func:`norm_modulate_fp8`.

    Returns:
        The result, and its values and scales as :func:`norm_modulate_fp8` gives them.

    Raises:
        As :func:`diffkern.ops.norm_modulate`; ValueError if a row has no elements, RuntimeError if a gradient is
        wanted.
    """
    options = eps, norm, scale_offset, rounding, out_dtype
    return _norm_modulate_and.call((x, scale, shift, weight, bias), options, provider)


def gate_residual_norm_modulate_and_fp8(
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
    provider: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`diffkern.ops.gate_residual_norm_modulate`, and its second result in rows of fp8.

    The arguments are those of that op; the provider is that of :func:`norm_modulate_fp8`.

    Returns:
        Both results, and values and scales of the second, as :func:`norm_modulate_and_fp8`.

    Raises:
        As :func:`norm_modulate_and_fp8`.
    """
    options = eps, norm, gate_activation, scale_offset, rounding, residual_dtype, out_dtype
    operands = residual, x, gate, scale, shift, weight, bias
    return _gate_residual_norm_modulate_and.call(operands, options, provider)


def activation_fp8(
    x: Tensor, function: str = "identity", *, front: Tensor | None = None, provider: str | None = None
) -> tuple[Tensor, Tensor]:
    """An activation into rows of fp8, maybe behind other elements: of ``[front, act(x)]``.

    Args:
        x: ``[..., D]``; float32, float16 or bfloat16. Rows that lie in no regular order are copied.
        function: ``"identity"``, ``"gelu"`` (erf), ``"gelu_tanh"``, ``"silu"`` or ``"quick_gelu"``.
        front: ``[..., F]`` of the same dtype, whose rows come before those of the activation; None for none.
        provider: As in :func:`norm_modulate_fp8`.

    Returns:
        Values ``[..., F + D]`` and scales as :func:`norm_modulate_fp8` gives them.

    Raises:
        TypeError: ``front`` has another dtype than ``x``.
        ValueError: the function is unknown, ``x`` has no elements in a row, or ``front`` has other rows.
        RuntimeError: a gradient is wanted.
        diffkern.providers.NoProviderError: the provider that was asked for cannot serve the call.
    """
    return _activation.call((x, front), (function,), provider)


def glu_and_fp8(
    value: Tensor,
    gate: Tensor,
    activation: str = "gelu",
    *,
    round_activation: bool = False,
    provider: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`diffkern.ops.glu`, and its result in rows of fp8: what :func:`activation_fp8` makes of it.

    It writes both in one pass, where some readers take fp8 and others may not. The arguments are those of that op,
    operands in float32, float16 or bfloat16; the provider is that of :func:`norm_modulate_fp8`.

    Returns:
        The result, and its values and scales as :func:`norm_modulate_fp8` gives them.

    Raises:
        As :func:`diffkern.ops.glu`; ValueError if a row has no elements, RuntimeError if a gradient is wanted.
    """
    return _glu_and.call((value, gate), (activation, round_activation), provider)


def linear_fp8(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    provider: str | None = None,
) -> Tensor:
    r"""A linear layer on rows of fp8: :math:`s_x s_w\, q_x q_w^\top + b`.

    On NVIDIA GPUs of compute capability 8.9 and newer, and into bfloat16, the tensor cores multiply the bytes. Sums of
    up to 4096 terms stay in their accumulators to the end, of about 14 bits, as NVIDIA's libraries keep them in forward
    passes; longer ones are moved to float32 registers on the way, which takes 6 to 20 % longer on an H100 and an H200
    at the shapes of LTX-Video, Flux and Wan. Elsewhere the numbers behind the bytes are multiplied in float32, which is
    right, and slow.

    Args:
        x: Values in e4m3 of shape ``[..., K]``.
        x_scale: Their scales in float32 of shape ``[..., 1]``.
        weight: Values in e4m3 of shape ``[N, K]``; for tensor cores K and N must be multiples of 16.
        weight_scale: Their scales in float32 of shape ``[N, 1]``.
        bias: ``[N]`` of ``out_dtype``, or None.
        out_dtype: Dtype of the result.
        provider: ``"eager"`` or None: what there is to fuse, torch itself fuses.

    Returns:
        A new tensor of shape ``[..., N]``.

    Raises:
        TypeError: values are not e4m3, or scales not float32.
        ValueError: shapes or devices do not fit together.
    """
    return _linear.call((x, x_scale, weight, weight_scale, bias), (out_dtype,), provider)


# --- checks, shapes --------------------------------------------------------------------------------------


def _check_rows(shape: torch.Size) -> None:
    if len(shape) == 0 or shape[-1] == 0:
        raise ValueError(f"an fp8 row needs elements to find its scale from, got a tensor of shape {tuple(shape)}")


def _check_no_gradient(*tensors: Tensor) -> None:
    """Transforms that differentiate would go straight through the rounding."""
    if not transforms_active():
        return
    for tensor in tensors:
        if torch._C._functorch.is_gradtrackingtensor(tensor) or forward_ad.unpack_dual(tensor).tangent is not None:
            _backward(None)


def _norm_modulate_and_prepare(x: Tensor, *args: Any) -> tuple[Any, ...]:
    _check_rows(x.shape)
    args = modulate.norm_modulate_prepare(x, *args)
    _check_no_gradient(*[operand for operand in args[:5] if operand is not None])
    return args


def _gate_residual_norm_modulate_and_prepare(residual: Tensor, x: Tensor, *args: Any) -> tuple[Any, ...]:
    _check_rows(residual.shape if x.ndim == 0 or x.shape[-1] else x.shape)
    args = modulate.gate_residual_norm_modulate_prepare(residual, x, *args)
    _check_no_gradient(*[operand for operand in args[:7] if operand is not None])
    return args


def _activation_prepare(x: Tensor, front: Tensor | None, function: str) -> tuple[Any, ...]:
    if function not in ("identity", *FUNCTIONS):
        raise ValueError(f"activation {function!r}: choose one of identity, {', '.join(FUNCTIONS)}")
    _check_rows(x.shape)
    if front is not None:
        if front.dtype != x.dtype:
            raise TypeError(f"front is {front.dtype}, and x {x.dtype}: rows have one dtype")
        if front.shape[:-1] != x.shape[:-1]:
            raise ValueError(f"front of shape {tuple(front.shape)} has other rows than x of shape {tuple(x.shape)}")
        _check_no_gradient(front)
    _check_no_gradient(x)
    return x, front, function


def _glu_and_prepare(value: Tensor, gate: Tensor, *args: Any) -> tuple[Any, ...]:
    _check_rows(value.shape)
    args = activation.glu_prepare(value, gate, *args)
    _check_no_gradient(value, gate)
    return args


def _linear_prepare(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> tuple[Any, ...]:
    for name, values, scales in (("x", x, x_scale), ("weight", weight, weight_scale)):
        if values.dtype != E4M3 or scales.dtype != torch.float32:
            raise TypeError(f"{name} must be {E4M3} with float32 scales, got {values.dtype} and {scales.dtype}")
        if scales.shape != (*values.shape[:-1], 1):
            raise ValueError(
                f"{name} of shape {tuple(values.shape)} needs scales of shape {(*values.shape[:-1], 1)}, "
                f"got {tuple(scales.shape)}"
            )
    if weight.ndim != 2 or x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"rows of shape {tuple(x.shape)} and a weight of shape {tuple(weight.shape)} do not fit together"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"the bias has shape {tuple(bias.shape)}, and the weight {weight.shape[0]} rows")
    return x, x_scale, weight, weight_scale, bias, out_dtype


def _rows(x: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    return x.new_empty(shape, dtype=E4M3), x.new_empty((*shape[:-1], 1), dtype=torch.float32)


def _and_rows(*results: Tensor) -> tuple[Tensor, ...]:
    """Results without data, and the last one in rows of fp8."""
    return (*results, *_rows(results[-1], results[-1].shape))


def _gate_residual_norm_modulate_fake(**args: Any) -> tuple[Tensor, ...]:
    new, y = modulate.gate_residual_norm_modulate_fake(**args, residual_dtype=None, out_dtype=None)
    return (new, *_rows(y, y.shape))


def _activation_fake(x: Tensor, front: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    ahead = 0 if front is None else front.shape[-1]
    return _rows(x, torch.Size((*x.shape[:-1], ahead + x.shape[-1])))


def _linear_fake(x: Tensor, weight: Tensor, out_dtype: torch.dtype, **options: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype)


def _backward(ctx: Any, *grads: Tensor) -> NoReturn:
    raise RuntimeError("rounding to fp8 has no gradient: use norm_modulate, gelu and linear where one is wanted")


# --- the torch ops ---------------------------------------------------------------------------------------


def _op(name: str, prepare: Callable[..., tuple[Any, ...]], fake: Callable[..., Any]) -> Op:
    """An op without a gradient, for which nothing is kept."""
    return Op(name, prepare, fake, _backward, setup_context=lambda ctx, inputs, output: None)


_norm_modulate: Op[tuple[Tensor, Tensor]] = _op(
    "norm_modulate_fp8",
    lambda *args: _norm_modulate_and_prepare(*args, 1.0, "once", None)[:7],
    lambda **args: _and_rows(modulate.norm_modulate_fake(**args, out_dtype=None))[1:],
)
_gate_residual_norm_modulate: Op[tuple[Tensor, Tensor, Tensor]] = _op(
    "gate_residual_norm_modulate_fp8",
    lambda *args: _gate_residual_norm_modulate_and_prepare(*args, None, 1.0, "once", None, None)[:9],
    _gate_residual_norm_modulate_fake,
)
_norm_modulate_and: Op[tuple[Tensor, Tensor, Tensor]] = _op(
    "norm_modulate_and_fp8",
    _norm_modulate_and_prepare,
    lambda **args: _and_rows(modulate.norm_modulate_fake(**args)),
)
_gate_residual_norm_modulate_and: Op[tuple[Tensor, Tensor, Tensor, Tensor]] = _op(
    "gate_residual_norm_modulate_and_fp8",
    _gate_residual_norm_modulate_and_prepare,
    lambda **args: _and_rows(*modulate.gate_residual_norm_modulate_fake(**args)),
)
_activation: Op[tuple[Tensor, Tensor]] = _op("activation_fp8", _activation_prepare, _activation_fake)
_glu_and: Op[tuple[Tensor, Tensor, Tensor]] = _op(
    "glu_and_fp8", _glu_and_prepare, lambda **args: _and_rows(activation.glu_fake(**args))
)
_linear: Op[Tensor] = _op("linear_fp8", _linear_prepare, _linear_fake)
