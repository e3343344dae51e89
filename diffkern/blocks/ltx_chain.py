"""What a block of LTX-Video computes for the next one.

A block learns which block comes next by what that one is called with. At the next step it prefetches the first norm of
that one, in one pass with its own last sum. The result is tied to the very tensors it was computed from, and dropped
with them. It reads the weights of the next block alone: offloading may bring those further on while this one runs.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from diffusers.models.transformers.transformer_ltx import LTXVideoTransformerBlock
from torch import Tensor

from diffkern.blocks.fp8 import RowwiseFp8
from diffkern.blocks.ltx_attention import is_weightless
from diffkern.blocks.pieces import plain, runs_fused, untouched
from diffkern.cache import memory, version

#: Shift, scale and gate of the attention and of the feed-forward, each ``[B, 1 or S, D]``, read in place.
Modulation = tuple[Tensor, ...]


def modulation_of(block: Any, temb: Tensor, batch: int) -> Modulation:
    """The modulation of one block: parts of its table plus ``temb``, ``[B, 1 or S, 6 * D]``."""
    modulation: Tensor = block._parameters["scale_shift_table"] + temb.reshape(batch, temb.size(1), 6, -1)
    return modulation.unbind(dim=2)


@dataclass(frozen=True)
class PrefetchedNorm:
    """The modulated first norm of a block, computed by the block before it.

    Attributes:
        sources: The hidden states and ``temb`` that it was computed from, not kept alive ...
        versions: ... and their versions.
        modulation: What :func:`modulation_of` returned for ``temb``.
        y: The result.
    """

    sources: tuple[weakref.ref[Tensor], weakref.ref[Tensor]]
    versions: tuple[int | None, int | None]
    modulation: Modulation
    y: Tensor | RowwiseFp8


#: What the block that ran last returned, and that block.
_last_result: list[tuple[weakref.ref[Tensor], weakref.ref[Any]] | None] = [None]


def pop_prefetched_norm(block: Any, x: Tensor, temb: Tensor, in_fp8: bool) -> PrefetchedNorm | None:
    """The first norm of ``x`` if the block before prefetched it. Tells that block which one comes next."""
    last, _last_result[0] = _last_result[0], None
    norm: PrefetchedNorm | None = memory(block).pop("norm1", None)
    before = last[1]() if last is not None and last[0]() is x else None
    if before is not None and before is not block:
        memory(before)["next"] = weakref.ref(block)
    if norm is None or norm.sources[0]() is not x or norm.sources[1]() is not temb:
        return None
    if isinstance(norm.y, RowwiseFp8) != in_fp8:
        return None
    return norm if norm.versions == (version(x), version(temb)) else None


def store_prefetched_norm(block: Any, x: Tensor, temb: Tensor, modulation: Modulation, y: Tensor | RowwiseFp8) -> None:
    """Keeps the first norm ``y`` of ``x`` for the next ``block``, as long as ``x`` lives."""
    owner = weakref.ref(block)

    def drop(gone: weakref.ref[Tensor]) -> None:
        block = owner()
        norm = None if block is None else memory(block).get("norm1")
        if norm is not None and norm.sources[0] is gone:
            memory(block).pop("norm1", None)  # type: ignore[arg-type]

    sources = weakref.ref(x, drop), weakref.ref(temb)
    memory(block)["norm1"] = PrefetchedNorm(sources, (version(x), version(temb)), modulation, y)


def remember_last(block: Any, x: Tensor) -> None:
    """Notes that ``x`` is what ``block`` returned: the block that is called with it is the next one."""
    _last_result[0] = weakref.ref(x), weakref.ref(block)


def next_block(block: Any, x: Tensor) -> Any | None:
    """The block that comes next, if its first norm can be computed here; None if that is not known."""
    reference = memory(block).pop("next", None)
    following = None if reference is None else reference()
    if following is None or "norm1" in memory(following):  # what was prefetched last time was not used
        return None
    # A hook on this block may write into its result. One on the next block may bring its weights only when that is
    # called, on a stream of its own; and a restored block uses nothing that was prefetched.
    if not untouched(block, LTXVideoTransformerBlock) or not untouched(following, LTXVideoTransformerBlock):
        return None
    if not runs_fused(following):
        return None
    table = following._parameters.get("scale_shift_table")
    if not is_weightless(following._modules["norm1"]) or not plain(table, x.device) or table.dtype != x.dtype:
        return None
    return following
