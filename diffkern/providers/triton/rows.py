"""Where the rows of tensors that are walked together lie in memory, as the few numbers a kernel needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

#: How many nested loops over rows the kernels know.
MAX_LOOPS = 3

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Loops:
    """The leading dimensions of several tensors, merged into at most three loops, the innermost first.

    Attributes:
        sizes: Number of iterations of each loop; 1 for the unused ones.
        strides: For each tensor, the elements between two iterations of each loop.
    """

    sizes: Triple
    strides: tuple[Triple, ...]

    @property
    def nested(self) -> bool:
        """Whether one loop is not enough."""
        return self.sizes[1] > 1 or self.sizes[2] > 1


def merge_loops(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> Loops | None:
    """Merges the dimensions that a kernel loops over, none of them of size 0.

    The iterations are independent of each other, so the dimensions may be walked in any order: the memory order of
    the first tensor is taken (the output, where its neighbouring rows should be written together), and that of the
    next ones where it leaves a choice.

    Args:
        sizes: Size of each dimension.
        strides: For each tensor, its strides in elements along those dimensions; any, 0 where it is broadcast.

    Returns:
        The loops, or None if more than three are left.
    """
    dims = [(*steps, size) for size, *steps in zip(sizes, *strides, strict=True) if size != 1]
    loops: list[tuple[int, ...]] = []
    for *steps, size in sorted(dims):
        if loops:
            *inner_steps, inner = loops[-1]
            if all(step == inner_step * inner for step, inner_step in zip(steps, inner_steps, strict=True)):
                loops[-1] = (*inner_steps, inner * size)
                continue
        loops.append((*steps, size))
    if len(loops) > MAX_LOOPS:
        return None
    loops += [(*(0 for _ in strides), 1)] * (MAX_LOOPS - len(loops))
    n0, n1, n2 = (loop[-1] for loop in loops)
    return Loops((n0, n1, n2), tuple((loops[0][t], loops[1][t], loops[2][t]) for t in range(len(strides))))


def stride_of(parameter: Tensor | None) -> int:
    """The stride of a vector; any will do for none."""
    return 1 if parameter is None else parameter.stride(0)


def strides_of(modulation: Tensor | None) -> tuple[int, int]:
    """The strides of a matrix, likewise."""
    return (0, 1) if modulation is None else (modulation.stride(0), modulation.stride(1))


def broadcast_strides(shape: Sequence[int], strides: Sequence[int], to_shape: Sequence[int]) -> tuple[int, ...]:
    """The strides with which a tensor is read as one of ``to_shape``, as ``Tensor.expand`` gives them.

    Raises:
        RuntimeError: torch would not broadcast it to that shape.
    """
    added = len(to_shape) - len(shape)
    fits = added >= 0 and all(own in (1, to) for own, to in zip(shape, to_shape[added:], strict=True))
    if not fits:
        raise RuntimeError(f"a tensor of shape {tuple(shape)} cannot be broadcast to {tuple(to_shape)}")
    own_strides = zip(shape, strides, to_shape[added:], strict=True)
    return (0,) * added + tuple(0 if own != to else stride for own, stride, to in own_strides)
