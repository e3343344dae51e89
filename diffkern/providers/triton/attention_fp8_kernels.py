"""The Triton kernels around an attention on e4m3: ranges of channels, means and scales, rounding, and back.

Sums are added up in a fixed order: a call has the same bits every time.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# The arguments of a kernel have the types that Triton gives them, which mypy does not know.
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def value_ranges(
    pid, v_ptr, part_ptr, v_batch, v_token, v_head, keys, blocks, tiles,
    KV_HEADS: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The part of one block of the values of a head."""
    head, block, batch = pid % KV_HEADS, pid // KV_HEADS % blocks, pid // KV_HEADS // blocks
    x_ptr = v_ptr + batch.to(tl.int64) * v_batch + head * v_head
    highs, sums = tl.zeros((TOKENS, D), tl.float32), tl.zeros((TOKENS, D), tl.float32)
    for tile in tl.range(tiles, loop_unroll_factor=2):
        token = (block * tiles + tile) * TOKENS + tl.arange(0, TOKENS)
        offsets = (token.to(tl.int64) * v_token)[:, None] + tl.arange(0, D)[None, :]
        x = tl.load(x_ptr + offsets, mask=(token < keys)[:, None], other=0.0).to(tl.float32)
        x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
        highs, sums = tl.maximum(highs, tl.abs(x)), sums + x
    _write_part(part_ptr, batch * KV_HEADS + head, block, blocks, highs, sums, D)


@triton.jit
def sampled(block, length, SAMPLE: tl.constexpr, TOKENS: tl.constexpr):
    """The tokens of one block of a sample, and which of them there are."""
    i = block * TOKENS + tl.arange(0, TOKENS)
    token = i.to(tl.int64)
    if length > SAMPLE:
        token = (token * SAMPLE + token * 79 % SAMPLE) * length // (SAMPLE * SAMPLE)
    return token, i < tl.minimum(length, SAMPLE)


@triton.jit
def sample_range(x, part_ptr, index, block, blocks, peak_ptr, D: tl.constexpr):
    """The part of one block of the sample of a head; the first one of all zeros the two peaks."""
    size = tl.abs(x)  # once: Triton 3.6 fails for compute capability 12.0 where it is asked for again behind a choice
    known = size < float("inf")
    _write_part(part_ptr, index, block, blocks, tl.where(known, size, 0.0), tl.where(known, x, 0.0), D)
    tl.store(peak_ptr + tl.arange(0, 2), tl.zeros((2,), tl.float32), mask=index + block + tl.arange(0, 2) * 0 == 0)


@triton.jit
def _write_part(part_ptr, index, block, blocks, highs, sums, D: tl.constexpr):
    """Writes ``part[head, {largest magnitude, sum}, block, channel]``."""
    part_ptr += (index * 2 * blocks + block) * D + tl.arange(0, D)
    tl.store(part_ptr, tl.max(highs, axis=0))
    tl.store(part_ptr + blocks * D, tl.sum(sums, axis=0))


