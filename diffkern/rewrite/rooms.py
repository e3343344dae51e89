"""Products and norms that need no copy behind them: their rows are computed where the rows of all streams lie.

``torch.cat([text, image], dim=1)`` copies both streams. A linear layer whose result becomes the longer part of that
leaves room for the other rows in front and behind, so that these alone are copied; it learns at the first
concatenation how much. So does a modulated norm. A linear layer of a part, ``to_out(x[:, :n])``, is one product for
each sample: for a batch, ``F.linear`` takes a product without the bias, and adds that in a pass of its own. And what is
concatenated may be the halves of one tensor already, and what is repeated be so once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import override

from diffkern.blocks.fp8 import RowMaker, shared_rows, takes_rows, weight_of
from diffkern.blocks.pieces import has_plain_parameters, runs_fused
from diffkern.ops.copying import copy_rows
from diffkern.providers.dispatch_modes import modes_active, transforms_active
from diffkern.rewrite.facts import child_of
from diffkern.rewrite.identity import SharingSite, WrittenOffGpus
from diffkern.rewrite.site import AllowedInStrict, FusedSite, Way
from diffkern.rewrite.streams import TOKENS_FIRST

# Bound once, since every call asks.
_is_traced = torch.compiler.is_dynamo_compiling
#: A product for each sample pays for this many samples at most, and for samples of at least so many rows.
MOST_SAMPLES, LEAST_ROWS = 4, 512
#: Results of fewer bytes are copied: the host takes longer to call a norm with room. Chosen, and not measured.
LEAST_BYTES = 1 << 25


class StreamSite(WrittenOffGpus):
    """A linear layer as it is written, but for where its result lies, and how many products it takes.

    Attributes:
        rows_around: Rows that its memory has in front of each sample and behind it; None for a stream that is copied.
        copied: Sites of the shorter streams that are copied into its memory.
    """

    not_quick, is_proven_ahead, lies_otherwise = None, False, True

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.rows_around: tuple[int, int] | None = (0, 0)
        self.copied: set[StreamSite | NormSite] = set()
        self._joins = self.plan.options["joins"]

    def __call__(self, module: nn.Module, *leaves: Any) -> Any:
        """Computes the site for its leaf."""
        (x,) = leaves
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or type(x) is not Tensor or x.ndim != 3:
            return self.original(module, x)
        room, y = self.rows_around, None  # which another thread may change
        if room is not None and (self._joins or x.shape[0] > 1):
            layer: Any = child_of(module, self.plan.modules["linear"])
            fused = runs_fused(layer)  # as one in fp8 does
            in_fp8 = takes_rows(layer, x) if fused else None
            usable = in_fp8 is not False if fused else has_plain_parameters(layer, x.device, x.dtype)
            if not usable or transforms_active() or modes_active():
                why = "its layer has a hook or an adapter, or a mode sees its call"
                return self.run_original(module, x, reason=AllowedInStrict(f"{self}: {why}"))
            if in_fp8:
                y = _fp8_product(layer, x, room)
            elif not fused:
                y = _product(x, layer.weight, layer.bias, room)
        made = self.original(module, x) if y is None else y
        if self._joins and room is not None:
            _remember(self, made, (0, 0) if y is None else room)
        self.count_fused(module)
        return made


class NormSite(FusedSite):
    """A modulated norm, whose memory may have room for a stream that is concatenated with its result.

    A batch with room is no contiguous tensor: it has some only for a module whose reader is as it was. So do norms that
    can write rows of fp8: of a result that is concatenated no layer reads these.

    Attributes:
        copied: As those of a :class:`StreamSite`.
        readers: What concatenated the results that a module made.
    """

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.copied: set[StreamSite | NormSite] = set()
        self.readers: WeakKeyDictionary[nn.Module, _Reader] = WeakKeyDictionary()
        self._rows_around: tuple[int, int] | None = (0, 0)

    @property
    def rows_around(self) -> tuple[int, int] | None:
        """As that of a :class:`StreamSite`; with rows, no function in the place of the site serves."""
        return self._rows_around

    @rows_around.setter
    def rows_around(self, rows: tuple[int, int] | None) -> None:
        self._rows_around, self.room = rows, any(rows or ())
        if rows == (0, 0):
            self._forget_specialized()  # so that the next results are remembered

    def __call__(self, module: nn.Module, *leaves: Any) -> Any:
        """Computes the site for its leaves."""
        result = super().__call__(module, *leaves)
        if self._rows_around is None or torch.compiler.is_compiling() or torch.is_grad_enabled():
            return result
        y = result[1] if type(result) is tuple else result
        if transforms_active() or modes_active():
            return result  # which has no storage
        if type(y) is Tensor and _pays(y) and (y.is_cuda or self.on_new_size is None):
            _remember(self, y, getattr(y, "_diffkern_room", (0, 0)), module)
        return result

    @override
    def compute(self, module: nn.Module, leaves: Any, way: Way, provider: str | None, room: Any = 0) -> Any:
        return super().compute(module, leaves, way, provider, self._room_for(module, leaves) if room else None)

    @override
    def _announced(self, maker: RowMaker, module: nn.Module, leaves: tuple[Any, ...], way: Way) -> Any:
        around = self._room_for(module, leaves)
        if around is None:
            return super()._announced(maker, module, leaves, way)
        return super().compute(module, leaves, way, self.provider, around)  # layers read the concatenation

    def _room_for(self, module: nn.Module, leaves: tuple[Any, ...]) -> tuple[int, int] | None:
        around, x = self._rows_around, leaves[self.sized]
        if not any(around or ()) or not _pays(x) or torch.is_grad_enabled():
            return None
        if x.shape[0] > 1 or self.maker is not None:
            reader = self.readers.get(module)
            return around if reader is not None and _Reader.of(reader.module(), module) == reader else None
        return around


def _pays(x: Tensor) -> bool:
    return x.ndim == 3 and x.numel() * x.element_size() >= LEAST_BYTES


class _Reader(NamedTuple):
    """What a concatenation that reads the results of another module depends on."""

    module: ref[nn.Module]
    forward: Any
    processor: type

    @staticmethod
    def of(module: nn.Module | None, maker: nn.Module) -> _Reader | None:
        """A module, unless hooks see what it is given; it sees its own tensors itself."""
        state = {} if module is None else module.__dict__
        if module is None or (module is not maker and (state["_forward_pre_hooks"] or state["_forward_hooks"])):
            return None
        return _Reader(ref(module), getattr(state.get("forward"), "__func__", None), type(state.get("processor")))


class JoinSite(FusedSite):
    """A concatenation of streams: of one that has room for the others, or else like any other site."""

    not_quick = "site.on_new_size is None or not x0.is_cpu"  # else no stream has room, see StreamSite.entry

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.lies_otherwise = self.plan.options["stream_dim"] in TOKENS_FIRST

    def __call__(self, module: nn.Module, *leaves: Any) -> Any:
        """Computes the site for its leaves."""
        asked = not (torch.compiler.is_compiling() or torch.is_grad_enabled() or transforms_active() or modes_active())
        if asked and _made:
            streams = list(self.operands(module, leaves).values())
            whole = _join(streams, self.plan.options["stream_dim"])  # type: ignore[arg-type]
            if whole is not None:
                self.count_fused(module)
                return whole
        return super().__call__(module, *leaves)

    @override
    def _no_gradients(self, module: nn.Module, leaves: tuple[Any, ...]) -> str:
        return "gradients are wanted, and what is written in place has none"


def _whole(a: Any, b: Any, dim: int) -> Tensor | None:
    """``torch.cat([a, b], dim)`` as a view, if ``b`` lies behind ``a`` in memory and both make a row-major tensor."""
    if type(a) is not Tensor or type(b) is not Tensor or a.dtype is not b.dtype or a.ndim != b.ndim or a.ndim < 3:
        return None
    shape, strides, dim = [*a.shape], a.stride(), dim % a.ndim
    shape[dim] += b.shape[dim]
    same = b.stride() == strides and a.untyped_storage()._cdata == b.untyped_storage()._cdata
    if not same or b.storage_offset() != a.storage_offset() + a.shape[dim] * strides[dim]:
        return None
    if (*a.shape[:dim], *a.shape[dim + 1 :]) != (*b.shape[:dim], *b.shape[dim + 1 :]):
        return None
    whole = a.as_strided(shape, strides)
    return whole if whole.is_contiguous() and not (a.is_neg() or a.is_conj() or b.is_neg() or b.is_conj()) else None


def _halves(module: nn.Module, a: Any, b: Any, dim: int) -> Tensor | None:
    """``torch.cat([a, b], dim)`` as a view of both, or in the memory of the longer one, if that has the room."""
    whole = _whole(a, b, dim)
    return _join([a, b], dim, module) if whole is None and _made else whole


class HalvesSite(SharingSite, WrittenOffGpus):
    """A concatenation of two tensors, which is a view of both where they are halves of one, or one has room."""

    shared = staticmethod(_halves)


# --- the room ------------------------------------------------------------------------------------------


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, room: tuple[int, int]) -> Tensor | None:
    """``F.linear`` of each sample, with room around it; None where all samples in one product take less time."""
    samples, rows, _ = x.shape
    if room == (0, 0) and (samples == 1 or x.stride(0) == rows * x.stride(1)):
        return None
    if _pays_together(x):
        few = room == (0, 0) and bias is not None and rows < LEAST_ROWS  # a copy takes less than to add the bias
        return F.linear(x.contiguous(), weight, bias) if few else None
    y = _between(x, weight, room)
    for one, into in zip(x, y, strict=True):
        if bias is None:
            torch.mm(one, weight.t(), out=into)
        else:
            torch.addmm(bias, one, weight.t(), out=into)
    return y


def _fp8_product(layer: Any, x: Tensor, room: tuple[int, int]) -> Tensor | None:
    """The same of a layer in fp8, whose one product of all samples adds the bias as well: only where there is room."""
    if room == (0, 0) or _pays_together(x):
        return None
    weights = weight_of(layer, x.device)
    return weights.run(layer, shared_rows(x, layer, weights.provider), _between(x, layer.weight, room))


def _pays_together(x: Tensor) -> bool:
    return x.shape[0] > 1 and (x.shape[0] > MOST_SAMPLES or x.shape[1] < LEAST_ROWS)


def _between(x: Tensor, weight: Tensor, room: tuple[int, int]) -> Tensor:
    samples, rows, _ = x.shape
    before, behind = room
    return x.new_empty((samples, before + rows + behind, weight.shape[0]))[:, before : before + rows]


class _Made(NamedTuple):
    """A result of a site, until it is concatenated: by then it is a view, of which its memory is all that is left."""

    storage: StorageWeakRef
    site: StreamSite | NormSite
    room: tuple[int, int]
    place: tuple[int | torch.SymInt, ...]
    module: ref[nn.Module] | None


#: By the address of the storage object, which is no other's while there is a weak reference to it.
_made: dict[int, _Made] = {}
#: Results that are remembered: a call that raises before its concatenation leaves some, and so do norms that have none.
_MOST_MADE = 64


def _remember(site: StreamSite | NormSite, y: Tensor, room: tuple[int, int], module: nn.Module | None = None) -> None:
    storage = y.untyped_storage()
    if len(_made) >= _MOST_MADE:
        for address in [address for address, one in tuple(_made.items()) if one.storage.expired()]:
            _made.pop(address, None)
    if len(_made) >= _MOST_MADE:
        _made.clear()
    place = y.storage_offset(), y.numel(), y.shape[1], y.stride(1)
    _made[storage._cdata] = _Made(StorageWeakRef(storage), site, room, place, None if module is None else ref(module))


def _join(streams: Sequence[Any], dim: int, module: nn.Module | None = None) -> Tensor | None:
    """``torch.cat(streams, dim)`` in the memory of the longest, if that has the room; None otherwise.

    It stands in a module, which may be another one than that which the longest was computed in.
    """
    if any([type(x) is not Tensor for x in streams]):
        return None
    found = [_made.pop(x.untyped_storage()._cdata, None) for x in streams]
    host = max(range(len(streams)), key=lambda i: streams[i].numel())
    made, x, dim = found[host], streams[host], dim % streams[host].ndim
    for other in [one.site for i, one in enumerate(found) if i != host and one is not None]:
        if made is not None and other is made.site:
            continue  # modules of one class share it: the shorter stream has room as well, and is copied
        if made is not None:
            made.site.copied.add(other)
            other.rows_around = None
        for site in tuple(other.copied):  # it was the longest until now
            other.copied.discard(site)
            site.rows_around = (0, 0)
    if made is None or x.ndim < 3:
        return None
    maker = None if made.module is None else made.module()
    reader = None if module is None or maker is None else _Reader.of(module, maker)
    if reader is not None and maker is not None and isinstance(made.site, NormSite):
        made.site.readers[maker] = reader
    shape = [*x.shape]
    sizes = [one.shape[dim] if one.ndim == x.ndim else 0 for one in streams]
    shape[dim] = sum(sizes)
    room = sum(sizes[:host]), sum(sizes[host + 1 :])
    if (x.storage_offset(), x.numel(), x.shape[dim], x.stride(dim)) != made.place:
        return None
    if room != made.room:
        made.site.rows_around = room  # the next time
        return None
    for one, size in zip(streams, sizes, strict=True):
        if one.dtype is not x.dtype or one.device != x.device or one.shape != (*shape[:dim], size, *shape[dim + 1 :]):
            return None
    whole: Tensor = x.as_strided(shape, x.stride(), 0)
    for i, part in enumerate(whole.split(sizes, dim)):
        if i != host:
            copy_rows(part, streams[i])
    return whole
