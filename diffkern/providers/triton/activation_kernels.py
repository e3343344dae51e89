"""The Triton kernels of activations and gated units. Imported at first use, since this needs Triton.

A program computes a tile of ``ROWS`` x ``COLS`` elements: the columns lie along the innermost loop of
:class:`diffkern.providers.triton.rows.Loops`, the rows along the second one; the third one is left to the grid.
Offsets are 64-bit, since a stride times an index passes 2^31 in tensors that models really have.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# The arguments of a kernel have the types that Triton gives them, which mypy does not know.
from __future__ import annotations

import triton
import triton.language as tl

# Plain counts: specialising on them would only compile more variants.
_COUNTS = ["col_tiles", "row_tiles"]


@triton.jit
def sigmoid_product(x, slope_times_x):
    """``x * sigmoid(slope * x)``. The exponential may overflow: a division by infinity is the right zero."""
    return tl.div_rn(x, 1.0 + tl.exp(-slope_times_x))


@triton.jit
def activate(x, FUNCTION: tl.constexpr):
    """The activation of that name, in float32."""
    if FUNCTION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif FUNCTION == "gelu_tanh":
        # 1 + tanh(u) = 2 sigmoid(2u); the factor is 2 sqrt(2 / pi).
        return sigmoid_product(x, 1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif FUNCTION == "silu":
        return sigmoid_product(x, x)
    else:
        tl.static_assert(FUNCTION == "quick_gelu")
        return sigmoid_product(x, 1.702 * x)


@triton.jit
def _locate(size0, size1, col_tiles, row_tiles, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Indices of this program's elements along the three loops, and which of them exist."""
    program = tl.program_id(0)
    col_tile = program % col_tiles
    outer = program // col_tiles
    col = col_tile.to(tl.int64) * COLS + tl.arange(0, COLS)
    row = (outer % row_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (row < size1)[:, None] & (col < size0)[None, :]
    return col, row, (outer // row_tiles).to(tl.int64), inside


@triton.jit
def _offsets(col, row, outer, stride0, stride1, stride2):
    return (row * stride1 + outer * stride2)[:, None] + (col * stride0)[None, :]


@triton.jit(do_not_specialize=_COUNTS)
def activation_kernel(
    v_ptr, g_ptr, y_ptr, size0, size1, col_tiles, row_tiles, y0, y1, y2, g0, g1, g2, v0, v1, v2,
    FUNCTION: tl.constexpr, ROUND: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Writes ``v * activation(g)``, or ``activation(g)`` where ``v_ptr`` is None; see ``diffkern.ops.glu``."""
    col, row, outer, inside = _locate(size0, size1, col_tiles, row_tiles, ROWS, COLS)
    gate = tl.load(g_ptr + _offsets(col, row, outer, g0, g1, g2), mask=inside, other=0.0).to(tl.float32)
    y = activate(gate, FUNCTION)
    if v_ptr is not None:
        value = tl.load(v_ptr + _offsets(col, row, outer, v0, v1, v2), mask=inside, other=0.0).to(tl.float32)
        if ROUND:
            y = y.to(g_ptr.dtype.element_ty).to(tl.float32)
        y = value * y
    tl.store(y_ptr + _offsets(col, row, outer, y0, y1, y2), y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_COUNTS)
def channel_glu_kernel(
    v_ptr, g_ptr, v_bias_ptr, g_bias_ptr, y_ptr,
    channels, positions, col_tiles, row_tiles, y_c, y0, y1, x_c, x0, x1, b_stride,
    FUNCTION: tl.constexpr, ROUND: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """See ``diffkern.ops.channel_glu``: the columns are channels, the rows positions in two loops."""
    col, row, outer, inside = _locate(channels, positions, col_tiles, row_tiles, ROWS, COLS)
    offsets = _offsets(col, row, outer, x_c, x0, x1)
    value = tl.load(v_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(g_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if v_bias_ptr is not None:
        value += tl.load(v_bias_ptr + col * b_stride, mask=col < channels, other=0.0).to(tl.float32)[None, :]
        gate += tl.load(g_bias_ptr + col * b_stride, mask=col < channels, other=0.0).to(tl.float32)[None, :]
        if ROUND:
            value = value.to(y_ptr.dtype.element_ty).to(tl.float32)
            gate = gate.to(y_ptr.dtype.element_ty).to(tl.float32)
    gate = activate(gate, FUNCTION)
    if ROUND:
        gate = gate.to(y_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + _offsets(col, row, outer, y_c, y0, y1), (value * gate).to(y_ptr.dtype.element_ty), mask=inside)
