"""The Triton kernels of activations and gated units into rows of fp8. Imported at first use, since this needs Triton.

A program computes ``ROWS`` rows in ``STEPS`` blocks of ``COLS`` columns. With one step a row is read once; else it is
read again after its peak is known.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# The arguments of a kernel have the types that Triton gives them, which mypy does not know.
from __future__ import annotations

import triton
import triton.language as tl

from diffkern.providers.triton.activation_kernels import activate


@triton.jit
def row_scale(peak):
    """What brings the peak of a row to 448, the largest number of e4m3, and the scale that takes it back."""
    peak = tl.maximum(peak, 1e-12)
    return tl.div_rn(448.0, peak), tl.div_rn(peak, 448.0)


@triton.jit
def _activated(
    x_ptr, front_ptr, row, col, mask, ahead, x_row, x_stride, front_row, front_stride, FUNCTION: tl.constexpr
):  # fmt: skip
    behind = mask if front_ptr is None else mask & (col >= ahead)[None, :]
    offsets = (row * x_row)[:, None] + ((col - ahead).to(tl.int64) * x_stride)[None, :]
    x = tl.load(x_ptr + offsets, mask=behind, other=0.0).to(tl.float32)
    if FUNCTION != "identity":
        x = activate(x, FUNCTION)
    if front_ptr is not None:
        offsets = (row * front_row)[:, None] + (col.to(tl.int64) * front_stride)[None, :]
        before = tl.load(front_ptr + offsets, mask=mask & (col < ahead)[None, :], other=0.0).to(tl.float32)
        x = tl.where((col < ahead)[None, :], before, x)
    return x


@triton.jit(do_not_specialize=["count"])
def activation_fp8_kernel(
    x_ptr, front_ptr, y_ptr, scale_ptr, count, length, ahead, x_row, x_stride, front_row, front_stride,
    FUNCTION: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Writes ``[front, activation(x)]`` as rows of e4m3, laid out densely, and the scale of each.

    ``ahead`` elements are those in front, 0 without them.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    peak = tl.zeros((ROWS,), dtype=tl.float32)
    if STEPS > 1:
        for step in range(STEPS):
            col = step * COLS + tl.arange(0, COLS)
            mask = inside[:, None] & (col < length)[None, :]
            y = _activated(
                x_ptr, front_ptr, row, col, mask, ahead, x_row, x_stride, front_row, front_stride, FUNCTION
            )  # fmt: skip
            peak = tl.maximum(peak, tl.max(tl.abs(y), axis=1))
    for step in range(STEPS):
        col = step * COLS + tl.arange(0, COLS)
        mask = inside[:, None] & (col < length)[None, :]
        y = _activated(
                x_ptr, front_ptr, row, col, mask, ahead, x_row, x_stride, front_row, front_stride, FUNCTION
            )  # fmt: skip
        if STEPS == 1:
            peak = tl.max(tl.abs(y), axis=1)
        factor, scale = row_scale(peak)
        if step == 0:
            tl.store(scale_ptr + row, scale, mask=inside)
        y = (y * factor[:, None]).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + (row * length)[:, None] + col.to(tl.int64)[None, :], y, mask=mask)


@triton.jit(do_not_specialize=["count"])
def glu_and_fp8_kernel(
    v_ptr, g_ptr, y_ptr, rows_ptr, scale_ptr, count, length, v_row, v_stride, g_row, g_stride,
    FUNCTION: tl.constexpr, ROUND: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Writes ``v * activation(g)`` and that as rows of e4m3 with their scales, all dense; a tile holds whole rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS).to(tl.int64)[None, :]
    inside = row < count
    mask = inside[:, None] & (col < length)
    gate = tl.load(g_ptr + (row * g_row)[:, None] + col * g_stride, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(v_ptr + (row * v_row)[:, None] + col * v_stride, mask=mask, other=0.0).to(tl.float32)
    y = activate(gate, FUNCTION)
    if ROUND:
        y = y.to(g_ptr.dtype.element_ty).to(tl.float32)
    y = (value * y).to(y_ptr.dtype.element_ty)
    factor, scale = row_scale(tl.max(tl.abs(y.to(tl.float32)), axis=1))
    tl.store(scale_ptr + row, scale, mask=inside)
    offsets = (row * length)[:, None] + col
    tl.store(y_ptr + offsets, y, mask=mask)
    tl.store(rows_ptr + offsets, (y.to(tl.float32) * factor[:, None]).to(rows_ptr.dtype.element_ty), mask=mask)
