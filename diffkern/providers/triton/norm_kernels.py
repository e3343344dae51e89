"""The Triton kernels of rms_norm and layer_norm. Imported at first use, since this needs Triton.

Shared conventions. A program computes ``ROWS`` rows in ``STEPS`` blocks of ``COLS`` columns; with one step
the row is read once and stays in registers, else it is read once per pass. ``size0``, ``size1`` and the grid
are the loops of :class:`diffkern.providers.triton.rows.Rows`, ``tiles`` is the number of tiles along the
innermost loop. Offsets are 64-bit, since a stride times an index passes 2^31 in tensors that models really
have. ``w_ptr`` and ``b_ptr`` may be None. Square root and division are the correctly rounded ones: every
backend has those two, while the approximate reciprocal square root differs between them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# The arguments of a kernel have the types that Triton gives them, which mypy does not know.
from __future__ import annotations

import triton
import triton.language as tl

# Plain counts: specialising on them would only compile more variants.
_COUNTS = ["size1", "tiles"]


@triton.jit
def _locate_rows(
    size0, size1, tiles, x0, x1, x2, y0, y1, y2, ROWS: tl.constexpr, NESTED: tl.constexpr
):  # fmt: skip
    """Offsets of this program's rows in x and in y, and which of them exist."""
    program = tl.program_id(0)
    tile = program % tiles if NESTED else program
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    x_row = row * x0
    y_row = row * y0
    if NESTED:
        outer = program // tiles
        loop1 = (outer % size1).to(tl.int64)
        loop2 = (outer // size1).to(tl.int64)
        x_row += loop1 * x1 + loop2 * x2
        y_row += loop1 * y1 + loop2 * y2
    return x_row, y_row, row < size0


@triton.jit
def _load(ptr, row, col, row_inside, col_inside, stride):
    """A tile in float32, with zeros outside."""
    offsets = row[:, None] + (col.to(tl.int64) * stride)[None, :]
    return tl.load(ptr + offsets, mask=row_inside[:, None] & col_inside[None, :], other=0.0).to(tl.float32)


@triton.jit
def _load_parameter(ptr, col, col_inside, stride):
    """The weight or bias of some columns in float32, as one row; unused where there is none."""
    if ptr is None:
        return 0.0
    else:
        return tl.load(ptr + col.to(tl.int64) * stride, mask=col_inside, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _store(ptr, value, row, col, row_inside, col_inside, stride):
    """Rounds a tile to the dtype of the output and writes it."""
    offsets = row[:, None] + (col.to(tl.int64) * stride)[None, :]
    mask = row_inside[:, None] & col_inside[None, :]
    tl.store(ptr + offsets, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rms_scale(total, length, eps, CLAMP: tl.constexpr):
    """What a row is multiplied by (or, with CLAMP, divided by), from the sum of its squares."""
    if CLAMP:
        norm = tl.sqrt_rn(total)
        # Not a maximum, which would turn a NaN into eps.
        return tl.where(norm < eps, eps, norm)
    return tl.div_rn(1.0, tl.sqrt_rn(total / length + eps))


@triton.jit
def _rms_finish(
    x, scale, length, weight, bias, weight_offset, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    OUT: tl.constexpr, ROUND: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    """Normalises a tile and applies weight and bias, rounding where the op says."""
    if CLAMP:
        y = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape)) * tl.sqrt_rn(length)
    else:
        y = x * scale[:, None]
    if ROUND is not None:
        y = y.to(ROUND).to(tl.float32)
    if HAS_WEIGHT:
        y = y * (weight + weight_offset)
    if HAS_BIAS:
        if ROUND is not None:
            y = y.to(OUT).to(tl.float32)
        y = y + bias
    return y


@triton.jit(do_not_specialize=_COUNTS)
def rms_norm_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr,
    row_length, size0, size1, tiles, x0, x1, x2, x_stride, y0, y1, y2, y_stride, w_stride, b_stride,
    eps, weight_offset,
    ROUND: tl.constexpr, CLAMP: tl.constexpr,
    NESTED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Writes ``x * rsqrt(mean(x^2) + eps) * (w + weight_offset) + b``; see ``diffkern.ops.rms_norm``."""
    x_row, y_row, row_inside = _locate_rows(size0, size1, tiles, x0, x1, x2, y0, y1, y2, ROWS, NESTED)
    OUT: tl.constexpr = y_ptr.dtype.element_ty
    length = tl.cast(row_length, tl.float32)
    HAS_WEIGHT: tl.constexpr = w_ptr is not None
    HAS_BIAS: tl.constexpr = b_ptr is not None
    if STEPS == 1:
        col = tl.arange(0, COLS)
        col_inside = col < row_length
        x = _load(x_ptr, x_row, col, row_inside, col_inside, x_stride)
        # Before the reduction, so that these loads are in flight while it waits.
        weight = _load_parameter(w_ptr, col, col_inside, w_stride)
        bias = _load_parameter(b_ptr, col, col_inside, b_stride)
        scale = _rms_scale(tl.sum(x * x, axis=1), length, eps, CLAMP)
        y = _rms_finish(x, scale, length, weight, bias, weight_offset, HAS_WEIGHT, HAS_BIAS, OUT, ROUND, CLAMP)
        _store(y_ptr, y, y_row, col, row_inside, col_inside, y_stride)
    else:
        squares = tl.zeros((ROWS, COLS), dtype=tl.float32)
        for step in range(STEPS):
            col = step * COLS + tl.arange(0, COLS)
            x = _load(x_ptr, x_row, col, row_inside, col < row_length, x_stride)
            squares += x * x
        scale = _rms_scale(tl.sum(squares, axis=1), length, eps, CLAMP)
        for step in range(STEPS):
            col = step * COLS + tl.arange(0, COLS)
            col_inside = col < row_length
            x = _load(x_ptr, x_row, col, row_inside, col_inside, x_stride)
            weight = _load_parameter(w_ptr, col, col_inside, w_stride)
            bias = _load_parameter(b_ptr, col, col_inside, b_stride)
            y = _rms_finish(x, scale, length, weight, bias, weight_offset, HAS_WEIGHT, HAS_BIAS, OUT, ROUND, CLAMP)
            _store(y_ptr, y, y_row, col, row_inside, col_inside, y_stride)


@triton.jit
def _centre(x, mean, col_inside):
    """``x - mean``, with zeros outside the row."""
    return tl.where(col_inside[None, :], x - mean[:, None], 0.0)


@triton.jit
def _layer_finish(centred, scale, weight, bias, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Normalises a centred tile and applies weight and bias."""
    y = centred * scale[:, None]
    if HAS_WEIGHT:
        y = y * weight
    if HAS_BIAS:
        y = y + bias
    return y


@triton.jit(do_not_specialize=_COUNTS)
def layer_norm_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr,
    row_length, size0, size1, tiles, x0, x1, x2, x_stride, y0, y1, y2, y_stride, w_stride, b_stride,
    eps,
    NESTED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Writes ``(x - mean(x)) * rsqrt(var(x) + eps) * w + b``, the variance in a second pass over the row."""
    x_row, y_row, row_inside = _locate_rows(size0, size1, tiles, x0, x1, x2, y0, y1, y2, ROWS, NESTED)
    length = tl.cast(row_length, tl.float32)
    HAS_WEIGHT: tl.constexpr = w_ptr is not None
    HAS_BIAS: tl.constexpr = b_ptr is not None
    if STEPS == 1:
        col = tl.arange(0, COLS)
        col_inside = col < row_length
        x = _load(x_ptr, x_row, col, row_inside, col_inside, x_stride)
        # Before the reductions, so that these loads are in flight while those wait.
        weight = _load_parameter(w_ptr, col, col_inside, w_stride)
        bias = _load_parameter(b_ptr, col, col_inside, b_stride)
        centred = _centre(x, tl.sum(x, axis=1) / length, col_inside)
        scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(centred * centred, axis=1) / length + eps))
        y = _layer_finish(centred, scale, weight, bias, HAS_WEIGHT, HAS_BIAS)
        _store(y_ptr, y, y_row, col, row_inside, col_inside, y_stride)
    else:
        sums = tl.zeros((ROWS, COLS), dtype=tl.float32)
        for step in range(STEPS):
            col = step * COLS + tl.arange(0, COLS)
            sums += _load(x_ptr, x_row, col, row_inside, col < row_length, x_stride)
        mean = tl.sum(sums, axis=1) / length
        squares = tl.zeros((ROWS, COLS), dtype=tl.float32)
        for step in range(STEPS):
            col = step * COLS + tl.arange(0, COLS)
            col_inside = col < row_length
            centred = _centre(_load(x_ptr, x_row, col, row_inside, col_inside, x_stride), mean, col_inside)
            squares += centred * centred
        scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(squares, axis=1) / length + eps))
        for step in range(STEPS):
            col = step * COLS + tl.arange(0, COLS)
            col_inside = col < row_length
            centred = _centre(_load(x_ptr, x_row, col, row_inside, col_inside, x_stride), mean, col_inside)
            weight = _load_parameter(w_ptr, col, col_inside, w_stride)
            bias = _load_parameter(b_ptr, col, col_inside, b_stride)
            y = _layer_finish(centred, scale, weight, bias, HAS_WEIGHT, HAS_BIAS)
            _store(y_ptr, y, y_row, col, row_inside, col_inside, y_stride)
