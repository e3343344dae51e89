"""The Triton kernels of group_norm_silu. Imported at first use, since this needs Triton.

A group is walked in tiles of ``POSITIONS`` x ``COLS`` elements. The columns are channels: some of one group where the
positions are neighbours in memory, all those of ``GROUPS`` groups where the channels are. Two passes: the first
leaves, for each of ``parts`` shares of a group, the number of elements, their mean and the sum of squares around it;
the second combines them and normalises. All values are taken relative to the first element of their group, so that
a mean far from zero costs no accuracy. Which share an element belongs to depends on the shape of a sample alone, and
everything is added in a fixed order.

Offsets are 64-bit, since a stride times an index passes 2^31 in tensors that models really have.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# The arguments of a kernel have the types that Triton gives them, which mypy does not know.
from __future__ import annotations

import triton
import triton.language as tl

from diffkern.providers.triton.activation_kernels import sigmoid_product

# Plain counts: specialising on them would only compile more variants.
_COUNTS = ["channel_tiles", "tiles", "parts", "samples1", "group_tiles", "size1"]


@triton.jit
def _spatial_offsets(position, size0, size1, stride0, stride1, stride2, NESTED: tl.constexpr):
    """Offsets of positions, which are numbered along up to three loops."""
    if NESTED:
        index0 = position % size0
        outer = position // size0
        return index0 * stride0 + (outer % size1) * stride1 + (outer // size1) * stride2
    return position * stride0


@triton.jit
def _columns(group_tile, tile, channel_tiles, channels, num_groups, GROUPS: tl.constexpr, COLS: tl.constexpr):
    """For each column of a tile its group (counted within the tile), its channel, and whether that exists."""
    column = tl.arange(0, COLS)
    if GROUPS == 1:
        within = (tile % channel_tiles) * COLS + column
        return column * 0, group_tile.to(tl.int64) * channels + within, within < channels
    first = group_tile * GROUPS
    groups = tl.minimum(GROUPS, num_groups - first)
    # Columns past the last group are counted to it; nothing comes from them.
    group = tl.minimum(column // channels, GROUPS - 1)
    return group, first.to(tl.int64) * channels + column, column < groups * channels


@triton.jit
def _pivots(x_ptr, group_tile, group, channels, stride, inside, GROUPS: tl.constexpr):
    """The first element of the group of each column."""
    channel = (group_tile * GROUPS + group).to(tl.int64) * channels
    return tl.load(x_ptr + channel * stride, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _added(a_ptr, stride, group_tile, group, channel, channels, inside, GROUPS: tl.constexpr):
    """What is added to each column, less what is added to the first channel of its group: values are relative to it."""
    first = (group_tile * GROUPS + group).to(tl.int64) * channels
    own = tl.load(a_ptr + channel * stride, mask=inside, other=0.0).to(tl.float32)
    return own - tl.load(a_ptr + first * stride, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=_COUNTS)
def group_statistics_kernel(
    x_ptr, a_ptr, partial_ptr, num_groups, channels, positions, channel_tiles, tiles, parts, samples1, group_tiles,
    x_n0, x_n1, x_c, size0, size1, x0, x1, x2, a_n, a_c,
    NESTED: tl.constexpr, POSITIONS: tl.constexpr, GROUPS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Writes count, mean and squares of one share of ``GROUPS`` groups, three floats for each."""
    program = tl.program_id(0)
    part = program % parts
    group_tile = (program // parts) % group_tiles
    sample_index = program // parts // group_tiles
    n0 = (sample_index // samples1).to(tl.int64)
    x_ptr += n0 * x_n0 + (sample_index % samples1).to(tl.int64) * x_n1

    # Sums around the mean of the first tile, so that no large terms cancel in the end.
    count = tl.zeros((COLS,), dtype=tl.float32)
    centre = tl.zeros((COLS,), dtype=tl.float32)
    plain = tl.zeros((POSITIONS, COLS), dtype=tl.float32)
    squares = tl.zeros((POSITIONS, COLS), dtype=tl.float32)
    for tile in range(part, tiles, parts):
        group, channel, exists = _columns(group_tile, tile, channel_tiles, channels, num_groups, GROUPS, COLS)
        first = (tile // channel_tiles).to(tl.int64) * POSITIONS
        position = first + tl.arange(0, POSITIONS)
        inside = (position < positions)[:, None] & exists[None, :]
        rows = _spatial_offsets(position, size0, size1, x0, x1, x2, NESTED)
        x = tl.load(x_ptr + rows[:, None] + (channel * x_c)[None, :], mask=inside, other=0.0).to(tl.float32)
        x -= _pivots(x_ptr, group_tile, group, channels, x_c, exists, GROUPS)[None, :]
        if a_ptr is not None:
            x += _added(a_ptr + n0 * a_n, a_c, group_tile, group, channel, channels, exists, GROUPS)[None, :]
        x = tl.where(inside, x, 0.0)
        rows_inside = tl.minimum(positions - first, POSITIONS).to(tl.float32)
        if tile == part:
            centre = tl.sum(x, axis=0) / rows_inside
        x = tl.where(inside, x - centre[None, :], 0.0)
        plain += x
        squares += x * x
        count += tl.where(exists, rows_inside, 0.0)

    plain_sum = tl.sum(plain, axis=0)
    rest = plain_sum / tl.maximum(count, 1.0)
    squares_sum = tl.sum(squares, axis=0) - plain_sum * rest
    mean = centre + rest
    column = tl.arange(0, COLS)
    for local in tl.static_range(GROUPS):
        mine = (tl.minimum(column // channels, GROUPS - 1) == local) if GROUPS > 1 else (column >= 0)
        total = tl.sum(tl.where(mine, count, 0.0), axis=0)
        group_mean = tl.sum(tl.where(mine, count * mean, 0.0), axis=0) / tl.maximum(total, 1.0)
        delta = mean - group_mean
        group_squares = tl.sum(tl.where(mine, squares_sum + count * delta * delta, 0.0), axis=0)
        group = group_tile * GROUPS + local
        if group < num_groups:
            place = partial_ptr + ((sample_index.to(tl.int64) * num_groups + group) * parts + part) * 3
            tl.store(place, total)
            tl.store(place + 1, group_mean)
            tl.store(place + 2, group_squares)


@triton.jit(do_not_specialize=_COUNTS)
def group_normalise_kernel(
    x_ptr, a_ptr, partial_ptr, w_ptr, b_ptr, y_ptr,
    num_groups, channels, positions, channel_tiles, tiles, parts, samples1, group_tiles,
    x_n0, x_n1, x_c, size0, size1, x0, x1, x2, a_n, a_c, y_n0, y_n1, y_c, y0, y1, y2, w_stride, b_stride, eps,
    SILU: tl.constexpr, PARTS: tl.constexpr,
    NESTED: tl.constexpr, POSITIONS: tl.constexpr, GROUPS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Writes one tile of ``silu((x + a - mean) / sqrt(var + eps) * w + b)``."""
    # Backwards: what the first pass read last is still in the cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    tile = program % tiles
    group_tile = (program // tiles) % group_tiles
    sample_index = program // tiles // group_tiles
    n0, n1 = (sample_index // samples1).to(tl.int64), (sample_index % samples1).to(tl.int64)
    x_ptr += n0 * x_n0 + n1 * x_n1
    group, channel, exists = _columns(group_tile, tile, channel_tiles, channels, num_groups, GROUPS, COLS)
    position = (tile // channel_tiles).to(tl.int64) * POSITIONS + tl.arange(0, POSITIONS)
    inside = (position < positions)[:, None] & exists[None, :]
    rows = _spatial_offsets(position, size0, size1, x0, x1, x2, NESTED)
    x = tl.load(x_ptr + rows[:, None] + (channel * x_c)[None, :], mask=inside, other=0.0).to(tl.float32)
    pivot = _pivots(x_ptr, group_tile, group, channels, x_c, exists, GROUPS)

    local = group_tile * GROUPS + tl.arange(0, GROUPS)
    part = tl.arange(0, PARTS)
    place = partial_ptr + (((sample_index.to(tl.int64) * num_groups + local) * parts)[:, None] + part[None, :]) * 3
    there = (local < num_groups)[:, None] & (part < parts)[None, :]
    count = tl.load(place, mask=there, other=0.0)
    part_mean = tl.load(place + 1, mask=there, other=0.0)
    part_squares = tl.load(place + 2, mask=there, other=0.0)
    total = tl.maximum(tl.sum(count, axis=1), 1.0)
    mean = tl.sum(count * part_mean, axis=1) / total
    delta = part_mean - mean[:, None]
    variance = tl.sum(part_squares + count * delta * delta, axis=1) / total
    rate = tl.div_rn(1.0, tl.sqrt_rn(variance + eps))
    # From groups to columns.
    mean = tl.gather(mean, group, 0)
    if a_ptr is not None:
        mean -= _added(a_ptr + n0 * a_n, a_c, group_tile, group, channel, channels, exists, GROUPS)
    rate = tl.gather(rate, group, 0)
    if w_ptr is not None:
        rate *= tl.load(w_ptr + channel * w_stride, mask=exists, other=0.0).to(tl.float32)
    y = ((x - pivot[None, :]) - mean[None, :]) * rate[None, :]
    if b_ptr is not None:
        y += tl.load(b_ptr + channel * b_stride, mask=exists, other=0.0).to(tl.float32)[None, :]
    if SILU:
        y = sigmoid_product(y, y)
    rows = n0 * y_n0 + n1 * y_n1 + _spatial_offsets(position, size0, size1, y0, y1, y2, NESTED)
    tl.store(y_ptr + rows[:, None] + (channel * y_c)[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)
