r"""Normalisation of queries and keys followed by rotary position embedding, in one pass over both.

Numerical contract (``docs/numerics.md`` has the table): the norm as in :mod:`diffkern.ops.norm`, the rotation as in
:mod:`diffkern.ops.rope`, float32 all the way and rounded once; with ``round_norm`` the result of the norm is rounded
to the dtype of the input before it is rotated, as a chain of modules does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diffkern.ops.contract import ContractRow
from diffkern.ops.norm import check_parameters, machine_eps
from diffkern.ops.norm_gradients import Modulation, metas, modulation_grads
from diffkern.ops.registration import Op
from diffkern.ops.rotary import (
    check_axes,
    check_choices,
    check_coords,
    check_table,
    dispatch_fn,
    from_complex,
    no_gradient_of,
    resolve_tokens,
    rotation_gradients,
)
from diffkern.providers.eager import compute_dtype
from diffkern.providers.eager.modulate import NO_NORM, NORMS, normalise
from diffkern.providers.eager.rope import ARITHMETICS

_MIX = "q, k, parameters and tables in any mix"

CONTRACT = (
    ContractRow(
        "qk_norm_rope",
        "plain",
        _MIX,
        "float32, the rotation without fused multiply-add",
        "once, to the dtype of q and k",
    ),
    ContractRow(
        "qk_norm_rope", "round_norm", _MIX, rounds="the result of the norm to the dtype of q and k, then the result"
    ),
    ContractRow("qk_norm_rope", "no norm", _MIX, "as rope", "as rope", "rope of q and of k"),
)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    cos: Tensor | Sequence[Tensor] | None = None,
    sin: Tensor | Sequence[Tensor] | None = None,
    eps: float | None = 1e-6,
    *,
    norm: str | None = "rms",
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    across_heads: int | None = None,
    weight_offset: float = 0.0,
    round_dtype: torch.dtype | None = None,
    round_norm: bool = False,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    grid: Sequence[int] | None = None,
    coords: Tensor | None = None,
    order: str = "blocked",
    front_pad: int = 0,
    pairing: str = "interleaved",
    arithmetic: str = "float32",
    rotary_dim: int | None = None,
    tokens: tuple[int, int] | None = None,
    seq_dim: int = 1,
    provider: str | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Normalises ``q`` and ``k`` and rotates them: ``rope(norm(q))``, ``rope(norm(k))``.

    Args:
        q: Queries ``[..., D]``, normalised over each head of ``D`` elements; with ``across_heads`` ``[..., H·D]``,
            normalised over all heads together. Any strides: the chunks of a packed projection are read in place.
            float32, float16, bfloat16 or float64.
        k: Keys, likewise; the number of heads and of tokens may differ from those of ``q``.
        q_weight: Weight of the norm of ``q``, of shape ``[D]`` or ``[H·D]``, or None.
        k_weight: Weight of the norm of ``k``, or None.
        cos: Cosines: a full table as in :func:`diffkern.ops.rope`, which broadcasts against ``[..., D]`` (with
            ``across_heads`` against ``[..., H, D]``); or, with ``grid`` or ``coords``, one table per axis as in
            :func:`diffkern.ops.rope_3d`; or a complex full table with ``sin=None``; None only normalises.
        sin: Sines, in the same form.
        eps: ``ε`` of the norms; None means the machine epsilon of the precision computed in.
        norm: ``"rms"``, ``"layer"`` or None.
        q_bias: Bias of the norm of ``q``, or None.
        k_bias: Bias of the norm of ``k``, or None.
        across_heads: The number of heads that are normalised together (that of ``q``; ``k`` has heads of the same
            size); None normalises each alone.
        weight_offset: Added to the weights of an RMS norm in float32; 0 for any other.
        round_dtype: As in :func:`diffkern.ops.rms_norm`.
        round_norm: Rounds the result of the norm to the dtype of ``q`` and ``k`` before the rotation. Implied by
            ``arithmetic="input"``.
        cos_k: A full table for ``k``, where that of ``q`` does not serve both.
        sin_k: Its sines.
        grid: As in :func:`diffkern.ops.rope_3d`.
        coords: As in :func:`diffkern.ops.rope_3d`.
        order: As in :func:`diffkern.ops.rope_3d`.
        front_pad: As in :func:`diffkern.ops.rope_3d`.
        pairing: As in :func:`diffkern.ops.rope`.
        arithmetic: As in :func:`diffkern.ops.rope`.
        rotary_dim: As in :func:`diffkern.ops.rope`, of each head.
        tokens: ``(start, length)`` of the tokens to rotate along ``seq_dim``; the others are only normalised.
        seq_dim: The dimension of ``q`` and ``k`` with the tokens.
        provider: ``"compiled"``, ``"triton"`` or ``"eager"``; None chooses the first that can.

    Returns:
        New tensors of the shapes and dtypes of ``q`` and ``k``, each laid out densely in the order of its input.
        Differentiable in ``q``, ``k``, the weights and biases and the tables.

    Raises:
        TypeError: a tensor has a dtype that does not fit.
        ValueError: shapes, devices or other arguments do not fit together; the message says which.
        IndexError: a coordinate on the CPU is outside its table.
        diffkern.providers.NoProviderError: the provider that was asked for cannot serve the call.
    """
    if seq_dim < 0 and (tokens is not None or grid is not None or coords is not None):
        if q.ndim != k.ndim:
            raise ValueError(f"seq_dim {seq_dim} is not the same dimension of q and k: count it from the front")
        seq_dim += q.ndim
    lists = _as_lists(cos, sin, cos_k, sin_k, grid, coords)
    # What rotates decides what the options mean, and lists do not say whether they are empty.
    form = _NOTHING if cos is None else _TABLES if grid is None and coords is None else _AXES
    options = (
        eps, norm, across_heads, weight_offset, round_dtype, round_norm, order, front_pad, pairing, arithmetic,
        rotary_dim, tokens, seq_dim, form,
    )  # fmt: skip
    operands = q, k, q_weight, k_weight, q_bias, k_bias, *lists, coords, [] if grid is None else list(grid)
    return dispatch_fn(_qk_norm_rope, coords)(operands, options, provider)


