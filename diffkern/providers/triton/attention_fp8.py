"""Queries, keys and values into e4m3, and the output back, by Triton: geometry and launches."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from diffkern.providers.eager.attention_fp8 import SAMPLE, SAMPLE_PEAK, WEIGHT_SCALE, Quantized, Unrotated
from diffkern.providers.eager.fp8 import E4M3
from diffkern.providers.triton.attention_fp8_kernels import (
    dequantize_kernel,
    ranges_kernel,
    round_kernel,
    scales_kernel,
)
from diffkern.providers.triton.attention_fp8_rotated_kernels import rotated_ranges_kernel, rotated_round_kernel
from diffkern.providers.triton.launching import Plan, device_guard, launch

#: Tokens of a tile and tiles of a program that rounds.
TOKENS, STEPS = 32, 4
#: Tokens of a tile whose range is found, programs that find ranges of values, and blocks of a head that are reduced at
#: once. Of the values of Flux 528 programs find the range in less time than twice as many.
RANGE_TOKENS, RANGE_PROGRAMS, BLOCKS = 16, 528, 16
#: Tokens and heads of a program that rotates.
ROTATED_TOKENS, TOGETHER = 16, 8


def quantize(query: Tensor, key: Tensor, value: Tensor) -> Quantized:
    """Computes :func:`diffkern.providers.eager.attention_fp8.quantize`; heads must have a power of two of channels."""
    given = tuple([x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value)])
    plans = _quantize_plans(query.shape, key.shape, *(s for x in given for s in x.stride()[:3]))
    return _launched(plans, (ranges_kernel, round_kernel), given, query.shape, key.shape)


def quantize_unrotated(x: Unrotated, value: Tensor) -> Quantized:
    """Computes :func:`diffkern.providers.eager.attention_fp8.quantize_unrotated`."""
    sides = [y for side in (x.queries, x.keys) for y in (side[0], side[-1])]  # one stream is both
    sides = [y if y.stride(-1) == 1 else y.contiguous() for y in (*sides, value)]
    parameters = [y for side in (x.q_weights, x.k_weights, x.cos, x.sin) for y in (side[0], side[-1])]
    first = sum(y.shape[1] for y in x.queries[:-1])
    strides = (s for y in sides for s in y.stride()[:3])
    plans = _unrotated_plans(x.queries[0].shape[2], value.shape, first, x.eps, *strides)
    query = torch.Size((*value.shape[:2], *x.queries[0].shape[2:]))
    kernels, given = (rotated_ranges_kernel, rotated_round_kernel), (*sides[:-1], *parameters, sides[-1])
    return _launched(plans, kernels, given, query, value.shape)


def _launched(
    plans: tuple[Plan, Plan, Plan], kernels: tuple[Any, Any], given: tuple[Tensor, ...], query: torch.Size,
    key: torch.Size,
) -> Quantized:  # fmt: skip
    """Has the tensors given brought into e4m3: their ranges, their scales, and the rounding."""
    x, (batch, keys, kv_heads, head_dim) = given[-1], key
    samples = SAMPLE // RANGE_TOKENS * batch * (query[2] + kv_heads)
    blocks = _range_blocks(keys, batch * kv_heads) * batch * kv_heads
    parts, peaks, scalars = _numbers(x, (samples + blocks) * 2 * head_dim), _numbers(x, 2), _numbers(x, 6)
    means, scale = _numbers(x, batch, 2 * kv_heads, head_dim), _numbers(x, batch, kv_heads, head_dim)
    sizes = [query.numel(), key.numel(), key.numel()]
    rounded = torch.empty(sum(sizes), dtype=E4M3, device=x.device)
    with device_guard(x.device):
        launch(plans[0], kernels[0], (*given, parts, peaks), x.device)
        launch(plans[1], scales_kernel, (parts, peaks, means, scale), x.device)
        launch(plans[2], kernels[1], (*given, rounded, means, scale, peaks, scalars), x.device)
    q8, k8, v8 = rounded.split(sizes)
    return Quantized(q8.view(query), k8.view(key), v8.view(key), scalars, scale, means[:, kv_heads:])


def dequantize(y: Tensor, x: Quantized, dtype: torch.dtype) -> Tensor:
    """Computes :func:`diffkern.providers.eager.attention_fp8.dequantize` of the dense output of an attention."""
    plan = _dequantize_plan(y.shape, x.value_scale.shape[1], x.value_mean.stride(0))
    result = torch.empty(y.shape, dtype=dtype, device=y.device)
    with device_guard(y.device):
        launch(plan, dequantize_kernel, (y, x.value_mean, x.value_scale, result), y.device)
    return result


def _numbers(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _blocks(length: int) -> int:
    return -(-length // (TOKENS * STEPS))


def _range_blocks(length: int, heads: int) -> int:
    return min(-(-length // RANGE_TOKENS), -(-RANGE_PROGRAMS // heads))


@lru_cache(maxsize=1024)
def _quantize_plans(query: tuple[int, ...], key: tuple[int, ...], *strides: int) -> tuple[Plan, Plan, Plan]:
    queries, heads = query[1:3]
    rounds = _blocks(max(queries, key[1]))
    return _plans((*strides, queries, key[1]), heads, queries, key, rounds, rounds * key[0] * (heads + key[2]), ())


@lru_cache(maxsize=1024)
def _unrotated_plans(
    heads: int, key: tuple[int, ...], first: int, eps: float, *strides: int
) -> tuple[Plan, Plan, Plan]:  # fmt: skip
    batch, length, kv_heads, _ = key
    blocks = -(-length // ROTATED_TOKENS)
    programs = (-(-heads // TOGETHER) - (-kv_heads // TOGETHER)) * blocks * batch
    tokens = *strides, first, length, eps
    return _plans(tokens, heads, length, key, blocks, programs, (ROTATED_TOKENS, TOGETHER))


def _plans(
    tokens: tuple[Any, ...], heads: int, queries: int, key: tuple[int, ...], blocks: int, programs: int,
    tiles: tuple[int, ...],
) -> tuple[Plan, Plan, Plan]:  # fmt: skip
    """Three launches; of the last one ``programs`` round queries and keys, with ``blocks`` of a head."""
    batch, keys, kv_heads, head_dim = key
    v_heads, qk_heads = batch * kv_heads, batch * (heads + kv_heads)
    ranges, v_rounds = _range_blocks(keys, v_heads), _blocks(keys)
    sizes, options = (heads, kv_heads, head_dim), {"num_warps": 4}
    firsts = batch * queries * heads * head_dim, batch * (queries * heads + keys * kv_heads) * head_dim
    v_tiles = -(-keys // (RANGE_TOKENS * ranges))
    s_blocks = SAMPLE // RANGE_TOKENS
    samples, v_part = s_blocks * qk_heads, s_blocks * qk_heads * 2 * head_dim
    found = (*tokens, samples, v_part, ranges, v_tiles, *sizes, RANGE_TOKENS, SAMPLE)
    reduced = (keys, qk_heads, v_part, ranges, s_blocks, *sizes, BLOCKS, SAMPLE)
    rounded = (*tokens, v_rounds * v_heads, v_rounds, blocks, *firsts, WEIGHT_SCALE, *sizes, SAMPLE_PEAK, TOKENS, STEPS)
    return (
        Plan((samples + ranges * v_heads,), found, options),
        Plan((qk_heads + v_heads,), reduced, options),
        Plan((v_rounds * v_heads + programs,), (*rounded, *tiles), options),
    )


@lru_cache(maxsize=1024)
def _dequantize_plan(shape: tuple[int, ...], kv_heads: int, mean_stride: int) -> Plan:
    batch, queries, heads, head_dim = shape
    blocks = _blocks(queries)
    rest = (mean_stride, queries, blocks, heads, kv_heads, head_dim, TOKENS, STEPS)
    return Plan((blocks * batch * heads,), rest, {"num_warps": 4})
