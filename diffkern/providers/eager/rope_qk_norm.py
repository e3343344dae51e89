"""qk_norm_rope, and that of two streams, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diffkern.providers.eager.modulate import normalise
from diffkern.providers.eager.precision import compute_dtype, laid_out_like
from diffkern.providers.eager.rope import INPUT, expand_axes, fit_table, rotate


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, q_bias: Tensor | None,
    k_bias: Tensor | None, cos: Sequence[Tensor], sin: Sequence[Tensor], cos_k: Sequence[Tensor],
    sin_k: Sequence[Tensor], coords: Tensor | None, grid: Sequence[int], alternating: bool, front_pad: int, norm: int,
    eps: float, heads: int, weight_offset: float, round_dtype: torch.dtype | None, round_norm: bool, half: bool,
    arithmetic: int, rotary_dim: int, seq_dim: int, start: int, length: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes :func:`diffkern.ops.qk_norm_rope`."""
    outs = []
    head_dim = q.shape[-1] // heads if heads else q.shape[-1]
    rotary = rotary_dim or head_dim
    for x, weight, bias, cos_list, sin_list in (
        (q, q_weight, q_bias, cos, sin),
        (k, k_weight, k_bias, cos_k, sin_k),
    ):
        dtype = x.dtype if round_norm or arithmetic == INPUT else compute_dtype(x)
        y = normalise(x, weight, bias, eps, norm, dtype, weight_offset, round_dtype)
        if cos_list:
            by_head = y.unflatten(-1, (y.shape[-1] // head_dim, head_dim)) if heads else y
            if grid or coords is not None:
                full_cos, full_sin = (
                    fit_table(expand_axes(axes, coords, grid, alternating, front_pad, fill), by_head, seq_dim, rotary)
                    for axes, fill in ((cos_list, 1.0), (sin_list, 0.0))
                )
            else:
                full_cos, full_sin = cos_list[0], sin_list[0]
            by_head = rotate(by_head, x.dtype, full_cos, full_sin, half, arithmetic, rotary, seq_dim, start, length)
            y = by_head.flatten(-2) if heads else by_head
        y = laid_out_like(x, y.to(x.dtype))
        outs.append(y.clone() if y is x else y)  # the result of an op must not be its input
    return outs[0], outs[1]


def joint_qk_norm_rope(
    q: Tensor, k: Tensor, q_2: Tensor, k_2: Tensor, q_weight: Tensor | None, k_weight: Tensor | None,
    q_weight_2: Tensor | None, k_weight_2: Tensor | None, q_bias: Tensor | None, k_bias: Tensor | None,
    q_bias_2: Tensor | None, k_bias_2: Tensor | None, cos: Sequence[Tensor], sin: Sequence[Tensor],
    cos_2: Sequence[Tensor], sin_2: Sequence[Tensor], dim: int, norm: int, eps: float, round_norm: bool, half: bool,
    arithmetic: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes :func:`diffkern.ops.joint_qk_norm_rope`."""
    rest = (None, (), False, 0, norm, eps, 0, 0.0, None, round_norm, half, arithmetic, 0, 1, 0, -1)
    first = qk_norm_rope(q, k, q_weight, k_weight, q_bias, k_bias, cos, sin, cos, sin, *rest)
    second = qk_norm_rope(q_2, k_2, q_weight_2, k_weight_2, q_bias_2, k_bias_2, cos_2, sin_2, cos_2, sin_2, *rest)
    queries, keys = (torch.cat(pair, dim).contiguous() for pair in zip(first, second, strict=True))
    return queries, keys
