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
def _range(
    x_ptr, part_ptr, stride, first, tiles, length, blocks, MEAN: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr
):
    """Writes least, largest and sum of each channel over tiles of tokens of a head, of what is finite.

    Without a mean to be taken away later: zeros, the largest magnitude and zeros.
    """
    col = tl.arange(0, D)
    none = tl.zeros((TOKENS, D), tl.float32)
    least, most, total = none, none, none
    if MEAN:
        least, most = none + float("inf"), none - float("inf")
    for tile in range(tiles):
        token = first + tile * TOKENS + tl.arange(0, TOKENS)
        offsets = (token.to(tl.int64) * stride)[:, None] + col[None, :]
        x = tl.load(x_ptr + offsets, mask=(token < length)[:, None], other=float("inf")).to(tl.float32)
        known = tl.abs(x) < float("inf")
        if MEAN:
            least = tl.minimum(least, tl.where(known, x, float("inf")))
            most = tl.maximum(most, tl.where(known, x, float("-inf")))
            total += tl.where(known, x, 0.0)
        else:
            most = tl.maximum(most, tl.where(known, tl.abs(x), 0.0))
    tl.store(part_ptr + col, tl.min(least, axis=0))
    tl.store(part_ptr + blocks * D + col, tl.max(most, axis=0))
    tl.store(part_ptr + 2 * blocks * D + col, tl.sum(total, axis=0))


