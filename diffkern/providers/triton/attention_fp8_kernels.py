"""The Triton kernels around an attention on e4m3: ranges of channels, their means and scales, rounding, and back.

Heads of queries, keys and values are numbered in this order in one launch, and programs of one block of tokens follow
each other. Sums are added up in a fixed order: a call has the same bits every time.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# The arguments of a kernel have the types that Triton gives them, which mypy does not know.
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _head_of(
    pid, q_ptr, k_ptr, v_ptr, q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    queries, keys, blocks, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
):  # fmt: skip
    """What a program works on: the head among all, the sample, the block, and where the head's tokens are."""
    head, rest = pid % (HEADS + 2 * KV_HEADS), pid // (HEADS + 2 * KV_HEADS)
    block, batch = rest % blocks, (rest // blocks).to(tl.int64)
    if head < HEADS:
        x_ptr = q_ptr + batch * q_batch + head * q_head
        stride, length = q_token + 0, queries + 0
    elif head < HEADS + KV_HEADS:
        x_ptr = k_ptr + batch * k_batch + (head - HEADS) * k_head
        stride, length = k_token + 0, keys + 0
    else:
        x_ptr = v_ptr + batch * v_batch + (head - HEADS - KV_HEADS) * v_head
        stride, length = v_token + 0, keys + 0
    return head, batch, block, x_ptr, stride, length


@triton.jit
def ranges_kernel(
    q_ptr, k_ptr, v_ptr, part_ptr, peak_ptr, q_batch, q_token, q_head, k_batch, k_token, k_head,
    v_batch, v_token, v_head, queries, keys, blocks, q_tiles, k_tiles,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Writes ``part[batch, head, {largest magnitude, sum}, block, channel]`` of what is finite; zeros the two peaks."""
    pid = tl.program_id(0)
    if pid == 0:
        tl.store(peak_ptr + tl.arange(0, 2), tl.zeros((2,), tl.float32))
    head, batch, block, x_ptr, stride, length = _head_of(
        pid, q_ptr, k_ptr, v_ptr, q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
        queries, keys, blocks, HEADS, KV_HEADS,
    )  # fmt: skip
    tiles = q_tiles if head < HEADS else k_tiles
    col = tl.arange(0, D)
    most, total = tl.zeros((TOKENS, D), tl.float32), tl.zeros((TOKENS, D), tl.float32)
    for tile in tl.range(tiles, loop_unroll_factor=2):
        token = (block * tiles + tile) * TOKENS + tl.arange(0, TOKENS)
        offsets = (token.to(tl.int64) * stride)[:, None] + col[None, :]
        x = tl.load(x_ptr + offsets, mask=(token < length)[:, None], other=0.0).to(tl.float32)
        x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
        most = tl.maximum(most, tl.abs(x))
        total += x
    part_ptr += ((batch * (HEADS + 2 * KV_HEADS) + head) * 2 * blocks + block) * D + col
    tl.store(part_ptr, tl.max(most, axis=0))
    tl.store(part_ptr + blocks * D, tl.sum(total, axis=0))


@triton.jit
def scales_kernel(
    part_ptr, peak_ptr, mean_ptr, scale_ptr, keys, blocks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Reduces the blocks of one head: means of keys and values, scales of values, peaks of all queries and all keys."""
    pid = tl.program_id(0)
    head, batch = pid % (HEADS + 2 * KV_HEADS), pid // (HEADS + 2 * KV_HEADS)
    col = tl.arange(0, D)
    peak, mean = tl.zeros((D,), tl.float32), tl.zeros((D,), tl.float32)
    part_ptr += pid * 2 * blocks * D
    for first in range(0, blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        offsets, mask = block[:, None] * D + col[None, :], (block < blocks)[:, None]
        peak = tl.maximum(peak, tl.max(tl.load(part_ptr + offsets, mask=mask, other=0.0), axis=0))
        mean += tl.sum(tl.load(part_ptr + offsets + blocks * D, mask=mask, other=0.0), axis=0)
    mean = tl.where(head < HEADS, 0.0, mean / keys)
    peak = tl.maximum(peak + tl.abs(mean), 1e-12)
    if head >= HEADS:
        tl.store(mean_ptr + (batch * 2 * KV_HEADS + head - HEADS) * D + col, mean)
    if head < HEADS + KV_HEADS:
        tl.atomic_max(peak_ptr + (head >= HEADS).to(tl.int32), tl.max(peak, axis=0))
    else:
        tl.store(scale_ptr + (batch * KV_HEADS + head - HEADS - KV_HEADS) * D + col, tl.div_rn(peak, 448.0))


@triton.jit
def round_kernel(
    q_ptr, k_ptr, v_ptr, y_ptr, peak_ptr, mean_ptr, scale_ptr, scalar_ptr,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, queries, keys, blocks,
    k_first, v_first, weight_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Writes queries, keys and values in e4m3, each laid out densely, one behind the other, and the six scalars."""
    pid = tl.program_id(0)
    if pid == 0:
        tl.store(scalar_ptr, tl.div_rn(tl.load(peak_ptr), 448.0))
        tl.store(scalar_ptr + 1, tl.div_rn(tl.load(peak_ptr + 1), 448.0))
        tl.store(scalar_ptr + 2, 1.0)
        tl.store(scalar_ptr + 3, tl.div_rn(1.0, weight_scale))
        tl.store(scalar_ptr + 4, weight_scale)
        tl.store(scalar_ptr + 5, 1.0)
    head, batch, block, x_ptr, stride, length = _head_of(
        pid, q_ptr, k_ptr, v_ptr, q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
        queries, keys, blocks, HEADS, KV_HEADS,
    )  # fmt: skip
    is_query, is_value, col = head < HEADS, head >= HEADS + KV_HEADS, tl.arange(0, D)
    place = tl.where(is_query, head, tl.where(is_value, head - HEADS - KV_HEADS, head - HEADS))
    heads = tl.where(is_query, HEADS, KV_HEADS)
    first = tl.where(is_query, 0, tl.where(is_value, v_first, k_first)) + (batch * length * heads + place) * D
    y_ptr += tl.multiple_of(first, 16)
    mean_ptr += (batch * 2 * KV_HEADS + head - HEADS) * D + col
    mean = tl.load(mean_ptr, mask=head + col * 0 >= HEADS, other=0.0)
    scale_ptr += (batch * KV_HEADS + place) * D + col
    scale = tl.load(scale_ptr, mask=head + col * 0 >= HEADS + KV_HEADS, other=1.0)
    peak = tl.load(peak_ptr + (head >= HEADS).to(tl.int32))
    factor = tl.where(is_value, tl.div_rn(1.0 + 0.0 * scale, scale), tl.div_rn(448.0, peak))
    for step in tl.static_range(STEPS):
        token = (block * STEPS + step) * TOKENS + tl.arange(0, TOKENS)
        mask = (token < length)[:, None]
        token = token.to(tl.int64)
        x = tl.load(x_ptr + (token * stride)[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)
        x = (x - mean[None, :]) * factor[None, :]
        known = tl.abs(x) < float("inf")
        x = tl.where(known, tl.minimum(tl.maximum(x, -448.0), 448.0), float("nan"))
        tl.store(y_ptr + (token * (heads * D))[:, None] + col[None, :], x.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def dequantize_kernel(
    y8_ptr, mean_ptr, scale_ptr, y_ptr, mean_batch, queries, blocks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Writes ``scale * y8 + mean`` in the dtype of ``y``; both are dense."""
    pid = tl.program_id(0)
    head, rest = pid % HEADS, pid // HEADS
    block, batch = rest % blocks, (rest // blocks).to(tl.int64)
    col = tl.arange(0, D)
    kv_head = head // (HEADS // KV_HEADS)
    mean = tl.load(mean_ptr + batch * mean_batch + kv_head * D + col)
    scale = tl.load(scale_ptr + (batch * KV_HEADS + kv_head) * D + col)
    first = (batch * queries * HEADS + head) * D
    for step in range(STEPS):
        token = (block * STEPS + step) * TOKENS + tl.arange(0, TOKENS)
        mask = (token < queries)[:, None]
        offsets = first + (token.to(tl.int64) * (HEADS * D))[:, None] + col[None, :]
        y = tl.load(y8_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        y = y * scale[None, :] + mean[None, :]
        tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)
