"""What decides how a site computes for leaves, as a key."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from diffkern.rewrite.layout import memory_order

#: The dtype and the order in memory of each tensor among the leaves, the value of the others, the device.
Signature = tuple[Any, ...]
PLAIN = (Tensor, nn.Parameter)


def signature_of(leaves: tuple[Any, ...]) -> Signature:
    """What decides how a site computes; no plain tensor has a signature that any proof holds for."""
    signature: list[Any] = [None]
    for leaf in leaves:  # asked at every call of every site: no function is called that need not be
        if signature[0] is None and isinstance(leaf, Tensor):
            signature[0] = leaf.device
        if type(leaf) is int:
            signature.append(_named_size(leaf, leaves))
        elif type(leaf) not in PLAIN:
            signature.append(_constant(leaf))
        else:
            signature.append(leaf.dtype if leaf.is_contiguous() else _layout(leaf))
    return tuple(signature)


def _named_size(number: int, leaves: tuple[Any, ...]) -> Any:
    """A number among the leaves; where it is the size of a tensor, which one: a proof holds for all sizes."""
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and number > 1 and number in leaf.shape:
            return "size", i, leaf.shape.index(number)
    return number


def _layout(leaf: Tensor) -> Any:
    """The dtype, and the strides where they are not those of row-major order: results are laid out like operands."""
    outer = None
    for stride in leaf.stride():  # mostly a part of something row-major, of which no order needs to be found
        if outer is not None and stride > outer:
            return leaf.dtype, memory_order(leaf)
        outer = stride
    return leaf.dtype


def _constant(leaf: Any) -> Any:
    if isinstance(leaf, (tuple, list)):
        return tuple([_layout(part) if type(part) in PLAIN else _constant(part) for part in leaf])
    return leaf if isinstance(leaf, (torch.dtype, int, float, str, torch.device)) else type(leaf)


def dtypes_in(signature: Any) -> set[torch.dtype]:
    """The dtypes that a signature names."""
    if isinstance(signature, tuple):
        return {dtype for part in signature for dtype in dtypes_in(part)}
    return {signature} if isinstance(signature, torch.dtype) else set()