@triton.jit
def ranges_kernel(
    q_ptr, k_ptr, v_ptr, part_ptr, peak_ptr, q_batch, q_token, q_head, k_batch, k_token, k_head,
    v_batch, v_token, v_head, queries, keys, samples, v_part, blocks, v_tiles,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """Parts of ``samples`` blocks of samples, of all heads of queries and keys, and of the values from ``v_part`` on."""
    pid = tl.program_id(0)
    if pid >= samples:
        value_ranges(
            pid - samples, v_ptr, part_ptr + v_part, v_batch, v_token, v_head, keys, blocks, v_tiles,
            KV_HEADS, D, TOKENS,
        )  # fmt: skip
    else:
        index, block = pid // (SAMPLE // TOKENS), pid % (SAMPLE // TOKENS)
        head, batch = index % (HEADS + KV_HEADS), (index // (HEADS + KV_HEADS)).to(tl.int64)
        if head < HEADS:
            x_ptr = q_ptr + batch * q_batch + head * q_head
            stride, length = q_token + 0, queries + 0
        else:
            x_ptr = k_ptr + batch * k_batch + (head - HEADS) * k_head
            stride, length = k_token + 0, keys + 0
        token, inside = sampled(block, length, SAMPLE, TOKENS)
        offsets = (token * stride)[:, None] + tl.arange(0, D)[None, :]
        x = tl.load(x_ptr + offsets, mask=inside[:, None], other=0.0).to(tl.float32)
        sample_range(x, part_ptr, index, block, SAMPLE // TOKENS, peak_ptr, D)


@triton.jit
def scales_kernel(
    part_ptr, peak_ptr, mean_ptr, scale_ptr, keys, heads, v_part, v_blocks, s_blocks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCKS: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """Reduces the blocks of a head: the first ``heads`` are those of queries and keys, then those of values come."""
    pid, col = tl.program_id(0), tl.arange(0, D)
    if pid < heads:
        head, batch, blocks = pid % (HEADS + KV_HEADS), pid // (HEADS + KV_HEADS), s_blocks + 0
        count = tl.minimum(keys, SAMPLE)
        first = pid * 2 * blocks * D
    else:
        head, batch, blocks = HEADS + KV_HEADS + (pid - heads) % KV_HEADS, (pid - heads) // KV_HEADS, v_blocks + 0
        count = keys + 0
        first = v_part + (pid - heads) * 2 * blocks * D
    peak, mean = tl.zeros((D,), tl.float32), tl.zeros((D,), tl.float32)
    for start in range(0, blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        offsets, mask = first + block[:, None] * D + col[None, :], (block < blocks)[:, None]
        peak = tl.maximum(peak, tl.max(tl.load(part_ptr + offsets, mask=mask, other=0.0), axis=0))
        mean += tl.sum(tl.load(part_ptr + offsets + blocks * D, mask=mask, other=0.0), axis=0)
    mean = tl.where(head < HEADS, 0.0, mean / count)
    peak = peak + tl.abs(mean)
    if head >= HEADS:
        tl.store(mean_ptr + (batch * 2 * KV_HEADS + head - HEADS) * D + col, mean)
    if head < HEADS + KV_HEADS:
        tl.atomic_max(peak_ptr + (head >= HEADS).to(tl.int32), tl.max(peak, axis=0))
    else:
        scale = tl.div_rn(tl.maximum(peak, 1e-12), 448.0)
        tl.store(scale_ptr + (batch * KV_HEADS + head - HEADS - KV_HEADS) * D + col, scale)


@triton.jit
def rounded(x, mean, factor):
    """What becomes e4m3: clamped to its largest number, NaN where it is not finite."""
    x = (x - mean[None, :]) * factor[None, :]
    known = tl.abs(x) < float("inf")
    return tl.where(known, tl.minimum(tl.maximum(x, -448.0), 448.0), float("nan"))


@triton.jit
def _round_tokens(
    x_ptr, y_ptr, mean, factor, block, stride, length, heads,
    D: tl.constexpr, TOKENS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Rounds some tokens of a head, which ends up in a dense tensor of so many heads."""
    col = tl.arange(0, D)
    for step in tl.static_range(STEPS):
        token = (block * STEPS + step) * TOKENS + tl.arange(0, TOKENS)
        mask = (token < length)[:, None]
        token = token.to(tl.int64)
        x = tl.load(x_ptr + (token * stride)[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)
        y = rounded(x, mean, factor).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + (token * (heads * D))[:, None] + col[None, :], y, mask=mask)


@triton.jit
def round_values(
    pid, v_ptr, y_ptr, mean_ptr, scale_ptr, v_batch, v_token, v_head, keys, blocks, v_first,
    KV_HEADS: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Writes some tokens of a head of the values in e4m3."""
    head, block, batch = pid % KV_HEADS, pid // KV_HEADS % blocks, (pid // KV_HEADS // blocks).to(tl.int64)
    col = tl.arange(0, D)
    mean = tl.load(mean_ptr + ((batch * 2 + 1) * KV_HEADS + head) * D + col)
    scale = tl.load(scale_ptr + (batch * KV_HEADS + head) * D + col)
    first = tl.multiple_of(v_first + (batch * keys * KV_HEADS + head) * D, 16)
    _round_tokens(
        v_ptr + batch * v_batch + head * v_head, y_ptr + first, mean, tl.div_rn(1.0 + 0.0 * scale, scale), block,
        v_token, keys, KV_HEADS, D, TOKENS, STEPS,
    )  # fmt: skip


@triton.jit
def mean_of(head, batch, mean_ptr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr):
    """What is taken from a head of queries, nothing, or of the keys behind them."""
    mean_ptr += (batch * 2 * KV_HEADS + head - HEADS) * D + tl.arange(0, D)
    return tl.load(mean_ptr, mask=head + tl.arange(0, D) * 0 >= HEADS, other=0.0)


@triton.jit
def factor_of(is_key, peak_ptr, SAMPLE_PEAK: tl.constexpr, D: tl.constexpr):
    """What queries, or keys, are multiplied by."""
    scale = _sampled_scale(tl.load(peak_ptr + is_key.to(tl.int32)), SAMPLE_PEAK)
    return tl.div_rn(tl.zeros((D,), tl.float32) + 1.0, scale)


@triton.jit
def _sampled_scale(peak, SAMPLE_PEAK: tl.constexpr):
    """What the peak of a sample asks for; that of zeros says nothing."""
    return tl.where(peak > 0.0, tl.maximum(peak, 1e-12), SAMPLE_PEAK) * (1.0 / SAMPLE_PEAK)


@triton.jit
def write_scalars(pid, scalar_ptr, peak_ptr, weight_scale, SAMPLE_PEAK: tl.constexpr):
    """Has the first program write the six scalars."""
    if pid == 0:
        tl.store(scalar_ptr, _sampled_scale(tl.load(peak_ptr), SAMPLE_PEAK))
        tl.store(scalar_ptr + 1, _sampled_scale(tl.load(peak_ptr + 1), SAMPLE_PEAK))
        tl.store(scalar_ptr + 2, 1.0)
        tl.store(scalar_ptr + 3, tl.div_rn(1.0, weight_scale))
        tl.store(scalar_ptr + 4, weight_scale)
        tl.store(scalar_ptr + 5, 1.0)


@triton.jit
def round_kernel(
    q_ptr, k_ptr, v_ptr, y_ptr, mean_ptr, scale_ptr, peak_ptr, scalar_ptr,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, queries, keys, values, v_blocks,
    blocks, k_first, v_first, weight_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, SAMPLE_PEAK: tl.constexpr,
    TOKENS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Writes the six scalars and queries, keys and values in e4m3, each laid out densely, one behind the other.

    Values come first, in ``values`` programs, for what was read last is still in a cache.
    """
    pid = tl.program_id(0)
    write_scalars(pid, scalar_ptr, peak_ptr, weight_scale, SAMPLE_PEAK)
    if pid < values:
        round_values(
            pid, v_ptr, y_ptr, mean_ptr, scale_ptr, v_batch, v_token, v_head, keys, v_blocks, v_first,
            KV_HEADS, D, TOKENS, STEPS,
        )  # fmt: skip
    else:
        head, rest = (pid - values) % (HEADS + KV_HEADS), (pid - values) // (HEADS + KV_HEADS)
        block, batch = rest % blocks, (rest // blocks).to(tl.int64)
        mean = mean_of(head, batch, mean_ptr, HEADS, KV_HEADS, D)
        factor = factor_of(head >= HEADS, peak_ptr, SAMPLE_PEAK, D)
        if head < HEADS:
            x_ptr = q_ptr + batch * q_batch + head * q_head
            first = (batch * queries * HEADS + head) * D
            stride, length, heads = q_token + 0, queries + 0, HEADS + 0 * head
        else:
            x_ptr = k_ptr + batch * k_batch + (head - HEADS) * k_head
            first = k_first + (batch * keys * KV_HEADS + head - HEADS) * D
            stride, length, heads = k_token + 0, keys + 0, KV_HEADS + 0 * head
        y_ptr += tl.multiple_of(first, 16)
        _round_tokens(x_ptr, y_ptr, mean, factor, block, stride, length, heads, D, TOKENS, STEPS)


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
