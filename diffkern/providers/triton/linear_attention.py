"""linear_attention by Triton: buffers, the products of torch, and launches. The rest is in its kernels."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from diffkern.providers.triton.launching import Plan, device_guard, launch
from diffkern.providers.triton.linear_attention_kernels import divide_kernel, split_heads_kernel
from diffkern.providers.triton.tiles import power_of_two

#: Elements of a program and its warps.
_TILE_ELEMENTS = 4096
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}

Four = tuple[int, int, int, int]


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, q_rotated: Tensor | None, k_rotated: Tensor | None, eps: float, relu: bool
) -> Tensor:
    """Computes :func:`diffkern.ops.linear_attention`."""
    y = v.new_empty(q.shape)
    if y.numel() == 0:
        return y
    batch, tokens, heads, size = q.shape
    seen = k.shape[1]
    rotated = q_rotated is not None
    queries, keys = (q, k) if q_rotated is None or k_rotated is None else (q_rotated, k_rotated)
    # In one piece: heads before tokens, in the order in which the products read them.
    wide = torch.empty(batch * heads * (tokens + 2 * seen) * size, dtype=torch.float32, device=q.device)
    parts = wide.split([batch * heads * count * size for count in (tokens, seen, seen)])
    wide_q, wide_k, wide_v = [part.view(batch * heads, -1, size) for part in parts]
    plan = _plan_split(
        batch, heads, size, tokens, seen, queries.stride(), keys.stride(), v.stride(), relu and not rotated
    )
    with device_guard(q.device):
        launch(plan, split_heads_kernel, (queries, keys, v, wide_q, wide_k, wide_v), q.device)
        state = torch.bmm(wide_k.transpose(1, 2), wide_v)
        numerator = torch.bmm(wide_q, state)
        added = (torch.relu(k) if relu else k) if rotated else wide_k
        total = added.sum(1, dtype=torch.float32).contiguous()
        plan = _plan_divide(batch, heads, size, tokens, q.stride(), float(eps), relu)
        launch(plan, divide_kernel, (numerator, q, total, y), q.device)
    return y


@lru_cache(maxsize=1024)
def _plan_split(
    batch: int, heads: int, size: int, tokens: int, seen: int, q: Four, k: Four, v: Four, relu: bool
) -> Plan:
    cols = power_of_two(size)
    rows = max(min(_TILE_ELEMENTS // cols, power_of_two(max(tokens, seen))), 1)
    tiles = -(-max(tokens, seen) // rows)
    return Plan(
        (batch * heads * tiles * 3,), (tokens, seen, heads, size, tiles, *q, *k, *v, relu, rows, cols), _OPTIONS
    )


@lru_cache(maxsize=1024)
def _plan_divide(batch: int, heads: int, size: int, tokens: int, q: Four, eps: float, relu: bool) -> Plan:
    cols = power_of_two(size)
    rows = max(min(_TILE_ELEMENTS // cols, power_of_two(tokens)), 1)
    tiles = -(-tokens // rows)
    return Plan((batch * heads * tiles,), (tokens, heads, size, tiles, *q, eps, relu, rows, cols), _OPTIONS)
