"""Which tile of the input one program works on: rows x columns, and how many warps share it.

Two ladders. Where the elements of a row are neighbours in memory, a program takes whole rows and its warps
lie along the row. Where instead the rows are neighbours (channel-first tensors, transposed views), a program
takes many rows, so that the loads of a warp still fall on consecutive addresses.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """The share of one program.

    Attributes:
        rows: Rows per program, a power of two.
        cols: Columns held at once, a power of two; the program loops over a row that is longer.
        num_warps: Warps per program.
    """

    rows: int
    cols: int
    num_warps: int


#: 32 elements for each of 32 lanes: fp32 fits the registers, and each lane has several loads in flight.
_ELEMENTS_PER_WARP = 1024
_MOST_WARPS = 16

# (widest row, rows). Short rows share a program, to fill four warps.
_ALONG_ROWS = ((64, 64), (128, 32), (256, 16), (512, 8), (1024, 4), (16384, 1))
_LONG_ROW = (1, 8192)

# (widest row, rows) for rows that are neighbours in memory: at least 16 of them, 32 bytes of a half dtype.
_ACROSS_ROWS = ((128, 64), (512, 32), (1024, 16))
_LONG_ROW_ACROSS = (64, 64)

#: A tile may leave this share of its rows unused, where the rows do not divide evenly.
_TOLERATED_WASTE = 0.25
_FEWEST_ROWS = 8


def choose_tile(row_length: int, rows: int, *, rows_are_neighbours: bool) -> Tile:
    """Chooses the tile for ``rows`` rows of the innermost loop, ``row_length`` long; both at least 1."""
    most_rows, cols = _LONG_ROW_ACROSS if rows_are_neighbours else _LONG_ROW
    for widest, enough_rows in _ACROSS_ROWS if rows_are_neighbours else _ALONG_ROWS:
        if row_length <= widest:
            most_rows, cols = enough_rows, max(_power_of_two(row_length), 16)
            break
    tile_rows = _fit_rows(most_rows, rows)
    return Tile(tile_rows, cols, min(max(tile_rows * cols // _ELEMENTS_PER_WARP, 1), _MOST_WARPS))


def _fit_rows(most: int, rows: int) -> int:
    """Shrinks the rows of a tile while too much of it would lie outside, as with 20 heads in tiles of 32."""
    fit = min(most, _power_of_two(rows))
    while fit > _FEWEST_ROWS and (1 - _TOLERATED_WASTE) * (-(-rows // fit) * fit) > rows:
        fit //= 2
    return fit


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
