"""Products of attention that need no copy behind them: their rows are computed where the rows of all streams lie.

``torch.cat([text, image], dim=1)`` copies both streams. A linear layer whose result becomes the longer part of that
leaves room for the other rows in front and behind, so that these alone are copied; it learns at the first
concatenation how much. A linear layer of a part, ``to_out(x[:, :n])``, is one product for each sample: for a batch,
``F.linear`` takes a product without the bias, and adds that in a pass of its own. And what is concatenated may be the
halves of one tensor already, and what is repeated be so once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import override

from diffkern.blocks.layout import is_last
from diffkern.blocks.pieces import has_plain_parameters, runs_fused
from diffkern.ops.copying import copy_rows
from diffkern.ops.group_norm import follows_layout
from diffkern.providers.dispatch_modes import modes_active, transforms_active
from diffkern.rewrite.facts import child_of
from diffkern.rewrite.site import FusedSite
from diffkern.rewrite.streams import TOKENS_FIRST

# Bound once, since every call asks.
_is_traced = torch.compiler.is_dynamo_compiling
#: A product for each sample pays for this many samples at most, and for samples of at least so many rows.
MOST_SAMPLES, LEAST_ROWS = 4, 512


class _WrittenOffGpus(FusedSite):
    """A site that is of use on GPUs: elsewhere a concatenation takes less time than to do without one."""

    @property
    @override
    def entry(self) -> Callable[..., Any]:
        """The site, which runs the expression as it is written but on GPUs."""
        original = self.original

        def as_written_off_gpus(module: nn.Module, *leaves: Any) -> Any:
            x = leaves[0]
            if not _is_traced() and type(x) is Tensor and not x.is_cuda and self.on_new_size is not None:
                self.idle_calls += 1
                self.original_calls += 1
                return original(module, *leaves)
            return self(module, *leaves)

        return as_written_off_gpus


class StreamSite(_WrittenOffGpus):
    """A linear layer as it is written, but for where its result lies, and how many products it takes.

    Attributes:
        rows_around: Rows that its memory has in front of each sample and behind it; None for a stream that is copied.
        copied: Sites of the shorter streams that are copied into its memory.
    """

    not_quick = None

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.rows_around: tuple[int, int] | None = (0, 0)
        self.copied: set[StreamSite] = set()
        self._joins = self.plan.options["joins"]

    def __call__(self, module: nn.Module, *leaves: Any) -> Any:
        """Computes the site for its leaf."""
        (x,) = leaves
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or type(x) is not Tensor or x.ndim != 3:
            return self.original(module, x)
        room, y = self.rows_around, None  # which another thread may change
        if room is not None and (self._joins or x.shape[0] > 1):
            layer: Any = child_of(module, self.plan.modules["linear"])
            is_plain = has_plain_parameters(layer, x.device, x.dtype) and not runs_fused(layer)  # as one in fp8 does
            if not is_plain or transforms_active() or modes_active():
                return self.run_original(module, x)
            y = _product(x, layer.weight, layer.bias, room)
        made = self.original(module, x) if y is None else y
        if self._joins and room is not None:
            _remember(self, made, (0, 0) if y is None else room)
        self.fused_calls += 1
        if self.observer is not None:
            self.observer(module, None)
        return made


class JoinSite(FusedSite):
    """A concatenation of streams: of one that has room for the others, or else like any other site."""

    not_quick = "site.on_new_size is None or not x0.is_cpu"  # else no stream has room, see StreamSite.entry

    def __call__(self, module: nn.Module, *leaves: Any) -> Any:
        """Computes the site for its leaves."""
        asked = not (torch.compiler.is_compiling() or torch.is_grad_enabled() or transforms_active() or modes_active())
        if asked and _made:
            streams = list(self.operands(module, leaves).values())
            whole = _join(streams, self.plan.options["stream_dim"])  # type: ignore[arg-type]
            if whole is not None:
                self.fused_calls += 1
                if self.observer is not None:
                    self.observer(module, None)
                return whole
        return super().__call__(module, *leaves)


class _SharingSite(FusedSite):
    """An expression whose result lies in the memory of an operand where that holds it; else as it is written."""

    #: The result for the operands and the dimension where it needs no memory of its own; None elsewhere.
    shared: Callable[..., Tensor | None]

    def __call__(self, module: nn.Module, *leaves: Any) -> Any:
        """Computes the site for its leaves."""
        if torch.compiler.is_compiling():
            return self.original(module, *leaves)
        shared = None
        if not (torch.is_grad_enabled() or transforms_active() or modes_active() or _may_be_written(module)):
            shared = self.shared(*self.operands(module, leaves).values(), self.plan.options["dim"])
        y = self.original(module, *leaves) if shared is None else shared
        self.fused_calls += 1
        if self.observer is not None:
            self.observer(module, None)
        return y


def _may_be_written(module: nn.Module) -> bool:
    """Whether a hook sees what a layer of the module is given: it may write into that."""
    if torch.nn.modules.module._global_forward_pre_hooks:
        return True
    children = [child for child in module._modules.values() if child is not None]
    inner = [one for child in children for one in child._modules.values() if one is not None]
    return any([child._forward_pre_hooks or child._forward_hooks for child in (*children, *inner)])


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


def _once(x: Any, n: Any, dim: int) -> Tensor | None:
    """``x.repeat_interleave(n, dim)`` as ``x`` itself, if that is the same."""
    once = type(n) is int and n == 1 and type(x) is Tensor and not x.requires_grad
    return x if once and -x.ndim <= dim < x.ndim else None


def _in_channels_last(x: Any, dim: int) -> Tensor | None:
    """``x.contiguous()`` as ``x`` itself, if it lies in channels last, and images may lie so here."""
    return x if type(x) is Tensor and follows_layout() and is_last(x) and not x.requires_grad else None


def _undivided(x: Any, n: Any, dim: int) -> Tensor | None:
    """``x / n`` as ``x`` itself, if that is the same."""
    by_one = type(n) in (int, float) and n == 1 and type(x) is Tensor and x.is_floating_point()
    return x if by_one and not x.requires_grad else None


class DividedSite(_SharingSite):
    """A division by a setting, which is the dividend itself where that is 1."""

    shared = staticmethod(_undivided)


class HalvesSite(_SharingSite, _WrittenOffGpus):
    """A concatenation of two tensors, which is a view of both where they are halves of one."""

    shared = staticmethod(_whole)


class ImageSite(_SharingSite, _WrittenOffGpus):
    """Tokens as an image: a view of them where the model computes in channels last, as they lie already."""

    shared = staticmethod(_in_channels_last)


class RepeatedSite(_SharingSite):
    """A repetition of each element along a dimension, which is the tensor itself where it is one of each."""

    shared = staticmethod(_once)


def lies_otherwise(site: FusedSite) -> bool:
    """Whether the result of a site is laid out otherwise than in stock, or it is of no use where no other's is."""
    return isinstance(site, (ImageSite, RepeatedSite, StreamSite)) or (
        isinstance(site, JoinSite) and site.plan.options["stream_dim"] in TOKENS_FIRST
    )