@triton.jit
def ranges_kernel(
    q_ptr, k_ptr, v_ptr, part_ptr, peak_ptr, q_batch, q_token, q_head, k_batch, k_token, k_head,
    v_batch, v_token, v_head, queries, keys, blocks, q_tiles, k_tiles,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Writes ``part[batch, head, {least, largest, sum}, block, channel]``, and zeros to the two peaks."""
    pid = tl.program_id(0)
    if pid == 0:
        tl.store(peak_ptr + tl.arange(0, 2), tl.zeros((2,), tl.float32))
    head, rest = pid % (HEADS + 2 * KV_HEADS), pid // (HEADS + 2 * KV_HEADS)
    block, batch = rest % blocks, (rest // blocks).to(tl.int64)
    part_ptr += ((batch * (HEADS + 2 * KV_HEADS) + head) * 3 * blocks + block) * D
    q_first, k_first = block * q_tiles * TOKENS, block * k_tiles * TOKENS
    if head < HEADS:
        q_ptr += batch * q_batch + head * q_head
        _range(q_ptr, part_ptr, q_token, q_first, q_tiles, queries, blocks, False, D, TOKENS)
    elif head < HEADS + KV_HEADS:
        k_ptr += batch * k_batch + (head - HEADS) * k_head
        _range(k_ptr, part_ptr, k_token, k_first, k_tiles, keys, blocks, True, D, TOKENS)
    else:
        v_ptr += batch * v_batch + (head - HEADS - KV_HEADS) * v_head
        _range(v_ptr, part_ptr, v_token, k_first, k_tiles, keys, blocks, True, D, TOKENS)


@triton.jit
def scales_kernel(
    part_ptr, peak_ptr, mean_ptr, scale_ptr, keys, blocks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Reduces the blocks of one head: means of keys and values, scales of values, peaks of all queries and all keys."""
    pid = tl.program_id(0)
    head, batch = pid % (HEADS + 2 * KV_HEADS), pid // (HEADS + 2 * KV_HEADS)
    col = tl.arange(0, D)
    least, most = tl.full((D,), float("inf"), tl.float32), tl.full((D,), float("-inf"), tl.float32)
    total = tl.zeros((D,), tl.float32)
    part_ptr += pid * 3 * blocks * D
    for first in range(0, blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        offsets, mask = block[:, None] * D + col[None, :], (block < blocks)[:, None]
        least = tl.minimum(least, tl.min(tl.load(part_ptr + offsets, mask=mask, other=float("inf")), axis=0))
        offsets += blocks * D
        most = tl.maximum(most, tl.max(tl.load(part_ptr + offsets, mask=mask, other=float("-inf")), axis=0))
        offsets += blocks * D
        total += tl.sum(tl.load(part_ptr + offsets, mask=mask, other=0.0), axis=0)
    mean = total / keys
    if head < HEADS:
        mean = tl.zeros((D,), tl.float32)
    else:
        tl.store(mean_ptr + (batch * 2 * KV_HEADS + head - HEADS) * D + col, mean)
    peak = tl.maximum(tl.maximum(most - mean, mean - least), 1e-12)
    if head < HEADS + KV_HEADS:
        tl.atomic_max(peak_ptr + (head >= HEADS).to(tl.int32), tl.max(peak, axis=0))
    else:
        tl.store(scale_ptr + (batch * KV_HEADS + head - HEADS - KV_HEADS) * D + col, tl.div_rn(peak, 448.0))


@triton.jit
def _round(
    x_ptr, y_ptr, stride, y_stride, block, length, mean, factor, D: tl.constexpr, TOKENS: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, D)
    for step in range(STEPS):
        token = (block * STEPS + step) * TOKENS + tl.arange(0, TOKENS)
        mask = (token < length)[:, None]
        token = token.to(tl.int64)
        x = tl.load(x_ptr + (token * stride)[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)
        x = (x - mean[None, :]) * factor[None, :]
        known = tl.abs(x) < float("inf")
        x = tl.where(known, tl.minimum(tl.maximum(x, -448.0), 448.0), float("nan"))
        y = x.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + (token * y_stride)[:, None] + col[None, :], y, mask=mask)


@triton.jit
def round_kernel(
    q_ptr, k_ptr, v_ptr, q8_ptr, k8_ptr, v8_ptr, peak_ptr, mean_ptr, scale_ptr, scalar_ptr,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, queries, keys, blocks, weight_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Writes queries, keys and values in e4m3, laid out densely, and the six scalars."""
    pid = tl.program_id(0)
    head, rest = pid % (HEADS + 2 * KV_HEADS), pid // (HEADS + 2 * KV_HEADS)
    block, batch = rest % blocks, (rest // blocks).to(tl.int64)
    q_peak, k_peak = tl.load(peak_ptr), tl.load(peak_ptr + 1)
    col, none = tl.arange(0, D), tl.zeros((D,), tl.float32)
    if pid == 0:
        tl.store(scalar_ptr, tl.div_rn(q_peak, 448.0))
        tl.store(scalar_ptr + 1, tl.div_rn(k_peak, 448.0))
        tl.store(scalar_ptr + 2, 1.0)
        tl.store(scalar_ptr + 3, tl.div_rn(1.0, weight_scale))
        tl.store(scalar_ptr + 4, weight_scale)
        tl.store(scalar_ptr + 5, 1.0)
    if head < HEADS:
        q_ptr += batch * q_batch + head * q_head
        q8_ptr += (batch * queries * HEADS + head) * D
        factor = none + tl.div_rn(448.0, q_peak)
        _round(q_ptr, q8_ptr, q_token, HEADS * D, block, queries, none, factor, D, TOKENS, STEPS)
    elif head < HEADS + KV_HEADS:
        head -= HEADS
        k_ptr += batch * k_batch + head * k_head
        k8_ptr += (batch * keys * KV_HEADS + head) * D
        mean = tl.load(mean_ptr + (batch * 2 * KV_HEADS + head) * D + col)
        factor = none + tl.div_rn(448.0, k_peak)
        _round(k_ptr, k8_ptr, k_token, KV_HEADS * D, block, keys, mean, factor, D, TOKENS, STEPS)
    else:
        head -= HEADS + KV_HEADS
        v_ptr += batch * v_batch + head * v_head
        v8_ptr += (batch * keys * KV_HEADS + head) * D
        mean = tl.load(mean_ptr + (batch * 2 * KV_HEADS + KV_HEADS + head) * D + col)
        factor = tl.div_rn(none + 1.0, tl.load(scale_ptr + (batch * KV_HEADS + head) * D + col))
        _round(v_ptr, v8_ptr, v_token, KV_HEADS * D, block, keys, mean, factor, D, TOKENS, STEPS)


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
