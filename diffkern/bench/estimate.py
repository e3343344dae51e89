"""What fusing can gain at most in a step, by bytes and operations: on the meta device, with no weights and no card."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


@dataclass(frozen=True)
class Card:
    """What a card does at most, by its data sheet: bytes a second, and dense bfloat16 operations a second."""

    bandwidth: float
    operations: float


CARDS: Mapping[str, Card] = {
    "T4": Card(0.32e12, 65e12),  # operations in float16, having no bfloat16
    "A100": Card(2.0e12, 312e12),
    "L40S": Card(0.86e12, 362e12),
    "H100": Card(3.35e12, 989e12),
    "H200": Card(4.8e12, 989e12),
    "B200": Card(8.0e12, 2250e12),
    "MI300X": Card(5.3e12, 1307e12),
}

#: The shares of the data sheet that products and attention, and stock's chains of small kernels, reach: with these, the
#: steps of Flux, Wan and LTX-Video come within 10 % of what was measured on an H200.
REACHED, GLUE_REACHED = 0.6, 0.65


#: Ops that move nothing, though their schemas do not say so.
_FREE = frozenset({"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "detach"})


@dataclass
class Estimate:
    """What one step asks of a card.

    Attributes:
        glue_bytes: Read and written by everything but matrix products, convolutions and attention.
        operations: Of those.
    """

    glue_bytes: int = 0
    operations: int = 0

    def sentence(self, name: str) -> str:
        """Says how much of the step is glue, and what its absence would gain, on the card of this name."""
        card = CARDS[name]
        glue = self.glue_bytes / (GLUE_REACHED * card.bandwidth)
        rest = self.operations / (REACHED * card.operations)
        return (
            f"on one {name}, by bytes and operations and not measured: glue moves {self.glue_bytes / 1e9:.1f} GB, "
            f"about {1e3 * glue:.1f} ms beside {1e3 * rest:.1f} ms of products and attention, so fusing gains less "
            f"than {(glue + rest) / rest:.2f}x; diffkern bench step measures it"
        )


def estimate(model: nn.Module, inputs: Mapping[str, Any]) -> Estimate:
    """Runs one step on the meta device, and adds up what it would move and compute.

    Raises:
        RuntimeError: the step reads a value, which there is none of.
    """
    traffic = _Traffic()
    with torch.no_grad(), _whole_calls(traffic.total), traffic:
        model(**inputs)
    return traffic.total


class _Traffic(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.total = Estimate()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.total.operations += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=result)
        elif func._overloadpacket.__name__ not in _FREE and not _is_view(func):
            self.total.glue_bytes += _bytes((args, kwargs, result))
        return result


@contextmanager
def _whole_calls(total: Estimate) -> Iterator[None]:
    """Attention and RMS norms are one kernel on a GPU; on the meta device torch would take them apart."""
    attention, rms_norm = F.scaled_dot_product_attention, F.rms_norm

    def attend(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        *batch, queries, width = query.shape
        pairs = queries * key.shape[-2] * torch.Size(batch).numel()
        total.operations += 2 * pairs * (width + value.shape[-1])
        return torch.empty((*batch, queries, value.shape[-1]), dtype=query.dtype, device="meta")

    def normalise(input: Tensor, *_: Any, **__: Any) -> Tensor:
        total.glue_bytes += 2 * _bytes(input)
        return torch.empty_like(input)

    F.scaled_dot_product_attention, F.rms_norm = attend, normalise
    try:
        yield
    finally:
        F.scaled_dot_product_attention, F.rms_norm = attention, rms_norm


def _is_view(func: Any) -> bool:
    return any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)


def _bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))
