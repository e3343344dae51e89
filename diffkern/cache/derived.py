"""Tensors computed from others (keys and values of a text, rotary tables, fp8 weights), and how long they are valid.

What was computed from a tensor is valid while that is the same tensor, at the same address, and not written since.
PyTorch counts most writes. It does not count those through ``tensor.data`` (an adapter merge, an EMA swap), NumPy or
DLPack; a checksum over the whole tensor finds these:

- On the CPU, and on every device but CUDA, a cache compares the checksums of all its sources at every call, before it
  returns anything. The first call after a write is right.
- On CUDA the comparison is a *round*: one for all caches of a device that were called since the last one, which begins
  when one of them is called again, so once in each step of a model. A round enqueues checksums of every small source
  (texts, vectors, tables) and of every ``ROUNDS``-th weight matrix. The next round reads the answer: by then a whole
  step lies between, and the GPU does not run dry while the host waits. A model that does not run costs nothing.

A write that is found warns, and invalidates everything that is kept anywhere.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

import torch
from torch import Tensor, nn
from typing_extensions import Self

from diffkern.cache.memory import memory
from diffkern.providers.dispatch_modes import modes_active

#: On CUDA a weight matrix is part of one round in so many.
ROUNDS = 16

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


_checks_paused: ContextVar[bool] = ContextVar("checks_paused", default=False)


@contextmanager
def checks_paused() -> Iterator[None]:
    """Checks nothing inside of the block: a proof is no step, and must not be told of another model's weights."""
    token = _checks_paused.set(True)
    try:
        yield
    finally:
        _checks_paused.reset(token)


def version(tensor: Tensor) -> int | None:
    """How often PyTorch counted a write into ``tensor``; None where it does not count (inference tensors)."""
    return None if tensor.is_inference() else tensor._version


def checksum(tensor: Tensor) -> tuple[Tensor, ...]:
    r"""The checksum of a whole tensor, as parts that are equal if, and for all practical purposes only if, it is.

    Of the elements as integers :math:`v_{i j}`, where :math:`j` is the last dimension, it has :math:`\sum_j v_{i j}`
    and :math:`\sum_i v_{i j}` in int64: changed elements show, and so do rows or columns that were permuted. Integers,
    because NaN differs from itself; of 32 bits at most, because sums of larger ones overflow, and two changed signs
    would cancel. A vector is its own checksum, and not copied. A matrix on NVIDIA's GPUs has :func:`row_hashes`.
    """
    values = tensor.detach().resolve_neg()
    if _is_hashed(values):
        return (row_hashes(values).flatten(),)
    if tensor.element_size() in _INTEGERS:
        values = values.view(_INTEGERS[tensor.element_size()])
    else:
        values = (values if values.ndim else values.reshape(1)).contiguous().view(torch.int32)
    if values.ndim < 2:
        return (values.reshape(-1),)
    others = tuple(range(values.ndim - 1))
    return values.sum(-1, dtype=torch.int64).reshape(-1), values.sum(others, dtype=torch.int64)


def row_hashes(matrix: Tensor) -> Tensor:
    r"""Eight numbers for each row of a dense matrix: :math:`h_{i r} = \sum_b v_{i b} m_{r b}` in int32.

    :math:`v_{i b}` are the bytes of row :math:`i` as signed integers, and :math:`m` are fixed odd factors, so that a
    changed byte shows in all eight, and bytes that change places show as well. A product of int8 matrices reads each
    byte once; to sum integers, PyTorch first writes all of them as int64.
    """
    values = matrix.view(torch.int8)
    return torch._int_mm(values, _factors(values.shape[1], values.device).t())


#: Rows of bytes up to here have sums in int32.
_LONGEST_HASHED = 2**31 // (128 * 127)


def _is_hashed(values: Tensor) -> bool:
    if values.device.type != "cuda" or torch.version.hip or values.ndim != 2 or not values.is_contiguous():
        return False
    length = values.shape[1] * values.element_size()
    return values.shape[0] > 16 and 0 < length <= _LONGEST_HASHED and length % 8 == 0  # what int8 products take


