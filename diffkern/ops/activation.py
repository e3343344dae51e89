r"""Activations of feed-forwards, alone and as the gate of a product.

Numerical contract (``docs/numerics.md`` has the table):

* float32, float16 and bfloat16, the two operands of a gate in any mix; float64 by the eager provider;
* all arithmetic in float32;
* rounds once, to the output dtype; with ``round_activation`` also between the activation and the product, as
  a chain of two PyTorch ops does.

``gelu`` and ``gelu_tanh`` are different functions: they differ by up to 4.7e-4, which bfloat16 hides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffkern.ops.contract import TO_INPUT, ContractRow
from diffkern.ops.norm_gradients import needs_grad
from diffkern.ops.registration import Op
from diffkern.providers.eager import compute_dtype
from diffkern.providers.eager.activation import FUNCTIONS, apply, apply_backward

CONTRACT = (
    ContractRow("activation", "gelu, gelu_tanh, silu, quick_gelu", "one dtype", rounds=TO_INPUT),
    ContractRow("glu", "plain", "two operands in any mix", rounds="once, to the promoted dtype"),
    ContractRow(
        "glu",
        "round_activation",
        "two operands in any mix",
        rounds="the activation to the dtype of the gate, the product to the promoted dtype",
    ),
    ContractRow("channel_glu", "plain", "two operands in any mix", rounds=TO_INPUT),
    ContractRow(
        "channel_glu",
        "round_each",
        "two operands in any mix",
        rounds="the sums, the activation and the product, to the dtype of the input",
    ),
)


def gelu(x: Tensor, approximate: str = "none", *, provider: str | None = None) -> Tensor:
    r"""Gaussian error linear unit.

    .. math::
        \text{none}: \; \tfrac x2 \left(1 + \operatorname{erf} \tfrac{x}{\sqrt 2}\right), \qquad
        \text{tanh}: \; \tfrac x2 \left(1 + \tanh\!\left(\sqrt{\tfrac 2\pi}\,(x + 0.044715\,x^3)\right)\right)

    Args:
        x: Input of any shape and strides; float32, float16, bfloat16 or float64.
        approximate: ``"none"`` or ``"tanh"``, as in :func:`torch.nn.functional.gelu`.
        provider: ``"compiled"``, ``"triton"`` or ``"eager"``; None chooses the first that can.

    Returns:
        A new tensor of the shape and dtype of ``x``, with the strides that a pointwise op gives. Differentiable.

    Raises:
        TypeError: ``x`` is not floating point.
        ValueError: ``approximate`` is neither of the two.
        diffkern.providers.NoProviderError: the provider that was asked for cannot serve the call.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units (GELUs)", 2016.
    """
    return _activation.call((x,), (gelu_name(approximate),), provider)


def silu(x: Tensor, *, provider: str | None = None) -> Tensor:
    r"""Sigmoid linear unit, :math:`x / (1 + e^{-x})`; otherwise like :func:`gelu`.

    Source: Elfwing, Uchibe and Doya, "Sigmoid-Weighted Linear Units", 2017.
    """
    return _activation.call((x,), ("silu",), provider)


def quick_gelu(x: Tensor, *, provider: str | None = None) -> Tensor:
    r"""The sigmoid form of GELU, :math:`x \, \sigma(1.702 x)`, of CLIP and of diffusers' ``ApproximateGELU``.

    Otherwise like :func:`gelu`, except that nothing is rounded before the product is.
    """
    return _activation.call((x,), ("quick_gelu",), provider)


def glu(
    value: Tensor,
    gate: Tensor,
    activation: str = "gelu",
    *,
    round_activation: bool = False,
    provider: str | None = None,
) -> Tensor:
    r"""Gated linear unit: :math:`v \cdot a(g)`.

    Args:
        value: ``v``, of any shape and strides, for instance half of a packed projection; it is read in place.
            float32, float16, bfloat16 or float64.
        gate: ``g``, of the shape of ``value``; any strides.
        activation: ``a``: ``"gelu"`` (erf), ``"gelu_tanh"``, ``"silu"`` or ``"quick_gelu"``.
        round_activation: Rounds ``a(g)`` to the dtype of ``gate`` before the product, as the chain
            ``value * F.gelu(gate)`` does.
        provider: As in :func:`gelu`.

    Returns:
        A new tensor of the shape of ``value`` and of the dtype that torch promotes the two to, laid out densely
        in the order of ``value``. Differentiable in both.

    Raises:
        TypeError: an operand is not floating point.
        ValueError: shapes or devices do not fit together, or the activation is unknown.
        diffkern.providers.NoProviderError: the provider that was asked for cannot serve the call.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    return _glu.call((value, gate), (activation, round_activation), provider)


