"""group_norm_silu by Triton: output, geometry and launches.

The arithmetic is in ``group_norm_kernels``.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from diffkern.providers.eager.precision import empty_output
from diffkern.providers.triton.group_norm_kernels import group_normalise_kernel, group_statistics_kernel
from diffkern.providers.triton.launching import Plan, device_guard, launch
from diffkern.providers.triton.rows import merge_loops, stride_of, strides_of
from diffkern.providers.triton.tiles import power_of_two

#: Elements of a tile of a group and its warps: 32 elements a thread.
_TILE_ELEMENTS = 4096
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
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
    y = empty_output(x, None, preserve_strides)
    if y.numel() == 0:
        return y
    options = (*strides_of(add), stride_of(weight), stride_of(bias), float(eps), silu)
    planned = _plans(x.shape, x.stride(), y.stride(), num_groups, per_frame, *options)
    if planned is None:
        dense = group_norm_silu(x.contiguous(), num_groups, weight, bias, add, eps, silu, per_frame, False)
        return y.copy_(dense)
    statistics, normalise, parts = planned
    partial = torch.empty(parts * 3, dtype=torch.float32, device=x.device)
    with device_guard(x.device):
        launch(statistics, group_statistics_kernel, (x, add, partial), x.device)
        launch(normalise, group_normalise_kernel, (x, add, partial, weight, bias, y), x.device)
    return y


@lru_cache(maxsize=1024)
def _plans(
    shape: tuple[int, ...], x_strides: tuple[int, ...], y_strides: tuple[int, ...], num_groups: int, per_frame: bool,
    a_n: int, a_c: int, w_stride: int, b_stride: int, eps: float, silu: bool,
) -> tuple[Plan, Plan, int] | None:  # fmt: skip
    """Plans the launches for a non-empty input; None if its positions need more than three loops.

    Returns:
        The launch for statistics, that for the result, and how many parts of groups there are between them.
    """
    first = 3 if per_frame else 2
    loops = merge_loops(shape[first:], (y_strides[first:], x_strides[first:]))  # in the output's memory order
    if loops is None:
        return None
    count = loops.sizes[0] * loops.sizes[1] * loops.sizes[2]
    of_group = shape[1] // num_groups
    groups, columns = 1, min(power_of_two(of_group), _MOST_COLUMNS)
    if loops.sizes[0] == 1 or x_strides[1] < loops.strides[1][0]:  # the channels are neighbours
        if 2 * of_group <= _ALONG:  # a power of two, as all lengths in Triton
            groups = min(1 << (_ALONG // of_group).bit_length() - 1, power_of_two(num_groups))
            columns = power_of_two(groups * of_group)
        positions = min(power_of_two(count), _TILE_ELEMENTS // columns)
    else:
        positions = min(power_of_two(count), max(_TILE_ELEMENTS // columns, _ALONG))
        columns = min(columns, _TILE_ELEMENTS // positions)
    channel_tiles = -(-of_group // columns) if groups == 1 else 1
    tiles = channel_tiles * -(-count // positions)
    parts = min(_MOST_PARTS, -(-tiles // _TILES_PER_PART))
    frames = shape[2] if per_frame else 1
    group_tiles = -(-num_groups // groups)

    def geometry(strides: tuple[int, ...]) -> tuple[int, ...]:
        return strides[0], strides[2] if per_frame else 0, strides[1]

    samples = shape[0] * frames
    walk = (num_groups, of_group, count, channel_tiles, tiles, parts, frames, group_tiles)
    x_geometry = (*geometry(x_strides), *loops.sizes[:2], *loops.strides[1], a_n, a_c)
    y_geometry = (*geometry(y_strides), *loops.strides[0])
    tile = (loops.nested, positions, groups, columns)
    finish = (w_stride, b_stride, eps, silu, power_of_two(parts))
    return (
        Plan((samples * group_tiles * parts,), (*walk, *x_geometry, *tile), _OPTIONS),
        Plan((samples * group_tiles * tiles,), (*walk, *x_geometry, *y_geometry, *finish, *tile), _OPTIONS),
        samples * num_groups * parts,
    )
