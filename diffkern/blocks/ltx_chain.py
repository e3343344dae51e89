"""What the blocks of LTX-Video compute for one another.

A block learns which block comes next by what that one is called with. At the next step it leaves that one its first
norm, of one pass with its own last sum, tied to the very tensors it was computed from; and the first block of all
computes the modulations of every block that is known to follow, with one sum in place of one in each. It does so last
of all: the GPU has its work by then, and does not wait for the host.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.transformers.transformer_ltx import LTXVideoTransformerBlock
from torch import Tensor

from diffkern.blocks.fp8 import Rows
from diffkern.blocks.memory import memory, version
from diffkern.blocks.pieces import plain, untouched
from diffkern.blocks.rms_pieces import is_weightless

#: Shift, scale and gate of the attention and of the feed-forward, each ``[B, 1 or S, D]``, read in place.
Modulation = tuple[Tensor, ...]


def modulation_of(block: Any, temb: Tensor, batch: int) -> Modulation:
    """The modulation of one block: parts of its table plus ``temb``, ``[B, 1 or S, 6 * D]``."""
    modulation: Tensor = _table(block) + temb.reshape(batch, temb.size(1), 6, -1)
    return modulation.unbind(dim=2)


class Modulations:
    """The modulations of a block and of those that are known to follow it, from one sum.

    Args:
        block: The block.
        x: Its hidden states.
        temb: What all of them are modulated by. One row per token, as image-to-video has it, would make the sum of all
            blocks too large: then each has its own.
    """

    def __init__(self, block: Any, x: Tensor, temb: Tensor) -> None:
        self._batch, self._temb, self._version = x.size(0), temb, version(temb)
        self._known: dict[int, tuple[Tensor, int | None, Modulation]] = {}
        blocks = [block]
        if self._version is not None and temb.size(1) == 1:
            blocks += _chain(block, x)
        if len(blocks) > 1:
            self._sum([_table(one) for one in blocks])

    def of(self, block: Any) -> Modulation:
        """The modulation of a block, by its table and ``temb`` as they are now."""
        table = _table(block)
        known = self._known.get(id(table))
        if known is not None:
            same, written, modulation = known
            if same is table and written == version(table) and self._version == version(self._temb):
                return modulation
        return modulation_of(block, self._temb, self._batch)

    def _sum(self, tables: list[Tensor]) -> None:
        batch, width = self._batch, tables[0].size(1)
        sums = self._temb.new_empty(len(tables), 6, batch, width)
        torch.add(torch.stack(tables).unsqueeze(2), self._temb.reshape(batch, 6, -1).transpose(0, 1), out=sums)
        parts = sums.view(6 * len(tables), batch, 1, width).unbind()
        for i, table in enumerate(tables):
            self._known[id(table)] = table, version(table), parts[6 * i : 6 * i + 6]


@dataclass(frozen=True)
class Norm1:
    """The modulated first norm of a block, computed by the block before it.

    Attributes:
        sources: The hidden states and ``temb`` that it was computed from ...
        versions: ... and their versions.
        modulations: Those of all blocks.
        modulation: That of this block.
        y: The result.
    """

    sources: tuple[Tensor, Tensor]
    versions: tuple[int | None, int | None]
    modulations: Modulations
    modulation: Modulation
    y: Tensor | Rows


#: What the block that ran last returned, and that block.
_last_result: list[tuple[weakref.ref[Tensor], weakref.ref[Any]] | None] = [None]


def take(block: Any, x: Tensor, temb: Tensor, in_8_bits: bool) -> Norm1 | None:
    """The first norm that the block before left here, if it is that of ``x``. Tells that block who comes next."""
    last, _last_result[0] = _last_result[0], None
    left: Norm1 | None = memory(block).pop("norm1", None)
    before = last[1]() if last is not None and last[0]() is x else None
    if before is not None and before is not block:
        memory(before)["follower"] = weakref.ref(block)
    if left is None or left.sources[0] is not x or left.sources[1] is not temb:
        return None
    if isinstance(left.y, Rows) != in_8_bits:
        return None
    return left if left.versions == (version(x), version(temb)) else None


def leave(
    follower: Any, x: Tensor, temb: Tensor, modulations: Modulations, modulation: Modulation, y: Tensor | Rows
) -> None:
    """Leaves the block that comes next its first norm ``y`` of ``x``."""
    memory(follower)["norm1"] = Norm1((x, temb), (version(x), version(temb)), modulations, modulation, y)


def remember_last(block: Any, x: Tensor) -> None:
    """Notes that ``x`` is what ``block`` returned: whoever is called with it follows."""
    _last_result[0] = weakref.ref(x), weakref.ref(block)


def follower_of(block: Any, x: Tensor) -> Any | None:
    """The block that comes next, if its first norm can be computed here; None if that is not known."""
    reference = memory(block).pop("follower", None)
    follower = None if reference is None else reference()
    if follower is None or "norm1" in memory(follower):  # the one left there last time was not taken
        return None
    return follower if _is_open(follower, x) and is_weightless(follower._modules["norm1"]) else None


def _chain(block: Any, x: Tensor) -> list[Any]:
    """The blocks that followed one another last time, as far as their tables can be read."""
    chain: list[Any] = []
    while True:
        reference = memory(block).get("follower")
        block = None if reference is None else reference()
        if block is None or block in chain or not _is_open(block, x):
            return chain
        chain.append(block)


def _is_open(block: Any, x: Tensor) -> bool:
    """Whether one may compute with the table of a block before that is called."""
    # A hook on it may bring its weights only when it is called, on a stream of its own. A restored one takes nothing.
    if not untouched(block, LTXVideoTransformerBlock) or "forward" not in block.__dict__:
        return False
    table = _table(block)
    return plain(table, x.device) and table.dtype == x.dtype and table.shape == (6, x.shape[-1])


def _table(block: Any) -> Any:
    return block._parameters["scale_shift_table"]
