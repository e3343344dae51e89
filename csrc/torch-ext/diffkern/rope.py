"""Rotary position embedding, alone and behind the normalisation of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ._ops import ops
from .fakes import fake


def rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    half: bool = False,
    arithmetic: int = 0,
    rotary_dim: int = 0,
    seq_dim: int = 0,
    start: int = 0,
    length: int = -1,
) -> Tensor:
    """Rotary position embedding: ``x[a]·cos[a] - x[b]·sin[a]`` and ``x[b]·cos[b] + x[a]·sin[b]`` for pairs ``(a, b)``.

    Args:
        x: Input ``[..., D]``, any strides; float32, float16, bfloat16 or float64.
        cos: One angle per element or per pair in the last dimension; the others broadcast to those of ``x``.
        sin: Likewise.
        half: The pairs are half of ``rotary_dim`` apart; otherwise they are neighbours.
        arithmetic: 0 for float32, 1 for float64, 2 for that of ``x`` with a rounding after every op.
        rotary_dim: Elements to rotate, the first ones; 0 for all.
        seq_dim: The dimension of the tokens that the next two count.
        start: First token to rotate; the tables begin there.
        length: Number of tokens to rotate; -1 for all. The others are copied.

    Returns:
        A new tensor like ``torch.empty_like(x)``.
    """
    return ops.rope(x, cos, sin, half, arithmetic, rotary_dim, seq_dim, start, length)


def rope_3d(
    x: Tensor,
    cos: list[Tensor],
    sin: list[Tensor],
    coords: Tensor | None,
    grid: list[int],
    alternating: bool = False,
    front_pad: int = 0,
    half: bool = False,
    arithmetic: int = 0,
    rotary_dim: int = 0,
    seq_dim: int = 1,
    start: int = 0,
    length: int = -1,
) -> Tensor:
    """:func:`rope` from one table ``[positions, pairs]`` per axis, for tokens on a grid or with coordinates.

    Args:
        x: As in :func:`rope`.
        cos: A table per axis, up to four.
        sin: Likewise.
        coords: int32 or int64 ``[tokens, axes]`` or ``[batch, tokens, axes]``; None with a grid.
        grid: Positions along each axis, the last the fastest; empty with coordinates.
        alternating: The pairs of the axes take turns; otherwise all of one axis come before those of the next.
        front_pad: Pairs in front that stay as they are.
        half: As in :func:`rope`, like the arguments after it.
    """
    return ops.rope_3d(
        x, cos, sin, coords, grid, alternating, front_pad, half, arithmetic, rotary_dim, seq_dim, start, length
    )  # fmt: skip


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    q_bias: Tensor | None,
    k_bias: Tensor | None,
    cos: list[Tensor],
    sin: list[Tensor],
    cos_k: list[Tensor],
    sin_k: list[Tensor],
    coords: Tensor | None,
    grid: list[int],
    alternating: bool = False,
    front_pad: int = 0,
    norm: int = 1,
    eps: float = 1e-6,
    heads: int = 0,
    weight_offset: float = 0.0,
    round_dtype: torch.dtype | None = None,
    round_norm: bool = False,
    half: bool = False,
    arithmetic: int = 0,
    rotary_dim: int = 0,
    seq_dim: int = 1,
    start: int = 0,
    length: int = -1,
) -> tuple[Tensor, Tensor]:
    """Normalises queries and keys over each head, or over all ``heads`` together, and rotates them.

    ``cos`` and ``sin`` hold one full table (see :func:`rope`), the tables of the axes (see :func:`rope_3d`) or nothing;
    ``cos_k`` and ``sin_k`` those of the keys. ``norm`` is 0 for none, 1 for the root mean square, 2 for layer
    normalisation. ``round_dtype`` rounds the normalised value before it is multiplied, ``round_norm`` the result of the
    norm before it is rotated.
    """
    return ops.qk_norm_rope(
        q, k, q_weight, k_weight, q_bias, k_bias, cos, sin, cos_k, sin_k, coords, grid, alternating, front_pad,
        norm, eps, heads, weight_offset, round_dtype, round_norm, half, arithmetic, rotary_dim, seq_dim, start, length,
    )  # fmt: skip


def joint_qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_2: Tensor,
    k_2: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    q_weight_2: Tensor | None,
    k_weight_2: Tensor | None,
    q_bias: Tensor | None,
    k_bias: Tensor | None,
    q_bias_2: Tensor | None,
    k_bias_2: Tensor | None,
    cos: list[Tensor],
    sin: list[Tensor],
    cos_2: list[Tensor],
    sin_2: list[Tensor],
    dim: int = 1,
    norm: int = 1,
    eps: float = 1e-6,
    round_norm: bool = False,
    half: bool = False,
    arithmetic: int = 0,
) -> tuple[Tensor, Tensor]:
    """:func:`qk_norm_rope` of two streams of tokens, the results one behind the other along ``dim``.

    Each stream has norms over single heads of its own, and a full table of its own or none. The results are
    contiguous.
    """
    return ops.joint_qk_norm_rope(
        q, k, q_2, k_2, q_weight, k_weight, q_weight_2, k_weight_2, q_bias, k_bias, q_bias_2, k_bias_2,
        cos, sin, cos_2, sin_2, dim, norm, eps, round_norm, half, arithmetic,
    )  # fmt: skip


def register_fakes() -> None:
    """Tells tracing what the ops return."""

    @fake("rope")
    def _(x, *args):
        return torch.empty_like(x)

    @fake("rope_3d")
    def _(x, *args):
        return torch.empty_like(x)

    @fake("qk_norm_rope")
    def _(q, k, *args):
        return torch.empty_like(q), torch.empty_like(k)

    @fake("joint_qk_norm_rope")
    def _(q, k, q_2, k_2, *args):
        dim = args[12]
        parts = ((q, q_2), (k, k_2))
        shapes = ((*x.shape[:dim], x.shape[dim] + y.shape[dim], *x.shape[dim + 1 :]) for x, y in parts)
        return tuple([q.new_empty(shape) for shape in shapes])
