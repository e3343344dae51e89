r"""Rotary position embedding, from full tables and from one table per axis.

Numerical contract (``docs/numerics.md`` has the table):

* ``"float32"`` arithmetic: float32 products and sums without fused multiply-add, rounded once: bit-equal to the
  chains of plain PyTorch ops that the models run, real or complex;
* ``"float64"``: the same in float64, as a complex128 table makes it;
* ``"input"``: everything in the dtype of the input, rounded after every op, as models do that rotate in bfloat16.

float64 inputs are computed in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diffkern.ops.contract import ContractRow
from diffkern.ops.registration import Op, check_device
from diffkern.ops.rotary import (
    ORDERS,
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
from diffkern.providers.eager import rope as reference
from diffkern.providers.eager.rope import ARITHMETICS

_MIX = "x, cos and sin in any mix"
_CHAIN = "x[a]*cos[a] - x[b]*sin[a], x[b]*cos[b] + x[a]*sin[b]"

CONTRACT = (
    ContractRow(
        "rope",
        "float32",
        _MIX,
        "float32, no fused multiply-add",
        "once, to the dtype of x",
        f"{_CHAIN} in float32",
    ),
    ContractRow("rope", "float64", _MIX, "float64", "to float32, then to the dtype of x", f"{_CHAIN} in float64"),
    ContractRow(
        "rope",
        "input",
        _MIX,
        "each product and sum in float32",
        "the tables, then each product and sum, to the dtype of x",
        f"{_CHAIN} in the dtype of x",
    ),
    ContractRow("rope_3d", "as rope", _MIX, "as rope", "as rope", "rope with the table of expand_axes"),
)


def rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor | None = None,
    *,
    pairing: str = "interleaved",
    arithmetic: str = "float32",
    rotary_dim: int | None = None,
    tokens: tuple[int, int] | None = None,
    seq_dim: int = 1,
    provider: str | None = None,
) -> Tensor:
    r"""Rotary position embedding from full tables.

    .. math::
        y_a = x_a \cos_a - x_b \sin_a, \qquad y_b = x_b \cos_b + x_a \sin_b

    for the pairs :math:`(a, b) = (2i, 2i+1)` (interleaved) or :math:`(i, i + R/2)` (half), ``R = rotary_dim``.
    The two elements of a pair may have different angles, in which case this is no rotation and is computed as
    written.

    Args:
        x: Input ``[..., D]`` of any strides; float32, float16, bfloat16 or float64. A head per row, or a flat row of
            all heads.
        cos: Cosines, in any float dtype. The last dimension has ``R`` elements (one angle per element) or ``R/2``
            (one per pair); the others broadcast against those of ``x``, as in ``x * cos``: ``[S, 1, R]`` is shared by
            the heads of ``[B, S, H, D]``, ``[S, R]`` by those of ``[B, H, S, D]``. With ``sin=None`` a complex tensor
            ``[..., R/2]``.
        sin: Sines; the shape may differ from that of ``cos`` as far as both broadcast.
        pairing: ``"interleaved"`` or ``"half"``.
        arithmetic: ``"float32"``, ``"float64"``, or ``"input"`` for the dtype of ``x`` with a rounding after every op.
        rotary_dim: ``R``, even; None means ``D``. The elements past it are copied.
        tokens: ``(start, length)`` of the tokens to rotate, along ``seq_dim``; the tables then belong to those
            tokens, and the others are copied. None means all.
        seq_dim: The dimension of ``x`` that ``tokens`` counts along.
        provider: ``"compiled"``, ``"triton"`` or ``"eager"``; None chooses the first that can.

    Returns:
        A new tensor of the shape and dtype of ``x``, laid out densely in the order of ``x``. Differentiable in
        ``x``, ``cos`` and ``sin``. There is no in-place form.

    Raises:
        TypeError: a tensor has a dtype that does not fit.
        ValueError: a table does not broadcast to ``x`` (a table is never what ``x`` is broadcast to), is on another
            device, or another argument does not fit; the message says which.
        diffkern.providers.NoProviderError: the provider that was asked for cannot serve the call.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """
    if sin is None:
        cos, sin = from_complex(cos)
    if tokens is not None and seq_dim < 0:
        seq_dim += x.ndim
    return _rope.call((x, cos, sin), (pairing, arithmetic, rotary_dim, tokens, seq_dim), provider)


def rope_3d(
    x: Tensor,
    cos_axes: Sequence[Tensor],
    sin_axes: Sequence[Tensor],
    *,
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
) -> Tensor:
    r""":func:`rope` from one small table per axis, for tokens that lie on a grid: no full table is read.

    A token at ``(t, h, w)`` takes row ``t`` of the first table, row ``h`` of the second and row ``w`` of the third;
    :func:`expand_axes` makes the table that :func:`rope` would need for the same result.

    Args:
        x: Input ``[..., D]``, as in :func:`rope`, with the tokens along ``seq_dim``.
        cos_axes: For each of one to four axes a table ``[N, n]``: ``N`` positions, ``n`` pairs.
        sin_axes: The sines, in the same shapes.
        grid: Number of positions along each axis; the tokens are the grid in row-major order.
        coords: Instead of ``grid``: int32 or int64 indices ``[S, axes]``, or ``[B, S, axes]`` where the samples
            (dimension 0 of ``x``) differ. An index outside its table raises on the CPU and gives NaN on a GPU.
        order: How the pairs of the axes are laid out: ``"blocked"``, all of the first axis, then all of the second
            and so on (Wan, HunyuanVideo, CogVideoX); or ``"alternating"``, one of each axis in turn (LTX).
        front_pad: Pairs in front of them with ``cos = 1`` and ``sin = 0``.
        pairing: As in :func:`rope`.
        arithmetic: As in :func:`rope`.
        rotary_dim: As in :func:`rope`. ``front_pad`` and the pairs of all axes add up to ``R/2``, or, for ``x``
            of four dimensions, to ``H·R/2``: then each of the ``H`` heads has its own share, in order.
        tokens: As in :func:`rope`; the grid or the coordinates belong to those tokens.
        seq_dim: The dimension of ``x`` with the tokens.
        provider: As in :func:`rope`.

    Returns:
        As :func:`rope`. Differentiable in ``x`` and in the tables.

    Raises:
        TypeError: a tensor has a dtype that does not fit.
        ValueError: shapes, devices or other arguments do not fit together.
        IndexError: a coordinate on the CPU is outside its table.
        diffkern.providers.NoProviderError: the provider that was asked for cannot serve the call.
    """
    if seq_dim < 0:
        seq_dim += x.ndim
    options = order, front_pad, pairing, arithmetic, rotary_dim, tokens, seq_dim
    operands = x, list(cos_axes), list(sin_axes), coords, [] if grid is None else list(grid)
    return dispatch_fn(_rope_3d, coords)(operands, options, provider)


def expand_axes(
    cos_axes: Sequence[Tensor], sin_axes: Sequence[Tensor], *, grid: Sequence[int] | None = None,
    coords: Tensor | None = None, order: str = "blocked", front_pad: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The tables of all tokens that :func:`rope_3d` does without: ``[S, P]``, or ``[B, S, P]`` for ``[B, S, axes]``.

    ``P`` is the number of pairs, ``front_pad`` included. The arguments are those of :func:`rope_3d`.

    Raises:
        ValueError: neither or both of ``grid`` and ``coords`` are given, the order is unknown, or devices differ.
    """
    if (grid is None) == (coords is None):
        raise ValueError("give either the grid or the coordinates of the tokens")
    if order not in ORDERS:
        raise ValueError(f"unknown order {order!r}: choose one of {', '.join(ORDERS)}")
    for name, tables in (("cos", cos_axes), ("sin", sin_axes), ("coords", [] if coords is None else [coords])):
        for axis, table in enumerate(tables):
            check_device(f"{name}[{axis}]", table, "cos[0]", cos_axes[0].device)
    alternating = order == "alternating"
    cos = reference.expand_axes(cos_axes, coords, grid or (), alternating, front_pad, 1.0)
    return cos, reference.expand_axes(sin_axes, coords, grid or (), alternating, front_pad, 0.0)


