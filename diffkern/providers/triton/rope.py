"""rope, rope_3d and qk_norm_rope by Triton: outputs, geometry and launch. The arithmetic is in ``rope_kernels``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton.language as tl
from torch import Tensor

from diffkern.providers.eager.modulate import NO_NORM
from diffkern.providers.eager.rope import FLOAT64, INPUT
from diffkern.providers.triton.norm import _ROUND_DTYPES, _device_guard
from diffkern.providers.triton.rope_kernels import rope_kernel
from diffkern.providers.triton.rows import broadcast_strides, merge_loops

_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}

#: Elements that a program holds, unless one row has more.
_TILE = 4096
_ELEMENTS_PER_WARP = 1024
_MOST_WARPS = 16

Strides = tuple[int, ...]


@dataclass(frozen=True)
class Rotation:
    """What q and k have in common.

    Attributes:
        cos: The full table, or one table per axis.
        sin: The same of the sines.
        coords: Coordinates of the tokens, if the tables are those of axes and there is no grid.
        grid: Positions along each axis.
        axes: Whether the tables are those of axes.
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
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    half: bool,
    arithmetic: int,
    rotary_dim: int,
    seq_dim: int,
    start: int,
    length: int,
) -> Tensor:
    """Computes :func:`diffkern.ops.rope`."""
    rotation = Rotation((cos,), (sin,), None, (), False, 0, half, arithmetic, rotary_dim, seq_dim, start, length)
    return _run(x, None, (None, None), (None, None), rotation, rotation, Norm(), 0)[0]


def rope_3d(
    x: Tensor,
    cos: Sequence[Tensor],
    sin: Sequence[Tensor],
    coords: Tensor | None,
    grid: Sequence[int],
    alternating: bool,
    front_pad: int,
    half: bool,
    arithmetic: int,
    rotary_dim: int,
    seq_dim: int,
    start: int,
    length: int,
) -> Tensor:
    """Computes :func:`diffkern.ops.rope_3d`."""
    rotation = Rotation(
        cos, sin, coords, grid, alternating, front_pad, half, arithmetic, rotary_dim, seq_dim, start, length
    )
    return _run(x, None, (None, None), (None, None), rotation, rotation, Norm(), 0)[0]


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    q_bias: Tensor | None,
    k_bias: Tensor | None,
    cos: Sequence[Tensor],
    sin: Sequence[Tensor],
    cos_k: Sequence[Tensor],
    sin_k: Sequence[Tensor],
    coords: Tensor | None,
    grid: Sequence[int],
    alternating: bool,
    front_pad: int,
    norm: int,
    eps: float,
    heads: int,
    weight_offset: float,
    round_dtype: torch.dtype | None,
    round_norm: bool,
    half: bool,
    arithmetic: int,
    rotary_dim: int,
    seq_dim: int,
    start: int,
    length: int,
) -> tuple[Tensor, Tensor]:
    """Computes :func:`diffkern.ops.qk_norm_rope`.

    Raises:
        TypeError: ``round_dtype`` is none of float16, bfloat16, float32 and float64.
    """
    if round_dtype is not None and round_dtype not in _ROUND_DTYPES:
        raise TypeError(f"the Triton qk_norm_rope cannot round to {round_dtype}: use the eager provider for it")
    rest = (coords, grid, alternating, front_pad, half, arithmetic, rotary_dim, seq_dim, start, length)
    kind = Norm(norm, eps, weight_offset, round_dtype, round_norm or arithmetic == INPUT)
    q_out, k_out = _run(
        q, k, (q_weight, q_bias), (k_weight, k_bias), Rotation(cos, sin, *rest), Rotation(cos_k, sin_k, *rest), kind, heads
    )  # fmt: skip
    assert k_out is not None
    return q_out, k_out


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


@dataclass(frozen=True)
class _Layout:
    """Where the rows lie: the loops, and the strides of result, input, cosines, sines and token along them."""

    sizes: tuple[int, int, int]
    strides: tuple[Strides, ...]


@lru_cache(maxsize=4096)
def _layout(sizes: Strides, strides: tuple[Strides, ...], across: bool) -> _Layout | None:
    """Merges the loops over rows, None if too many are left; across heads the last one is kept for the heads."""
    if not across:
        loops = merge_loops(sizes, strides)
        return None if loops is None else _Layout(loops.sizes, loops.strides)
    loops = merge_loops(sizes[:-1], tuple(own[:-1] for own in strides))
    if loops is None or loops.sizes[2] > 1:
        return None
    inner = tuple((own[-1], *merged[:2]) for own, merged in zip(strides, loops.strides, strict=True))
    return _Layout((sizes[-1], *loops.sizes[:2]), inner)


