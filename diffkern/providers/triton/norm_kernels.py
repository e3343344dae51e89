"""The Triton kernel of all norms over rows, modulated or not, and of gated residuals, imported at first use.

A program computes ``ROWS`` rows in ``STEPS`` blocks of ``COLS`` columns; with one step the row is read once and stays
in registers, else its inputs are read once per pass. Every operand has strides of its own along the three loops of
:class:`diffkern.providers.triton.rows.Loops`, 0 where it is broadcast, and along the row. Offsets are 64-bit.

Launched without fused multiply-add, since products and sums are promised to be those of a chain of torch ops. The
``*_ROUND`` parameters are the half dtypes that such a chain rounds to on the way, or None. Square root and division are
the correctly rounded ones, which every backend has; approximate reciprocal square roots differ between them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from diffkern.providers.triton.activation_kernels import sigmoid_product
from diffkern.providers.triton.fp8_kernels import row_scale

# Plain counts: specialising on them would only compile more variants.
_COUNTS = ["size1", "tiles"]


@triton.jit
def _row_offsets(row, loop1, loop2, s0, s1, s2, NESTED: tl.constexpr):
    offsets = row * s0
    if NESTED:
        offsets += loop1 * s1 + loop2 * s2
    return offsets


@triton.jit
def _load(ptr, row, col, row_inside, col_inside, stride):
    """A tile of an operand in float32, with zeros outside; unused where there is no such operand."""
    if ptr is None:
        return 0.0
    else:
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
def _round(value, DTYPE: tl.constexpr):
    if DTYPE is None:
        return value
    else:
        return value.to(DTYPE).to(tl.float32)


@triton.jit
def _tanh(x):
    # tanh(x) = x + x^3 p(x^2) below 0.6, to 8e-8; a fit at Chebyshev nodes.
    square = x * x
    polynomial = -6.276387721e-03 * square + 2.111621387e-02
    polynomial = (polynomial * square - 5.387513712e-02) * square + 1.333292425e-01
    polynomial = polynomial * square - 3.333333135e-01
    magnitude = tl.abs(x)
    power = tl.exp(-2.0 * magnitude)
    quotient = tl.div_rn(1.0 - power, 1.0 + power)
    return tl.where(magnitude < 0.6, x + x * (square * polynomial), tl.where(x < 0.0, -quotient, quotient))


@triton.jit
def _activate(gate, ACTIVATION: tl.constexpr):
    if ACTIVATION == 1:
        return _tanh(gate)
    elif ACTIVATION == 2:
        return tl.div_rn(1.0, 1.0 + tl.exp(-gate))
    else:
        return gate


@triton.jit
def _input(
    r_ptr, x_ptr, g_ptr, r_row, x_row, g_row, col, row_inside, col_inside, r_stride, x_stride, g_stride,
    OUT: tl.constexpr, ACTIVATION: tl.constexpr, GATE_ROUND: tl.constexpr, GATED_ROUND: tl.constexpr,
    RESIDUAL_ROUND: tl.constexpr,
):  # fmt: skip
    """What the norm reads: x, or the new residual, rounded to its dtype."""
    x = _load(x_ptr, x_row, col, row_inside, col_inside, x_stride)
    if r_ptr is None:
        return x
    else:
        residual = _load(r_ptr, r_row, col, row_inside, col_inside, r_stride)
        if g_ptr is not None:
            gate = _load(g_ptr, g_row, col, row_inside, col_inside, g_stride)
            x = _round(_round(_activate(gate, ACTIVATION), GATE_ROUND) * x, GATED_ROUND)
        return _round(residual + x, RESIDUAL_ROUND).to(OUT).to(tl.float32)


@triton.jit
def _centre(x, mean, col_inside):
    """``x - mean``, with zeros outside the row."""
    return tl.where(col_inside[None, :], x - mean[:, None], 0.0)


@triton.jit
def _factor(squares, length, eps, CLAMP: tl.constexpr):
    """What a row is multiplied by (or, with CLAMP, divided by), from the sum of its squares."""
    if CLAMP:
        norm = tl.sqrt_rn(squares)
        # Not a maximum, which would turn a NaN into eps.
        return tl.where(norm < eps, eps, norm)
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, length) + eps))


@triton.jit
def _scaled(value, factor, length, CLAMP: tl.constexpr):
    if CLAMP:
        return tl.div_rn(value, tl.broadcast_to(factor[:, None], value.shape)) * tl.sqrt_rn(length)
    return value * factor[:, None]


@triton.jit
def _modulate(
    y, scale, shift, weight, bias, scale_offset, weight_offset, HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, OUT: tl.constexpr, VALUE_ROUND: tl.constexpr,
    NORM_ROUND: tl.constexpr, SCALE_ROUND: tl.constexpr, PRODUCT_ROUND: tl.constexpr, SUM_ROUND: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """What comes after the normalisation, but for the rounding to the output dtype."""
    y = _round(y, VALUE_ROUND)
    if HAS_WEIGHT:
        y = y * (weight + weight_offset)
    if HAS_BIAS:
        if VALUE_ROUND is not None:
            y = _round(y, OUT)
        y = y + bias
    y = _round(y, NORM_ROUND)
    if HAS_SCALE:
        y = _round(y * _round(scale + scale_offset, SCALE_ROUND), PRODUCT_ROUND)
    if HAS_SHIFT:
        y = _round(y + shift, SUM_ROUND)
    if SILU:
        y = sigmoid_product(y, y)
    return y


@triton.jit(do_not_specialize=_COUNTS)
def norm_kernel(
    residual_ptr, x_ptr, gate_ptr, scale_ptr, shift_ptr, weight_ptr, bias_ptr, new_ptr, y_ptr, rows_ptr, row_scale_ptr,
    row_length, size0, size1, tiles,
    o0, o1, o2, r0, r1, r2, x0, x1, x2, g0, g1, g2, c0, c1, c2, h0, h1, h2,
    o_stride, r_stride, x_stride, g_stride, c_stride, h_stride, w_stride, b_stride,
    eps, scale_offset, weight_offset,
    NORM: tl.constexpr, CLAMP: tl.constexpr, SILU: tl.constexpr, ACTIVATION: tl.constexpr,
    VALUE_ROUND: tl.constexpr, GATE_ROUND: tl.constexpr, GATED_ROUND: tl.constexpr, RESIDUAL_ROUND: tl.constexpr,
    NORM_ROUND: tl.constexpr, SCALE_ROUND: tl.constexpr, PRODUCT_ROUND: tl.constexpr, SUM_ROUND: tl.constexpr,
    NESTED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Writes ``new = residual + act(gate) * x`` where there is a residual, and the modulated norm of that, or of x.

    ``NORM`` is 0 for none, 1 for RMS, 2 for layer norm; ``ACTIVATION`` 0 for none, 1 for tanh, 2 for sigmoid. With
    ``CLAMP`` an RMS norm bounds the length by ``eps``; with ``VALUE_ROUND`` what it normalised is rounded, and its
    product with the weight before a bias is added. Any of the pointers but ``x_ptr`` may be None. ``new_ptr``, ``y_ptr``
    and ``rows_ptr`` are laid out alike. With ``rows_ptr`` in place of ``y_ptr``, for which a row must be a single step
    of contiguous memory, ``y`` is written there divided by the scale of its row.
    """
    program = tl.program_id(0)
    tile = program % tiles if NESTED else program
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_inside = row < size0
    outer = program // tiles
    loop1 = (outer % size1).to(tl.int64)
    loop2 = (outer // size1).to(tl.int64)
    o_row = _row_offsets(row, loop1, loop2, o0, o1, o2, NESTED)
    r_row = _row_offsets(row, loop1, loop2, r0, r1, r2, NESTED)
    x_row = _row_offsets(row, loop1, loop2, x0, x1, x2, NESTED)
    g_row = _row_offsets(row, loop1, loop2, g0, g1, g2, NESTED)
    c_row = _row_offsets(row, loop1, loop2, c0, c1, c2, NESTED)
    h_row = _row_offsets(row, loop1, loop2, h0, h1, h2, NESTED)

    IN: tl.constexpr = x_ptr.dtype.element_ty if new_ptr is None else new_ptr.dtype.element_ty
    OUT: tl.constexpr = IN if y_ptr is None else y_ptr.dtype.element_ty
    length = tl.cast(row_length, tl.float32)
    mean = tl.zeros((ROWS,), dtype=tl.float32)
    factor = tl.full((ROWS,), 1.0, dtype=tl.float32)
    if STEPS > 1 and NORM != 0:
        if NORM == 2:
            sums = tl.zeros((ROWS, COLS), dtype=tl.float32)
            for step in range(STEPS):
                col = step * COLS + tl.arange(0, COLS)
                sums += _input(
                    residual_ptr, x_ptr, gate_ptr, r_row, x_row, g_row, col, row_inside, col < row_length,
                    r_stride, x_stride, g_stride, IN, ACTIVATION, GATE_ROUND, GATED_ROUND, RESIDUAL_ROUND,
                )  # fmt: skip
            mean = tl.div_rn(tl.sum(sums, axis=1), length)
        squares = tl.zeros((ROWS, COLS), dtype=tl.float32)
        for step in range(STEPS):
            col = step * COLS + tl.arange(0, COLS)
            col_inside = col < row_length
            value = _input(
                residual_ptr, x_ptr, gate_ptr, r_row, x_row, g_row, col, row_inside, col_inside,
                r_stride, x_stride, g_stride, IN, ACTIVATION, GATE_ROUND, GATED_ROUND, RESIDUAL_ROUND,
            )  # fmt: skip
            value = _centre(value, mean, col_inside)
            squares += value * value
        factor = _factor(tl.sum(squares, axis=1), length, eps, CLAMP)

    for step in range(STEPS):
        col = step * COLS + tl.arange(0, COLS)
        col_inside = col < row_length
        value = _input(
            residual_ptr, x_ptr, gate_ptr, r_row, x_row, g_row, col, row_inside, col_inside,
            r_stride, x_stride, g_stride, IN, ACTIVATION, GATE_ROUND, GATED_ROUND, RESIDUAL_ROUND,
        )  # fmt: skip
        # Before the reductions, so that these loads are in flight while those wait.
        scale = _load(scale_ptr, c_row, col, row_inside, col_inside, c_stride)
        shift = _load(shift_ptr, h_row, col, row_inside, col_inside, h_stride)
        weight = _load_parameter(weight_ptr, col, col_inside, w_stride)
        bias = _load_parameter(bias_ptr, col, col_inside, b_stride)
        if new_ptr is not None:
            _store(new_ptr, value, o_row, col, row_inside, col_inside, o_stride)
        if y_ptr is not None or rows_ptr is not None:
            if STEPS == 1 and NORM != 0:
                if NORM == 2:
                    mean = tl.div_rn(tl.sum(value, axis=1), length)
                centred = _centre(value, mean, col_inside)
                factor = _factor(tl.sum(centred * centred, axis=1), length, eps, CLAMP)
            if NORM == 2:
                value = _centre(value, mean, col_inside)
            if NORM != 0:
                value = _scaled(value, factor, length, CLAMP)
            y = _modulate(
                value, scale, shift, weight, bias, scale_offset, weight_offset, scale_ptr is not None,
                shift_ptr is not None, weight_ptr is not None, bias_ptr is not None, OUT, VALUE_ROUND,
                NORM_ROUND, SCALE_ROUND, PRODUCT_ROUND, SUM_ROUND, SILU,
            )  # fmt: skip
            if y_ptr is not None:
                _store(y_ptr, y, o_row, col, row_inside, col_inside, o_stride)
            else:
                y_factor, y_scale = row_scale(tl.max(tl.abs(y), axis=1))
                tl.store(row_scale_ptr + o_row // row_length, y_scale, mask=row_inside)
                _store(rows_ptr, y * y_factor[:, None], o_row, col, row_inside, col_inside, 1)
