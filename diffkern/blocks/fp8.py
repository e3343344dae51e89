"""Linear layers in fp8: the fp8 copies of their weights, and inputs that are quantised once for all their readers.

A weight is quantised at its first use, and the copy is kept beside its module (a block, or the layer itself) for as
long as it is valid (:mod:`diffkern.cache.derived`). One that its library holds in fp8 is used as it is. In a block,
layers that read the same rows share one copy, and are one product; layers that are called as modules share the rows
(:func:`shared_rows`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from diffkern.blocks.pieces import has_plain_parameters, plain, runs_fused, untouched
from diffkern.cache import UNDO, DerivedCache, TensorFingerprint, kept_of, memory, version
from diffkern.ops import activation_fp8
from diffkern.providers.cublaslt import layers
from diffkern.providers.dispatch_modes import modes_active, transforms_active
from diffkern.providers.eager.fp8 import E4M3

#: Tensor cores take sides that are multiples of this.
MULTIPLE = 16


class RowwiseFp8(NamedTuple):
    """Hidden states in fp8 (e4m3), with one scale for each row."""

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """The shape of the hidden states."""
        return self.values.shape


class StoredWeight(NamedTuple):
    """A weight of another library in e4m3, ``[N, K]``, row-major, and a scale for each row, ``[N, 1]`` in float32."""

    values: Tensor
    scales: Tensor


def stored_weight(weight: Any) -> StoredWeight | None:
    """The parts of a weight of torchao's ``Float8Tensor``, whose configurations make one scale a row by default.

    None for any other weight, also for one of another fp8 format or with other blocks, which its library computes with.
    """
    kind = type(weight)
    if kind.__name__ != "Float8Tensor" or not kind.__module__.startswith("torchao."):
        return None
    values, scales = weight.qdata, weight.scale
    plain = type(values) is type(scales) is Tensor and values.ndim == 2 and values.is_contiguous()
    if not plain or values.dtype is not E4M3 or scales.dtype is not torch.float32:
        return None
    return StoredWeight(values, scales) if scales.shape == (values.shape[0], 1) and scales.is_contiguous() else None


def dequantized(layer: nn.Module, dtype: torch.dtype) -> nn.Linear | None:
    """A layer of torch that has the weight of ``layer`` as numbers of ``dtype``; None if it holds no such weight."""
    stored, bias = stored_weight(layer._parameters.get("weight")), layer._parameters.get("bias")
    if stored is None:
        return None
    rows, columns = stored.values.shape
    plain = nn.Linear(columns, rows, bias is not None, device="meta", dtype=dtype)
    plain.weight = nn.Parameter(stored.values.to(dtype) * stored.scales.to(dtype), requires_grad=False)
    if bias is not None:
        plain.bias = nn.Parameter(bias.detach().to(dtype), requires_grad=False)
    return plain


def fits(layer: nn.Module | None, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a weight of a linear layer can be quantised beside others: torch's own, with sides for tensor cores."""
    if layer is None or not untouched(layer, nn.Linear) or stored_weight(layer._parameters.get("weight")) is not None:
        return False
    return unfit_weights(layer, device, dtype) is None


