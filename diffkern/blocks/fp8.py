"""Linear layers of a block in 8 bits: the copies of their weights, and how it is noticed that one is out of date.

A copy is made at first use and kept beside the block. It is made anew when the parameter, its version or its address
is another one. Merging an adapter writes into ``weight.data``, which changes none of the three; so every few calls some
rows of the weights of one block are compared with what they were, without waiting for the answer. Where they differ a
warning says so, and all copies are made anew.
"""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from diffkern.blocks.memory import memory, version
from diffkern.blocks.pieces import plain_linear, run_layer
from diffkern.ops import activation_fp8
from diffkern.providers.eager.fp8 import multiply_rows

#: Tensor cores take sides that are multiples of this.
MULTIPLE = 16
#: One row in so many is compared.
SAMPLED = 64
#: Calls of blocks between two comparisons.
EVERY = 16


class Rows(NamedTuple):
    """Hidden states in rows of 8 bits."""

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """The shape of the hidden states."""
        return self.values.shape


def fits(layer: nn.Module | None, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a linear layer can be computed in 8 bits: torch's own, with sides that tensor cores take."""
    if layer is None or not plain_linear(layer, device, dtype):
        return False
    weight: Any = layer._parameters["weight"]
    rows, columns = weight.shape
    return rows % MULTIPLE == 0 and columns % MULTIPLE == 0  # type: ignore[no-any-return]


def as_rows(x: Tensor | Rows, provider: str | None) -> Rows:
    """The hidden states in rows of 8 bits."""
    return x if isinstance(x, Rows) else Rows(*activation_fp8(x, provider=provider))


@dataclass(frozen=True)
class _Copy:
    """A weight in 8 bits, viewed as ``[K, N]``, and what it was made of, which it does not keep alive."""

    source: weakref.ref[Tensor]
    version: int | None
    address: int
    generation: int
    columns: Tensor
    scales: Tensor
    sample: Tensor

    def is_of(self, weight: Tensor) -> bool:
        return (
            self.source() is weight
            and self.version == version(weight)
            and self.address == weight.data_ptr()
            and self.generation == _watch.generation
        )


class Weights:
    """The weights of one block in 8 bits."""

    def __init__(self) -> None:
        self._copies: dict[str, _Copy] = {}
        self._made = 0
        self._answer: tuple[Tensor, torch.cuda.Event | None] | None = None
        _watch.add(self)

    def run(self, name: str, layer: nn.Module, x: Tensor | Rows) -> Tensor:
        """Calls a layer, which goes by ``name`` in this block, on hidden states in whatever form they have."""
        if not isinstance(x, Rows):
            return run_layer(layer, x)
        weight: Any = layer._parameters["weight"]
        copy = self._copies.get(name)
        if copy is None or not copy.is_of(weight):
            copy = self._copies[name] = _copied(weight)
            self._made += 1
        # Not linear_fp8, whose checks take half as long as the rest: nothing here has a gradient or is traced.
        return multiply_rows(x.values, x.scales, copy.columns, copy.scales, layer._parameters["bias"], weight.dtype)

    def compare(self) -> bool | None:
        """Whether the last comparison found a change, None if that is not known yet; asks for the next one."""
        found: bool | None = None
        answer = self._answer
        if answer is not None:
            flag, event = answer
            if event is not None and not event.query():
                return None
            found, self._answer = bool(flag), None
        current = [
            (weight, copy.sample)
            for copy in tuple(self._copies.values())  # other threads add to them
            if (weight := copy.source()) is not None and copy.is_of(weight)
        ]
        if current:
            differ = torch.stack([(_bits(weight) != sample).any() for weight, sample in current]).any()
            if differ.is_cuda:
                flag = torch.empty((), dtype=torch.bool, pin_memory=True)
                flag.copy_(differ, non_blocking=True)
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(differ.device))
                self._answer = flag, event
            else:
                self._answer = differ, None
        return found

    def state(self) -> Hashable:
        """Is another one as soon as a copy is made, or is out of date by the version of its weight."""
        sources = [copy.source() for copy in tuple(self._copies.values())]
        return self._made, tuple(None if weight is None else version(weight) for weight in sources)

    def forget_the_question(self) -> None:
        """Drops a comparison under way, of copies that are none any more."""
        self._answer = None


def weights_of(block: nn.Module) -> Weights:
    """The weights of a block in 8 bits, made as they are needed. Now and then compares those of some block."""
    _watch.tick()
    known = memory(block)
    if "fp8" not in known:
        known["fp8"] = Weights()
    weights: Weights = known["fp8"]
    return weights


def state_of(block: nn.Module) -> Hashable:
    """What a recording of a block depends on: which copies it read, and that they are up to date."""
    weights: Weights | None = memory(block).get("fp8")
    return None if weights is None else weights.state()


def generation() -> int:
    """How often all copies were thrown away."""
    return _watch.generation


def compare_next() -> None:
    """Compares the weights of the block whose turn it is; for whoever replays steps without calling the blocks."""
    _watch.compare_next()


class _Watch:
    """Whose turn it is to be compared, and how often a change was found. Models may run in several threads."""

    def __init__(self) -> None:
        self.generation = 0
        self._lock = threading.Lock()
        self._calls = itertools.count(1)
        self._stores: weakref.WeakSet[Weights] = weakref.WeakSet()
        # Weak, too: the copies of a block that is restored are memory to give back at once.
        self._turns: list[weakref.ref[Weights]] = []

    def add(self, store: Weights) -> None:
        with self._lock:
            self._stores.add(store)

    def tick(self) -> None:
        if next(self._calls) % EVERY == 0:
            self.compare_next()

    def compare_next(self) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        store = self._next()
        if store is None or not store.compare():
            return
        with self._lock:
            self.generation += 1
            for other in self._stores:
                other.forget_the_question()
        warnings.warn(
            "diffkern: weights changed without a sign, as merging an adapter changes them. Their copies in 8 bits "
            "are made anew; the last calls still ran with the old ones",
            stacklevel=2,
        )

    def _next(self) -> Weights | None:
        """The one whose turn it is, of those that are still there."""
        with self._lock:
            if not self._turns:
                self._turns = [weakref.ref(store) for store in self._stores]
            while self._turns:
                store = self._turns.pop()()
                if store is not None:
                    return store
        return None


_watch = _Watch()


@torch.no_grad()
def _copied(weight: Tensor) -> _Copy:
    # Signs first: what another thread writes into the weight meanwhile must show.
    signs = version(weight), weight.data_ptr(), _watch.generation
    sample = _bits(weight).clone()
    values, scales = activation_fp8(weight.detach())
    return _Copy(weakref.ref(weight), *signs, values.t(), scales.t(), sample)


def _bits(weight: Tensor) -> Tensor:
    """Some rows of a weight as integers: NaN is equal to itself there."""
    return weight.detach()[::SAMPLED].view({2: torch.int16, 4: torch.int32}[weight.element_size()])


def gelu_feed_forward(weights: Weights, feed_forward: nn.Module, rows: Rows, provider: str | None) -> Tensor:
    """Diffusers' ``FeedForward`` with a tanh GELU and silent dropouts, both products in 8 bits."""
    net: Any = feed_forward._modules["net"]
    first, *rest = net._modules.values()
    x = weights.run("ff.0", first._modules["proj"], rows)
    (last,) = (layer for layer in rest if type(layer) is nn.Linear)
    return weights.run("ff.1", last, Rows(*activation_fp8(x, "gelu_tanh", provider=provider)))
