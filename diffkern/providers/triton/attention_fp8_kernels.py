"""The Triton kernels around an attention on e4m3: ranges of channels, means and scales, rounding, and back.

In a launch heads of values come first, for what was read last is read again at once. Sums are added up in a fixed
order: a call has the same bits every time.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# The arguments of a kernel have the types that Triton gives them, which mypy does not know.
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _head_of(
    pid, q_ptr, k_ptr, v_ptr, q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    queries, keys, values, v_blocks, blocks, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
):  # fmt: skip
    """What a program works on: the head among all, the sample, the block, and where the head's tokens are.

    ``values`` programs have ``v_blocks`` of each head of the values; after them ``blocks`` of each other head follow.
    """
    if pid < values:
        head, rest, parts = HEADS + KV_HEADS + pid % KV_HEADS, pid // KV_HEADS, v_blocks + 0
    else:
        pid -= values
        head, rest, parts = pid % (HEADS + KV_HEADS), pid // (HEADS + KV_HEADS), blocks + 0
    block, batch = rest % parts, (rest // parts).to(tl.int64)
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
    q_ptr, k_ptr, v_ptr, part_ptr, peak_ptr, mean_ptr, q_batch, q_token, q_head, k_batch, k_token, k_head,
    v_batch, v_token, v_head, queries, keys, values, blocks, v_tiles, q_peaks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """Writes what the finite numbers of values and of a sample of queries and keys say.

    That is ``part[batch, head of values, {largest magnitude, sum}, block, channel]``, the means of keys, and a peak for
    each head of queries, then of keys, without them.
    """
    head, batch, block, x_ptr, stride, length = _head_of(
        tl.program_id(0), q_ptr, k_ptr, v_ptr, q_batch, q_token, q_head, k_batch, k_token, k_head,
        v_batch, v_token, v_head, queries, keys, values, blocks, 1, HEADS, KV_HEADS,
    )  # fmt: skip
    is_value, col = head >= HEADS + KV_HEADS, tl.arange(0, D)
    count = tl.where(is_value, length, tl.minimum(length, SAMPLE))
    tiles = v_tiles if is_value else SAMPLE // TOKENS
    highs, sums = tl.zeros((TOKENS, D), tl.float32), tl.zeros((TOKENS, D), tl.float32)
    for tile in tl.range(tiles, loop_unroll_factor=2):
        i = (block * tiles + tile) * TOKENS + tl.arange(0, TOKENS)
        token = i.to(tl.int64)
        if count < length:
            token = (token * SAMPLE + token * 79 % SAMPLE) * length // (SAMPLE * SAMPLE)
        offsets = (token * stride)[:, None] + col[None, :]
        x = tl.load(x_ptr + offsets, mask=(i < count)[:, None], other=0.0).to(tl.float32)
        x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
        highs = tl.maximum(highs, tl.abs(x))
        sums += x
    peak, total = tl.max(highs, axis=0), tl.sum(sums, axis=0)
    if is_value:
        offsets = ((batch * KV_HEADS + head - HEADS - KV_HEADS) * 2 * blocks + block) * D + col
        tl.store(part_ptr + offsets, peak)
        tl.store(part_ptr + offsets + blocks * D, total)
    elif head >= HEADS:
        mean = total / count
        tl.store(mean_ptr + (batch * 2 * KV_HEADS + head - HEADS) * D + col, mean)
        tl.store(peak_ptr + q_peaks + batch * KV_HEADS + head - HEADS, tl.max(peak + tl.abs(mean), axis=0))
    else:
        tl.store(peak_ptr + batch * HEADS + head, tl.max(peak, axis=0))


@triton.jit
def _sampled_scale(peak_ptr, count, SAMPLE_PEAK: tl.constexpr):
    """What one of ``count`` peaks that is the largest asks for; peaks of zero say nothing."""
    peak = tl.zeros((128,), tl.float32)
    for first in range(0, count, 128):
        i = first + tl.arange(0, 128)
        peak = tl.maximum(peak, tl.load(peak_ptr + i, mask=i < count, other=0.0))
    peak = tl.max(peak, axis=0)
    return tl.where(peak > 0.0, tl.maximum(peak, 1e-12), SAMPLE_PEAK) * (1.0 / SAMPLE_PEAK)


@triton.jit
def scales_kernel(
    part_ptr, peak_ptr, mean_ptr, scale_ptr, scalar_ptr, keys, blocks, q_peaks, k_peaks, weight_scale,
    KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCKS: tl.constexpr, SAMPLE_PEAK: tl.constexpr,
):  # fmt: skip
    """Reduces the blocks of one head of the values to its means and scales; the first program writes the six scalars."""
    pid = tl.program_id(0) - 1
    if pid < 0:
        tl.store(scalar_ptr, _sampled_scale(peak_ptr, q_peaks, SAMPLE_PEAK))
        tl.store(scalar_ptr + 1, _sampled_scale(peak_ptr + q_peaks, k_peaks, SAMPLE_PEAK))
        tl.store(scalar_ptr + 2, 1.0)
        tl.store(scalar_ptr + 3, tl.div_rn(1.0, weight_scale))
        tl.store(scalar_ptr + 4, weight_scale)
        tl.store(scalar_ptr + 5, 1.0)
    else:
        head, batch, col = pid % KV_HEADS, pid // KV_HEADS, tl.arange(0, D)
        peak, mean = tl.zeros((D,), tl.float32), tl.zeros((D,), tl.float32)
        for first in range(0, blocks, BLOCKS):
            block = first + tl.arange(0, BLOCKS)
            offsets, mask = (pid * 2 * blocks + block)[:, None] * D + col[None, :], (block < blocks)[:, None]
            peak = tl.maximum(peak, tl.max(tl.load(part_ptr + offsets, mask=mask, other=0.0), axis=0))
            mean += tl.sum(tl.load(part_ptr + offsets + blocks * D, mask=mask, other=0.0), axis=0)
        mean = mean / keys
        tl.store(mean_ptr + ((batch * 2 + 1) * KV_HEADS + head) * D + col, mean)
        tl.store(scale_ptr + pid * D + col, tl.div_rn(tl.maximum(peak + tl.abs(mean), 1e-12), 448.0))


@triton.jit
def round_kernel(
    q_ptr, k_ptr, v_ptr, y_ptr, mean_ptr, scale_ptr, scalar_ptr,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, queries, keys, values, v_blocks,
    blocks, k_first, v_first,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Writes queries, keys and values in e4m3, each laid out densely, one behind the other."""
    head, batch, block, x_ptr, stride, length = _head_of(
        tl.program_id(0), q_ptr, k_ptr, v_ptr, q_batch, q_token, q_head, k_batch, k_token, k_head,
        v_batch, v_token, v_head, queries, keys, values, v_blocks, blocks, HEADS, KV_HEADS,
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
    scale *= tl.load(scalar_ptr + tl.where(is_value, 2, tl.where(is_query, 0, 1)))
    factor = tl.div_rn(1.0 + 0.0 * scale, scale)
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
