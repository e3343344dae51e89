"""add_norm_silu_pad by Triton: output, geometry and launch of ``add_norm_silu_pad_kernels``."""

from __future__ import annotations

import torch
from torch import Tensor

from diffkern.providers.triton.add_norm_silu_pad_kernels import add_norm_silu_pad_kernel
from diffkern.providers.triton.launching import device_guard, for_rows
from diffkern.providers.triton.rows import stride_of, strides_of
from diffkern.providers.triton.tiles import power_of_two, warps_for

#: For four warps, where the channels are few enough, or nothing is summed over them: then a program takes a slice.
_TILE_ELEMENTS = 4096
_MOST_OF_A_SLICE = 1024
#: Positions of a tile where they, and not the channels, are neighbours in memory: 32 bytes of a half dtype.
_FEWEST_NEIGHBOURS = 16


def add_norm_silu_pad(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, scale: Tensor | None, shift: Tensor | None, eps: float,
    norm: bool, silu: bool, front: int, back: int, channels_last: bool,
) -> Tensor:  # fmt: skip
    """Computes :func:`diffkern.ops.add_norm_silu_pad`."""
    batch, channels, frames, height, width = x.shape
    out_frames = front + frames + back
    y = torch.empty(
        (batch, channels, out_frames, height, width),
        dtype=x.dtype,
        device=x.device,
        memory_format=torch.channels_last_3d if channels_last else torch.contiguous_format,
    )
    if y.numel() == 0:
        return y
    x = _with_rows(x)
    residual = None if residual is None else _with_rows(residual)
    columns = max(power_of_two(channels), 16)
    columns = columns if norm else min(columns, _MOST_OF_A_SLICE)
    positions = max(_TILE_ELEMENTS // columns, 1)
    if not channels_last or x.stride(1) > 1:
        positions = max(positions, _FEWEST_NEIGHBOURS)
    tiles = -(-height * width // positions)
    with device_guard(x.device):
        for_rows(add_norm_silu_pad_kernel, channels)[(batch * out_frames * tiles, -(-channels // columns))](
            x, bias, residual, scale, shift, y,
            channels, height * width, tiles, frames, out_frames, front,
            *_strides(x), *((0, 0, 0, 0) if residual is None else _strides(residual)), *_strides(y),
            stride_of(bias), *strides_of(scale), *strides_of(shift), eps, norm, silu, positions, columns,
            num_warps=warps_for(positions * columns), enable_fp_fusion=True,
        )  # fmt: skip
    return y


def _with_rows(x: Tensor) -> Tensor:
    """``x``, whose positions within a frame lie at equal distances; a copy of it if they do not."""
    _, _, _, height, width = x.shape
    return x if height == 1 or width == 1 or x.stride(3) == width * x.stride(4) else x.contiguous()


def _strides(x: Tensor) -> tuple[int, int, int, int]:
    """Elements between samples, channels, frames, and positions of a frame."""
    sample, channel, frame, row, column = x.stride()
    return sample, channel, frame, row if x.shape[4] == 1 else column
