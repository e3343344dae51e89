"""The Triton kernels that bring queries and keys into e4m3 from before their norm and rotation, and values as they are.

A program that rounds has some tokens of several heads, which are rotated by the same angles; while one is computed, the
next one is read. Tokens before ``first``
belong to the first of two streams; of one stream all belong to the second.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# The arguments of a kernel have the types that Triton gives them, which mypy does not know.
from __future__ import annotations

import triton
import triton.language as tl

from diffkern.providers.triton.attention_fp8_kernels import (
    factor_of,
    mean_of,
    round_values,
    rounded,
    sample_range,
    sampled,
    value_ranges,
    write_scalars,
)


@triton.jit
def _both_streams(one_ptr, one_token, other_ptr, other_token, token, inside, first, D: tl.constexpr):
    """Rows of some tokens in float32, of which those before ``first`` are in the first of two tensors."""
    col = tl.arange(0, D)[None, :]
    early, late = inside & (token < first), inside & (token >= first)
    x = tl.load(one_ptr + (token * one_token)[:, None] + col, mask=early[:, None], other=0.0).to(tl.float32)
    other_ptr += ((token - first) * other_token)[:, None] + col
    return x + tl.load(other_ptr, mask=late[:, None], other=0.0).to(tl.float32)


@triton.jit
def _angles(cos_0, sin_0, cos_1, sin_1, token, inside, first, D: tl.constexpr, TOKENS: tl.constexpr):
    """Cosines and sines of the first elements of the pairs of some tokens, and those of the second ones."""
    cos = _both_streams(cos_0, D, cos_1, D, token, inside, first, D)
    sin = _both_streams(sin_0, D, sin_1, D, token, inside, first, D)
    cos_a, cos_b = tl.split(tl.reshape(cos, (TOKENS, D // 2, 2)))
    sin_a, sin_b = tl.split(tl.reshape(sin, (TOKENS, D // 2, 2)))
    return cos_a, sin_a, cos_b, sin_b


@triton.jit
def _side(
    is_query, batch, q_0, q_1, k_0, k_1, qw_0, qw_1, kw_0, kw_1, q0_batch, q0_token, q0_head, q1_batch, q1_token,
    q1_head, k0_batch, k0_token, k0_head, k1_batch, k1_token, k1_head, token, first, D: tl.constexpr,
):  # fmt: skip
    """Where the queries, or the keys, of one sample are in both streams, and the weights of their norms by token."""
    if is_query:
        x_0, token_0, head_0, w_0 = q_0 + batch * q0_batch, q0_token + 0, q0_head + 0, qw_0
        x_1, token_1, head_1, w_1 = q_1 + batch * q1_batch, q1_token + 0, q1_head + 0, qw_1
    else:
        x_0, token_0, head_0, w_0 = k_0 + batch * k0_batch, k0_token + 0, k0_head + 0, kw_0
        x_1, token_1, head_1, w_1 = k_1 + batch * k1_batch, k1_token + 0, k1_head + 0, kw_1
    one, other = tl.load(w_0 + tl.arange(0, D)).to(tl.float32), tl.load(w_1 + tl.arange(0, D)).to(tl.float32)
    return x_0, token_0, head_0, x_1, token_1, head_1, tl.where((token < first)[:, None], one[None, :], other[None, :])


@triton.jit
def _rotated(x, weights, eps, cos_a, sin_a, cos_b, sin_b, D: tl.constexpr, TOKENS: tl.constexpr):
    """Some tokens of one head, normed and rotated."""
    x *= tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, axis=1) / D + eps))[:, None]
    a, b = tl.split(tl.reshape(x * weights, (TOKENS, D // 2, 2)))
    return tl.interleave(a * cos_a - b * sin_a, b * cos_b + a * sin_b)


@triton.jit
def rotated_ranges_kernel(
    q_0, q_1, k_0, k_1, qw_0, qw_1, kw_0, kw_1, cos_0, cos_1, sin_0, sin_1, v_ptr, part_ptr, peak_ptr,
    q0_batch, q0_token, q0_head, q1_batch, q1_token, q1_head, k0_batch, k0_token, k0_head, k1_batch, k1_token, k1_head,
    v_batch, v_token, v_head, first, length, eps, samples, v_part, blocks, v_tiles,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """What :func:`~diffkern.providers.triton.attention_fp8_kernels.ranges_kernel` does, of rotated samples."""
    pid = tl.program_id(0)
    if pid >= samples:
        value_ranges(
            pid - samples, v_ptr, part_ptr + v_part, v_batch, v_token, v_head, length, blocks, v_tiles,
            KV_HEADS, D, TOKENS,
        )  # fmt: skip
    else:
        index, block = pid // (SAMPLE // TOKENS), pid % (SAMPLE // TOKENS)
        head, batch = index % (HEADS + KV_HEADS), (index // (HEADS + KV_HEADS)).to(tl.int64)
        token, inside = sampled(block, length, SAMPLE, TOKENS)
        cos_a, sin_a, cos_b, sin_b = _angles(cos_0, sin_0, cos_1, sin_1, token, inside, first, D, TOKENS)
        x_0, token_0, head_0, x_1, token_1, head_1, weights = _side(
            head < HEADS, batch, q_0, q_1, k_0, k_1, qw_0, qw_1, kw_0, kw_1, q0_batch, q0_token, q0_head,
            q1_batch, q1_token, q1_head, k0_batch, k0_token, k0_head, k1_batch, k1_token, k1_head, token, first, D,
        )  # fmt: skip
        head = tl.where(head < HEADS, head, head - HEADS)
        x = _both_streams(x_0 + head * head_0, token_0, x_1 + head * head_1, token_1, token, inside, first, D)
        x = _rotated(x, weights, eps, cos_a, sin_a, cos_b, sin_b, D, TOKENS)
        sample_range(x, part_ptr, index, block, SAMPLE // TOKENS, peak_ptr, D)


@triton.jit
def rotated_round_kernel(
    q_0, q_1, k_0, k_1, qw_0, qw_1, kw_0, kw_1, cos_0, cos_1, sin_0, sin_1, v_ptr, y_ptr, mean_ptr, scale_ptr,
    peak_ptr, scalar_ptr,
    q0_batch, q0_token, q0_head, q1_batch, q1_token, q1_head, k0_batch, k0_token, k0_head, k1_batch, k1_token, k1_head,
    v_batch, v_token, v_head, first, length, eps, values, v_blocks, blocks, k_first, v_first, weight_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, SAMPLE_PEAK: tl.constexpr,
    V_TOKENS: tl.constexpr, STEPS: tl.constexpr, TOKENS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """What :func:`~diffkern.providers.triton.attention_fp8_kernels.round_kernel` does; a program has some heads."""
    pid = tl.program_id(0)
    write_scalars(pid, scalar_ptr, peak_ptr, weight_scale, SAMPLE_PEAK)
    if pid < values:
        round_values(
            pid, v_ptr, y_ptr, mean_ptr, scale_ptr, v_batch, v_token, v_head, length, v_blocks, v_first,
            KV_HEADS, D, V_TOKENS, STEPS,
        )  # fmt: skip
    else:
        q_groups, groups = tl.cdiv(HEADS, TOGETHER), tl.cdiv(HEADS, TOGETHER) + tl.cdiv(KV_HEADS, TOGETHER)
        group, rest = (pid - values) % groups, (pid - values) // groups
        block, batch = rest % blocks, (rest // blocks).to(tl.int64)
        token = block.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
        inside, is_query = token < length, group < q_groups
        cos_a, sin_a, cos_b, sin_b = _angles(cos_0, sin_0, cos_1, sin_1, token, inside, first, D, TOKENS)
        x_0, token_0, head_0, x_1, token_1, head_1, weights = _side(
            is_query, batch, q_0, q_1, k_0, k_1, qw_0, qw_1, kw_0, kw_1, q0_batch, q0_token, q0_head,
            q1_batch, q1_token, q1_head, k0_batch, k0_token, k0_head, k1_batch, k1_token, k1_head, token, first, D,
        )  # fmt: skip
        heads, before = tl.where(is_query, HEADS, KV_HEADS), tl.where(is_query, 0, HEADS)
        place = tl.where(is_query, 0, k_first) + batch * length * heads * D
        factor = factor_of(before > 0, peak_ptr, SAMPLE_PEAK, D)
        head = tl.where(is_query, group, group - q_groups) * TOGETHER
        x = _both_streams(x_0 + head * head_0, token_0, x_1 + head * head_1, token_1, token, inside, first, D)
        mean = mean_of(before + head, batch, mean_ptr, HEADS, KV_HEADS, D)
        for step in tl.static_range(TOGETHER):
            here, after = token < tl.where(head < heads, length, 0), tl.minimum(head + 1, heads - 1)
            if step + 1 < TOGETHER:
                next_x = _both_streams(
                    x_0 + after * head_0, token_0, x_1 + after * head_1, token_1, token, inside, first, D
                )  # fmt: skip
                next_mean = mean_of(before + after, batch, mean_ptr, HEADS, KV_HEADS, D)
            y = rounded(_rotated(x, weights, eps, cos_a, sin_a, cos_b, sin_b, D, TOKENS), mean, factor)
            offsets = place + head * D + (token * (heads * D))[:, None] + tl.arange(0, D)[None, :]
            tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=here[:, None])
            if step + 1 < TOGETHER:
                x, mean = next_x, next_mean
                head += 1
