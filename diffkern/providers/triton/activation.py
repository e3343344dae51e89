"""Activations and gated units by Triton: output, geometry and launch. The arithmetic is in ``activation_kernels``."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from diffkern.providers.triton.activation_kernels import activation_kernel, channel_glu_kernel
from diffkern.providers.triton.launching import Plan, device_guard, launch
from diffkern.providers.triton.rows import merge_loops, stride_of
from diffkern.providers.triton.tiles import power_of_two

#: Elements of a program and its warps: 16 elements a thread keep several 16-byte loads in flight.
_TILE_ELEMENTS = 2048
#: Channels of a tile whose positions are neighbours instead.
_NARROW = 16
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


def activation(x: Tensor, function: str) -> Tensor:
    """Computes :func:`diffkern.ops.gelu`, ``silu`` and ``quick_gelu``."""
    return _run(None, x, torch.empty_like(x), function, False)


def glu(value: Tensor, gate: Tensor, function: str, round_activation: bool) -> Tensor:
    """Computes :func:`diffkern.ops.glu`."""
    y = torch.empty_like(value, dtype=torch.promote_types(value.dtype, gate.dtype))
    return _run(value, gate, y, function, round_activation)


def channel_glu(x: Tensor, bias: Tensor | None, function: str, round_each: bool) -> Tensor:
    """Computes :func:`diffkern.ops.channel_glu`."""
    value, gate = x.chunk(2, 1)
    y = torch.empty_like(value)
    if y.numel() == 0:
        return y
    channels = value.shape[1]
    plan = _plan_channels(value.shape, y.stride(), x.stride(), stride_of(bias), function, round_each)
    if plan is None:
        return y.copy_(channel_glu(x.contiguous(), bias, function, round_each))
    gate_bias = None if bias is None else bias[channels:]
    with device_guard(x.device):
        launch(plan, channel_glu_kernel, (value, gate, bias, gate_bias, y), x.device)
    return y


@lru_cache(maxsize=4096)
def _plan_channels(
    shape: tuple[int, ...], y_strides: tuple[int, ...], x_strides: tuple[int, ...], b_stride: int, *options: str | bool
) -> Plan | None:
    """Plans the launch for a non-empty result of one shape; None if its positions need more than two loops."""
    channels, sizes = shape[1], (shape[0], *shape[2:])
    loops = merge_loops(sizes, [(strides[0], *strides[2:]) for strides in (y_strides, x_strides)])
    if loops is None or loops.sizes[2] > 1:
        return None
    cols = min(power_of_two(channels), _TILE_ELEMENTS if y_strides[1] == 1 else _NARROW)
    rows = min(power_of_two(loops.sizes[0]), _TILE_ELEMENTS // cols)
    col_tiles, row_tiles = -(-channels // cols), -(-loops.sizes[0] // rows)
    (y0, y1, _), (x0, x1, _) = loops.strides
    rest = (channels, loops.sizes[0], col_tiles, row_tiles, y_strides[1], y0, y1, x_strides[1], x0, x1, b_stride)
    return Plan((col_tiles * row_tiles * loops.sizes[1],), (*rest, *options, rows, cols), _OPTIONS)


def _run(value: Tensor | None, gate: Tensor, y: Tensor, function: str, round_activation: bool) -> Tensor:
    if y.numel() == 0:
        return y
    strides = y.stride(), gate.stride(), gate.stride() if value is None else value.stride()
    plan = _plan(gate.shape, strides, function, round_activation)
    if plan is None:
        dense = None if value is None else value.contiguous(), gate.contiguous(), y.contiguous()
        return y.copy_(_run(*dense, function, round_activation))
    with device_guard(gate.device):
        launch(plan, activation_kernel, (value, gate, y), gate.device)
    return y


@lru_cache(maxsize=4096)
def _plan(shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...], *options: str | bool) -> Plan | None:
    """Plans the launch for non-empty tensors of one shape, output first; None if they need more than three loops."""
    loops = merge_loops(shape, strides)
    if loops is None:
        return None
    size0, size1, size2 = loops.sizes
    cols = min(power_of_two(size0), _TILE_ELEMENTS)
    rows = min(power_of_two(size1), _TILE_ELEMENTS // cols)
    col_tiles, row_tiles = -(-size0 // cols), -(-size1 // rows)
    flat = tuple(stride for triple in loops.strides for stride in triple)
    rest = (size0, size1, col_tiles, row_tiles, *flat, *options, rows, cols)
    return Plan((col_tiles * row_tiles * size2,), rest, _OPTIONS)
