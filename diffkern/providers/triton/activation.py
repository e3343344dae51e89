"""Activations and gated units by Triton: output, geometry and launch. The arithmetic is in ``activation_kernels``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from diffkern.providers.triton.activation_kernels import activation_kernel, glu_kernel
from diffkern.providers.triton.launching import device_guard
from diffkern.providers.triton.rows import merge_loops

#: Elements of a program and its warps: 16 elements a thread keep several 16-byte loads in flight.
_TILE_ELEMENTS = 2048
_NUM_WARPS = 4


def activation(x: Tensor, function: str) -> Tensor:
    """Computes :func:`diffkern.ops.gelu`, ``silu`` and ``quick_gelu``."""
    y = torch.empty_like(x)
    if y.numel() == 0:
        return y
    launch = launch_for(x.shape, (y.stride(), x.stride()))
    if launch is None:
        return y.copy_(activation(x.contiguous(), function))
    with device_guard(x.device):
        activation_kernel[launch.grid](
            x, y, *launch.geometry, function, launch.rows, launch.cols,
            num_warps=_NUM_WARPS, enable_fp_fusion=True,
        )  # fmt: skip
    return y


def glu(value: Tensor, gate: Tensor, function: str, round_activation: bool) -> Tensor:
    """Computes :func:`diffkern.ops.glu`."""
    y = torch.empty_like(value, dtype=torch.promote_types(value.dtype, gate.dtype))
    if y.numel() == 0:
        return y
    launch = launch_for(value.shape, (y.stride(), value.stride(), gate.stride()))
    if launch is None:
        return y.copy_(glu(value.contiguous(), gate.contiguous(), function, round_activation))
    with device_guard(value.device):
        glu_kernel[launch.grid](
            value, gate, y, *launch.geometry, function, round_activation, launch.rows, launch.cols,
            num_warps=_NUM_WARPS, enable_fp_fusion=True,
        )  # fmt: skip
    return y


@dataclass(frozen=True)
class Launch:
    """What a launch needs beyond the tensors.

    Attributes:
        grid: Number of programs.
        geometry: The kernels' arguments from ``size0`` to the last stride.
        rows: Rows of a tile, a power of two.
        cols: Columns of a tile, a power of two.
    """

    grid: tuple[int]
    geometry: tuple[int, ...]
    rows: int
    cols: int


@lru_cache(maxsize=4096)
def launch_for(shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...]) -> Launch | None:
    """Plans the launch for non-empty tensors of one shape, output first; None if they need more than three loops."""
    loops = merge_loops(shape, strides)
    if loops is None:
        return None
    size0, size1, size2 = loops.sizes
    cols = min(_power_of_two(size0), _TILE_ELEMENTS)
    rows = min(_power_of_two(size1), _TILE_ELEMENTS // cols)
    col_tiles, row_tiles = -(-size0 // cols), -(-size1 // rows)
    flat = tuple(stride for triple in loops.strides for stride in triple)
    return Launch((col_tiles * row_tiles * size2,), (size0, size1, col_tiles, row_tiles, *flat), rows, cols)


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
