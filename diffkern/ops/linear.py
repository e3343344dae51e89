r"""A linear layer with the activation in the epilogue of its matrix product.

Numerical contract (``docs/numerics.md`` has the table): float32, float16 or bfloat16, one dtype for all operands
(float64 too). Where the GPU's library has the epilogue, the sum with the bias reaches the activation in float32
and the result is rounded once; elsewhere it is ``F.linear`` followed by ``F.gelu``, which rounds twice.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from diffkern.ops.activation import gelu_name
from diffkern.ops.contract import ContractRow
from diffkern.ops.registration import Op
from diffkern.providers.eager.activation import apply_backward
from diffkern.providers.eager.linear import linear_gelu as plain_linear_gelu

CONTRACT = (
    ContractRow(
        "linear_gelu",
        "tanh, bias, on CUDA",
        "float16 or bfloat16",
        "float32 sums and activation",
        "once, to the dtype of the input",
    ),
    ContractRow(
        "linear_gelu",
        "any other",
        "one dtype",
        "float32 sums and activation",
        "before and after the activation, to the dtype of the input",
        exact="F.gelu(F.linear(x, weight, bias), approximate)",
    ),
)


def linear_gelu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    approximate: str = "tanh",
    provider: str | None = None,
) -> Tensor:
    r"""A linear layer followed by GELU: :math:`\operatorname{gelu}(x W^\top + b)`.

    Args:
        x: Input of shape ``[..., K]``.
        weight: ``W`` of shape ``[N, K]``, of the dtype of ``x``.
        bias: ``b`` of shape ``[N]``, or None.
        approximate: ``"tanh"`` or ``"none"``, as in :func:`torch.nn.functional.gelu`. The epilogue of the GPU's
            matrix product knows the tanh form alone.
        provider: ``"eager"`` or None: what there is to fuse, torch itself fuses.

    Returns:
        A new contiguous tensor of shape ``[..., N]``. Differentiable in all three; backward computes the linear
        layer again rather than keep its result. Under autocast the operands are cast as ``F.linear`` casts them.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit together, in the words of ``F.linear``.
        ValueError: ``approximate`` is neither of the two.
    """
    function = gelu_name(approximate)
    # The first question is quick: the name of a device takes long to form.
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    y: Tensor = _linear_gelu.call((x, weight, bias), (function,), provider)
    return y


def _linear_gelu_prepare(x: Tensor, weight: Tensor, bias: Tensor | None, function: str) -> tuple[Any, ...]:
    return x, weight, bias, function


def _linear_gelu_fake(x: Tensor, weight: Tensor, bias: Tensor | None, function: str) -> Tensor:
    # The errors of F.linear are wanted, its strides are not: those of a product depend on the path it takes.
    return torch.empty_like(F.linear(x, weight, bias), memory_format=torch.contiguous_format)


def _linear_gelu_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.function, _ = inputs
    ctx.save_for_backward(x, weight, bias)


def _linear_gelu_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The pointwise part in float32, the products in the dtype of the layer, as torch's own backward does."""
    x, weight, bias = ctx.saved_tensors
    grad = apply_backward(grad, F.linear(x, weight, bias), ctx.function)
    needs_x, needs_weight, needs_bias = (*ctx.needs_input_grad, False)[:3]
    rows = grad.reshape(-1, grad.shape[-1])
    grad_x = grad @ weight if needs_x else None
    grad_weight = rows.t() @ x.reshape(-1, x.shape[-1]) if needs_weight else None
    grad_bias = rows.sum(0) if needs_bias else None
    return grad_x, grad_weight, grad_bias, None, None


_linear_gelu = Op(
    "linear_gelu",
    _linear_gelu_prepare,
    _linear_gelu_fake,
    _linear_gelu_setup_context,
    _linear_gelu_backward,
    traced=plain_linear_gelu,
)
