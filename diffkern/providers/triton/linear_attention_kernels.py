"""The Triton kernels around the products of linear attention. Imported at first use, since this needs Triton.

A program computes ``ROWS`` tokens of one head. Offsets are 64-bit, since a stride times an index passes 2^31 in tensors
that models really have.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# The arguments of a kernel have the types that Triton gives them, which mypy does not know.
from __future__ import annotations

import triton
import triton.language as tl

# Plain counts: specialising on them would only compile more variants.
_COUNTS = ["tokens", "seen", "heads", "tiles"]


@triton.jit
def _locate(index, heads, tiles, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The sample, the head, the tokens and the columns of a program."""
    outer = index // tiles
    token = (index % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return (outer // heads).to(tl.int64), (outer % heads).to(tl.int64), token, tl.arange(0, COLS).to(tl.int64)


@triton.jit
def _positive(x, RELU: tl.constexpr):
    """The positive part; what is no number stays so."""
    return tl.where(x < 0.0, 0.0, x) if RELU else x


@triton.jit
def _split(
    x_ptr, y_ptr, sample, head, heads, token, col, tokens, size, x_b, x_n, x_h, x_d, RELU: tl.constexpr
):  # fmt: skip
    inside = (token < tokens)[:, None] & (col < size)[None, :]
    offsets = (sample * x_b + head * x_h + token * x_n)[:, None] + (col * x_d)[None, :]
    x = _positive(tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32), RELU)
    rows = (sample * heads + head) * tokens + token
    tl.store(y_ptr + rows[:, None] * size + col[None, :], x, mask=inside)


@triton.jit(do_not_specialize=_COUNTS)
def split_heads_kernel(
    q_ptr, k_ptr, v_ptr, wide_q_ptr, wide_k_ptr, wide_v_ptr, tokens, seen, heads, size, tiles,
    q_b, q_n, q_h, q_d, k_b, k_n, k_h, k_d, v_b, v_n, v_h, v_d,
    RELU: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Writes queries, keys and values ``[B, N, H, D]`` in float32 as ``[B, H, N, D]``."""
    program = tl.program_id(0)
    sample, head, token, col = _locate(program // 3, heads, tiles, ROWS, COLS)
    if program % 3 == 0:
        _split(q_ptr, wide_q_ptr, sample, head, heads, token, col, tokens, size, q_b, q_n, q_h, q_d, RELU)
    elif program % 3 == 1:
        _split(k_ptr, wide_k_ptr, sample, head, heads, token, col, seen, size, k_b, k_n, k_h, k_d, RELU)
    else:
        _split(v_ptr, wide_v_ptr, sample, head, heads, token, col, seen, size, v_b, v_n, v_h, v_d, False)


@triton.jit(do_not_specialize=["tokens", "heads", "tiles"])
def divide_kernel(
    x_ptr, q_ptr, total_ptr, y_ptr, tokens, heads, size, tiles, q_b, q_n, q_h, q_d, eps,
    RELU: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Writes ``x / (q . total + eps)`` of ``x`` in ``[B, H, N, D]`` as ``[B, N, H, D]``; ``total`` is the sum of keys."""
    sample, head, token, col = _locate(tl.program_id(0), heads, tiles, ROWS, COLS)
    col_inside = col < size
    inside = (token < tokens)[:, None] & col_inside[None, :]
    offsets = (sample * q_b + head * q_h + token * q_n)[:, None] + (col * q_d)[None, :]
    q = _positive(tl.load(q_ptr + offsets, mask=inside, other=0.0).to(tl.float32), RELU)
    outer = sample * heads + head
    total = tl.load(total_ptr + outer * size + col, mask=col_inside, other=0.0)
    weight = tl.sum(q * total[None, :], axis=1) + eps
    x = tl.load(x_ptr + (outer * tokens + token)[:, None] * size + col[None, :], mask=inside, other=0.0)
    y = tl.div_rn(x.to(tl.float32), weight[:, None] + tl.zeros([ROWS, COLS], tl.float32))
    rows = (sample * tokens + token) * heads + head
    tl.store(y_ptr + rows[:, None] * size + col[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)
