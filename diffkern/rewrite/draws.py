"""Random leaves for the proofs of a site: like those of a call, and no larger than a proof may cost."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from diffkern.rewrite.layout import memory_order
from diffkern.rewrite.rotation import tensors_in
from diffkern.verify.contract import ROWS

#: Elements of a random leaf at most: a proof must not cost what a step costs.
_LARGEST = 1 << 22
#: Elements of a proof of bit identity: two ways to sum up a row may differ in one of ten thousand elements.
_EXACT_ELEMENTS = 1 << 20
#: Random leaves of such a proof at most.
_MOST_DRAWS = 256
#: Dtypes of indices, which may be one of each token.
_INDICES = frozenset({torch.int32, torch.int64})
#: Powers of two by which random numbers of such a proof differ in size: sums of numbers alike in size are exact, and
#: the order of summation does not show.
_SPREAD = 3.0


def draws_of(leaves: tuple[Any, ...], exact: bool) -> int:
    """How often to draw: in few rows the ratio, and equality above all, is a matter of luck."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
    if exact:
        return min(_MOST_DRAWS, -(-_EXACT_ELEMENTS // max([1, *[leaf.numel() for leaf in tensors]])))
    rows = max([leaf.numel() // max(leaf.shape[-1], 1) for leaf in tensors], default=1)
    return min(16, -(-ROWS // max(rows, 1)))


def random_like(leaves: tuple[Any, ...], seed: int = 0, spread: bool = False, dim: int = -1) -> tuple[Any, ...]:
    """Random leaves of the same dtypes and of like shapes and layouts, smaller where they are large.

    Args:
        leaves: The leaves.
        seed: Of the random numbers.
        spread: Whether they differ widely in size.
        dim: The dimension that keeps its size.
    """
    tensors = tensors_in(leaves)
    largest = max([leaf.numel() for leaf in tensors], default=0)
    limit = next((limit for limit in (1 << 30, 1024, 128, 16, 4) if _shrunk_size(tensors, limit, dim) <= _LARGEST), 2)
    numbers = {leaf for leaf in leaves if type(leaf) is int}
    if numbers and largest <= 8 * _LARGEST:
        limit = 1 << 30  # a size that the expression names
    sizes = {size for leaf in tensors for size in leaf.shape[:-1]}
    # What is left of a stream of tokens without another one has a size that no tensor may have.
    streams = {number for number in numbers if any(size - number in sizes for size in sizes)}
    shrinks = [(size, at not in (dim, dim + leaf.ndim)) for leaf in tensors for at, size in enumerate(leaf.shape)]
    named = {size for size, whether in shrinks if whether} | streams
    sizes |= streams
    generator = torch.Generator("cpu").manual_seed(seed)

    def draw(leaf: Any) -> Any:
        if isinstance(leaf, (tuple, list)):
            return type(leaf)([draw(part) for part in leaf])
        if type(leaf) is int and leaf in named:
            return min(leaf, limit)
        return _random(leaf, limit, generator, spread, dim, sizes) if isinstance(leaf, Tensor) else leaf

    drawn = [draw(leaf) for leaf in leaves]
    for i, j in permutations(range(len(leaves)), 2):
        if are_halves(leaves[i], leaves[j]):
            drawn[i], drawn[j] = torch.cat([drawn[i], drawn[j]], dim=-1).chunk(2, dim=-1)
    return tuple(drawn)


def are_halves(first: Any, second: Any) -> bool:
    """Whether two leaves are the halves of the rows of one tensor, which some kernels take and others refuse."""
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)) or first.ndim < 2:
        return False
    alike = first.shape == second.shape and first.stride() == second.stride() and first.dtype == second.dtype
    size = first.shape[-1]
    adjacent = second.data_ptr() - first.data_ptr() == size * first.element_size()
    return alike and adjacent and first.stride()[-2:] == (2 * size, 1)


def _random(
    leaf: Tensor, limit: int, generator: torch.Generator, spread: bool, dim: int, sizes: Collection[int]
) -> Tensor:
    shape = _shrunk(leaf, limit, dim, sizes)
    if leaf.is_complex():
        return torch.randn(shape, generator=generator, dtype=torch.complex64, device="cpu").to(leaf.device, leaf.dtype)
    if not leaf.is_floating_point():
        # Indices, of which each of several tensors has its own: 0 and 1 are in every table that has two rows.
        if leaf.dtype in _INDICES and leaf.numel() and int(leaf.max()) > 0:
            return torch.randint(0, 2, shape, generator=generator, dtype=leaf.dtype, device="cpu").to(leaf.device)
        return torch.zeros(shape, dtype=leaf.dtype, device=leaf.device)
    y = torch.randn(shape, generator=generator, device="cpu")
    if spread:
        y *= torch.exp2(_SPREAD * torch.randn(shape, generator=generator, device="cpu").clamp(-1, 1))
    y = (y + 0.3).to(leaf.device, leaf.dtype)
    if 0 in leaf.stride() or leaf.is_contiguous():
        return y
    # Laid out alike: torch computes parts of a larger tensor in another order than the whole.
    if shape == list(leaf.shape):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device).copy_(y)
    order = memory_order(leaf)
    return y.permute(order).contiguous().permute([order.index(dim) for dim in range(leaf.ndim)])


def _shrunk(leaf: Tensor, limit: int, kept: int, sizes: Collection[int] = ()) -> list[int]:
    of_tokens = leaf.dtype in _INDICES and leaf.ndim > 0 and leaf.shape[-1] in sizes
    whole = () if of_tokens else (kept, kept + leaf.ndim)
    return [size if dim in whole else _shrunk_dim(size, limit, sizes) for dim, size in enumerate(leaf.shape)]


def _shrunk_dim(size: int, limit: int, sizes: Collection[int]) -> int:
    """As many rows as two streams have together stay as many."""
    parts = [(part, size - part) for part in sizes if size - part in sizes and size > limit]
    return min(size, limit) if not parts else sum([min(part, limit) for part in min(parts)])


def _shrunk_size(tensors: Sequence[Tensor], limit: int, dim: int) -> int:
    return max([torch.Size(_shrunk(leaf, limit, dim)).numel() for leaf in tensors], default=0)