#: What a call rotates by.
_NOTHING, _TABLES, _AXES = range(3)


def _as_lists(
    cos: Tensor | Sequence[Tensor] | None, sin: Tensor | Sequence[Tensor] | None, cos_k: Tensor | None,
    sin_k: Tensor | None, grid: Sequence[int] | None, coords: Tensor | None,
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:  # fmt: skip
    """The cosines and sines of q, and those of k."""
    axes = grid is not None or coords is not None
    if cos is None:
        if sin is not None or cos_k is not None or sin_k is not None or axes:
            raise ValueError("there are tables or positions, but no cos")
        return [], [], [], []
    if axes:
        if isinstance(cos, Tensor) or isinstance(sin, Tensor) or sin is None or cos_k is not None or sin_k is not None:
            raise ValueError(
                "with a grid or coordinates cos and sin are sequences, one table per axis, for q and k alike"
            )
        if grid is not None and len(grid) == 0:
            raise ValueError("the grid has no axes")
        cos, sin = list(cos), list(sin)
        return cos, sin, cos, sin
    of_q = _full(cos, sin)
    return (*of_q, *(of_q if cos_k is None else _full(cos_k, sin_k)))


def _full(cos: Tensor | Sequence[Tensor], sin: Tensor | Sequence[Tensor] | None) -> tuple[list[Tensor], list[Tensor]]:
    if not isinstance(cos, Tensor) or not (sin is None or isinstance(sin, Tensor)):
        raise ValueError("several tables are those of axes: give the grid or the coordinates as well")
    if sin is None:
        cos, sin = from_complex(cos)
    return [cos], [sin]


def _check_rotation(
    q: Tensor, k: Tensor, lists: Sequence[list[Tensor]], coords: Tensor | None, grid: list[int], order: str,
    front_pad: int, heads: int, pairing: str, arithmetic: str, rotary_dim: int | None, tokens: tuple[int, int] | None,
    seq_dim: int,
) -> tuple[int, int, int]:  # fmt: skip
    """Checks the tables; returns seq_dim, start and length."""
    unused = 1  # what the signature has
    if not lists[0]:
        check_choices(q.shape, q.dtype, pairing, arithmetic, None if heads else rotary_dim)
        return unused, 0, -1
    heads_k = k.shape[-1] * heads // q.shape[-1] if heads else 0
    shapes: list[Sequence[int]] = [q.shape, k.shape]
    if heads:
        shapes = [(*x.shape[:-1], n, x.shape[-1] // n) for x, n in ((q, heads), (k, max(heads_k, 1)))]
    axes = len(grid) > 0 or coords is not None  # torch.compile in torch 2.11 cannot trace bool(grid)
    for tensor in (q, k):
        start, length, dim = resolve_tokens(tensor.shape, tokens, seq_dim, needed=axes)
    for i, shape in enumerate(shapes):
        rotary = check_choices(shape, q.dtype, pairing, arithmetic, rotary_dim)
        cos, sin = lists[2 * i], lists[2 * i + 1]
        if axes:
            count = shape[3 - dim] if len(shape) == 4 and dim in (1, 2) else 0
            check_axes(shape, cos, sin, grid or None, coords, order, front_pad, rotary, count, dim, length)
            continue
        if length >= 0:
            shape = (*shape[:dim], length, *shape[dim + 1 :])
        check_table("cos", cos[0], shape, rotary)
        check_table("sin", sin[0], shape, rotary)
    check_coords(coords, lists[0])
    return dim if axes or length >= 0 else unused, start, length


def _qk_norm_rope_prepare(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, q_bias: Tensor | None,
    k_bias: Tensor | None, cos: list[Tensor], sin: list[Tensor], cos_k: list[Tensor], sin_k: list[Tensor],
    coords: Tensor | None, grid: list[int], eps: float | None, norm: str | None, across_heads: int | None,
    weight_offset: float, round_dtype: torch.dtype | None, round_norm: bool, order: str, front_pad: int, pairing: str,
    arithmetic: str, rotary_dim: int | None, tokens: tuple[int, int] | None, seq_dim: int, form: int,
) -> tuple[Any, ...]:  # fmt: skip
    if norm not in NORMS:
        raise ValueError(f"unknown norm {norm!r}: choose 'rms', 'layer' or None")
    if weight_offset and norm != "rms":
        raise ValueError(f"a weight_offset belongs to the weights of an RMS norm, and norm is {norm!r}")
    if q.dtype != k.dtype:
        raise ValueError(f"q is {q.dtype}, k is {k.dtype}: they must be alike")
    heads = across_heads or 0
    if heads:
        size = q.shape[-1] // heads
        if q.shape[-1] % heads or k.shape[-1] % max(size, 1):
            raise ValueError(f"rows of {q.shape[-1]} and {k.shape[-1]} elements are not those of {heads} equal heads")
    if q.ndim > 0 and k.ndim > 0:  # else they cannot be rotated, which is checked next
        check_parameters(q.shape[-1], q_weight, q_bias, " of q")
        check_parameters(k.shape[-1], k_weight, k_bias, " of k")
    if eps is None:
        eps = machine_eps(q.dtype)
    lists = cos, sin, cos_k, sin_k
    dim, start, length = _check_rotation(
        q, k, lists, coords, grid, order, front_pad, heads, pairing, arithmetic, rotary_dim, tokens, seq_dim
    )
    return (
        q, k, q_weight, k_weight, q_bias, k_bias, *lists, coords, grid, order == "alternating", front_pad,
        NORMS[norm], eps, heads, weight_offset, round_dtype, round_norm, pairing == "half", ARITHMETICS[arithmetic],
        rotary_dim or 0, dim, start, length,
    )  # fmt: skip


def _qk_norm_rope_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, q_weight, k_weight, q_bias, k_bias, *lists, coords, ctx.grid = inputs[:12]
    ctx.options = inputs[12:-1]
    ctx.biases, ctx.has_bias = metas(q_bias, k_bias), [bias is not None for bias in (q_bias, k_bias)]
    ctx.axes = len(lists[0])
    ctx.row_of_q = q.shape[-1]
    ctx.table_grads = [any(table.requires_grad for table in (*lists[i], *lists[i + 1])) for i in (0, 2)]
    # Without a bias the norm can be computed again from what is kept anyway; a bias is kept for the tables' sake.
    biases = [bias if wanted else None for bias, wanted in zip((q_bias, k_bias), ctx.table_grads, strict=True)]
    ctx.save_for_backward(q, k, q_weight, k_weight, *biases, coords, *(table for tables in lists for table in tables))


def _qk_norm_rope_backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    """Turns the gradients back, which is a rotation by the negative angles, and sends them through the norms."""
    q, k, q_weight, k_weight, q_bias, k_bias, coords, *tables = ctx.saved_tensors
    axes = ctx.axes
    lists = [tables[i * axes : (i + 1) * axes] for i in range(4)]
    results = [
        _one_backward(ctx, x, weight, bias, grad, lists[i], lists[i + 1], coords, i // 2)
        for x, weight, bias, grad, i in ((q, q_weight, q_bias, grads[0], 0), (k, k_weight, k_bias, grads[1], 2))
    ]
    by_argument = [grad for pair in zip(*(result[:3] for result in results), strict=True) for grad in pair]
    by_list = [grad for result in results for grad in result[3:]]
    return (*by_argument, *by_list, None, no_gradient_of(ctx.grid))


def _one_backward(
    ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, grad: Tensor, cos: list[Tensor], sin: list[Tensor],
    coords: Tensor | None, which: int,
) -> tuple[Any, ...]:  # fmt: skip
    """The gradients of one of q and k, its weight and bias, and its tables."""
    (
        alternating, front_pad, norm, eps, heads, weight_offset, _, _,
        half, arithmetic, rotary_dim, seq_dim, start, length,
    ) = ctx.options  # fmt: skip
    dtype = compute_dtype(x)
    grad = grad.to(dtype)
    grad_cos: list[Tensor | None] = []
    grad_sin: list[Tensor | None] = []
    if heads and cos:
        # Heads of k are as wide as those of q.
        count = x.shape[-1] // (ctx.row_of_q // heads)
        grad = grad.unflatten(-1, (count, -1))
    if cos:
        rotated = None
        if ctx.table_grads[which]:
            rotated = normalise(x, weight, bias, eps, norm, dtype, weight_offset).view_as(grad)
        rotary = rotary_dim or grad.shape[-1]
        turn = (alternating, front_pad, half, arithmetic, rotary, seq_dim, start, length)
        grad, grad_cos, grad_sin = rotation_gradients(rotated, grad, cos, sin, coords, ctx.grid, *turn)
    if heads and cos:
        grad = grad.flatten(-2)
    if norm == NO_NORM:
        return grad.to(x.dtype), None, None, grad_cos, grad_sin
    options = Modulation(eps, norm, 0.0, (*metas(x, None, None, weight), ctx.biases[which]), weight_offset)
    needs = True, False, False, weight is not None, ctx.has_bias[which]
    grad_x, _, _, *parameters = modulation_grads(options, needs, grad, x, None, weight, None)
    assert grad_x is not None
    return (grad_x.to(x.dtype), *parameters, grad_cos, grad_sin)


_qk_norm_rope = Op(
    "qk_norm_rope",
    _qk_norm_rope_prepare,
    lambda q, k, **_: (torch.empty_like(q), torch.empty_like(k)),
    _qk_norm_rope_backward,
    setup_context=_qk_norm_rope_setup_context,
)
