"""rope, rope_3d, qk_norm_rope and joint_qk_norm_rope by Triton: outputs, geometry and launch.

The arithmetic is in ``rope_kernels``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton.language as tl
from torch import Tensor

from diffkern.providers.eager.modulate import NO_NORM
from diffkern.providers.eager.rope import FLOAT64, INPUT, expand_axes, fit_table
from diffkern.providers.triton.launching import device_guard
from diffkern.providers.triton.rope_kernels import rope_kernel
from diffkern.providers.triton.rows import Loops, broadcast_strides, merge_loops, stride_of
from diffkern.providers.triton.tiles import power_of_two, warps_for

_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}

#: Elements that a program holds, unless one row has more.
_TILE = 4096

Strides = tuple[int, ...]


@dataclass(frozen=True)
class Rotation:
    """What q and k have in common.

    Attributes:
        cos: The full table, or one table per axis.
        sin: The same of the sines.
        coords: Coordinates of the tokens, if the tables are those of axes and there is no grid.
        grid: Positions along each axis.
    """

    cos: Sequence[Tensor]
    sin: Sequence[Tensor]
    coords: Tensor | None
    grid: Sequence[int]
    alternating: bool
    front_pad: int
    half: bool
    arithmetic: int
    rotary_dim: int
    seq_dim: int
    start: int
    length: int

    @property
    def axes(self) -> bool:
        """Whether the tables are those of axes."""
        return self.coords is not None or bool(self.grid)


@dataclass(frozen=True)
class Norm:
    """The norm in front of a rotation; see :func:`diffkern.ops.qk_norm_rope`."""

    kind: int = NO_NORM
    eps: float = 0.0
    weight_offset: float = 0.0
    round_dtype: torch.dtype | None = None
    round_norm: bool = False


def rope(
    x: Tensor, cos: Tensor, sin: Tensor, half: bool, arithmetic: int, rotary_dim: int, seq_dim: int, start: int,
    length: int,
) -> Tensor:  # fmt: skip
    """Computes :func:`diffkern.ops.rope`."""
    rotation = Rotation((cos,), (sin,), None, (), False, 0, half, arithmetic, rotary_dim, seq_dim, start, length)
    return _run(x, None, (None, None), (None, None), rotation, rotation, Norm(), 0)[0]


def rope_3d(
    x: Tensor, cos: Sequence[Tensor], sin: Sequence[Tensor], coords: Tensor | None, grid: Sequence[int],
    alternating: bool, front_pad: int, half: bool, arithmetic: int, rotary_dim: int, seq_dim: int, start: int,
    length: int,
) -> Tensor:  # fmt: skip
    """Computes :func:`diffkern.ops.rope_3d`."""
    rotation = Rotation(
        cos, sin, coords, grid, alternating, front_pad, half, arithmetic, rotary_dim, seq_dim, start, length
    )
    return _run(x, None, (None, None), (None, None), rotation, rotation, Norm(), 0)[0]


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, q_bias: Tensor | None,
    k_bias: Tensor | None, cos: Sequence[Tensor], sin: Sequence[Tensor], cos_k: Sequence[Tensor],
    sin_k: Sequence[Tensor], coords: Tensor | None, grid: Sequence[int], alternating: bool, front_pad: int, norm: int,
    eps: float, heads: int, weight_offset: float, round_dtype: torch.dtype | None, round_norm: bool, half: bool,
    arithmetic: int, rotary_dim: int, seq_dim: int, start: int, length: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes :func:`diffkern.ops.qk_norm_rope`.

    Raises:
        TypeError: ``round_dtype`` is none of float16, bfloat16, float32 and float64.
    """
    if round_dtype is not None and round_dtype not in _TYPES:
        raise TypeError(f"the Triton qk_norm_rope cannot round to {round_dtype}: use the eager provider for it")
    rest = (coords, grid, alternating, front_pad, half, arithmetic, rotary_dim, seq_dim, start, length)
    kind = Norm(norm, eps, weight_offset, round_dtype, round_norm or arithmetic == INPUT)
    q_rotation, k_rotation = Rotation(cos, sin, *rest), Rotation(cos_k, sin_k, *rest)
    q_out, k_out = _run(q, k, (q_weight, q_bias), (k_weight, k_bias), q_rotation, k_rotation, kind, heads)
    return q_out, k_out


