r"""Linear layers with the activation in the epilogue of the matrix product.

Numerical contract (``docs/numerics.md`` has the table): float32, float16 or bfloat16, one dtype for all operands
(float64 too). Where the GPU's library has the epilogue, the sum with the bias reaches the activation in float32
and the result is rounded once; elsewhere it is ``F.linear`` followed by ``F.gelu``, which rounds twice.

On NVIDIA's GPUs the algorithm of a large product in float16 or bfloat16 is measured, among those that give the bits of
torch's own: see :mod:`diffkern.providers.cublaslt`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from diffkern.ops.activation import gelu_name
from diffkern.ops.contract import TO_INPUT, ContractRow
from diffkern.ops.copying import copy_rows
from diffkern.ops.norm_gradients import needs_grad
from diffkern.ops.registration import Op
from diffkern.providers import cublaslt
from diffkern.providers.cublaslt.layers import as_matrix, linear_gelu_into
from diffkern.providers.cublaslt.layers import linear_gelu as plain_linear_gelu
from diffkern.providers.dispatch_modes import constant_in_graphs, modes_active, transforms_active
from diffkern.providers.eager.activation import apply_backward
from diffkern.providers.registry import kernel_for

_SUMS = "float32 sums and activation"
CONTRACT = (
    ContractRow("linear_gelu", "tanh, bias, on CUDA", "float16 or bfloat16", _SUMS, TO_INPUT),
    ContractRow(
        "linear_gelu",
        "any other",
        "one dtype",
        _SUMS,
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
    room: int = 0,
    provider: str | None = None,
) -> Tensor:
    r"""A linear layer followed by GELU: :math:`\operatorname{gelu}(x W^\top + b)`.

    Args:
        x: Input of shape ``[..., K]``.
        weight: ``W`` of shape ``[N, K]``, of the dtype of ``x``.
        bias: ``b`` of shape ``[N]``, or None.
        approximate: ``"tanh"`` or ``"none"``, as in :func:`torch.nn.functional.gelu`. The epilogue of the GPU's
            matrix product knows the tanh form alone.
        room: Elements that memory shall have in front of each row, for :func:`concatenate`. There is none where a
            gradient may be wanted or a graph is traced.
        provider: ``"eager"`` or None: what there is to fuse, torch itself fuses.

    Returns:
        A new tensor of shape ``[..., N]``, contiguous but for the room. Differentiable in all three; backward computes
        the linear layer again rather than keep its result. Under autocast the operands are cast as ``F.linear`` casts
        them.

    Raises:
        RuntimeError: shapes or dtypes do not fit together, in the words of ``F.linear``.
        ValueError: ``approximate`` is neither of the two, or devices differ.
    """
    function = gelu_name(approximate)
    dtype = _autocast_dtype(x)
    if dtype is not None:
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if room and not (torch.is_grad_enabled() or torch.compiler.is_compiling() or transforms_active() or modes_active()):
        kernel_for("linear_gelu", x.device, provider, x.dtype, weight.dtype)  # raises as the call without room does
        memory = x.new_empty((*x.shape[:-1], room + weight.shape[0]))
        y = linear_gelu_into(memory[..., room:], x, weight, bias, function)
        y._diffkern_memory = memory  # type: ignore[attr-defined]
        return y
    return _linear_gelu.call((x, weight, bias), (function,), provider)


def concatenate(front: Tensor, x: Tensor, dim: int) -> Tensor:
    """``torch.cat([front, x], dim)``, in the memory of ``x`` if that has room for ``front``.

    Args:
        front: Any tensor.
        x: If it is a result of :func:`linear_gelu` with as much room as ``front`` is wide, it shares its memory with
            the result from now on, and ``dim`` is the last one; any other is copied, as torch does.
        dim: The dimension.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return torch.cat([front, x], dim)
    memory = x.__dict__.pop("_diffkern_memory", None)
    if memory is None or type(front) is not Tensor or dim not in (-1, x.ndim - 1):
        return torch.cat([front, x], dim)
    place = memory[..., : memory.shape[-1] - x.shape[-1]]
    if front.shape != place.shape or front.dtype != x.dtype or front.device != x.device:
        return torch.cat([front, x], dim)
    copy_rows(place, front)
    return memory  # type: ignore[no-any-return]


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype in which ``F.linear`` would multiply under autocast; None without it."""
    # The first question is quick: the name of a device takes long to form.
    if not torch._C._is_any_autocast_enabled() or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None


def _linear_gelu_fake(x: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
    # The errors of F.linear are wanted, its strides are not: those of a product depend on the path it takes.
    return torch.empty_like(F.linear(x, weight, bias), memory_format=torch.contiguous_format)


def _linear_gelu_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The pointwise part in float32, the products in the dtype of the layer, as torch's own backward does."""
    x, weight, bias = ctx.saved_tensors
    grad = apply_backward(grad, F.linear(x, weight, bias), ctx.function)
    needs_x, needs_weight, needs_bias = needs_grad(ctx, 3)
    rows = as_matrix(grad)
    grad_x = grad @ weight if needs_x else None
    grad_weight = rows.t() @ as_matrix(x) if needs_weight else None
    grad_bias = rows.sum(0) if needs_bias else None
    return grad_x, grad_weight, grad_bias


@constant_in_graphs
def _is_measured(device_type: str, dtype: torch.dtype) -> bool:
    """Whether algorithms are measured for such operands; ``torch.compile`` takes the answer for a constant."""
    return cublaslt.serves(device_type, dtype)


def _linear_gelu_traced(x: Tensor, weight: Tensor, bias: Tensor | None, function: str) -> Tensor | None:
    """Plain torch, which Inductor can look into, unless there is an algorithm to choose."""
    if bias is not None and function == "gelu_tanh" and _is_measured(x.device.type, x.dtype):
        return None
    return plain_linear_gelu(x, weight, bias, function)


# There is nothing to prepare: F.linear says what does not fit.
_linear_gelu = Op(
    "linear_gelu", lambda *args: args, _linear_gelu_fake, _linear_gelu_backward, traced=_linear_gelu_traced
)
