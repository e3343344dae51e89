"""The rotary embedding of LTX-Video: the same tables at every step of a run, so computed once.

Stock, the denoiser builds ``[B, S, D]`` float32 tables of cosines and sines at every step, and every block reads
them twice. A table is the product of a grid: its columns depend on the frame, on the line or on the column alone.
Where that holds for the very tables at hand, the blocks read one small table per axis instead.

A graph of ``torch.compile`` cannot look at tables. There the tables by axis are those of three thin grids, one for each
axis, by the stock formula as well; the full ones are in the graph for whoever reads them, and gone if nobody does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.transformers.transformer_ltx import LTXVideoRotaryPosEmbed
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from diffkern.blocks.memory import memory, version
from diffkern.blocks.pieces import untouched
from diffkern.blocks.recipe import BlockRecipe
from diffkern.ops import expand_axes
from diffkern.providers.onlookers import modes_active

Tables = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class AxialTables:
    """Rotary tables by axis, as :func:`diffkern.ops.rope_3d` takes them.

    Attributes:
        cos: Cosines of the frames ``[F, n]``, lines ``[H, n]`` and columns ``[W, n]``, float32.
        sin: Sines, likewise.
        grid: ``(F, H, W)``.
        front_pad: Pairs in front that are not rotated.
    """

    cos: tuple[Tensor, ...]
    sin: tuple[Tensor, ...]
    grid: tuple[int, int, int]
    front_pad: int

    #: The pairs of a row go through the axes in turn.
    order = "alternating"


class TracedTables(tuple[Tensor, Tensor]):
    """Full tables in a graph of ``torch.compile``: a pair for everybody but the blocks, who find the axes with them.

    Attributes:
        axes: The same tables by axis; None in a pair that somebody else made of this one, and once somebody may
            have written into it.
    """

    axes: AxialTables | None = None


#: Tables of cosines that are known to be products of a grid -> (their version, the sines and theirs, the axes).
_axial: Any = WeakIdKeyDictionary()


def axial_tables(tables: Tables) -> AxialTables | None:
    """Returns the axes of full tables that :data:`RECIPE` made, as long as nobody wrote into them."""
    if torch.compiler.is_compiling():
        return tables.axes if type(tables) is TracedTables else None
    known = _axial.get(tables[0])
    if known is None:
        return None
    versions, sin, axes = known
    return axes if sin is tables[1] and versions == (version(tables[0]), version(sin)) else None


class LTXRotaryEmbedding(BlockRecipe):
    """``LTXVideoRotaryPosEmbed``."""

    op = "ltx_rope"
    ops = ()
    fingerprints = frozenset({"100bb1261b00b56b"})
    versions = "diffusers 0.42"

    @staticmethod
    @override
    def arguments(
        hidden_states: Tensor,
        num_frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
        rope_interpolation_scale: tuple[Tensor, float, float] | None = None,
        video_coords: Tensor | None = None,
    ) -> tuple[Any, ...]:
        return hidden_states, num_frames, height, width, rope_interpolation_scale, video_coords

    @override
    def declines(self, module: nn.Module, call: tuple[Any, ...]) -> str | None:
        x, *sizes, scale, coords = call
        if type(x) is not Tensor or x.is_meta or x.ndim < 1:
            return "the hidden states are not a plain tensor with data"
        if coords is not None and torch.compiler.is_compiling():
            return None  # nothing is remembered in a graph, and versions cannot be asked for there
        if coords is not None:
            if type(coords) is not Tensor or coords.requires_grad or version(coords) is None:
                return "its coordinates are not a plain tensor without gradient whose changes torch counts"
        elif not all(type(size) is int for size in sizes):
            return "its grid is not given as three integers"
        elif scale is not None and not (type(scale) is tuple and all(type(part) in (int, float) for part in scale)):
            return "its interpolation scale is not a tuple of numbers"
        return None

    @override
    def stock_pieces(self, module: nn.Module, call: tuple[Any, ...]) -> tuple[str, ...]:
        return ()

    @override
    def compute(self, module: nn.Module, call: tuple[Any, ...], provider: str | None, stock: tuple[str, ...]) -> Tables:
        owner: Any = module
        if torch.compiler.is_compiling():
            return _traced(owner, *call)
        # Whoever hears of the tables could write into them, and a mode may make them of something else than memory.
        if not untouched(owner, LTXVideoRotaryPosEmbed) or modes_active():
            return LTXVideoRotaryPosEmbed.forward(owner, *call)  # type: ignore[no-any-return]
        x, *rest, coords = call
        bases = (owner.base_num_frames, owner.base_height, owner.base_width, owner.patch_size, owner.patch_size_t)
        key = (x.shape[0], x.device, owner.dim, owner.theta, bases, *rest, None if coords is None else version(coords))
        key += (torch.is_inference_mode_enabled(),)  # tables made there must not meet autograd
        remembered = memory(module)
        last = remembered.get("tables")
        # Coordinates are compared as objects, and kept for that: an address alone may be given to another tensor.
        if last is not None and last[0] == key and last[1] is coords and last[2] == _versions(last[3]):
            return last[3]  # type: ignore[no-any-return]
        tables = _shared(LTXVideoRotaryPosEmbed.forward(owner, *call))
        remembered["tables"] = key, coords, _versions(tables), tables
        if coords is None:
            axes = _axes(tables, call[1:4], owner.dim % 6 // 2)
            if axes is not None:
                _axial[tables[0]] = (version(tables[0]), version(tables[1])), tables[1], axes
        return tables

    @override
    def sources(self) -> tuple[Callable[..., Any], ...]:
        return LTXVideoRotaryPosEmbed.forward, LTXVideoRotaryPosEmbed._prepare_video_coords

    @override
    def samples(
        self, module: nn.Module, tokens: int, device: torch.device, dtype: torch.dtype
    ) -> list[tuple[Any, ...]]:
        x = torch.empty(2, 1, 1, device=device, dtype=dtype)
        coords = torch.arange(2 * 3 * tokens, device=device, dtype=torch.float32).view(2, 3, tokens)
        return [(x, 3, 3, -(-tokens // 9), (0.3, 32.0, 32.0), None), (x, None, None, None, None, coords)]

    @override
    def make_plain(self, module: nn.Module) -> None:
        """Nothing: it has no children."""


def _traced(owner: Any, x: Tensor, frames: Any, height: Any, width: Any, scale: Any, coords: Tensor | None) -> Tables:
    """The stock tables in a graph of ``torch.compile``, with their axes where all that is known."""
    tables: Tables = LTXVideoRotaryPosEmbed.forward(owner, x, frames, height, width, scale, coords)
    # Who hears of the tables could write into them, which does not show in a graph.
    if coords is not None or owner.dim % 2 or torch.is_grad_enabled() or not untouched(owner, LTXVideoRotaryPosEmbed):
        return tables
    one = x.new_empty(1)
    thin = [
        LTXVideoRotaryPosEmbed.forward(owner, one, *sizes, scale)
        for sizes in ((frames, 1, 1), (1, height, 1), (1, 1, width))
    ]
    front = owner.dim % 6
    cos, sin = (
        tuple(_computed_once(pair[part][0, :, front + 2 * axis :: 6]) for axis, pair in enumerate(thin))
        for part in (0, 1)
    )
    traced = TracedTables(tables)
    traced.axes = AxialTables(cos, sin, (frames, height, width), front // 2)
    return traced


def _computed_once(table: Tensor) -> Tensor:
    """A copy that has memory of its own: Inductor would compute another one for each op that reads it."""
    table = table.clone(memory_format=torch.contiguous_format)
    return table.as_strided(table.shape, table.stride())


def _versions(tables: Tables) -> tuple[int | None, ...]:
    return tuple(version(table) for table in tables)


def _shared(tables: Tables) -> Tables:
    """The tables of the first sample for all, where they are alike: half the memory under guidance."""
    if tables[0].shape[0] == 1 or _is_capturing(tables[0]):
        return tables
    if not all(torch.equal(table[:1].expand_as(table), table) for table in tables):
        return tables
    cos, sin = (table[:1].clone().expand_as(table) for table in tables)
    return cos, sin


def _axes(tables: Tables, grid: tuple[int, int, int], front_pad: int) -> AxialTables | None:
    """Takes tables apart by axis; None if putting them together again does not give the same to the bit."""
    shared = tables[0].shape[0] == 1 or tables[0].stride(0) == 0
    if not shared or 0 in tables[0].shape or _is_capturing(tables[0]):
        return None
    frames, height, width = grid
    pairs = [table[0, :, ::2] for table in tables]
    if any(not torch.equal(table[0, :, 1::2], own) for table, own in zip(tables, pairs, strict=True)):
        return None
    turned = [own[:, front_pad:].reshape(frames, height, width, -1, 3) for own in pairs]
    cos, sin = (
        (own[:, 0, 0, :, 0].contiguous(), own[0, :, 0, :, 1].contiguous(), own[0, 0, :, :, 2].contiguous())
        for own in turned
    )
    whole = expand_axes(cos, sin, grid=grid, order=AxialTables.order, front_pad=front_pad)
    if not all(torch.equal(again, own) for again, own in zip(whole, pairs, strict=True)):
        return None
    return AxialTables(cos, sin, grid, front_pad)


def _is_capturing(tensor: Tensor) -> bool:
    """Whether data cannot be looked at, since a CUDA graph is being captured."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


RECIPE = LTXRotaryEmbedding()
