"""The Triton kernel of rope, rope_3d and qk_norm_rope. Imported at first use, since this needs Triton.

A program computes ``ROWS`` heads. A head is read as its two pair halves, ``a`` and ``b`` (neighbours, or elements
half a row apart), and the ``REST`` that is not rotated. With ``ACROSS`` the rows of a program are the heads of one
token, and are normalised together. Where a row begins in each operand (x, the result, the tables) comes from three
nested loops, as in the other kernels; ``token`` is such an operand too, whose "address" is the number of the token.

What belongs to q or to k comes in tuples:

* ``tensors``: input, result, weight, bias, tables of cosines, tables of sines, coordinates;
* ``loops``: rows of the innermost loop, iterations of the middle one, tiles of the innermost one, elements that are
  normalised together;
* ``strides``: of the result, the input, the cosines (or coordinates), the sines (or the first pair of a row) along the
  three loops and along the row; of the token along the loops; of weight and bias.

Products and sums of the rotation are not contracted: the launch turns that off.
"""

from __future__ import annotations

import triton
import triton.language as tl

_COUNTS = ["programs_q", "start", "length"]


@triton.jit
def _offsets(row, loop1, loop2, strides):
    return row * strides[0] + loop1 * strides[1] + loop2 * strides[2]


@triton.jit
def _load_pairs(ptr, row, stride, limit, row_inside, HALF: tl.constexpr, PAIRS: tl.constexpr, TYPE: tl.constexpr):
    """The first and second elements of the pairs of some rows; ``limit`` elements are paired."""
    if HALF:
        pair = tl.arange(0, PAIRS)
        mask = row_inside[:, None] & (pair < limit // 2)[None, :]
        offsets = row[:, None] + (pair.to(tl.int64) * stride)[None, :]
        a = tl.load(ptr + offsets, mask=mask, other=0.0)
        b = tl.load(ptr + offsets + tl.cast(limit // 2, tl.int64) * stride, mask=mask, other=0.0)
    else:
        col = tl.arange(0, 2 * PAIRS)
        mask = row_inside[:, None] & (col < limit)[None, :]
        both = tl.load(ptr + row[:, None] + (col.to(tl.int64) * stride)[None, :], mask=mask, other=0.0)
        a, b = tl.split(tl.reshape(both, (row.shape[0], PAIRS, 2)))
    return a.to(TYPE), b.to(TYPE)


@triton.jit
def _store_pairs(ptr, a, b, row, stride, limit, row_inside, HALF: tl.constexpr, PAIRS: tl.constexpr):
    if HALF:
        pair = tl.arange(0, PAIRS)
        mask = row_inside[:, None] & (pair < limit // 2)[None, :]
        offsets = row[:, None] + (pair.to(tl.int64) * stride)[None, :]
        tl.store(ptr + offsets, _narrow(a, ptr), mask=mask)
        tl.store(ptr + offsets + tl.cast(limit // 2, tl.int64) * stride, _narrow(b, ptr), mask=mask)
    else:
        col = tl.arange(0, 2 * PAIRS)
        mask = row_inside[:, None] & (col < limit)[None, :]
        offsets = row[:, None] + (col.to(tl.int64) * stride)[None, :]
        tl.store(ptr + offsets, tl.interleave(_narrow(a, ptr), _narrow(b, ptr)), mask=mask)


@triton.jit
def _narrow(value, ptr):
    """Rounds to the dtype of a tensor; from float64 by way of float32, as torch does."""
    TYPE: tl.constexpr = ptr.dtype.element_ty
    if TYPE != tl.float64:
        value = value.to(tl.float32)
    return value.to(TYPE)


@triton.jit
def _round(value, TYPE: tl.constexpr):
    """Rounds to a dtype and comes back, where there is one to round to."""
    if TYPE is None:
        return value
    else:
        return value.to(TYPE).to(value.dtype)


@triton.jit
def _multiplied(
    value, weight, bias, weight_offset,
    FIRST: tl.constexpr, LAST: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Weight and bias, with a rounding before (FIRST) and between and after (LAST)."""
    value = _round(value, FIRST)
    if HAS_WEIGHT:
        value = value * (weight + weight_offset)
    if HAS_BIAS:
        if FIRST is not None:
            value = _round(value, LAST)
        value = value + bias
    return _round(value, LAST)


@triton.jit
def _axis_tables(
    cos_ptrs, sin_ptrs, coords_ptr, coords_row, coords_stride, position, base, inside, limit, widths, sizes, grid,
    front_pad, ALTERNATING: tl.constexpr, PAIRS: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Cosines and sines of some rows from the tables of the axes, one per pair; NaN for coordinates outside."""
    AXES: tl.constexpr = len(cos_ptrs)
    pair = tl.arange(0, PAIRS)
    index = base[:, None] + pair[None, :] - front_pad
    mask = inside[:, None] & (pair < limit // 2)[None, :]
    cos = tl.full(index.shape, 1.0, TYPE)
    sin = tl.full(index.shape, 0.0, TYPE)
    for axis in tl.static_range(AXES):
        if ALTERNATING:
            column = index // AXES
            mine = mask & (index >= 0) & (index % AXES == axis)
        else:
            column = index
            for earlier in tl.static_range(axis):
                column -= widths[earlier]
            mine = mask & (column >= 0) & (column < widths[axis])
        if coords_ptr is None:
            at = position
            for later in tl.static_range(axis + 1, AXES):  # row-major: the last axis is the fastest
                at = at // grid[later]
            at = at % grid[axis]
            known = inside
        else:
            at = tl.load(coords_ptr + coords_row + axis * coords_stride, mask=inside, other=0).to(tl.int64)
            known = inside & (at >= 0) & (at < sizes[axis])
        offsets = (at * widths[axis])[:, None] + column
        found = mine & known[:, None]
        axis_cos = tl.load(cos_ptrs[axis] + offsets, mask=found, other=float("nan")).to(TYPE)
        axis_sin = tl.load(sin_ptrs[axis] + offsets, mask=found, other=float("nan")).to(TYPE)
        cos = tl.where(mine, axis_cos, cos)
        sin = tl.where(mine, axis_sin, sin)
    return cos, sin


@triton.jit
def _load_compact(ptr, row, stride, limit, row_inside, PAIRS: tl.constexpr, TYPE: tl.constexpr):
    """One value per pair, for both of its elements."""
    pair = tl.arange(0, PAIRS)
    mask = row_inside[:, None] & (pair < limit // 2)[None, :]
    value = tl.load(ptr + row[:, None] + (pair.to(tl.int64) * stride)[None, :], mask=mask, other=0.0).to(TYPE)
    return value, value


@triton.jit
def _rotate(
    program, tensors, loops, strides, row_length, rotary, start, length, eps, weight_offset,
    widths, sizes, grid, front_pad,
    COMPACT_COS: tl.constexpr, COMPACT_SIN: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr,
    TABLES: tl.constexpr, ALTERNATING: tl.constexpr, PARTIAL: tl.constexpr, NORM: tl.constexpr, ACROSS: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, HALF: tl.constexpr, INPUT: tl.constexpr, WIDE: tl.constexpr,
    TURN: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Normalises and rotates the rows of one program."""
    x_ptr, y_ptr, w_ptr, b_ptr, cos_ptrs, sin_ptrs, coords_ptr = tensors
    n0, n1, tiles, norm_length = loops
    y_strides, x_strides, a_strides, b_strides, token_strides, w_stride, bias_stride = strides
    x_stride = x_strides[3]
    y_stride = y_strides[3]
    outer = program // tiles
    row = (program % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    loop1 = (outer % n1).to(tl.int64)
    loop2 = (outer // n1).to(tl.int64)
    inside = row < n0
    x_row = _offsets(row, loop1, loop2, x_strides)
    y_row = _offsets(row, loop1, loop2, y_strides)
    a, b = _load_pairs(x_ptr, x_row, x_stride, rotary, inside, HALF, PAIRS, WIDE)
    if REST > 0:
        rest_col = rotary + tl.arange(0, REST)
        rest_mask = inside[:, None] & (rest_col < row_length)[None, :]
        rest = tl.load(x_ptr + x_row[:, None] + (rest_col.to(tl.int64) * x_stride)[None, :], mask=rest_mask, other=0.0)
        rest = rest.to(WIDE)

    if NORM > 0:
        count = tl.cast(norm_length, WIDE)
        if NORM == 2:
            total = tl.sum(a, axis=1) + tl.sum(b, axis=1)
            if REST > 0:
                total += tl.sum(rest, axis=1)
            if ACROSS:
                total = tl.zeros_like(total) + tl.sum(total, axis=0)
            mean = (total / count)[:, None]
            used = inside[:, None] & (tl.arange(0, PAIRS) < rotary // 2)[None, :]
            a = tl.where(used, a - mean, 0.0)
            b = tl.where(used, b - mean, 0.0)
            if REST > 0:
                rest = tl.where(rest_mask, rest - mean, 0.0)
        squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
        if REST > 0:
            squares += tl.sum(rest * rest, axis=1)
        if ACROSS:
            squares = tl.zeros_like(squares) + tl.sum(squares, axis=0)
        if WIDE == tl.float64:
            scale = (1.0 / tl.sqrt(squares / count + eps))[:, None]
        else:
            scale = tl.div_rn(1.0, tl.sqrt_rn(squares / count + eps))[:, None]
        a, b = a * scale, b * scale
        HAS_WEIGHT: tl.constexpr = w_ptr is not None
        HAS_BIAS: tl.constexpr = b_ptr is not None
        if ACROSS:
            parameter_row = row * row_length
            parameter_inside = inside
        else:
            parameter_row = tl.zeros((1,), tl.int64)
            parameter_inside = tl.full((1,), True, tl.int1)
        w_a, w_b, w_rest, b_a, b_b, b_rest = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        if HAS_WEIGHT:
            w_a, w_b = _load_pairs(
                w_ptr, parameter_row * w_stride, w_stride, rotary, parameter_inside, HALF, PAIRS, WIDE
            )
        if HAS_BIAS:
            b_a, b_b = _load_pairs(
                b_ptr, parameter_row * bias_stride, bias_stride, rotary, parameter_inside, HALF, PAIRS, WIDE
            )
        a = _multiplied(a, w_a, b_a, weight_offset, FIRST, LAST, HAS_WEIGHT, HAS_BIAS)
        b = _multiplied(b, w_b, b_b, weight_offset, FIRST, LAST, HAS_WEIGHT, HAS_BIAS)
        if REST > 0:
            rest_at = parameter_row[:, None] + rest_col[None, :]
            parameter_mask = parameter_inside[:, None] & (rest_col < row_length)[None, :]
            if HAS_WEIGHT:
                w_rest = tl.load(w_ptr + rest_at * w_stride, mask=parameter_mask, other=0.0).to(WIDE)
            if HAS_BIAS:
                b_rest = tl.load(b_ptr + rest_at * bias_stride, mask=parameter_mask, other=0.0).to(WIDE)
            rest = _multiplied(rest * scale, w_rest, b_rest, weight_offset, FIRST, LAST, HAS_WEIGHT, HAS_BIAS)

    if TABLES != 0:
        if SHARED:
            table_row = tl.zeros((1,), tl.int64)
        else:
            table_row = row
        token = _offsets(table_row, loop1, loop2, token_strides) - start
        known = table_row < n0
        if PARTIAL:
            known = known & (token >= 0) & (token < length)
        first = _offsets(table_row, loop1, loop2, a_strides) - a_strides[4]
        second = _offsets(table_row, loop1, loop2, b_strides) - b_strides[4]
        a_stride = a_strides[3]
        b_stride = b_strides[3]
        if TABLES == 2:
            cos_a, sin_a = _axis_tables(
                cos_ptrs, sin_ptrs, coords_ptr, first, a_stride, token, second, known, rotary, widths, sizes, grid,
                front_pad, ALTERNATING, PAIRS, TURN,
            )  # fmt: skip
            cos_b, sin_b = cos_a, sin_a
        else:
            if COMPACT_COS:
                cos_a, cos_b = _load_compact(cos_ptrs[0], first, a_stride, rotary, known, PAIRS, TURN)
            else:
                cos_a, cos_b = _load_pairs(cos_ptrs[0], first, a_stride, rotary, known, HALF, PAIRS, TURN)
            if COMPACT_SIN:
                sin_a, sin_b = _load_compact(sin_ptrs[0], second, b_stride, rotary, known, PAIRS, TURN)
            else:
                sin_a, sin_b = _load_pairs(sin_ptrs[0], second, b_stride, rotary, known, HALF, PAIRS, TURN)
        if INPUT:
            EACH: tl.constexpr = x_ptr.dtype.element_ty
            cos_a, sin_a = _round(cos_a, EACH), _round(sin_a, EACH)
            cos_b, sin_b = _round(cos_b, EACH), _round(sin_b, EACH)
        else:
            EACH: tl.constexpr = None
        wide_a, wide_b = a.to(TURN), b.to(TURN)
        turned_a = _round(wide_a * cos_a, EACH) - _round(wide_b * sin_a, EACH)
        turned_b = _round(wide_b * cos_b, EACH) + _round(wide_a * sin_b, EACH)
        if PARTIAL:
            a = tl.where(known[:, None], turned_a, wide_a)
            b = tl.where(known[:, None], turned_b, wide_b)
        else:
            a, b = turned_a, turned_b

    _store_pairs(y_ptr, a, b, y_row, y_stride, rotary, inside, HALF, PAIRS)
    if REST > 0:
        offsets = y_row[:, None] + (rest_col.to(tl.int64) * y_stride)[None, :]
        tl.store(y_ptr + offsets, _narrow(rest, y_ptr), mask=rest_mask)


@triton.jit(do_not_specialize=_COUNTS)
def rope_kernel(
    q, q_loops, q_strides, k, k_loops, k_strides, programs_q, row_length, rotary, start, length, eps, weight_offset,
    widths, sizes, grid, front_pad,
    COMPACT_COS_Q: tl.constexpr, COMPACT_SIN_Q: tl.constexpr, SHARED_Q: tl.constexpr, ROWS_Q: tl.constexpr,
    COMPACT_COS_K: tl.constexpr, COMPACT_SIN_K: tl.constexpr, SHARED_K: tl.constexpr, ROWS_K: tl.constexpr,
    TABLES: tl.constexpr, ALTERNATING: tl.constexpr, PARTIAL: tl.constexpr, NORM: tl.constexpr, ACROSS: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, HALF: tl.constexpr, INPUT: tl.constexpr, WIDE: tl.constexpr,
    TURN: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, BOTH: tl.constexpr,
):  # fmt: skip
    """Rotates q, and with BOTH also k: the first ``programs_q`` programs are those of q."""
    program = tl.program_id(0)
    if not BOTH:
        _rotate(
            program, q, q_loops, q_strides, row_length, rotary, start, length, eps, weight_offset,
            widths, sizes, grid, front_pad,
            COMPACT_COS_Q, COMPACT_SIN_Q, SHARED_Q, ROWS_Q, TABLES, ALTERNATING, PARTIAL, NORM, ACROSS,
            FIRST, LAST, HALF, INPUT, WIDE, TURN, PAIRS, REST,
        )  # fmt: skip
    else:
        if program < programs_q:
            _rotate(
                program, q, q_loops, q_strides, row_length, rotary, start, length, eps, weight_offset,
                widths, sizes, grid, front_pad,
                COMPACT_COS_Q, COMPACT_SIN_Q, SHARED_Q, ROWS_Q, TABLES, ALTERNATING, PARTIAL, NORM, ACROSS,
                FIRST, LAST, HALF, INPUT, WIDE, TURN, PAIRS, REST,
            )  # fmt: skip
        else:
            _rotate(
                program - programs_q, k, k_loops, k_strides, row_length, rotary, start, length, eps, weight_offset,
                widths, sizes, grid, front_pad,
                COMPACT_COS_K, COMPACT_SIN_K, SHARED_K, ROWS_K, TABLES, ALTERNATING, PARTIAL, NORM, ACROSS,
                FIRST, LAST, HALF, INPUT, WIDE, TURN, PAIRS, REST,
            )  # fmt: skip