def joint_qk_norm_rope(
    q: Tensor, k: Tensor, q_2: Tensor, k_2: Tensor, q_weight: Tensor | None, k_weight: Tensor | None,
    q_weight_2: Tensor | None, k_weight_2: Tensor | None, q_bias: Tensor | None, k_bias: Tensor | None,
    q_bias_2: Tensor | None, k_bias_2: Tensor | None, cos: Sequence[Tensor], sin: Sequence[Tensor],
    cos_2: Sequence[Tensor], sin_2: Sequence[Tensor], dim: int, norm: int, eps: float, round_norm: bool, half: bool,
    arithmetic: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes :func:`diffkern.ops.joint_qk_norm_rope`."""
    kind, joint = Norm(norm, eps, 0.0, None, round_norm or arithmetic == INPUT), []
    for first, second in ((q, q_2), (k, k_2)):
        shape = (*first.shape[:dim], first.shape[dim] + second.shape[dim], *first.shape[dim + 1 :])
        joint.append(first.new_empty(shape))
    for streams, start, parameters, tables in (
        ((q, k), (0, 0), ((q_weight, q_bias), (k_weight, k_bias)), (cos, sin)),
        ((q_2, k_2), (q.shape[dim], k.shape[dim]), ((q_weight_2, q_bias_2), (k_weight_2, k_bias_2)), (cos_2, sin_2)),
    ):
        rotation = Rotation(*tables, None, (), False, 0, half, arithmetic, 0, 1, 0, -1)
        outs = [out.narrow(dim, at, x.shape[dim]) for out, at, x in zip(joint, start, streams, strict=True)]
        _run(*streams, *parameters, rotation, rotation, kind, 0, outs)
    return joint[0], joint[1]


@dataclass(frozen=True)
class _Operand:
    """The launch arguments of q or of k; see ``rope_kernels``."""

    tensors: tuple[object, ...]
    loops: tuple[int, int, int, int]
    strides: tuple[object, ...]
    shared: bool
    compact: tuple[bool, bool]
    rows: int
    programs: int


@lru_cache(maxsize=4096)
def _layout(sizes: Strides, strides: tuple[Strides, ...], across: bool) -> Loops | None:
    """Merges the loops over rows, None if too many are left; across heads the last one is kept for the heads."""
    if not across:
        return merge_loops(sizes, strides)
    loops = merge_loops(sizes[:-1], tuple(own[:-1] for own in strides))
    if loops is None or loops.sizes[2] > 1:
        return None
    inner = tuple((own[-1], *merged[:2]) for own, merged in zip(strides, loops.strides, strict=True))
    return Loops((sizes[-1], *loops.sizes[:2]), inner)


def _run(
    q: Tensor, k: Tensor | None, q_parameters: tuple[Tensor | None, Tensor | None],
    k_parameters: tuple[Tensor | None, Tensor | None], q_rotation: Rotation, k_rotation: Rotation, norm: Norm,
    heads: int, outs: Sequence[Tensor] = (),
) -> Sequence[Tensor]:  # fmt: skip
    """One launch for q and, if there is one, k; into new tensors unless ``outs`` are given."""
    head_dim = q.shape[-1] // heads if heads else q.shape[-1]
    given = [(q, q_parameters, q_rotation)] + ([] if k is None else [(k, k_parameters, k_rotation)])
    outs = outs or [torch.empty_like(x) for x, _, _ in given]
    across = heads > 0 and norm.kind != NO_NORM
    rotary = q_rotation.rotary_dim or head_dim
    pairs = power_of_two(max(rotary // 2, 1))
    rest = 0 if rotary == head_dim else power_of_two(head_dim - rotary)
    row_elements = power_of_two(2 * pairs + rest)
    operands = [
        _operand(x, out, parameters, rotation, head_dim, rotary, heads > 0, across, row_elements)
        for (x, parameters, rotation), out in zip(given, outs, strict=True)
        if x.numel() > 0
    ]
    if not operands:
        return outs
    if None in operands:
        # Rare: by way of contiguous inputs and full tables, whose rows make a single loop.
        dense = [(x.contiguous(), _dense(rotation, _split(x, heads, head_dim), rotary)) for x, _, rotation in given]
        (q, q_rotation), (k_dense, k_rotation) = dense[0], dense[-1]
        results = _run(
            q, None if k is None else k_dense, q_parameters, k_parameters, q_rotation, k_rotation, norm, heads
        )
        return [out.copy_(result) for out, result in zip(outs, results, strict=True)]
    first, other = operands[0], operands[-1]
    assert first is not None and other is not None
    tables = 0 if not q_rotation.cos else 2 if q_rotation.axes else 1
    wide = tl.float64 if q.dtype == torch.float64 else tl.float32
    largest = max(first.rows, other.rows) * row_elements
    with device_guard(q.device):
        rope_kernel[(first.programs + (other.programs if other is not first else 0),)](
            first.tensors, first.loops, first.strides,
            other.tensors, other.loops, other.strides,
            first.programs, head_dim, rotary, q_rotation.start, max(q_rotation.length, 0), norm.eps, norm.weight_offset,
            *_axes(q_rotation),
            *first.compact, first.shared, first.rows, *other.compact, other.shared, other.rows,
            tables, q_rotation.alternating, tables > 0 and q_rotation.length >= 0, norm.kind, across,
            None if norm.round_dtype is None else _TYPES[norm.round_dtype],
            _TYPES[q.dtype] if norm.round_norm and q.dtype != torch.float64 else None,
            q_rotation.half, q_rotation.arithmetic == INPUT, wide,
            tl.float64 if q_rotation.arithmetic == FLOAT64 else wide, pairs, rest, other is not first,
            num_warps=warps_for(largest), enable_fp_fusion=False,
        )  # fmt: skip
    return outs


def _operand(
    x: Tensor, out: Tensor, parameters: tuple[Tensor | None, Tensor | None], rotation: Rotation, head_dim: int,
    rotary: int, flat: bool, across: bool, row_elements: int,
) -> _Operand | None:  # fmt: skip
    """Plans the share of q or k in a launch; None if its rows need more loops than there are."""
    x_view, out_view = (t.unflatten(-1, (-1, head_dim)) if flat else t for t in (x, out))
    shape = tuple(x_view.shape)
    tables = _tables(rotation, shape, rotary)
    layout = _layout(
        shape[:-1], (out_view.stride()[:-1], x_view.stride()[:-1], tables.first, tables.second, tables.token), across
    )
    if layout is None:
        return None
    inner = layout.sizes[0]
    rows = power_of_two(inner) if across else min(power_of_two(inner), max(_TILE // row_elements, 1))
    tiles = -(-inner // rows)
    y_steps, x_steps, first, second, token = layout.strides
    weight, bias = parameters
    return _Operand(
        (x, out, weight, bias, tables.cos, tables.sin, rotation.coords),
        (inner, layout.sizes[1], tiles, x.shape[-1] if across else head_dim),
        (
            (*y_steps, _step(out_view)), (*x_steps, _step(x_view)), (*first, *tables.first_column),
            (*second, *tables.second_column), token,
            stride_of(weight), stride_of(bias),
        ),
        first[0] == 0 and second[0] == 0 and token[0] == 0,
        tables.compact,
        rows,
        tiles * layout.sizes[1] * layout.sizes[2],
    )  # fmt: skip


@dataclass(frozen=True)
class _Tables:
    """How the tables are read.

    Attributes:
        cos: The full table, or one per axis.
        sin: The same of the sines.
        first: Strides of the cosines, or of the coordinates, along the leading dimensions of what is rotated.
        second: Those of the sines, or of the first pair of a row among the pairs of all heads.
        token: Those of the number of the token.
        first_column: Step along the row, and the offset of the first token to rotate.
        second_column: The same.
        compact: Whether cosines and sines have one angle per pair.
    """

    cos: tuple[Tensor, ...]
    sin: tuple[Tensor, ...]
    first: Strides
    second: Strides
    token: Strides
    first_column: tuple[int, int]
    second_column: tuple[int, int]
    compact: tuple[bool, bool]


def _tables(rotation: Rotation, shape: Strides, rotary: int) -> _Tables:
    lead = len(shape) - 1
    none = (0,) * lead
    start, seq_dim = rotation.start, rotation.seq_dim
    if not rotation.cos:
        return _Tables((), (), none, none, none, (1, 0), (1, 0), (False, False))
    token = tuple(int(dim == seq_dim) for dim in range(lead))
    if not rotation.axes:
        cos, sin = rotation.cos[0], rotation.sin[0]
        partial = rotation.length >= 0
        span = (*shape[:seq_dim], rotation.length, *shape[seq_dim + 1 : -1]) if partial else shape[:-1]
        first, second = (broadcast_strides(t.shape[:-1], t.stride()[:-1], span) for t in (cos, sin))
        columns = [(_step(t), start * steps[seq_dim] if partial else 0) for t, steps in ((cos, first), (sin, second))]
        compact = (cos.shape[-1] != rotary, sin.shape[-1] != rotary)
        token = token if partial else none
        return _Tables((cos,), (sin,), first, second, token, columns[0], columns[1], compact)
    cos_axes, sin_axes = (tuple(table.contiguous() for table in tables) for tables in (rotation.cos, rotation.sin))
    coords, column = none, (1, 0)
    if rotation.coords is not None:
        steps = rotation.coords.stride()
        samples = steps[0] if rotation.coords.ndim == 3 and rotation.coords.shape[0] > 1 else 0
        coords = tuple(steps[-2] if dim == seq_dim else samples if dim == 0 else 0 for dim in range(lead))
        column = (steps[-1], start * steps[-2])
    pairs = rotation.front_pad + sum(table.shape[1] for table in cos_axes)
    own = rotary // 2 if 2 * pairs != rotary else 0
    heads = tuple(own if dim == 3 - seq_dim else 0 for dim in range(lead))
    return _Tables(cos_axes, sin_axes, coords, heads, token, column, (1, 0), (True, True))


def _axes(rotation: Rotation) -> tuple[Strides | int, ...]:
    """Widths, positions and grid of the axes, and the padding in front.

    Side by side and not as one tuple: Triton 3.6 loses the ones in a tuple inside of a tuple.
    """
    if not rotation.axes:
        return (), (), (), 0
    widths = tuple(table.shape[1] for table in rotation.cos)
    sizes = tuple(table.shape[0] for table in rotation.cos)
    return widths, sizes, tuple(rotation.grid) or sizes, rotation.front_pad


def _dense(rotation: Rotation, x: Tensor, rotary: int) -> Rotation:
    """The same rotation from full tables that have an own, contiguous row for every row of ``x``."""
    if not rotation.cos:
        return rotation
    tables = []
    for axes, fill in ((rotation.cos, 1.0), (rotation.sin, 0.0)):
        table = axes[0]
        if rotation.axes:
            full = expand_axes(axes, rotation.coords, rotation.grid, rotation.alternating, rotation.front_pad, fill)
            table = fit_table(full, x, rotation.seq_dim, rotary)
        whole = table.new_full((*x.shape[:-1], table.shape[-1]), fill)
        part = whole if rotation.length < 0 else whole.narrow(rotation.seq_dim, rotation.start, rotation.length)
        part.copy_(table)
        tables.append(whole)
    return replace(rotation, cos=tables[:1], sin=tables[1:], coords=None, grid=(), start=0, length=-1)


def _split(x: Tensor, heads: int, head_dim: int) -> Tensor:
    return x.unflatten(-1, (-1, head_dim)) if heads else x


def _step(x: Tensor) -> int:
    """The stride along the row. A single element may carry any; 1 spares a variant of the kernel."""
    return x.stride(-1) if x.shape[-1] > 1 else 1