def _run(
    q: Tensor,
    k: Tensor | None,
    q_parameters: tuple[Tensor | None, Tensor | None],
    k_parameters: tuple[Tensor | None, Tensor | None],
    q_rotation: Rotation,
    k_rotation: Rotation,
    norm: Norm,
    heads: int,
) -> tuple[Tensor, Tensor | None]:
    """One launch for q and, if there is one, k."""
    q_out, k_out = torch.empty_like(q), None if k is None else torch.empty_like(k)
    head_dim = q.shape[-1] // heads if heads else q.shape[-1]
    both = [(q, q_out, q_parameters, q_rotation)]
    if k is not None and k_out is not None and k.numel() > 0:
        both.append((k, k_out, k_parameters, k_rotation))
    if q.numel() == 0:
        both = both[1:]
    if not both:
        return q_out, k_out
    rotary = q_rotation.rotary_dim or head_dim
    pairs = _power_of_two(max(rotary // 2, 1))
    rest = 0 if rotary == head_dim else _power_of_two(head_dim - rotary)
    operands = [_operand(*each, head_dim, heads > 0, norm.kind, 2 * pairs + rest) for each in both]
    first, second = operands[0], operands[1] if len(operands) > 1 else None
    other = second or first
    tables = 0 if not q_rotation.cos else 2 if q_rotation.axes else 1
    wide = tl.float64 if q.dtype == torch.float64 else tl.float32
    partial = tables > 0 and q_rotation.length >= 0
    largest = max(operand.rows for operand in operands) * (2 * pairs + rest)
    with _device_guard(q.device):
        rope_kernel[(sum(operand.programs for operand in operands),)](
            first.tensors, first.loops, first.strides,
            None if second is None else second.tensors, other.loops, other.strides,
            first.programs, head_dim, rotary, q_rotation.start, max(q_rotation.length, 0), norm.eps, norm.weight_offset,
            _axes(q_rotation) if tables == 2 else None,
            *first.compact, first.shared, first.rows, *other.compact, other.shared, other.rows,
            tables, q_rotation.alternating, partial, norm.kind, heads > 0,
            None if norm.round_dtype is None else _ROUND_DTYPES[norm.round_dtype],
            _TYPES[q.dtype] if norm.round_norm and q.dtype != torch.float64 else None,
            q_rotation.half, q_rotation.arithmetic == INPUT, wide,
            tl.float64 if q_rotation.arithmetic == FLOAT64 else wide, pairs, rest,
            num_warps=min(max(largest // _ELEMENTS_PER_WARP, 1), _MOST_WARPS), enable_fp_fusion=False,
        )  # fmt: skip
    return q_out, k_out


def _axes(rotation: Rotation) -> tuple[object, ...]:
    widths = tuple(table.shape[1] for table in rotation.cos)
    sizes = tuple(table.shape[0] for table in rotation.cos)
    return widths, sizes, tuple(rotation.grid) or sizes, rotation.front_pad


def _operand(
    x: Tensor,
    out: Tensor,
    parameters: tuple[Tensor | None, Tensor | None],
    rotation: Rotation,
    head_dim: int,
    across: bool,
    norm: int,
    row_elements: int,
) -> _Operand:
    views = [x, out]
    if across:
        views = [view.unflatten(-1, (view.shape[-1] // head_dim, head_dim)) for view in views]
    shape = tuple(views[0].shape)
    tables, steps = _table_strides(rotation, shape, head_dim)
    layout = _layout(
        shape[:-1], (views[1].stride()[:-1], views[0].stride()[:-1], *steps), across and norm != NO_NORM
    )
    if layout is None:
        # Rare: by way of a contiguous input and a full table, whose rows make a single loop.
        dense = x.contiguous()
        result = _run(dense, None, parameters, parameters, _dense(rotation, shape), rotation, Norm(), 0)
        raise AssertionError(result)
    weight, bias = parameters
    rows = min(_power_of_two(layout.sizes[0]), max(_TILE // row_elements, 1))
    if across and norm != NO_NORM:
        rows = _power_of_two(layout.sizes[0])
    tiles = -(-layout.sizes[0] // rows)
    y, x_steps, a, b, token = layout.strides
    return _Operand(
        (x, out, weight, bias, *tables),
        (layout.sizes[0], layout.sizes[1], tiles, x.shape[-1] if across else head_dim),
        ((*y, _last(views[1])), (*x_steps, _last(views[0])), (*a, _column(rotation, 0)), (*b, _column(rotation, 1)), token,
         1 if weight is None else weight.stride(0), 1 if bias is None else bias.stride(0)),
        a[0] == 0 and b[0] == 0 and token[0] == 0,
        _compact(rotation, head_dim),
        rows,
        tiles * layout.sizes[1] * layout.sizes[2],
    )  # fmt: skip