@lru_cache(maxsize=64)
def _factors(length: int, device: torch.device) -> Tensor:
    """Eight rows of odd numbers below 128 without a pattern, computed on the device: the host does not wait."""
    mixed = torch.arange(8 * length, device=device) * 0x9E3779B1
    for shift, factor in ((15, 0x85EBCA77), (13, 0xC2B2AE3D)):
        mixed = (mixed ^ (mixed >> shift)) * factor & 0xFFFFFFFF
    return ((mixed >> 16) & 127 | 1).to(torch.int8).view(8, length)


@dataclass(frozen=True, eq=False)
class TensorFingerprint:
    """A tensor as it was when something was computed from it. It does not keep the tensor alive."""

    tensor: weakref.ref[Tensor]
    version: int | None  # how often PyTorch had counted a write
    address: int  # where its data was
    strides: tuple[int, ...]  # how the data was laid out
    generation: int  # how often everything that is kept had been invalidated
    checksum: tuple[Tensor, ...]  # see :func:`checksum`
    turn: int | None  # which of :data:`ROUNDS` rounds of its cache, on CUDA, compare it; None for every round

    @classmethod
    @torch.no_grad()
    def of(cls, tensor: Tensor, rotates: bool = False, sums: bool = True) -> Self:
        """Takes the fingerprint of a plain tensor. Call it before you read the tensor: a write in between must show.

        Rounds take turns with a matrix that ``rotates``; ``sums`` find writes that PyTorch does not count.
        """
        turn = next(_rounds.turns) % ROUNDS if rotates and tensor.ndim > 1 else None
        signs = version(tensor), tensor.data_ptr(), tensor.stride(), _rounds.generation
        if not sums:
            return cls(weakref.ref(tensor), *signs, (), turn)
        parts = checksum(tensor)
        return cls(weakref.ref(tensor), *signs, parts if tensor.ndim > 1 else (parts[0].clone(),), turn)

    def matches(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is the same one, unchanged as far as can be told without its data."""
        return (
            self.tensor() is tensor
            and self.version is not None  # where PyTorch counts no writes, nothing can be told
            and self.version == version(tensor)
            and self.address == tensor.data_ptr()
            and self.strides == tensor.stride()
            and self.generation == _rounds.generation
        )

    def pairs(self, device: torch.device | None = None) -> list[tuple[Tensor, Tensor]]:
        """The parts of the checksum now and then; none where :meth:`matches` is False already, or on other devices."""
        tensor = self.tensor()
        if tensor is None or not self.matches(tensor) or (device is not None and tensor.device != device):
            return []
        if not self.checksum:
            return []
        return list(zip(checksum(tensor), self.checksum, strict=True))

    def was_overwritten(self) -> bool:
        """Whether the tensor was written and PyTorch did not count it. Waits for the device."""
        return not all(torch.equal(now, then) for now, then in self.pairs())


def match_all(fingerprints: Sequence[TensorFingerprint], tensors: Sequence[Tensor]) -> bool:
    """Whether ``tensors`` match ``fingerprints`` one by one."""
    return len(fingerprints) == len(tensors) and all(map(TensorFingerprint.matches, fingerprints, tensors))


class DerivedCache(ABC):
    """Keeps what was computed from other tensors."""

    def __init__(self) -> None:
        #: Whether a result was overwritten by the code that received it. That will happen again at each call, so from
        #: then on every call computes its own.
        self.is_disabled = False
        #: The round in which it was called last, and in how many rounds it was compared.
        self.called: tuple[torch.device, int] | None = None
        self.compared = 0
        _rounds.add(self)

    @abstractmethod
    def fingerprints(self) -> Iterable[TensorFingerprint]:
        """Those of all sources and results, as a snapshot: other threads may add to the cache meanwhile."""

    def results(self) -> Iterable[TensorFingerprint]:
        """Those of results that others can write into."""
        return ()

    @abstractmethod
    def entries(self) -> list[object]:
        """What is kept now. A CUDA graph that reads it holds this: the cache may replace it, which frees the memory."""

    def on_call(self, device: torch.device) -> None:
        """To be called once in each step on ``device``, before anything that is kept is used: checks the sources."""
        if modes_active() or _checks_paused.get():
            return  # fake tensors have no data, and a counter of operations would count the check
        if device.type != "cuda":
            if any(map(TensorFingerprint.was_overwritten, self.fingerprints())):
                _rounds.invalidate()
        elif not torch.cuda.is_current_stream_capturing():
            now = device, _rounds.numbers[device]
            if self.called == now:
                start_round(device, ())
                now = device, _rounds.numbers[device]
            self.called = now


class _Rounds:
    """The caches that there are, and the rounds on each device. Models may run in several threads."""

    def __init__(self) -> None:
        self.generation = 0
        self.turns = count()
        self._lock = threading.RLock()
        self._caches: weakref.WeakSet[DerivedCache] = weakref.WeakSet()
        self.numbers: Counter[torch.device] = Counter()  # of the rounds that began
        self._answers: dict[torch.device, tuple[Tensor, torch.cuda.Event | None]] = {}

    def add(self, cache: DerivedCache) -> None:
        with self._lock:
            self._caches.add(cache)

    @torch.no_grad()
    def start(self, device: torch.device, called: Iterable[DerivedCache] | None) -> None:
        with self._lock:
            now = device, self.numbers[device]
            for cache in called or ():
                cache.called = now
            self.numbers[device] += 1
            flag, event = self._answers.pop(device, (None, None))
            if event is not None:
                event.synchronize()
            if flag is not None and flag.item():
                self.invalidate()
            used = [cache for cache in tuple(self._caches) if called is None or cache.called == now]
            for cache in used:
                cache.compared += 1
            pairs = [
                pair
                for cache in used
                for fingerprint in cache.fingerprints()
                if fingerprint.turn is None or fingerprint.turn == cache.compared % ROUNDS
                for pair in fingerprint.pairs(device)
            ]
            if pairs:
                self._answers[device] = _answer(pairs, device)

    def invalidate(self) -> None:
        with self._lock:
            for cache in tuple(self._caches):
                cache.is_disabled |= any(map(TensorFingerprint.was_overwritten, cache.results()))
            self.generation += 1
            self._answers.clear()
        warnings.warn(
            "diffkern: a tensor was written in a way that PyTorch does not count, as tensor.data, NumPy and adapter "
            "merges write. What diffkern keeps (fp8 weights, keys and values of the text, rotary tables) is computed "
            "again; on a GPU the last steps may have used old values: call diffkern.forget(model) after such a write",
            stacklevel=3,
        )


def _answer(pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> tuple[Tensor, torch.cuda.Event | None]:
    """Whether any pair differs, as a flag on the host that holds once the event has passed."""
    kinds = {now.dtype for now, _ in pairs}
    differ = [
        torch.cat([now for now, _ in pairs if now.dtype is kind]).ne(
            torch.cat([then for _, then in pairs if then.dtype is kind])
        )
        for kind in kinds
    ]
    found = torch.cat(differ).any()
    if device.type != "cuda":
        return found, None
    flag = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
    event = torch.cuda.Event()
    with torch.cuda.device(device):
        flag.copy_(found, non_blocking=True)
        event.record()
    return flag, event


def entries_of(module: nn.Module) -> list[object]:
    """What is kept now of a module, see :meth:`DerivedCache.entries`."""
    held = [(one.entries() if isinstance(one, DerivedCache) else [one]) for one in _held(module)]
    return [entry for entries in held for entry in entries]


def caches_of(module: nn.Module) -> list[DerivedCache]:
    """The caches of a module."""
    return [one for one in _held(module) if isinstance(one, DerivedCache)]


def _held(module: nn.Module) -> Iterator[object]:
    for value in tuple(memory(module).values()):
        yield from tuple(value.values()) if isinstance(value, dict) else (value,)


def start_round(device: torch.device, called: Iterable[DerivedCache] | None = None) -> None:
    """Reads the answer of the last round on ``device``, and begins the next.

    It compares the caches that were called since, and those in ``called``, which a step uses without a call of them;
    with None all that there are.
    """
    _rounds.start(device, called)


def generation() -> int:
    """How often everything that is kept was invalidated."""
    return _rounds.generation


_rounds = _Rounds()
