"""Whether a fused computation earns its place: it and what it replaces are timed in turns on the operands of a call."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from diffkern.cache.derived import checks_paused
from diffkern.verify import choices
from diffkern.verify.isolation import uncounted

#: By how much the fused computation may seem to take longer: clocks are not exact.
HYSTERESIS = 1.02
#: Bytes of operands above which nothing is timed, unless their copies take a small share of the memory that a GPU has
#: free: time goes into memory traffic then, of which a fused op has less.
_LARGEST_TIMED, _SHARE = 1 << 28, 16
#: Rounds in which each computation has its turn on a GPU, fewer where a call of each takes more than a share of so many
#: seconds; the fastest counts.
_ROUNDS, _GPU_BUDGET = 5, 1.0
#: Turns of each on a CPU, at least and at most, and the seconds after which there are no more of them.
_LEAST_TURNS, _MOST_TURNS, _BUDGET = 2, 200, 0.02
#: What takes longer than so many microseconds is called once alone after its warm-up.
_LONG = 0.3e6
#: Calls of a turn on a GPU at most. The GPU sleeps before, at least so many clock cycles, until the host has launched
#: them; no GPU has more cycles in a second than the last.
_GPU_CALLS, _SLEEP, _CYCLES = 8, 3_000_000, 3e9


@dataclass(frozen=True)
class Cost:
    """What a call takes, in microseconds."""

    #: What the host computes until it returns. While it has to wait for other programs nothing counts: they may be gone
    #: in the next call.
    host: float
    device: float  # Until the device has computed it, without waits for the host. On a CPU that is the same.

    def __str__(self) -> str:
        host = f" (host {self.host:.1f} us)" if self.host != self.device else ""
        return f"{self.device:.1f} us{host}"


@dataclass(frozen=True)
class Prepared:
    """A computation, and what is done before each turn of it without being timed."""

    prepare: Callable[[], Any]  # does that, such as laying weights out as the computation would leave them
    compute: Callable[[], Any]
    #: Returns what a GPU takes for it as a CUDA graph, in microseconds, or None. Asked where the host could not launch
    #: it ahead: a GPU holds about a thousand kernels in its queue.
    replay: Callable[[], float | None] | None = None

    def __call__(self) -> Any:
        """Computes it, and prepares nothing."""
        return self.compute()


def is_too_large(nbytes: int, device: torch.device) -> bool:
    """Whether operands of so many bytes are not copied to be timed."""
    return nbytes > _LARGEST_TIMED and (device.type != "cuda" or nbytes * _SHARE > torch.cuda.mem_get_info(device)[0])


#: Costs by device and key, as :func:`kept_costs` finds them.
Shared = dict[Hashable, tuple[Cost, ...]]
_shared: ContextVar[Shared | None] = ContextVar("costs of an injection", default=None)


@contextmanager
def sharing(known: Shared) -> Iterator[None]:
    """Shares the costs of what is timed inside, so that modules of one kind are timed once where no disk keeps them."""
    token = _shared.set(known)
    try:
        yield
    finally:
        _shared.reset(token)


def kept_costs(computations: Sequence[Callable[[], Any]], device: torch.device, *key: Hashable) -> list[Cost]:
    """The costs of a computation and of what it replaces: those shared, or kept on disk, for a key, else timed now."""
    shared, kind = _shared.get(), (device, *key)
    if shared is not None and kind in shared:
        return list(shared[kind])
    found = costs_of(choices.recall(device, *key) or "")
    if found is None:
        with uncounted():
            found = costs(computations, device)
        text = " ".join(str(value) for cost in found for value in (cost.host, cost.device))
        choices.remember(device, text, *key)
    if shared is not None:
        shared[kind] = tuple(found)
    return found


def reason_to_stay_stock(
    computations: Sequence[Callable[[], Any]], device: torch.device, replayed: bool, *key: Hashable
) -> str:
    """Why a fused computation, the first of two, is not worth it by its time, kept for a key; "" if it is.

    They run without gradients, and do not warn: no user asked for them.
    """
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fused, stock = kept_costs(computations, device, *key)
    except torch.OutOfMemoryError:
        return ""  # the call itself says so
    return reason_without_gain(fused, stock, replayed)


def costs_of(text: str) -> list[Cost] | None:
    """The two costs of a text that is kept on disk; None for any other text."""
    try:
        values = [float(part) for part in text.split()]
    except ValueError:
        return None
    return [Cost(*values[:2]), Cost(*values[2:])] if len(values) == 4 else None


def reason_without_gain(fused: Cost, stock: Cost, replayed: bool) -> str:
    """Why a fused computation is not worth it, with both costs; "" if it is.

    Where steps that wait for the host become CUDA graphs, ``replayed``, only the device counts. Else the larger of the
    two does, what the step waits for; and where that stays the same within the accuracy of clocks, the device may not
    take longer either: another host is faster.
    """
    if replayed:
        gains = fused.device <= HYSTERESIS * stock.device
    else:
        waits = [max(cost.host, cost.device) for cost in (fused, stock)]
        tied = HYSTERESIS * waits[0] > waits[1]
        gains = waits[0] <= HYSTERESIS * waits[1] and not (tied and fused.device > HYSTERESIS * stock.device)
    return "" if gains else f"fused it takes {fused}, as it is written {stock}: no gain"


def costs(computations: Sequence[Callable[[], Any]], device: torch.device) -> list[Cost]:
    """Times computations in turns, a few milliseconds in all unless a single call takes longer: then fewer calls.

    On a GPU the time of the device is that between two of its events, which it reaches once the host has launched what
    stands between them: as far as its queue holds that, a slow host is not in it. What a step looks at once, such as
    the checksums of all weights of which something is kept, is in no call: on a CPU each call looks at its own.
    """
    with checks_paused() if device.type != "cpu" else nullcontext():
        return _costs(computations, device)


def _costs(computations: Sequence[Callable[[], Any]], device: torch.device) -> list[Cost]:
    for compute in computations:  # loads and compiles
        _prepare(compute)
        compute()
    single = [_single(compute, device) for compute in computations]
    longest = max(turn.took for turn in single)
    if device.type == "cuda" and (longest <= _LONG or any(2 * turn.launched > turn.took for turn in single)):
        return _on_gpu(computations, device, single)
    if longest > _LONG:
        return [Cost(turn.host if device.type == "cuda" else turn.took, turn.took) for turn in single]
    fastest = [float("inf")] * len(computations)
    other_work = _OtherWork()
    began = time.perf_counter()
    for number in range(_MOST_TURNS):
        for i, compute in enumerate(computations):
            _prepare(compute)
            other_work()
            started = time.perf_counter()
            compute()
            finish(device)
            fastest[i] = min(fastest[i], time.perf_counter() - started)
        if number >= _LEAST_TURNS and time.perf_counter() - began > _BUDGET:
            break
    return [Cost(took * 1e6, took * 1e6) for took in fastest]


def _prepare(compute: Callable[[], Any]) -> None:
    if isinstance(compute, Prepared):
        compute.prepare()


class _OtherWork:
    """What stands between two calls in a model: their code and data are no longer in the nearest caches.

    Called again and again at once, a computation of much Python code takes less than half of the time that it takes
    in a model, and one of few large functions nearly all of it.
    """

    def __init__(self) -> None:
        self._x, self._weight = torch.ones(64, 64, device="cpu"), torch.ones(192, 64, device="cpu")
        self._data = torch.ones(1 << 16, device="cpu")

    def __call__(self) -> None:
        F.linear(F.silu(self._x), self._weight).chunk(6, dim=-1)
        self._data.sum()


class _Turn(NamedTuple):
    """What a call takes on a device that has nothing else to do, in microseconds."""

    host: float  # so long the host computes
    launched: float  # after so long it returns
    took: float  # after so long the device is done, which may have waited for the host


def _single(compute: Callable[[], Any], device: torch.device, calls: int = 1) -> _Turn:
    _prepare(compute)
    finish(device)
    began, worked = time.perf_counter(), time.thread_time()
    for _ in range(calls):
        compute()
    host, launched = time.thread_time() - worked, time.perf_counter() - began
    finish(device)
    return _Turn(*(seconds * 1e6 / calls for seconds in (host, launched, time.perf_counter() - began)))


def finish(device: torch.device) -> None:
    """Waits until a device has done what was launched."""
    if device.type != "cpu" and device.type == getattr(torch.accelerator.current_accelerator(), "type", None):
        torch.accelerator.synchronize(device)


def _on_gpu(computations: Sequence[Callable[[], Any]], device: torch.device, single: Sequence[_Turn]) -> list[Cost]:
    """The host by calls on an idle GPU, and the GPU by calls that the host launches while it sleeps."""
    stream, longest = torch.cuda.current_stream(device), max(turn.took for turn in single)
    calls = min(_GPU_CALLS, 1 + int(_BUDGET * 1e6 / longest))
    rounds = max(1, min(_ROUNDS, int(_GPU_BUDGET * 1e6 / (longest * len(computations)))))
    turns = list(single)
    devices, is_late = [float("inf")] * len(computations), False
    with torch.cuda.device(device):
        for _ in range(rounds):
            for i, compute in enumerate(computations):
                turns[i] = _Turn(*map(min, turns[i], _single(compute, device, calls)))
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(max(_SLEEP, int(_CYCLES * calls * turns[i].launched / 1e6)))
                start.record(stream)
                for _ in range(calls):
                    compute()
                is_late |= start.query()  # the GPU woke before all was launched, or the host waited for that
                end.record(stream)
                end.synchronize()
                devices[i] = min(devices[i], start.elapsed_time(end) * 1e3 / calls)
        replays = [_replay(compute) for compute in computations] if is_late else [None]
    devices = devices if None in replays else replays  # type: ignore[assignment]
    return [Cost(turn.host, took) for turn, took in zip(turns, devices, strict=True)]


def _replay(compute: Callable[[], Any]) -> float | None:
    if not isinstance(compute, Prepared) or compute.replay is None:
        return None
    compute.prepare()
    return compute.replay()
