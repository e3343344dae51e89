"""What a block of LTX-Video computes for the next one.

A block learns which block comes next by what that one is called with. At the next step it leaves that one its first
norm, of one pass with its own last sum, tied to the very tensors it was computed from. It reads the weights of the next
block alone: those further on may be brought while this one runs.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from diffusers.models.transformers.transformer_ltx import LTXVideoTransformerBlock
from torch import Tensor

from diffkern.blocks.fp8 import Rows
from diffkern.blocks.memory import memory, version
from diffkern.blocks.pieces import plain, runs_fused, untouched
from diffkern.blocks.rms_pieces import is_weightless

#: Shift, scale and gate of the attention and of the feed-forward, each ``[B, 1 or S, D]``, read in place.
Modulation = tuple[Tensor, ...]


def modulation_of(block: Any, temb: Tensor, batch: int) -> Modulation:
    """The modulation of one block: parts of its table plus ``temb``, ``[B, 1 or S, 6 * D]``."""
    modulation: Tensor = block._parameters["scale_shift_table"] + temb.reshape(batch, temb.size(1), 6, -1)
    return modulation.unbind(dim=2)


@dataclass(frozen=True)
class Norm1:
    """The modulated first norm of a block, computed by the block before it.

    Attributes:
        sources: The hidden states and ``temb`` that it was computed from ...
        versions: ... and their versions.
        modulation: What :func:`modulation_of` gave for ``temb``.
        y: The result.
    """

    sources: tuple[Tensor, Tensor]
    versions: tuple[int | None, int | None]
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


def leave(follower: Any, x: Tensor, temb: Tensor, modulation: Modulation, y: Tensor | Rows) -> None:
    """Leaves the block that comes next its first norm ``y`` of ``x``."""
    memory(follower)["norm1"] = Norm1((x, temb), (version(x), version(temb)), modulation, y)


def remember_last(block: Any, x: Tensor) -> None:
    """Notes that ``x`` is what ``block`` returned: whoever is called with it follows."""
    _last_result[0] = weakref.ref(x), weakref.ref(block)


def follower_of(block: Any, x: Tensor) -> Any | None:
    """The block that comes next, if its first norm can be computed here; None if that is not known."""
    reference = memory(block).pop("follower", None)
    follower = None if reference is None else reference()
    if follower is None or "norm1" in memory(follower):  # the one left there last time was not taken
        return None
    # A hook on it may bring its weights only when it is called, on a stream of its own. A restored one takes nothing.
    if not untouched(follower, LTXVideoTransformerBlock) or not runs_fused(follower):
        return None
    table = follower._parameters.get("scale_shift_table")
    if not is_weightless(follower._modules["norm1"]) or not plain(table, x.device) or table.dtype != x.dtype:
        return None
    return follower
