"""How it is noticed that what was computed from weights is out of date.

Copies of weights in 8 bits, and the keys and values of a text, are kept from step to step. They hold as long as the
tensors that they were computed from are the same ones, at the same address, and written no more since, as torch counts
it. Merging an adapter writes into ``weight.data``, which changes none of the three; so every few calls some rows of the
tensors behind one store are compared with what they were, without waiting for the answer. Where they differ a warning
says so, and everything that is kept anywhere is computed anew.
"""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffkern.blocks.memory import version

#: One row in so many of a weight is compared.
SAMPLED = 64

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Source:
    """A tensor as it was when something was computed from it. It is not kept alive.

    Attributes:
        tensor: The tensor.
        version: How often it had been written in place.
        address: Where its data lay.
        generation: How often everything kept had been thrown away.
        sample: Some of its rows, as integers.
        step: One row in so many is among them.
    """

    tensor: weakref.ref[Tensor]
    version: int | None
    address: int
    generation: int
    sample: Tensor
    step: int

    @classmethod
    @torch.no_grad()
    def of(cls, tensor: Tensor, step: int = SAMPLED) -> Source:
        """Notes what ``tensor`` is now. To be called before it is read: what is written meanwhile must show."""
        signs = version(tensor), tensor.data_ptr(), _watch.generation
        return cls(weakref.ref(tensor), *signs, _rows(tensor, step).clone(), step)

    def is_still(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is the same one, unchanged as far as can be told without looking at its data."""
        return (
            self.tensor() is tensor
            and self.version == version(tensor)
            and self.address == tensor.data_ptr()
            and self.generation == _watch.generation
        )

    def differs(self) -> Tensor | None:
        """Whether the sample is another one now, on the device; None if the rest already says that it is no more."""
        tensor = self.tensor()
        if tensor is None or not self.is_still(tensor):
            return None
        return (_rows(tensor, self.step) != self.sample).any()


def _rows(tensor: Tensor, step: int) -> Tensor:
    """Some rows as integers: NaN is equal to itself there."""
    return tensor.detach()[::step].view(_INTEGERS[tensor.element_size()])


class Store(ABC):
    """Something that keeps what was computed from weights."""

    def __init__(self) -> None:
        self._answer: tuple[Tensor, torch.cuda.Event | None] | None = None
        _watch.add(self)

    @abstractmethod
    def sources(self) -> Iterable[Source]:
        """What it was computed from. Other threads may add to it meanwhile."""

    def compare(self) -> bool | None:
        """Whether the last comparison found a change, None if that is not known yet; asks for the next one."""
        found: bool | None = None
        answer = self._answer
        if answer is not None:
            flag, event = answer
            if event is not None and not event.query():
                return None
            found, self._answer = bool(flag), None
        differences = [differs for source in self.sources() if (differs := source.differs()) is not None]
        if differences:
            differ = torch.stack(differences).any()
            if differ.is_cuda:
                flag = torch.empty((), dtype=torch.bool, pin_memory=True)
                flag.copy_(differ, non_blocking=True)
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(differ.device))
                self._answer = flag, event
            else:
                self._answer = differ, None
        return found

    def forget_the_question(self) -> None:
        """Drops a comparison under way, of what is kept no more."""
        self._answer = None


def tick(every: int) -> None:
    """Compares the store whose turn it is, every so many calls."""
    if next(_watch.calls) % every == 0:
        _watch.compare_next()


def compare_next() -> None:
    """Compares the store whose turn it is; for whoever replays steps without calling the blocks."""
    _watch.compare_next()


def generation() -> int:
    """How often everything kept was thrown away."""
    return _watch.generation


class _Watch:
    """Whose turn it is to be compared, and how often a change was found. Models may run in several threads."""

    def __init__(self) -> None:
        self.generation = 0
        self.calls = itertools.count(1)
        self._lock = threading.Lock()
        self._stores: weakref.WeakSet[Store] = weakref.WeakSet()
        # Weak, too: what a block that is restored has kept is memory to give back at once.
        self._turns: Sequence[weakref.ref[Store]] = []

    def add(self, store: Store) -> None:
        with self._lock:
            self._stores.add(store)

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
            "diffkern: weights changed without a sign, as merging an adapter changes them. What is kept of them "
            "(copies in 8 bits, keys and values of the text) is computed anew; the last calls still ran with the old",
            stacklevel=2,
        )

    def _next(self) -> Store | None:
        """The one whose turn it is, of those that are still there."""
        with self._lock:
            turns = list(self._turns) or [weakref.ref(store) for store in self._stores]
            store = None
            while turns and store is None:
                store = turns.pop()()
            self._turns = turns
        return store


_watch = _Watch()
