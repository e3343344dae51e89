"""Which tile of the input one program works on: rows x columns, and how many warps share it.

Two ladders. Where the elements of a row are neighbours in memory, a program takes whole rows and its warps lie
along the row. Where instead the rows are neighbours (channel-first tensors, transposed views), a program takes
many rows, so that the loads of a warp still fall on consecutive addresses.
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


# (widest row, rows, warps): 32 elements per thread of a 32-lane warp, which keeps a row of fp32 in registers
# and several 16-byte loads per thread in flight; short rows share a program to fill it.
_ALONG_ROWS = (
    (64, 64, 4),
    (128, 32, 4),
    (256, 16, 4),
    (512, 8, 4),
    (1024, 4, 4),
    (2048, 1, 2),
    (4096, 1, 4),
    (8192, 1, 8),
    (16384, 1, 16),
)
_LONG_ROW = Tile(rows=1, cols=8192, num_warps=8)

# As above, for rows that are neighbours in memory: at least 16 of them, 32 bytes of a half dtype.
_ACROSS_ROWS = ((64, 64, 4), (128, 64, 8), (256, 32, 8), (512, 32, 16), (1024, 16, 16))
_LONG_ROW_ACROSS = Tile(rows=64, cols=64, num_warps=4)

#: A tile may leave this share of its rows unused, where the rows do not divide evenly.
_TOLERATED_WASTE = 0.25
_FEWEST_ROWS = 8


def choose_tile(row_length: int, rows: int, *, rows_are_neighbours: bool) -> Tile:
    """Chooses the tile for ``rows`` rows (of the innermost loop) of ``row_length`` elements, both at least 1."""
    for widest, most_rows, num_warps in _ACROSS_ROWS if rows_are_neighbours else _ALONG_ROWS:
        if row_length <= widest:
            cols = max(_power_of_two(row_length), 16)
            return Tile(_fit_rows(most_rows, rows), cols, num_warps)
    long_row = _LONG_ROW_ACROSS if rows_are_neighbours else _LONG_ROW
    return Tile(_fit_rows(long_row.rows, rows), long_row.cols, long_row.num_warps)


def _fit_rows(most: int, rows: int) -> int:
    """Shrinks the rows of a tile as long as too much of it would lie outside, as with 24 heads in tiles of 32."""
    fit = min(most, _power_of_two(rows))
    while fit > _FEWEST_ROWS and (1 - _TOLERATED_WASTE) * (-(-rows // fit) * fit) > rows:
        fit //= 2
    return fit


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
