"""linear_attention in plain PyTorch, computed in float32 and rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from diffkern.providers.eager.precision import compute_dtype


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, q_rotated: Tensor | None, k_rotated: Tensor | None, eps: float, relu: bool
) -> Tensor:
    """Computes :func:`diffkern.ops.linear_attention`."""
    dtype, result = compute_dtype(q, k, v, q_rotated, k_rotated), v.dtype
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if relu:
        q, k = torch.relu(q), torch.relu(k)
    queries, keys = [x if y is None else y.to(dtype) for x, y in ((q, q_rotated), (k, k_rotated))]
    state = torch.matmul(keys.permute(0, 2, 3, 1), v.transpose(1, 2))
    y = torch.matmul(queries.transpose(1, 2), state).transpose(1, 2)
    weights = (q * k.sum(1, keepdim=True)).sum(-1, keepdim=True) + eps
    return (y / weights).to(result).contiguous()
