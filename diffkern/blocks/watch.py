"""How it is noticed that what was computed from weights is out of date.

Copies of weights in 8 bits, and the keys and values of a text, are kept from step to step. They hold as long as the
tensors that they were computed from are the same ones, at the same address, and written no more since, as torch counts
it. Merging an adapter writes into ``weight.data``, which changes none of the three; so in about every step some rows of
the tensors behind one store are compared with what they were, without waiting for the answer. Where they differ a
warning says so, and everything that is kept anywhere is computed anew.
"""

from __future__ import annotations

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
        strides: How.
        generation: How often everything kept had been thrown away.
        sample: Some of its rows, as integers.
        step: One row in so many is among them.
    """

    tensor: weakref.ref[Tensor]
    version: int | None
    address: int
    strides: tuple[int, ...]
    generation: int
    sample: Tensor
    step: int

    @classmethod
    @torch.no_grad()
    def of(cls, tensor: Tensor, whole: bool = False) -> Source:
        """Notes what ``tensor`` is now. To be called before it is read: what is written meanwhile must show.

        Args:
            tensor: A plain tensor.
            whole: Whether all of it is compared, as a vector always is, and not some rows.
        """
        step = 1 if whole or tensor.ndim < 2 else SAMPLED
        signs = version(tensor), tensor.data_ptr(), tensor.stride(), _watch.generation
        return cls(weakref.ref(tensor), *signs, _rows(tensor, step).clone(), step)

    def is_still(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is the same one, unchanged as far as can be told without looking at its data."""
        return (
            self.tensor() is tensor
            and self.version is not None  # else torch does not count, and nothing can be told
            and self.version == version(tensor)
            and self.address == tensor.data_ptr()
            and self.strides == tensor.stride()
            and self.generation == _watch.generation
        )

    def differs(self) -> Tensor | None:
        """Whether the sample is another one now, on the device; None if the rest already says that it is no more."""
        tensor = self.tensor()
        if tensor is None or not self.is_still(tensor):
            return None
        return (_rows(tensor, self.step) != self.sample).any()


def are_still(sources: Sequence[Source], tensors: Sequence[Tensor]) -> bool:
    """Whether ``tensors`` are, one by one, those that ``sources`` were noted of, unchanged."""
    return len(sources) == len(tensors) and all(map(Source.is_still, sources, tensors))


def _rows(tensor: Tensor, step: int) -> Tensor:
    """Some rows as integers: NaN is equal to itself there."""
    return tensor.detach()[::step].view(_INTEGERS[tensor.element_size()])


class Store(ABC):
    """Something that keeps what was computed from weights."""

    def __init__(self) -> None:
        self._left = _watch.add(self)
        self._answer: tuple[Tensor, torch.cuda.Event | None] | None = None

    @abstractmethod
    def sources(self) -> Iterable[Source]:
        """What it was computed from. Other threads may add to it meanwhile."""

    def tick(self) -> None:
        """Counts a call. Asks for a comparison every as many calls as there are stores: one in each step, about."""
        self._left -= 1
        if self._answer is not None or self._left <= 0:
            self._left = _watch.size()
            _watch.check(self)

    def changed(self) -> bool:
        """Whether a comparison is done and has found a change; asks for one if none is under way."""
        answer = self._answer
        if answer is None:
            self._ask()
            return False
        differ, event = answer
        if event is not None and not event.query():
            return False
        self._answer = None
        return bool(differ)

    def _ask(self) -> None:
        differences = [differs for source in self.sources() if (differs := source.differs()) is not None]
        if not differences:
            return
        differ = torch.stack(differences).any()
        if not differ.is_cuda:
            self._answer = differ, None
            return
        flag = torch.empty((), dtype=torch.bool, pin_memory=True)
        flag.copy_(differ, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(differ.device))
        self._answer = flag, event

    def waits(self) -> bool:
        """Whether a comparison is under way, or done and not looked at."""
        return self._answer is not None

    def forget_the_question(self) -> None:
        """Drops a comparison under way, of what is kept no more."""
        self._answer = None


def compare_next() -> None:
    """Compares the store whose turn it is; for whoever replays steps without calling the blocks."""
    store = _watch.next()
    if store is not None:
        _watch.check(store)


def generation() -> int:
    """How often everything kept was thrown away."""
    return _watch.generation


class _Watch:
    """Which stores there are, and how often a change was found. Models may run in several threads."""

    def __init__(self) -> None:
        self.generation = 0
        self._lock = threading.Lock()
        self._stores: weakref.WeakSet[Store] = weakref.WeakSet()
        # Weak, too: what a block that is restored has kept is memory to give back at once.
        self._turns: list[weakref.ref[Store]] = []
        self._asked: weakref.ref[Store] | None = None

    def add(self, store: Store) -> int:
        """Takes up a store, and says where it begins to count, so that not all are compared at the same time."""
        with self._lock:
            self._stores.add(store)
            return len(self._stores)

    def size(self) -> int:
        """How many there are, two at least: between two questions there must be time for an answer."""
        return max(2, len(self._stores))

    def check(self, store: Store) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        if not store.changed():
            return
        with self._lock:
            self.generation += 1
            for other in self._stores:
                other.forget_the_question()
        warnings.warn(
            "diffkern: weights changed without a sign, as merging an adapter changes them. What is kept of them (in 8 "
            "bits, or as keys and values of the text) is computed anew; the last calls may have run with the old",
            stacklevel=2,
        )

    def next(self) -> Store | None:
        """The one that was asked last, until its answer is known; then the next one of those that are still there."""
        with self._lock:
            asked = None if self._asked is None else self._asked()
            if asked is not None and asked.waits():
                return asked
            if not self._turns:
                self._turns = [weakref.ref(store) for store in self._stores]
            while self._turns:
                self._asked = self._turns.pop()
                store = self._asked()
                if store is not None:
                    return store
        return None


_watch = _Watch()