# --- the room ------------------------------------------------------------------------------------------


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, room: tuple[int, int]) -> Tensor | None:
    """``F.linear`` of each sample, with room around it; None where all samples in one product take less time."""
    samples, rows, _ = x.shape
    if room == (0, 0) and (samples == 1 or x.stride(0) == rows * x.stride(1)):
        return None
    if samples > 1 and (samples > MOST_SAMPLES or rows < LEAST_ROWS):
        few = room == (0, 0) and bias is not None and rows < LEAST_ROWS  # a copy takes less than to add the bias
        return F.linear(x.contiguous(), weight, bias) if few else None
    before, behind = room
    y = x.new_empty((samples, before + rows + behind, weight.shape[0]))[:, before : before + rows]
    for one, into in zip(x, y, strict=True):
        if bias is None:
            torch.mm(one, weight.t(), out=into)
        else:
            torch.addmm(bias, one, weight.t(), out=into)
    return y


class _Made(NamedTuple):
    """A result of a site, until it is concatenated: by then it is a view, of which its memory is all that is left."""

    storage: StorageWeakRef
    site: StreamSite
    room: tuple[int, int]
    place: tuple[int | torch.SymInt, ...]


#: By the address of the storage object, which is no other's while there is a weak reference to it.
_made: dict[int, _Made] = {}
#: Results that are remembered: a call that raises before its concatenation leaves some.
_MOST_MADE = 64


def _remember(site: StreamSite, y: Tensor, room: tuple[int, int]) -> None:
    storage = y.untyped_storage()
    if len(_made) >= _MOST_MADE:
        _made.clear()
    place = y.storage_offset(), y.numel(), y.shape[1], y.stride(1)
    _made[storage._cdata] = _Made(StorageWeakRef(storage), site, room, place)


def _join(streams: Sequence[Any], dim: int) -> Tensor | None:
    """``torch.cat(streams, dim)`` in the memory of the longest, if that has the room; None otherwise."""
    if any([type(x) is not Tensor for x in streams]):
        return None
    found = [_made.pop(x.untyped_storage()._cdata, None) for x in streams]
    host = max(range(len(streams)), key=lambda i: streams[i].numel())
    made, x, dim = found[host], streams[host], dim % streams[host].ndim
    for other in [one.site for i, one in enumerate(found) if i != host and one is not None]:
        if made is not None:
            made.site.copied.add(other)
            other.rows_around = None
        for site in tuple(other.copied):  # it was the longest until now
            other.copied.discard(site)
            site.rows_around = (0, 0)
    if made is None or x.ndim < 3:
        return None
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
