"""rope and rope_3d in plain PyTorch.

Half inputs are widened to float32, rotated and rounded once; ``"input"`` arithmetic stays in the dtype of the
input and rounds after every op, as models do that rotate in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

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
    full_cos, full_sin = (
        fit_table(expand_axes(axes, coords, grid, alternating, front_pad, fill), x, seq_dim, rotary_dim)
        for axes, fill in ((cos, 1.0), (sin, 0.0))
    )
    return rope(x, full_cos, full_sin, half, arithmetic, rotary_dim, seq_dim, start, length)


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
