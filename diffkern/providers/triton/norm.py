"""rms_norm and layer_norm by Triton: output, geometry and launch. The arithmetic is in ``norm_kernels``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton.language as tl
from torch import Tensor

from diffkern.providers.triton.launching import device_guard, for_rows
from diffkern.providers.triton.norm_kernels import layer_norm_kernel, rms_norm_kernel
from diffkern.providers.triton.rows import merge_rows
from diffkern.providers.triton.tiles import Tile, choose_tile

# Fused multiply-add is asked for at each launch, since Triton's default differs between versions.

# The kernels compute in float32, where rounding to a wider dtype changes nothing.
_ROUND_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float32,
}


def rms_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, weight_offset: float,
    round_dtype: torch.dtype | None, out_dtype: torch.dtype | None, clamp_eps: bool, preserve_strides: bool,
) -> Tensor:  # fmt: skip
    """Computes :func:`diffkern.ops.rms_norm` over the last dimension.

    Raises:
        TypeError: ``round_dtype`` is none of float16, bfloat16, float32 and float64.
    """
    if round_dtype is not None and round_dtype not in _ROUND_DTYPES:
        raise TypeError(f"the Triton rms_norm cannot round to {round_dtype}: use the eager provider for it")
    y = _empty_output(x, out_dtype, preserve_strides)
    if y.numel() == 0:
        return y
    launch = launch_for(x.shape, x.stride(), y.stride())
    if launch is None:
        dense = rms_norm(x.contiguous(), weight, bias, eps, weight_offset, round_dtype, out_dtype, clamp_eps, False)
        return y.copy_(dense)
    with device_guard(x.device):
        for_rows(rms_norm_kernel, x.shape[-1])[launch.grid](
            x, weight, bias, y, *launch.geometry, _stride(weight), _stride(bias), eps, weight_offset,
            None if round_dtype is None else _ROUND_DTYPES[round_dtype], clamp_eps,
            launch.nested, launch.tile.rows, launch.tile.cols, launch.steps,
            num_warps=launch.tile.num_warps, enable_fp_fusion=True,
        )  # fmt: skip
    return y


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out_dtype: torch.dtype | None,
    preserve_strides: bool,
) -> Tensor:  # fmt: skip
    """Computes :func:`diffkern.ops.layer_norm` over the last dimension."""
    y = _empty_output(x, out_dtype, preserve_strides)
    if y.numel() == 0:
        return y
    launch = launch_for(x.shape, x.stride(), y.stride())
    if launch is None:
        return y.copy_(layer_norm(x.contiguous(), weight, bias, eps, out_dtype, False))
    with device_guard(x.device):
        for_rows(layer_norm_kernel, x.shape[-1])[launch.grid](
            x, weight, bias, y, *launch.geometry, _stride(weight), _stride(bias), eps,
            launch.nested, launch.tile.rows, launch.tile.cols, launch.steps,
            num_warps=launch.tile.num_warps, enable_fp_fusion=True,
        )  # fmt: skip
    return y


@dataclass(frozen=True)
class Launch:
    """What a launch needs beyond the tensors and the numbers of the op.

    Attributes:
        grid: Number of programs.
        geometry: The kernels' arguments from ``row_length`` to ``y_stride``.
        nested: Whether the rows need more than one loop.
        tile: The share of one program.
        steps: Blocks of ``tile.cols`` columns in a row.
    """

    grid: tuple[int]
    geometry: tuple[int, ...]
    nested: bool
    tile: Tile
    steps: int


@lru_cache(maxsize=4096)
def launch_for(shape: tuple[int, ...], x_strides: tuple[int, ...], y_strides: tuple[int, ...]) -> Launch | None:
    """Plans the launch for a non-empty input and output; None if their rows need more than three loops."""
    rows = merge_rows(shape, x_strides, y_strides)
    if rows is None:
        return None
    size0, size1, size2 = rows.sizes
    row_length = shape[-1]
    # A single element may carry any stride; 1 spares a variant of the kernel.
    x_stride, y_stride = (x_strides[-1], y_strides[-1]) if row_length > 1 else (1, 1)
    neighbours = size0 > 1 and 0 < rows.x_strides[0] < x_stride
    tile = choose_tile(row_length, rows_are_neighbours=neighbours)
    tiles = -(-size0 // tile.rows)
    geometry = (row_length, size0, size1, tiles, *rows.x_strides, x_stride, *rows.y_strides, y_stride)
    return Launch((tiles * size1 * size2,), geometry, rows.nested, tile, -(-row_length // tile.cols))


def _empty_output(x: Tensor, out_dtype: torch.dtype | None, preserve_strides: bool) -> Tensor:
    memory_format = torch.preserve_format if preserve_strides else torch.contiguous_format
    return torch.empty_like(x, dtype=out_dtype, memory_format=memory_format)


def _stride(parameter: Tensor | None) -> int:
    return 1 if parameter is None else parameter.stride(0)
