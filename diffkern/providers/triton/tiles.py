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

#: The longest row that one program holds at once, where its elements are neighbours.
LONGEST_TILE = 16384

# (widest row, rows). Short rows share a program, to fill four warps.
_ALONG_ROWS = ((64, 64), (128, 32), (256, 16), (512, 8), (1024, 4), (LONGEST_TILE, 1))
_LONG_ROW = (1, 8192)

# (widest row, rows) for rows that are neighbours in memory: at least 16 of them, 32 bytes of a half dtype.
_ACROSS_ROWS = ((128, 64), (512, 32), (1024, 16))
_LONG_ROW_ACROSS = (64, 64)


def choose_tile(row_length: int, *, rows_are_neighbours: bool) -> Tile:
    """Chooses the tile for rows of ``row_length`` elements, at least 1.

    The number of rows has no say: a sample must come out the same to the bit whatever batch it is in, and the
    order of a sum follows the tile.
    """
    rows, cols = _LONG_ROW_ACROSS if rows_are_neighbours else _LONG_ROW
    for widest, enough_rows in _ACROSS_ROWS if rows_are_neighbours else _ALONG_ROWS:
        if row_length <= widest:
            rows, cols = enough_rows, max(power_of_two(row_length), 16)
            break
    return Tile(rows, cols, warps_for(rows * cols))


def warps_for(elements: int) -> int:
    """How many warps share a tile of so many elements."""
    return min(power_of_two(max(elements // _ELEMENTS_PER_WARP, 1)), _MOST_WARPS)


def power_of_two(value: int) -> int:
    """The least power of two that is not below ``value``, at least 1."""
    return 1 << (value - 1).bit_length()
