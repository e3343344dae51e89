"""Activations into rows of fp8, by Triton: outputs, geometry and launch of ``fp8_kernels``."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from diffkern.providers.eager.fp8 import E4M3
from diffkern.providers.triton.activation import glu
from diffkern.providers.triton.fp8_kernels import activation_fp8_kernel, glu_and_fp8_kernel
from diffkern.providers.triton.launching import Plan, device_guard, launch
from diffkern.providers.triton.rows import merge_loops
from diffkern.providers.triton.tiles import choose_tile


def activation_fp8(x: Tensor, front: Tensor | None, function: str) -> tuple[Tensor, Tensor]:
    """Computes :func:`diffkern.ops.activation_fp8`."""
    ahead = 0 if front is None else front.shape[-1]
    values, scales = rows_of_8_bits(x, torch.Size((*x.shape[:-1], ahead + x.shape[-1])))
    if x.numel():
        plan = _plan(x.shape, x.stride(), ahead, None if front is None else front.stride(), function)
        if plan is None:
            x, front = x.contiguous(), None if front is None else front.contiguous()
            plan = _plan(x.shape, x.stride(), ahead, None if front is None else front.stride(), function)
            assert plan is not None
        device = x.device
        with device_guard(device):
            launch(plan, activation_fp8_kernel, (x, front, values, scales), device)
    return values, scales


@lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, ...], strides: tuple[int, ...], ahead: int, front: tuple[int, ...] | None, function: str
) -> Plan | None:
    """Plans the launch for a non-empty input; None if its rows, or those in front, do not lie at equal distances."""
    length, front = ahead + shape[-1], strides if front is None else front
    walk = _rows(shape, strides, front)
    if walk is None:
        return None
    rows, x_row, front_row = walk
    tile = choose_tile(length, rows_are_neighbours=False)
    rest = (
        *(rows, length, ahead, x_row, strides[-1], front_row, front[-1]),
        *(function, tile.rows, tile.cols, -(-length // tile.cols)),
    )
    return Plan((-(-rows // tile.rows),), rest, {"num_warps": tile.num_warps})


def glu_and_fp8(value: Tensor, gate: Tensor, function: str, round_activation: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Computes :func:`diffkern.ops.glu_and_fp8`."""
    y = torch.empty_like(value, dtype=torch.promote_types(value.dtype, gate.dtype))
    plan = _plan_glu(y.shape, value.stride(), gate.stride(), function, round_activation) if y.is_contiguous() else None
    if plan is None or y.numel() == 0:
        y = glu(value, gate, function, round_activation)
        return (y, *quantize_rows(y))
    rows = rows_of_8_bits(y, y.shape)
    with device_guard(y.device):
        launch(plan, glu_and_fp8_kernel, (value, gate, y, *rows), y.device)
    return (y, *rows)


@lru_cache(maxsize=4096)
def _plan_glu(
    shape: tuple[int, ...], value: tuple[int, ...], gate: tuple[int, ...], *options: str | bool
) -> Plan | None:
    """Plans the launch for rows that lie at equal distances; None for others, and for longer ones than a tile.

    Those would be read twice, both operands of them: two passes read less.
    """
    walk, tile = _rows(shape, value, gate), choose_tile(shape[-1], rows_are_neighbours=False)
    if walk is None or tile.cols < shape[-1]:
        return None
    rows, value_row, gate_row = walk
    rest = rows, shape[-1], value_row, value[-1], gate_row, gate[-1], *options, tile.rows, tile.cols
    return Plan((-(-rows // tile.rows),), rest, {"num_warps": tile.num_warps})


def _rows(shape: tuple[int, ...], *strides: tuple[int, ...]) -> tuple[int, int, int] | None:
    """How many rows two tensors have, and how far these are apart in each; None if the distances differ."""
    dense = torch.empty(shape, device="meta").stride()
    loops = merge_loops(shape[:-1], [own[:-1] for own in (dense, *strides)])
    if loops is None or loops.nested:
        return None
    return loops.sizes[0], loops.strides[1][0], loops.strides[2][0]


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Brings each row into fp8 as it is."""
    return activation_fp8(x, None, "identity")


def rows_of_8_bits(x: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Uninitialised values in e4m3 of a shape, and the scale of each row, on the device of ``x``."""
    return empty(x, shape, E4M3), x.new_empty((*shape[:-1], 1), dtype=torch.float32)


def empty(x: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """``x.new_empty(shape, dtype=dtype)``, in half the time where the shape is that of ``x``."""
    if x.shape == shape:
        return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    return x.new_empty(shape, dtype=dtype)
