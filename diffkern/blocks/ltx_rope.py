"""The rotary embedding of LTX-Video: the same tables at every step of a run, so computed once.

Stock, the denoiser builds ``[B, S, D]`` float32 tables of cosines and sines at every step, and every block reads
them twice. A table is the product of a grid: its columns depend on the frame, on the line or on the column alone.
Where that holds for the very tables at hand, the blocks read one small table per axis instead. Attention processors get
the full tables, may write into them, and would find what another step wrote: ``exact`` keeps none.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.transformers.transformer_ltx import LTXVideoRotaryPosEmbed
from torch import Tensor, nn
from typing_extensions import override

from diffkern.blocks.pieces import untouched
from diffkern.blocks.recipe import BlockRecipe
from diffkern.cache import DerivedCache, TensorFingerprint, kept_of, version
from diffkern.cache.rotary import AxialTables, KeptTables, keep_axes
from diffkern.ops import expand_axes
from diffkern.providers.dispatch_modes import functions_intercepted, modes_active, transforms_active
from diffkern.verify.samples import Draws

Tables = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class _TablesOfVideo(KeptTables):
    """Tables, and what they were computed from."""

    key: Hashable  # the numbers
    coords: TensorFingerprint | None  # the coordinates of the video; None without

    def holds(self, key: Hashable, coords: Tensor | None) -> bool:
        """Whether these are the tables of a call."""
        if self.key != key or (self.coords is None) != (coords is None):
            return False
        return (self.coords is None or self.coords.matches(coords)) and self.is_valid()  # type: ignore[arg-type]


class _RotaryTables(DerivedCache):
    """The tables that a module returned last."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: _TablesOfVideo | None = None

    @override
    def fingerprints(self) -> Iterable[TensorFingerprint]:
        kept = self.kept
        coords = () if kept is None or kept.coords is None else (kept.coords,)
        return () if kept is None else (*coords, *kept.fingerprints)

    @override
    def results(self) -> Iterable[TensorFingerprint]:
        kept = self.kept
        return () if kept is None else kept.fingerprints

    @override
    def entries(self) -> list[object]:
        return [self.kept]


class LTXRotaryEmbedding(BlockRecipe):
    """``LTXVideoRotaryPosEmbed``."""

    op = "ltx_rope"
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
    def unfit(self, module: nn.Module, call: tuple[Any, ...]) -> str | None:
        x, *sizes, scale, coords = call
        if type(x) is not Tensor or x.is_meta or x.ndim < 1:
            return "the hidden states are not a plain tensor with data"
        if torch.compiler.is_compiling():
            return None  # nothing is kept in a graph, and versions cannot be asked for there
        if coords is not None:
            if type(coords) is not Tensor or coords.requires_grad or version(coords) is None:
                return "its coordinates are not a plain tensor without gradient whose changes torch counts"
        elif not all(type(size) is int for size in sizes):
            return "its grid is not given as three integers"
        elif scale is not None and not (type(scale) is tuple and all(type(part) in (int, float) for part in scale)):
            return "its interpolation scale is not a tuple of numbers"
        return None

    @override
    def compute(self, module: nn.Module, call: tuple[Any, ...], provider: str | None, stock: tuple[str, ...]) -> Tables:
        owner: Any = module
        if torch.compiler.is_compiling():
            return LTXVideoRotaryPosEmbed.forward(owner, *call)  # type: ignore[no-any-return]
        cache = kept_of(module, "tables", _RotaryTables)
        cache.on_call(call[0].device)
        # A hook could write into the tables; modes and transforms may make them of something else than memory.
        seen = modes_active() or transforms_active() or functions_intercepted()
        if cache.is_disabled or seen or not untouched(owner, LTXVideoRotaryPosEmbed):
            cache.kept = None
            return LTXVideoRotaryPosEmbed.forward(owner, *call)  # type: ignore[no-any-return]
        x, *rest, coords = call
        bases = (owner.base_num_frames, owner.base_height, owner.base_width, owner.patch_size, owner.patch_size_t)
        key = (x.shape[0], x.device, owner.dim, owner.theta, bases, *rest)
        kept = cache.kept  # another thread may put other tables there meanwhile
        if kept is not None and kept.holds(key, coords):
            return kept.tables
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return LTXVideoRotaryPosEmbed.forward(owner, *call)  # type: ignore[no-any-return]  # into the graph's memory
        # Tables made in inference mode could not be used in training, and would not count writes.
        with torch.inference_mode(False), torch.no_grad():
            source = None if coords is None else TensorFingerprint.of(coords)
            tables: Tables = LTXVideoRotaryPosEmbed.forward(owner, *call)
            axes = _axes(tables, call[1:4], owner.dim % 6 // 2) if coords is None else None
            cache.kept = _TablesOfVideo(tables, tuple(map(TensorFingerprint.of, tables)), axes, key, source)
        keep_axes(cache.kept)
        return tables

    @override
    def sources(self) -> tuple[Callable[..., Any], ...]:
        return LTXVideoRotaryPosEmbed.forward, LTXVideoRotaryPosEmbed._prepare_video_coords

    @override
    def sample_calls(self, module: nn.Module, tokens: int, draw: Draws) -> list[tuple[Any, ...]]:
        x = draw(2, 1, 1)
        coords = torch.arange(2 * 3 * tokens, device=draw.device, dtype=torch.float32).view(2, 3, tokens)
        return [(x, 3, 3, -(-tokens // 9), (0.3, 32.0, 32.0), None), (x, None, None, None, None, coords)]


def _axes(tables: Tables, grid: tuple[int, int, int], front_pad: int) -> AxialTables | None:
    """Takes tables apart by axis; None if putting them together again does not return the same to the bit."""
    if 0 in tables[0].shape or not all(torch.equal(table[:1].expand_as(table), table) for table in tables):
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


RECIPE = LTXRotaryEmbedding()