def channel_glu(
    x: Tensor,
    bias: Tensor | None = None,
    activation: str = "silu",
    *,
    round_each: bool = False,
    provider: str | None = None,
) -> Tensor:
    r"""Gated linear unit of the two halves of the channels, behind a convolution whose bias is added with it.

    .. math:: y_c = (x_c + b_c) \cdot a(x_{C + c} + b_{C + c})

    Args:
        x: Input of shape ``[B, 2C, ...]``, any strides; float32, float16, bfloat16 or float64.
        bias: ``b`` of shape ``[2C]``, or None.
        activation: ``a``, as in :func:`glu`.
        round_each: Rounds each sum, and ``a`` of it, to the dtype of ``x``, as a chain of PyTorch ops does.
        provider: ``"triton"`` or ``"eager"``; None chooses the first that can.

    Returns:
        A new tensor ``[B, C, ...]`` of the dtype of ``x``, laid out densely in the order of ``x``. Differentiable in
        both.

    Raises:
        TypeError: an operand is not floating point.
        ValueError: the channels are odd, the bias has not one value for each, or the activation is unknown.
        diffkern.providers.NoProviderError: the provider that was asked for cannot serve the call.

    Source: Cai et al., "EfficientViT", 2023, whose MBConv has it in the place of its second activation; Sana.
    """
    return _channel_glu.call((x, bias), (activation, round_each), provider)


def geglu(
    x: Tensor,
    approximate: str = "none",
    *,
    dim: int = -1,
    gate_first: bool = False,
    round_activation: bool = False,
    provider: str | None = None,
) -> Tensor:
    """:func:`glu` of the two halves of ``x`` with GELU: ``first * gelu(second)``, as diffusers' ``GEGLU`` has it.

    Args:
        x: Both halves, one after the other along ``dim``.
        approximate: As in :func:`gelu`.
        dim: The dimension that is halved, of even size.
        gate_first: ``gelu(first) * second`` instead.
        round_activation: As in :func:`glu`.
        provider: As in :func:`gelu`.

    Raises:
        ValueError: ``dim`` is out of range or has an odd size; otherwise as in :func:`glu`.
    """
    value, gate = _halves(x, dim, gate_first)
    return glu(value, gate, gelu_name(approximate), round_activation=round_activation, provider=provider)


def swiglu(
    x: Tensor,
    *,
    dim: int = -1,
    gate_first: bool = False,
    round_activation: bool = False,
    provider: str | None = None,
) -> Tensor:
    """:func:`glu` of the two halves of ``x`` with SiLU: ``first * silu(second)``, as diffusers' ``SwiGLU`` has it.

    The arguments are those of :func:`geglu`; ``gate_first`` is for ``Flux2SwiGLU``, ``silu(first) * second``.
    """
    value, gate = _halves(x, dim, gate_first)
    return glu(value, gate, "silu", round_activation=round_activation, provider=provider)


