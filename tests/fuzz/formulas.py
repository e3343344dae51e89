"""What every public op computes, written from its formula alone, in the dtype of its operands.

In float64 this is the truth; in float32 it shows what a right order of operations loses there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Formula = Callable[..., "tuple[Tensor, ...]"]


def _normalised(x: Tensor, kind: str | None, eps: float, dims: Sequence[int] = (-1,)) -> Tensor:
    if kind is None:
        return x
    if kind == "layer":
        x = x - x.mean(dims, keepdim=True)
    return x / (x.square().mean(dims, keepdim=True) + eps).sqrt()


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, offset: float = 0.0) -> Tensor:
    x = x if weight is None else x * (weight + offset)
    return x if bias is None else x + bias


def _modulated(x: Tensor, scale: Tensor | None, shift: Tensor | None, offset: float = 1.0) -> Tensor:
    x = x if scale is None else x * (offset + scale)
    return x if shift is None else x + shift


#: In place of a GELU: the number whose multiple by ``1 + erf`` or ``1 + tanh`` torch computes.
MAGNITUDE = "magnitude"


def _activated(x: Tensor, function: str | None) -> Tensor:
    if function == "silu":
        return x * torch.sigmoid(x)
    if function == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    if function in ("gelu", "gelu_tanh"):
        return x * _gelu_factor(x, function)
    return x.abs() if function == MAGNITUDE else x


def _gelu_factor(x: Tensor, function: str) -> Tensor:
    """``(1 + erf) / 2`` or ``(1 + tanh) / 2``: as torch computes them in float32, and without cancelling in float64."""
    exact = x.dtype == torch.float64
    if function == "gelu":
        x = x / math.sqrt(2)
        return 0.5 * (torch.erfc(-x) if exact else 1 + torch.erf(x))
    x = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return torch.sigmoid(2 * x) if exact else 0.5 * (1 + torch.tanh(x))


def _gelu_name(approximate: str) -> str:
    return {"none": "gelu", "tanh": "gelu_tanh"}.get(approximate, approximate)


def gelu(x: Tensor, approximate: str) -> tuple[Tensor, ...]:
    return (_activated(x, _gelu_name(approximate)),)


def silu(x: Tensor) -> tuple[Tensor, ...]:
    return (_activated(x, "silu"),)


def quick_gelu(x: Tensor) -> tuple[Tensor, ...]:
    return (_activated(x, "quick_gelu"),)


def glu(value: Tensor, gate: Tensor, activation: str, **_: Any) -> tuple[Tensor, ...]:
    return (value * _activated(gate, activation),)


def geglu(x: Tensor, approximate: str, dim: int, gate_first: bool, **_: Any) -> tuple[Tensor, ...]:
    first, second = x.chunk(2, dim)
    value, gate = (second, first) if gate_first else (first, second)
    return (value * _activated(gate, _gelu_name(approximate)),)


def swiglu(x: Tensor, dim: int, gate_first: bool, **_: Any) -> tuple[Tensor, ...]:
    first, second = x.chunk(2, dim)
    value, gate = (second, first) if gate_first else (first, second)
    return (value * _activated(gate, "silu"),)


def _along(x: Tensor, parameter: Tensor | None, dim: int) -> Tensor | None:
    """A parameter of one dimension, or of the last ones of x, so that it broadcasts along ``dim``."""
    if parameter is None or parameter.ndim > 1:
        return parameter
    return parameter.view(-1, *(1,) * (x.ndim - 1 - dim % x.ndim))


def rms_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dim: int, weight_offset: float, clamp_eps: bool,
    **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    parameter = weight if weight is not None else bias
    dims = tuple(range(-parameter.ndim, 0)) if parameter is not None and parameter.ndim > 1 else (dim,)
    if clamp_eps:
        count = math.prod(x.shape[d] for d in dims)
        length = x.square().sum(dims, keepdim=True).sqrt()
        y = x / length.clamp(min=eps) * math.sqrt(count)
    else:
        y = _normalised(x, "rms", eps, dims)
    return (_affine(y, _along(x, weight, dim), _along(x, bias, dim), weight_offset),)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dim: int, **_: Any
) -> tuple[Tensor, ...]:
    parameter = weight if weight is not None else bias
    dims = tuple(range(-parameter.ndim, 0)) if parameter is not None and parameter.ndim > 1 else (dim,)
    return (_affine(_normalised(x, "layer", eps, dims), _along(x, weight, dim), _along(x, bias, dim)),)


def norm_modulate(
    x: Tensor, scale: Tensor | None, shift: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float,
    norm: str | None, scale_offset: float, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return (_modulated(_affine(_normalised(x, norm, eps), weight, bias), scale, shift, scale_offset),)


def gate_residual(
    residual: Tensor, x: Tensor, gate: Tensor | None, gate_activation: str | None, **_: Any
) -> tuple[Tensor, ...]:
    if gate is None:
        return (residual + x,)
    gate = torch.tanh(gate) if gate_activation == "tanh" else torch.sigmoid(gate) if gate_activation else gate
    return (residual + gate * x,)


def gate_residual_norm_modulate(
    residual: Tensor, x: Tensor, gate: Tensor | None, scale: Tensor | None, shift: Tensor | None,
    gate_activation: str | None, weight: Tensor | None, bias: Tensor | None, eps: float, norm: str | None,
    scale_offset: float, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    (new,) = gate_residual(residual, x, gate, gate_activation)
    return new, *norm_modulate(new, scale, shift, weight, bias, eps, norm, scale_offset)


def in_groups(x: Tensor, add: Tensor | None, num_groups: int, frames: str) -> tuple[Tensor, tuple[int, ...]]:
    """What a group norm normalises, and along which of its dimensions."""
    groups = (x if add is None else x + add).unflatten(1, (num_groups, -1))
    return groups, (2, 4, 5) if frames == "each" else tuple(range(2, groups.ndim))


def group_norm_silu(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, add: Tensor | None, eps: float,
    activation: str | None, frames: str, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    groups, dims = in_groups(x, add, num_groups, frames)
    y = _normalised(groups, "layer", eps, dims).flatten(1, 2)
    return (_activated(_affine(y, _along(x, weight, 1), _along(x, bias, 1)), activation),)


def channel_rms_norm_silu(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, scale: Tensor | None, shift: Tensor | None, eps: float,
    eps_mode: str, activation: str | None, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    if eps_mode == "clamp":
        y = x / x.square().sum(1, keepdim=True).sqrt().clamp(min=eps) * math.sqrt(x.shape[1])
    else:
        y = _normalised(x, "rms", eps, (1,))
    y = _affine(y, _along(x, weight, 1), _along(x, bias, 1))
    return (_activated(_modulated(y, scale, shift), activation),)


def add_norm_silu_pad(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, scale: Tensor | None, shift: Tensor | None, eps: float,
    norm: str | None, activation: str | None, pad: tuple[int, int], **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    def channels(parameter: Tensor | None) -> Tensor | None:
        return None if parameter is None else parameter[..., None, None, None]

    y = x if bias is None else x + bias[:, None, None, None]
    y = y if residual is None else y + residual
    y = _modulated(_normalised(y, norm, eps, (1,)), channels(scale), channels(shift))
    y = _activated(y, activation)
    return (torch.cat([y[:, :, :1]] * pad[0] + [y] + [y[:, :, -1:]] * pad[1], 2),)


def channel_glu(x: Tensor, bias: Tensor | None, activation: str, **_: Any) -> tuple[Tensor, ...]:
    value, gate = _affine(x, None, _along(x, bias, 1)).chunk(2, 1)
    return (value * _activated(gate, activation),)


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, eps: float, q_rotated: Tensor | None = None, k_rotated: Tensor | None = None
) -> tuple[Tensor, ...]:
    q, k = q.clamp(min=0), k.clamp(min=0)
    weights = torch.einsum(
        "bnhd,bmhd->bhnm", q if q_rotated is None else q_rotated, k if k_rotated is None else k_rotated
    )
    sums = torch.einsum("bnhd,bmhd->bnh", q, k)[..., None] + eps
    return (torch.einsum("bhnm,bmhe->bnhe", weights, v) / sums,)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> tuple[Tensor, ...]:
    return (_activated(_affine(x @ weight.t(), None, bias), _gelu_name(approximate)),)


def _rotated(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    pairing: str,
    rotary_dim: int | None,
    tokens: tuple[int, int] | None,
    seq_dim: int,
) -> Tensor:
    if tokens is not None:
        start, length = tokens
        parts = x.split((start, length, x.shape[seq_dim] - start - length), seq_dim)
        return torch.cat(
            (parts[0], _rotated(parts[1], cos, sin, pairing, rotary_dim, None, seq_dim), parts[2]), seq_dim
        )
    rotary = x.shape[-1] if rotary_dim is None else rotary_dim
    index = torch.arange(rotary, device=x.device)
    first = index[: rotary // 2] if pairing == "half" else index[0::2]
    second = index[rotary // 2 :] if pairing == "half" else index[1::2]
    pairs = torch.arange(rotary // 2, device=x.device)
    (cos_a, cos_b), (sin_a, sin_b) = (
        (table[..., first], table[..., second]) if table.shape[-1] == rotary else (table[..., pairs],) * 2
        for table in (cos, sin)
    )
    a, b = x[..., first], x[..., second]
    y = torch.empty_like(x)
    y = torch.cat((a * cos_a - b * sin_a, b * cos_b + a * sin_b), -1)[..., torch.cat((first, second)).argsort()]
    return torch.cat((y, x[..., rotary:]), -1)


def rope(x: Tensor, cos: Tensor, sin: Tensor | None, pairing: str, rotary_dim: int | None,
         tokens: tuple[int, int] | None, seq_dim: int, **_: Any) -> tuple[Tensor, ...]:  # fmt: skip
    if sin is None:
        cos, sin = cos.real, cos.imag
    return (_rotated(x, cos, sin, pairing, rotary_dim, tokens, seq_dim),)


def expand_axes(
    cos_axes: Sequence[Tensor], sin_axes: Sequence[Tensor], grid: Sequence[int] | None, coords: Tensor | None,
    order: str, front_pad: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    if coords is None:
        assert grid is not None
        index = torch.cartesian_prod(*(torch.arange(size, device=cos_axes[0].device) for size in grid))
        coords = index.view(-1, len(grid))
    tables = []
    for axes, fill in ((cos_axes, 1.0), (sin_axes, 0.0)):
        columns = [axis[coords[..., i].long()] for i, axis in enumerate(axes)]
        table = torch.stack(columns, -1).flatten(-2) if order == "alternating" else torch.cat(columns, -1)
        tables.append(torch.cat((table.new_full((*table.shape[:-1], front_pad), fill), table), -1))
    return tuple(tables)


def rope_3d(
    x: Tensor, cos_axes: Sequence[Tensor], sin_axes: Sequence[Tensor], grid: Sequence[int] | None,
    coords: Tensor | None, order: str, front_pad: int, pairing: str, rotary_dim: int | None,
    tokens: tuple[int, int] | None, seq_dim: int, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    cos, sin = expand_axes(cos_axes, sin_axes, grid, coords, order, front_pad)
    rotary = x.shape[-1] if rotary_dim is None else rotary_dim
    seq_dim %= x.ndim
    fitted = []
    for table in (cos, sin):
        if 2 * table.shape[-1] != rotary:  # every head has its share, and x is [B, S, H, D] or [B, H, S, D]
            table = table.unflatten(-1, (-1, rotary // 2))
            fitted.append(table if seq_dim == 1 else table.transpose(-3, -2))
            continue
        shape = [1] * (x.ndim - 1) + [table.shape[-1]]
        shape[seq_dim] = table.shape[-2]
        if table.ndim == 3:
            shape[0] = table.shape[0]
        fitted.append(table.reshape(shape))
    return (_rotated(x, *fitted, pairing, rotary_dim, tokens, seq_dim),)


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, q_bias: Tensor | None,
    k_bias: Tensor | None, cos: Any, sin: Any, cos_k: Tensor | None, sin_k: Tensor | None, eps: float,
    norm: str | None, across_heads: int | None, weight_offset: float, grid: Sequence[int] | None,
    coords: Tensor | None, order: str, front_pad: int, pairing: str, rotary_dim: int | None,
    tokens: tuple[int, int] | None, seq_dim: int, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    head_dim = q.shape[-1] // (across_heads or 1)
    results = []
    for x, weight, bias, own_cos, own_sin in ((q, q_weight, q_bias, cos, sin), (k, k_weight, k_bias, cos_k, sin_k)):
        y = _affine(_normalised(x, norm, eps), weight, bias, weight_offset)
        y = y.unflatten(-1, (-1, head_dim)) if across_heads else y
        own_cos, own_sin = (cos, sin) if own_cos is None else (own_cos, own_sin)
        if grid is not None or coords is not None:
            (y,) = rope_3d(y, own_cos, own_sin, grid, coords, order, front_pad, pairing, rotary_dim, tokens, seq_dim)
        elif own_cos is not None:
            (y,) = rope(y, own_cos, own_sin, pairing, rotary_dim, tokens, seq_dim)
        results.append(y.flatten(-2) if across_heads else y)
    return tuple(results)


def joint_qk_norm_rope(
    queries: list[Tensor], keys: list[Tensor], dim: int, eps: float, norm: str | None, pairing: str, **given: Any
) -> tuple[Tensor, ...]:
    streams = []
    for i, (q, k) in enumerate(zip(queries, keys, strict=True)):
        names = {"q_weight": "q_weights", "k_weight": "k_weights", "q_bias": "q_biases", "k_bias": "k_biases"}
        own = {name: given[lists][i] if lists in given else None for name, lists in names.items()}
        cos, sin = (given[name][i] if name in given else None for name in ("cos", "sin"))
        streams.append(
            qk_norm_rope(
                q, k, **own, cos=cos, sin=sin, cos_k=None, sin_k=None, eps=eps, norm=norm, across_heads=None,
                weight_offset=0.0, grid=None, coords=None, order="blocked", front_pad=0, pairing=pairing,
                rotary_dim=None, tokens=None, seq_dim=dim,
            )
        )  # fmt: skip
    return tuple([torch.cat(pair, dim) for pair in zip(*streams, strict=True)])


def activation_fp8(x: Tensor, function: str, front: Tensor | None = None) -> tuple[Tensor, ...]:
    y = _activated(x, function)
    return (y if front is None else torch.cat([front, y], -1),)


def norm_modulate_fp8(x: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return norm_modulate(x, scale_offset=1.0, **options)


def gate_residual_norm_modulate_fp8(residual: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return gate_residual_norm_modulate(residual, gate_activation=None, scale_offset=1.0, **options)


def norm_modulate_and_fp8(x: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return 2 * norm_modulate(x, **options)


def gate_residual_norm_modulate_and_fp8(residual: Tensor, **options: Any) -> tuple[Tensor, ...]:
    new, y = gate_residual_norm_modulate(residual, **options)
    return new, y, y


def glu_and_fp8(value: Tensor, gate: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return 2 * glu(value, gate, **options)


def linear_fp8(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, **_: Any
) -> tuple[Tensor, ...]:
    return (_affine((x * x_scale) @ (weight * weight_scale).t(), None, bias),)