def unfit_weights(layer: nn.Module, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a linear layer cannot be computed in fp8 for inputs of ``dtype`` on ``device``, or None."""
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    stored = stored_weight(weight)
    if weight is not None and stored is not None:
        here = stored.values.device == stored.scales.device == device and weight.dtype is dtype
        if here and (bias is None or (bias.dtype is dtype and plain(bias, device))):
            return _unfit_sides(stored.values)
        return "its weights are elsewhere, or of another dtype than its input"
    replaced = not torch.compiler.is_compiling() and home_of(layer._parameters.get("weight")) == device
    if not has_plain_parameters(layer, device, dtype, STORE if replaced else None):
        return "its weights are quantised, elsewhere, or of another dtype than its input"
    assert weight is not None
    if not torch.compiler.is_compiling() and version(weight) is None:  # in a graph nothing is kept
        return "its weight is an inference tensor, whose writes PyTorch does not count"
    return _unfit_sides(weight)


def _unfit_sides(weight: Tensor) -> str | None:
    rows, columns = weight.shape
    if rows % MULTIPLE or columns % MULTIPLE:
        return f"tensor cores take sides that are multiples of {MULTIPLE}, and it has {columns} x {rows}"
    return None


def quantize_rowwise(x: Tensor | RowwiseFp8, provider: str | None) -> RowwiseFp8:
    """Quantises hidden states unless they are in fp8 already."""
    return x if isinstance(x, RowwiseFp8) else RowwiseFp8(*activation_fp8(x, provider=provider))


#: Where weights are whose copies in fp8 have taken their place.
STORE = torch.device("cpu")
#: Where these weights were before, by their identity.
_away: dict[int, tuple[weakref.ref[Tensor], torch.device]] = {}


def home_of(weight: Tensor | None) -> torch.device | None:
    """The device of the copy in fp8 that has taken the place of a weight; None for a weight that is in its place."""
    ref, home = _away.get(id(weight), (None, None))
    return home if ref is not None and weight is not None and ref() is weight and weight.device == STORE else None


@torch.no_grad()
def replace_weight(layer: nn.Module) -> None:
    """Quantises the weight of a layer and moves it to :data:`STORE`; it is back as soon as the layer is restored."""
    weight = layer._parameters["weight"]
    assert weight is not None
    key, home = id(weight), weight.device
    _away[key] = weakref.ref(weight, lambda gone: _away.pop(key, None)), home
    memory(layer).setdefault(UNDO, set()).add(_put_back)
    copy = _copy_of(weight, home)
    weight.data = weight.data.to(STORE)
    copy.source = TensorFingerprint.of(weight, sums=False)
    _known(layer)._copy = copy


def _put_back(layer: nn.Module) -> None:
    weight = layer._parameters.get("weight")
    home = home_of(weight)
    if weight is not None and home is not None:
        weight.data = weight.data.to(home)
        del _away[id(weight)]


#: A key of :data:`_shared`: the tensor by its identity, and where rows of it are written in order.
_Place = tuple[int, int, bool]


class RowMaker:
    """What makes tensors that layers in fp8 may read, and can write their rows in the same pass.

    Nothing says ahead who reads a tensor: hooks, adapters and the layers themselves decide that at every call. So each
    call does what the readers of the last one would have had use for.
    """

    wanted = False  # whether a layer in fp8 read the last tensor


@dataclass(eq=False)
class _Rows:
    """A tensor in fp8, the layers that have read it, and what made it, if that can write rows as well."""

    source: weakref.ref[Tensor]
    state: tuple[Any, ...]  # what says that it is as it was
    rows: RowwiseFp8 | None  # None until a layer reads it
    provider: str | None  # who quantised it; None for its maker
    readers: set[int]  # the layers, by their identity
    maker: RowMaker | None = None  # see above


_shared: dict[_Place, _Rows] = {}


def shared_rows(x: Tensor, reader: nn.Module, provider: str | None) -> RowwiseFp8:
    """Quantises the input of a layer, once for all layers that read this tensor.

    Rows are given again only for the same tensor, at the same address, not written since as far as PyTorch counts, and
    **once to each reader**: a layer that comes a second time is in another step, for which the input may have been
    written in a way that PyTorch does not count (as replays of CUDA graphs write). They go with the tensor, and with a
    reader that has hooks: those may write its input so, before it and after it.
    """
    if x.is_inference():  # which count no writes
        return quantize_rowwise(x, provider)
    place = _place(x)
    if reader._forward_pre_hooks or reader._forward_hooks:
        _shared.pop(place, None)
        return quantize_rowwise(x, provider)
    known = _shared.get(place)
    if known is None or known.source() is not x or known.state != _state(x) or id(reader) in known.readers:
        known = _remember(place, x, None, None)
    elif known.maker is not None:
        known.maker.wanted = True
    if known.rows is None or known.provider not in (None, provider):
        known.rows, known.provider = quantize_rowwise(x, provider), provider
    known.readers.add(id(reader))
    return known.rows


def announce(x: Tensor, rows: RowwiseFp8 | None, maker: RowMaker) -> None:
    """Lets layers that read a new tensor have its rows, if they are written already, and its maker learn of that."""
    if not x.is_inference():
        _remember(_place(x), x, rows, maker)


def _place(x: Tensor) -> _Place:
    if x.is_cuda:
        stream = torch._C._cuda_getCurrentRawStream(x.device.index)
        return id(x), stream, torch.cuda.is_current_stream_capturing()
    return id(x), threading.get_ident(), False


def _state(x: Tensor) -> tuple[Any, ...]:
    return x._version, x.data_ptr(), x.shape, x.stride()


def _remember(place: _Place, x: Tensor, rows: RowwiseFp8 | None, maker: RowMaker | None) -> _Rows:
    source = weakref.ref(x, lambda gone: _forget(place, gone))
    known = _shared[place] = _Rows(source, _state(x), rows, None, set(), maker)
    return known


def _forget(place: _Place, gone: weakref.ref[Tensor]) -> None:
    known = _shared.get(place)
    if known is not None and known.source is gone:
        del _shared[place]
        if known.maker is not None and not known.readers:
            known.maker.wanted = False


#: Rows, dtype and device of an input: for each a layer is proven, and timed, by itself.
_Kind = tuple[int, torch.dtype, torch.device]

#: So many copies in a row that were of use once: the weight is another one at every call, as offloading makes it.
WASTED = 3


@dataclass(eq=False)
class _Copy:
    """A weight in fp8."""

    source: TensorFingerprint  # the weight
    values: Tensor  # ``[N, K]``
    scales: Tensor  # of the rows, ``[N, 1]``
    uses: int = field(default=0, repr=False)  # how often it was read
    wasted: int = field(default=0, repr=False)  # how many copies before it, in a row, were read no more than once


class Fp8Weight(DerivedCache):
    """The weight of a layer in fp8."""

    def __init__(self) -> None:
        super().__init__()
        self.moves = False  # whether copies were of no use, because the weight is another one at every call
        self.provider: str | None = None  # who quantised the input of the layer last; None for the first that can
        self.took: dict[_Kind, bool] = {}  # for kinds of inputs, whether the layer computed the last such call in fp8
        self._copy: _Copy | None = None
        self._made = 0

    def call(self, layer: nn.Module, x: Tensor, provider: str | None) -> Tensor:
        """Calls the layer in fp8 with an input that ``provider`` quantises, and notes that it took such a one."""
        kind = _kind_of(x)
        self.took[kind] = False  # if it raises
        y = self.run(layer, shared_rows(x, layer, provider))
        self.took[kind], self.provider = True, provider
        return y

    @override
    def fingerprints(self) -> Iterable[TensorFingerprint]:
        copy = self._copy
        return () if copy is None else (copy.source,)

    def run(self, layer: nn.Module, x: RowwiseFp8, out: Tensor | None = None) -> Tensor:
        """Calls the layer in fp8.

        Rows ``[B, S, K]`` may be told where their result shall be: ``out`` is ``[B, S, N]`` of the dtype of the weight,
        each sample of it contiguous, and takes a product each.
        """
        parameters: Any = layer._parameters
        weight = parameters["weight"]
        copy = stored_weight(weight) or self._copied(weight, x.values.device)
        # Not the op, whose checks take half as long as the rest: nothing here has a gradient or is traced.
        # The tensor cores make bfloat16 of such products.
        dtype = torch.bfloat16 if x.values.is_cuda else weight.dtype
        of_weight = copy.values, copy.scales, parameters["bias"], dtype
        if out is None:
            y = layers.linear_rows(x.values, x.scales, *of_weight)
            return y if dtype is weight.dtype else y.to(weight.dtype)
        for values, scales, into in zip(x.values, x.scales, out, strict=True):
            if dtype is weight.dtype:
                layers.linear_rows(values, scales, *of_weight, into)
            else:
                into.copy_(layers.linear_rows(values, scales, *of_weight))
        return out

    def _copied(self, weight: Tensor, device: torch.device) -> _Copy:
        copy = self._copy
        if copy is None or copy.values.device != device or not copy.source.matches(weight):
            wasted = copy.wasted + 1 if copy is not None and copy.uses < 2 else 0
            copy = self._copy = _copy_of(weight, device)
            copy.wasted = wasted
            self._made += 1
            self.moves |= wasted >= WASTED
        copy.uses += 1
        return copy

    def drop(self) -> None:
        """Drops the copy, where the layer does not read it any more."""
        self._copy = None

    @override
    def entries(self) -> list[object]:
        return [] if self._copy is None else [self._copy]

    def state(self) -> Hashable:
        """Changes as soon as a copy is made, or PyTorch counts a write into its source."""
        tensors = [source.tensor() for source in self.fingerprints()]
        return self._made, tuple([None if tensor is None else version(tensor) for tensor in tensors])


def weight_of(layer: nn.Module, device: torch.device) -> Fp8Weight:
    """The weight of a layer in fp8, quantised as needed, and checked: to be called once in each step."""
    weight = _known(layer)
    weight.on_call(device)
    return weight


def _known(layer: nn.Module) -> Fp8Weight:
    return kept_of(layer, "fp8", Fp8Weight)


def _kind_of(x: Tensor) -> _Kind:
    return x.numel() // max(x.shape[-1], 1), x.dtype, x.device


def was_asked(layer: nn.Module, x: Tensor) -> None:
    """Notes that a layer was called with ``x``: unless it computed in fp8, it does not for so many rows."""
    _known(layer).took.setdefault(_kind_of(x), False)


def takes_rows(layer: nn.Module | None, x: Tensor) -> bool | None:
    """Whether a layer that computed a call of as many rows as ``x`` in fp8 would do so now; None before its first one.

    Who asks may quantise the input in the place of the layer, which no hook and no mode may want to see then.
    """
    if layer is None or type(x) is not Tensor or not untouched(layer, nn.Linear) or not runs_fused(layer):
        return False
    weight = _known(layer)
    if weight.moves or modes_active() or transforms_active() or unfit_weights(layer, x.device, x.dtype) is not None:
        return False
    return weight.took.get(_kind_of(x))


def state_of(layer: nn.Module) -> Hashable:
    """What a CUDA graph of a layer depends on: which copy it read, and that this is valid."""
    weight: Fp8Weight | None = memory(layer).get("fp8")
    return None if weight is None else weight.state()


@torch.no_grad()
def _copy_of(weight: Tensor, device: torch.device) -> _Copy:
    sums = weight.device == device  # the host would take seconds for them
    source = TensorFingerprint.of(weight, rotates=True, sums=sums)
    return _Copy(source, *activation_fp8(weight.detach().to(device)))


def parts_of_feed_forward(feed_forward: Any) -> tuple[list[nn.Module], list[nn.Module]]:
    """The linear layers of diffusers' ``FeedForward`` with a GELU, and its dropouts."""
    first, *rest = feed_forward._modules["net"]._modules.values()
    layers = [first._modules["proj"], *(layer for layer in rest if type(layer) is nn.Linear)]
    return layers, [layer for layer in rest if type(layer) is not nn.Linear]