def gelu_name(approximate: str) -> str:
    """Returns the name among :data:`FUNCTIONS` of what ``F.gelu`` calls ``approximate``.

    Raises:
        ValueError: it is neither ``"none"`` nor ``"tanh"``.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"unknown approximation {approximate!r} of GELU: choose 'none' or 'tanh'")
    return "gelu" if approximate == "none" else "gelu_tanh"


def _halves(x: Tensor, dim: int, gate_first: bool) -> tuple[Tensor, Tensor]:
    """The value and the gate, as views."""
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim {dim} is out of range for an input of {x.ndim} dimensions")
    if x.shape[dim] % 2:
        raise ValueError(f"dimension {dim} has the odd size {x.shape[dim]} and cannot be halved")
    first, second = x.chunk(2, dim)
    return (second, first) if gate_first else (first, second)


def _activation_prepare(x: Tensor, function: str) -> tuple[Any, ...]:
    if not x.is_floating_point():
        raise TypeError(f"an activation needs a floating point input, got {x.dtype}")
    return x, function


def _activation_backward(ctx: Any, grad: Tensor) -> list[Tensor]:
    (x,) = ctx.saved_tensors
    return [apply_backward(grad, x, ctx.function)]


_activation = Op("activation", _activation_prepare, lambda x, **_: torch.empty_like(x), _activation_backward)


def glu_prepare(value: Tensor, gate: Tensor, activation: str, round_activation: bool) -> tuple[Any, ...]:
    """Checks the arguments of :func:`glu`."""
    if not (value.is_floating_point() and gate.is_floating_point()):
        raise TypeError(f"a gated unit needs floating point operands, got {value.dtype} and {gate.dtype}")
    if activation not in FUNCTIONS:
        raise ValueError(f"unknown activation {activation!r}: choose one of {', '.join(FUNCTIONS)}")
    if value.shape != gate.shape:
        raise ValueError(
            f"the value has shape {tuple(value.shape)}, the gate {tuple(gate.shape)}: they must be the same"
        )
    return value, gate, activation, round_activation


def glu_fake(value: Tensor, gate: Tensor, **options: Any) -> Tensor:
    """What :func:`glu` returns, without numbers."""
    return torch.empty_like(value, dtype=torch.promote_types(value.dtype, gate.dtype))


def _glu_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Backward of the unrounded formula; the activation is computed again rather than kept."""
    value, gate = ctx.saved_tensors
    dtype = compute_dtype(value, gate)
    grad, wide = grad.to(dtype), gate.to(dtype)
    grad_value = grad_gate = None
    if ctx.needs_input_grad[0]:
        grad_value = (grad * apply(wide, ctx.function)).to(value.dtype)
    if ctx.needs_input_grad[1]:
        grad_gate = apply_backward(grad * value.to(dtype), wide, ctx.function).to(gate.dtype)
    return grad_value, grad_gate


_glu = Op("glu", glu_prepare, glu_fake, _glu_backward)


def _channel_glu_prepare(x: Tensor, bias: Tensor | None, activation: str, round_each: bool) -> tuple[Any, ...]:
    if not (x.is_floating_point() and (bias is None or bias.is_floating_point())):
        raise TypeError(f"a gated unit needs floating point operands, got {x.dtype}")
    if activation not in FUNCTIONS:
        raise ValueError(f"unknown activation {activation!r}: choose one of {', '.join(FUNCTIONS)}")
    if x.ndim < 2 or x.shape[1] % 2:
        raise ValueError(f"the input must have shape [B, 2C, ...], got {tuple(x.shape)}")
    if bias is not None and bias.shape != x.shape[1:2]:
        raise ValueError(f"the bias has shape {tuple(bias.shape)}, but the input has {x.shape[1]} channels")
    return x, bias, activation, round_each


def _channel_glu_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Backward of the unrounded formula; the sums and the activation are computed again rather than kept."""
    x, bias = ctx.saved_tensors
    dtype = compute_dtype(x, bias)
    wide = x.to(dtype) if bias is None else x.to(dtype) + bias.to(dtype).view(-1, *(1,) * (x.ndim - 2))
    (value, gate), grad = wide.chunk(2, 1), grad.to(dtype)
    halves = grad * apply(gate, ctx.function), apply_backward(grad * value, gate, ctx.function)
    grads = torch.cat(halves, 1)
    needs_x, needs_bias = needs_grad(ctx, 2)
    grad_bias = grads.sum([d for d in range(x.ndim) if d != 1]).to(bias.dtype) if needs_bias else None
    return grads.to(x.dtype) if needs_x else None, grad_bias


_channel_glu = Op(
    "channel_glu", _channel_glu_prepare, lambda x, **_: torch.empty_like(x.chunk(2, 1)[0]), _channel_glu_backward
)
