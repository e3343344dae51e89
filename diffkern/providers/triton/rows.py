"""Where the rows of an input and its output lie in memory, as the few numbers a kernel needs."""

from __future__ import annotations

from dataclasses import dataclass

#: How many nested loops over rows the kernels know.
MAX_LOOPS = 3

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Rows:
    """All leading dimensions of a tensor pair, merged into at most three loops, the innermost first.

    Attributes:
        sizes: Number of iterations of each loop; 1 for the unused ones.
        x_strides: Elements between two iterations, in the input.
        y_strides: The same in the output.
    """

    sizes: Triple
    x_strides: Triple
    y_strides: Triple

    @property
    def nested(self) -> bool:
        """Whether one loop is not enough."""
        return self.sizes[1] > 1 or self.sizes[2] > 1


def merge_rows(shape: tuple[int, ...], x_strides: tuple[int, ...], y_strides: tuple[int, ...]) -> Rows | None:
    """Merges the leading dimensions of a non-empty tensor pair of one shape.

    Rows are independent of each other, so the dimensions may be walked in any order: the output's memory order
    is taken, which keeps neighbouring rows of channel-first tensors neighbours.

    Args:
        shape: The shape, of which the last dimension is the row itself and is left alone.
        x_strides: Strides of the input, in elements; any, 0 included.
        y_strides: Strides of the output.

    Returns:
        The loops, or None if more than three are left.
    """
    dims = [dim for dim in zip(y_strides[:-1], x_strides[:-1], shape[:-1], strict=True) if dim[2] != 1]
    loops: list[tuple[int, int, int]] = []
    for y_stride, x_stride, size in sorted(dims):
        if loops:
            y_inner, x_inner, inner = loops[-1]
            if y_stride == y_inner * inner and x_stride == x_inner * inner:
                loops[-1] = (y_inner, x_inner, inner * size)
                continue
        loops.append((y_stride, x_stride, size))
    if len(loops) > MAX_LOOPS:
        return None
    loops += [(0, 0, 1)] * (MAX_LOOPS - len(loops))
    (y0, x0, n0), (y1, x1, n1), (y2, x2, n2) = loops
    return Rows((n0, n1, n2), (x0, x1, x2), (y0, y1, y2))