def _rope_prepare(
    x: Tensor, cos: Tensor, sin: Tensor, pairing: str, arithmetic: str, rotary_dim: int | None,
    tokens: tuple[int, int] | None, seq_dim: int,
) -> tuple[Any, ...]:  # fmt: skip
    shape: Sequence[int] = x.shape
    rotary = check_choices(shape, x.dtype, pairing, arithmetic, rotary_dim)
    start, length, dim = resolve_tokens(shape, tokens, seq_dim)
    if length >= 0:
        shape = (*shape[:dim], length, *shape[dim + 1 :])
    check_table("cos", cos, shape, rotary)
    check_table("sin", sin, shape, rotary)
    return x, cos, sin, pairing == "half", ARITHMETICS[arithmetic], rotary_dim or 0, dim, start, length


def _rope_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cos, sin, half, arithmetic, rotary_dim, *place, _ = inputs
    ctx.options = (None, (), False, 0, half, arithmetic, rotary_dim or x.shape[-1], *place)
    ctx.save_for_backward(x if cos.requires_grad or sin.requires_grad else None, cos, sin)


def _rope_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, cos, sin = ctx.saved_tensors
    grad_x, (grad_cos,), (grad_sin,) = rotation_gradients(x, grad, [cos], [sin], *ctx.options)
    return grad_x, grad_cos, grad_sin


_rope = Op("rope", _rope_prepare, lambda x, **_: torch.empty_like(x), _rope_backward, setup_context=_rope_setup_context)


def _rope_3d_prepare(
    x: Tensor, cos: list[Tensor], sin: list[Tensor], coords: Tensor | None, grid: list[int], order: str, front_pad: int,
    pairing: str, arithmetic: str, rotary_dim: int | None, tokens: tuple[int, int] | None, seq_dim: int,
) -> tuple[Any, ...]:  # fmt: skip
    rotary = check_choices(x.shape, x.dtype, pairing, arithmetic, rotary_dim)
    start, length, dim = resolve_tokens(x.shape, tokens, seq_dim, needed=True)
    heads = x.shape[3 - dim] if x.ndim == 4 and dim in (1, 2) else 0
    check_axes(x.shape, cos, sin, grid or None, coords, order, front_pad, rotary, heads, dim, length)
    check_coords(coords, cos)
    return (
        x, cos, sin, coords, grid, order == "alternating", front_pad, pairing == "half", ARITHMETICS[arithmetic],
        rotary_dim or 0, dim, start, length,
    )  # fmt: skip


def _rope_3d_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cos, sin, coords, *layout, rotary_dim, dim, start, length, _ = inputs
    ctx.options = (*layout, rotary_dim or x.shape[-1], dim, start, length)
    wanted = any(table.requires_grad for table in (*cos, *sin))
    ctx.save_for_backward(x if wanted else None, coords, *cos, *sin)


def _rope_3d_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, coords, *tables = ctx.saved_tensors
    axes = len(tables) // 2
    grads = rotation_gradients(x, grad, tables[:axes], tables[axes:], coords, *ctx.options)
    return (*grads, None, no_gradient_of(ctx.options[0]))


_rope_3d = Op(
    "rope_3d",
    _rope_3d_prepare,
    lambda x, **_: torch.empty_like(x),
    _rope_3d_backward,
    setup_context=_rope_3d_setup_context,
)
