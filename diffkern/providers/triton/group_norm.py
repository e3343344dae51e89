"""group_norm_silu by Triton: output, geometry and launches.

The arithmetic is in ``group_norm_kernels``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from diffkern.providers.triton.group_norm_kernels import (
    group_normalise_kernel,
    group_statistics_kernel,
)
from diffkern.providers.triton.launching import device_guard
from diffkern.providers.triton.rows import merge_loops

#: Elements of a tile of a group and its warps: 32 elements a thread.
_TILE_ELEMENTS = 4096
_NUM_WARPS = 4
#: Consecutive elements of a tile that make full use of memory transactions, whatever the dtype.
_ALONG = 64
_MOST_COLUMNS = 128
#: A group is shared among so many programs that even a few groups fill a GPU ...
_MOST_PARTS = 64
#: ... but each has this many tiles to sum, if there are as many.
_TILES_PER_PART = 4


def group_norm_silu(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    add: Tensor | None,
    eps: float,
    silu: bool,
    per_frame: bool,
    preserve_strides: bool,
) -> Tensor:
    """Computes :func:`diffkern.ops.group_norm_silu`."""
    y = torch.empty_like(x, memory_format=torch.preserve_format if preserve_strides else torch.contiguous_format)
    if y.numel() == 0:
        return y
    launch = group_launch_for(x.shape, x.stride(), y.stride(), num_groups, per_frame)
    if launch is None:
        dense = group_norm_silu(x.contiguous(), num_groups, weight, bias, add, eps, silu, per_frame, False)
        return y.copy_(dense)
    partial = torch.empty(launch.samples * num_groups * launch.parts * 3, dtype=torch.float32, device=x.device)
    fixed = (launch.nested, launch.positions, launch.groups, launch.columns)
    with device_guard(x.device):
        group_statistics_kernel[(launch.samples * launch.group_tiles * launch.parts,)](
            x, add, partial, *launch.walk, *launch.x_geometry, *_strides(add), *fixed,
            num_warps=_NUM_WARPS, enable_fp_fusion=True,
        )  # fmt: skip
        group_normalise_kernel[(launch.samples * launch.group_tiles * launch.tiles,)](
            x, add, partial, weight, bias, y, *launch.walk, *launch.x_geometry, *_strides(add), *launch.y_geometry,
            _stride(weight), _stride(bias), eps, silu, _power_of_two(launch.parts), *fixed,
            num_warps=_NUM_WARPS, enable_fp_fusion=True,
        )  # fmt: skip
    return y


@dataclass(frozen=True)
class GroupLaunch:
    """What the two launches of a group norm need beyond the tensors and the numbers of the op.

    Attributes:
        samples: Independent samples, each with all groups: the batch, or batch times frames.
        group_tiles: Programs side by side that share the groups of a sample.
        tiles: Tiles of a group.
        parts: Shares in which the statistics of a group are computed.
        walk: The kernels' arguments from ``num_groups`` to ``group_tiles``.
        x_geometry: Those from ``x_n0`` to ``x2``.
        y_geometry: Those from ``y_n0`` to ``y2``.
        nested: Whether the positions need more than one loop.
        positions: Positions of a tile.
        groups: Groups of a tile.
        columns: Channels of a tile, all groups together.
    """

    samples: int
    group_tiles: int
    tiles: int
    parts: int
    walk: tuple[int, ...]
    x_geometry: tuple[int, ...]
    y_geometry: tuple[int, ...]
    nested: bool
    positions: int
    groups: int
    columns: int


@lru_cache(maxsize=1024)
def group_launch_for(
    shape: tuple[int, ...],
    x_strides: tuple[int, ...],
    y_strides: tuple[int, ...],
    num_groups: int,
    per_frame: bool,
) -> GroupLaunch | None:
    """Plans the launches for a non-empty input; None if its positions need more than three loops."""
    first = 3 if per_frame else 2
    loops = merge_loops(shape[first:], (y_strides[first:], x_strides[first:]))  # in the output's memory order
    if loops is None:
        return None
    count = loops.sizes[0] * loops.sizes[1] * loops.sizes[2]
    of_group = shape[1] // num_groups
    groups, columns = 1, min(_power_of_two(of_group), _MOST_COLUMNS)
    if loops.sizes[0] == 1 or x_strides[1] < loops.strides[1][0]:  # the channels are neighbours
        if 2 * of_group <= _ALONG:  # a power of two, as all lengths in Triton
            groups = min(1 << (_ALONG // of_group).bit_length() - 1, _power_of_two(num_groups))
            columns = _power_of_two(groups * of_group)
        positions = min(_power_of_two(count), _TILE_ELEMENTS // columns)
    else:
        positions = min(_power_of_two(count), max(_TILE_ELEMENTS // columns, _ALONG))
        columns = min(columns, _TILE_ELEMENTS // positions)
    channel_tiles = -(-of_group // columns) if groups == 1 else 1
    tiles = channel_tiles * -(-count // positions)
    parts = min(_MOST_PARTS, -(-tiles // _TILES_PER_PART))
    frames = shape[2] if per_frame else 1
    group_tiles = -(-num_groups // groups)

    def geometry(strides: tuple[int, ...]) -> tuple[int, ...]:
        return strides[0], strides[2] if per_frame else 0, strides[1]

    return GroupLaunch(
        samples=shape[0] * frames,
        group_tiles=group_tiles,
        tiles=tiles,
        parts=parts,
        walk=(num_groups, of_group, count, channel_tiles, tiles, parts, frames, group_tiles),
        x_geometry=(*geometry(x_strides), *loops.sizes[:2], *loops.strides[1]),
        y_geometry=(*geometry(y_strides), *loops.strides[0]),
        nested=loops.nested,
        positions=positions,
        groups=groups,
        columns=columns,
    )


def _stride(parameter: Tensor | None) -> int:
    return 1 if parameter is None else parameter.stride(0)


def _strides(modulation: Tensor | None) -> tuple[int, int]:
    return (0, 1) if modulation is None else (modulation.stride(0), modulation.stride(1))


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
