"""The order in which tensors lie in memory, and streams of tokens joined in that order.

Heads before tokens are mostly a view of tokens before heads. Joined as they lie in memory they are copied in whole
rows, and attention gives its result in the order of its queries, so that the heads of a token need no copy behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diffkern.ops.copying import copy_rows


def memory_order(x: Tensor) -> tuple[int, ...]:
    """The dimensions of a tensor from the outermost to the innermost in memory."""
    strides = x.stride()
    outer = [  # not sorted(): torch.compile compares sizes that it does not know, and cannot sort them
        sum([1 if other > own or (other == own and j < i) else 0 for j, other in enumerate(strides)])
        for i, own in enumerate(strides)
    ]
    return tuple([outer.index(place) for place in range(len(outer))])


def largest_of(streams: Sequence[Tensor]) -> Tensor:
    """The tensor with most elements, the first of several."""
    largest = streams[0]
    for x in streams[1:]:  # not max(), into which torch.compile does not look
        largest = x if x.numel() > largest.numel() else largest
    return largest


def order_of_rows(streams: Sequence[Tensor]) -> tuple[int, ...] | None:
    """The order of the largest tensor; None if that is row-major, or the last dimension is not the innermost one."""
    largest = largest_of(streams)
    order, plain = memory_order(largest), tuple(range(largest.ndim))
    return None if order == plain or order[-1:] != plain[-1:] else order


def permuted(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """A tensor, or one that broadcasts against such, with its dimensions in another order."""
    return x[(None,) * (len(order) - x.ndim)].permute(order)


def restored(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """What :func:`permuted` was made from."""
    return x.permute([order.index(dim) for dim in range(len(order))])


def concatenate(streams: Sequence[Tensor], dim: int, in_order: bool) -> Tensor:
    """``torch.cat(streams, dim)``, with ``in_order`` laid out as the largest stream, else row-major."""
    order = order_of_rows(streams)
    if order is None:
        return torch.cat(list(streams), dim)
    if in_order:
        rows = [permuted(x, order) for x in streams]
        if largest_of(rows).is_contiguous():  # a copy of the others costs less than the kernel for what is not
            rows = [x.contiguous() for x in rows]
        return restored(torch.cat(rows, order.index(dim % len(order))), order)
    # The kernel that concatenates what is not row-major takes longer than two copies.
    shape, sizes = list(streams[0].shape), [x.shape[dim] for x in streams]
    shape[dim] = sum(sizes)
    joint = streams[0].new_empty(shape)
    for part, x in zip(joint.split(sizes, dim), streams, strict=True):
        copy_rows(part, x)
    return joint
