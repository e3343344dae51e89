"""Queries, keys and values into e4m3, and the output back, by Triton: geometry and launches."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from diffkern.providers.eager.attention_fp8 import SAMPLE, SAMPLE_PEAK, WEIGHT_SCALE, Quantized
from diffkern.providers.eager.fp8 import E4M3
from diffkern.providers.triton.attention_fp8_kernels import (
    dequantize_kernel,
    ranges_kernel,
    round_kernel,
    scales_kernel,
)
from diffkern.providers.triton.launching import Plan, device_guard, launch

#: Tokens of a tile and tiles of a program that rounds.
TOKENS, STEPS = 32, 4
#: Tokens of a tile whose range is found, programs that find ranges of values, all at once on a large GPU, and blocks
#: of a head that are reduced at once.
RANGE_TOKENS, RANGE_PROGRAMS, BLOCKS = 16, 1056, 16


def quantize(query: Tensor, key: Tensor, value: Tensor) -> Quantized:
    """Computes :func:`diffkern.providers.eager.attention_fp8.quantize`; heads must have a power of two of channels."""
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    batch, keys, kv_heads, head_dim = key.shape
    ranges, scales, rounds = _quantize_plans(
        query.shape, key.shape, *(s for x in (query, key, value) for s in x.stride()[:3])
    )
    blocks = _range_blocks(keys, batch * kv_heads)
    parts = _numbers(query, batch, kv_heads, 2, blocks, head_dim)
    peaks, scalars = _numbers(query, batch * (query.shape[2] + kv_heads)), _numbers(query, 6)
    means, scale = _numbers(query, batch, 2 * kv_heads, head_dim), _numbers(query, batch, kv_heads, head_dim)
    rounded = torch.empty(query.numel() + 2 * key.numel(), dtype=E4M3, device=query.device)
    with device_guard(query.device):
        launch(ranges, ranges_kernel, (query, key, value, parts, peaks, means), query.device)
        launch(scales, scales_kernel, (parts, peaks, means, scale, scalars), query.device)
        launch(rounds, round_kernel, (query, key, value, rounded, means, scale, scalars), query.device)
    q8, k8, v8 = rounded.split([query.numel(), key.numel(), key.numel()])
    q8, k8, v8 = q8.view(query.shape), k8.view(key.shape), v8.view(key.shape)
    return Quantized(q8, k8, v8, scalars, scale, means[:, kv_heads:])


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
    batch, keys, kv_heads, head_dim = key
    queries, heads = query[1:3]
    v_heads, qk_heads = batch * kv_heads, batch * (heads + kv_heads)
    ranges, v_rounds, rounds = _range_blocks(keys, v_heads), _blocks(keys), _blocks(max(queries, keys))
    tiles = -(-keys // (RANGE_TOKENS * ranges))
    sizes, options = (heads, kv_heads, head_dim), {"num_warps": 4}
    tokens = *strides, queries, keys
    firsts = batch * queries * heads * head_dim, batch * (queries * heads + keys * kv_heads) * head_dim
    found = (*tokens, ranges * v_heads, ranges, tiles, batch * heads, *sizes, RANGE_TOKENS, SAMPLE)
    reduced = (keys, ranges, batch * heads, v_heads, WEIGHT_SCALE, kv_heads, head_dim, BLOCKS, SAMPLE_PEAK)
    rounded = (*tokens, v_rounds * v_heads, v_rounds, rounds, *firsts, *sizes, TOKENS, STEPS)
    return (
        Plan((ranges * v_heads + qk_heads,), found, options),
        Plan((1 + v_heads,), reduced, options),
        Plan((v_rounds * v_heads + rounds * qk_heads,), rounded, options),
    )


@lru_cache(maxsize=1024)
def _dequantize_plan(shape: tuple[int, ...], kv_heads: int, mean_stride: int) -> Plan:
    batch, queries, heads, head_dim = shape
    blocks = _blocks(queries)
    rest = (mean_stride, queries, blocks, heads, kv_heads, head_dim, TOKENS, STEPS)
    return Plan((blocks * batch * heads,), rest, {"num_warps": 4})
