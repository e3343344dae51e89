"""Rotations, also of what is normalised before, in plain PyTorch.

Half inputs are widened to float32, rotated and rounded once; ``"input"`` arithmetic stays in the dtype of the
input and rounds after every op, as models do that rotate in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from diffkern.providers.eager.modulate import normalise
from diffkern.providers.eager.precision import compute_dtype, laid_out_like

#: How the arithmetic is written in the schemas of the ops. A dict, for torch.compile: see NORMS.
ARITHMETICS: Mapping[str, int] = {"float32": 0, "float64": 1, "input": 2}
FLOAT32, FLOAT64, INPUT = ARITHMETICS.values()


def rope(
    x: Tensor, cos: Tensor, sin: Tensor, half: bool, arithmetic: int, rotary_dim: int, seq_dim: int, start: int,
    length: int,
) -> Tensor:  # fmt: skip
    """Computes :func:`diffkern.ops.rope`."""
    rotary_dim = rotary_dim or x.shape[-1]
    return laid_out_like(x, rotate(x, x.dtype, cos, sin, half, arithmetic, rotary_dim, seq_dim, start, length))


def rope_3d(
    x: Tensor, cos: Sequence[Tensor], sin: Sequence[Tensor], coords: Tensor | None, grid: Sequence[int],
    alternating: bool, front_pad: int, half: bool, arithmetic: int, rotary_dim: int, seq_dim: int, start: int,
    length: int,
) -> Tensor:  # fmt: skip
    """Computes :func:`diffkern.ops.rope_3d`."""
    rotary_dim = rotary_dim or x.shape[-1]
    tables = full_tables(cos, sin, coords, grid, alternating, front_pad, x, seq_dim, rotary_dim)
    return rope(x, *tables, half, arithmetic, rotary_dim, seq_dim, start, length)


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, q_bias: Tensor | None,
    k_bias: Tensor | None, cos: Sequence[Tensor], sin: Sequence[Tensor], cos_k: Sequence[Tensor],
    sin_k: Sequence[Tensor], coords: Tensor | None, grid: Sequence[int], alternating: bool, front_pad: int, norm: int,
    eps: float, heads: int, weight_offset: float, round_dtype: torch.dtype | None, round_norm: bool, half: bool,
    arithmetic: int, rotary_dim: int, seq_dim: int, start: int, length: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes :func:`diffkern.ops.qk_norm_rope`."""
    outs = []
    head_dim = q.shape[-1] // heads if heads else q.shape[-1]
    rotary = rotary_dim or head_dim
    for x, weight, bias, cos_list, sin_list in (
        (q, q_weight, q_bias, cos, sin),
        (k, k_weight, k_bias, cos_k, sin_k),
    ):
        dtype = x.dtype if round_norm or arithmetic == INPUT else compute_dtype(x)
        y = normalise(x, weight, bias, eps, norm, dtype, weight_offset, round_dtype)
        if cos_list:
            by_head = y.unflatten(-1, (y.shape[-1] // head_dim, head_dim)) if heads else y
            tables = cos_list[0], sin_list[0]
            if grid or coords is not None:
                axes = cos_list, sin_list
                tables = full_tables(*axes, coords, grid, alternating, front_pad, by_head, seq_dim, rotary)
            by_head = rotate(by_head, x.dtype, *tables, half, arithmetic, rotary, seq_dim, start, length)
            y = by_head.flatten(-2) if heads else by_head
        y = laid_out_like(x, y.to(x.dtype))
        outs.append(y.clone() if y is x else y)  # the result of an op must not be its input
    return outs[0], outs[1]


def joint_qk_norm_rope(
    q: Tensor, k: Tensor, q_2: Tensor, k_2: Tensor, q_weight: Tensor | None, k_weight: Tensor | None,
    q_weight_2: Tensor | None, k_weight_2: Tensor | None, q_bias: Tensor | None, k_bias: Tensor | None,
    q_bias_2: Tensor | None, k_bias_2: Tensor | None, cos: Sequence[Tensor], sin: Sequence[Tensor],
    cos_2: Sequence[Tensor], sin_2: Sequence[Tensor], dim: int, norm: int, eps: float, round_norm: bool, half: bool,
    arithmetic: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes :func:`diffkern.ops.joint_qk_norm_rope`."""
    rest = (None, (), False, 0, norm, eps, 0, 0.0, None, round_norm, half, arithmetic, 0, 1, 0, -1)
    first = qk_norm_rope(q, k, q_weight, k_weight, q_bias, k_bias, cos, sin, cos, sin, *rest)
    second = qk_norm_rope(q_2, k_2, q_weight_2, k_weight_2, q_bias_2, k_bias_2, cos_2, sin_2, cos_2, sin_2, *rest)
    queries, keys = (torch.cat(pair, dim).contiguous() for pair in zip(first, second, strict=True))
    return queries, keys


def rotate(
    x: Tensor, out_dtype: torch.dtype, cos: Tensor, sin: Tensor, half: bool, arithmetic: int, rotary_dim: int,
    seq_dim: int, start: int, length: int,
) -> Tensor:  # fmt: skip
    """Returns ``x``, rotated, in ``out_dtype``, which is also the one that arithmetic in the input's dtype uses."""
    whole = length < 0 or (start == 0 and length == x.shape[seq_dim])
    part = x if whole else x.narrow(seq_dim, start, length)
    dtype = {INPUT: out_dtype, FLOAT64: torch.float64}.get(arithmetic) or compute_dtype(x)
    a, b = (pairs.to(dtype) for pairs in split_pairs(part, half, rotary_dim))
    cos_a, cos_b = split_table(cos.to(dtype), half, rotary_dim)
    sin_a, sin_b = split_table(sin.to(dtype), half, rotary_dim)
    turned = ((a * cos_a - b * sin_a).to(out_dtype), (b * cos_b + a * sin_b).to(out_dtype))
    y = torch.cat(turned, -1) if half else torch.stack(turned, -1).flatten(-2)
    if rotary_dim < x.shape[-1]:
        y = torch.cat((y, part[..., rotary_dim:].to(out_dtype)), -1)
    if not whole:
        end = start + length
        before, after = x.narrow(seq_dim, 0, start), x.narrow(seq_dim, end, x.shape[seq_dim] - end)
        y = torch.cat((before.to(out_dtype), y, after.to(out_dtype)), seq_dim)
    return y


def split_pairs(x: Tensor, half: bool, rotary_dim: int) -> tuple[Tensor, Tensor]:
    """The first and the second elements of all pairs, as views."""
    if half:
        return x[..., : rotary_dim // 2], x[..., rotary_dim // 2 : rotary_dim]
    return x[..., 0:rotary_dim:2], x[..., 1:rotary_dim:2]


def split_table(table: Tensor, half: bool, rotary_dim: int) -> tuple[Tensor, Tensor]:
    """The angles of the first and of the second elements; the same ones, if there is one angle per pair."""
    if table.shape[-1] != rotary_dim:
        return table, table
    return split_pairs(table, half, rotary_dim)


def full_tables(
    cos: Sequence[Tensor], sin: Sequence[Tensor], coords: Tensor | None, grid: Sequence[int], alternating: bool,
    front_pad: int, x: Tensor, seq_dim: int, rotary_dim: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The tables of axes as two that broadcast against ``x``."""
    full = [expand_axes(axes, coords, grid, alternating, front_pad, fill) for axes, fill in ((cos, 1.0), (sin, 0.0))]
    return fit_table(full[0], x, seq_dim, rotary_dim), fit_table(full[1], x, seq_dim, rotary_dim)


def expand_axes(
    axes: Sequence[Tensor], coords: Tensor | None, grid: Sequence[int], alternating: bool, front_pad: int, fill: float
) -> Tensor:
    """The compact table of all tokens, ``[S, P]`` or, for coordinates per sample, ``[B, S, P]``.

    A coordinate outside its axis gives NaN.
    """
    if coords is None:
        rank = len(grid)
        columns = [
            axis[: grid[i]].view(*(-1 if dim == i else 1 for dim in range(rank)), axis.shape[-1]).expand(*grid, -1)
            for i, axis in enumerate(axes)
        ]
    else:
        columns = [_look_up(axis, coords[..., i]) for i, axis in enumerate(axes)]
    table = torch.stack(columns, -1).flatten(-2) if alternating else torch.cat(columns, -1)
    if front_pad:
        table = torch.cat((table.new_full((*table.shape[:-1], front_pad), fill), table), -1)
    return table if coords is not None else table.flatten(0, -2)


def _look_up(axis: Tensor, index: Tensor) -> Tensor:
    outside = (index < 0) | (index >= axis.shape[0])
    found = axis[index.clamp(0, axis.shape[0] - 1).long()]
    return found.masked_fill(outside.unsqueeze(-1), torch.nan)


def fit_table(table: Tensor, x: Tensor, seq_dim: int, rotary_dim: int) -> Tensor:
    """Views ``[S, P]`` or ``[B, S, P]`` so that it broadcasts against ``x``.

    Where the table holds ``rotary_dim / 2`` angles it is shared by all heads, else every head has its own.
    """
    lead = table.shape[:-2]
    if 2 * table.shape[-1] != rotary_dim:
        table = table.unflatten(-1, (-1, rotary_dim // 2))
        if seq_dim == x.ndim - 2:
            table = table.transpose(-3, -2)
        return table
    after = x.ndim - 2 - seq_dim
    middle = seq_dim - len(lead)
    shape = (*lead, *(1,) * (middle if lead else 0), table.shape[-2], *(1,) * after, table.shape[-1])
    return table.reshape(shape)
