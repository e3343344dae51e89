"""Whether a fused computation earns its place: it and what it replaces are timed in turns on the operands of a call."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from diffkern.verify import choices
from diffkern.verify.isolation import uncounted

#: By how much the fused computation may seem to take longer: clocks are not exact.
HYSTERESIS = 1.02
#: Bytes of operands above which nothing is timed: time goes into memory traffic then, of which a fused op has less.
LARGEST_TIMED = 1 << 28
#: Rounds in which each computation has its turn on a GPU; the fastest counts.
_ROUNDS = 5
#: Turns of each on a CPU, at least and at most, and the seconds after which there are no more of them.
_LEAST_TURNS, _MOST_TURNS, _BUDGET = 2, 200, 0.02
#: What takes longer than so many seconds is called once alone after its warm-up.
_LONG = 0.3
#: Calls of a round on a GPU at most, and the clock cycles that it sleeps before, so that the host has launched them.
_GPU_CALLS, _SLEEP = 8, 3_000_000


@dataclass(frozen=True)
class Cost:
    """What a call takes, in microseconds.

    Attributes:
        host: Until it returns.
        device: Until the device has computed it, without waits for the host. On a CPU that is the same.
    """

    host: float
    device: float

    def __str__(self) -> str:
        host = f" (host {self.host:.1f} us)" if self.host != self.device else ""
        return f"{self.device:.1f} us{host}"


def kept_costs(computations: Sequence[Callable[[], Any]], device: torch.device, *key: Hashable) -> list[Cost]:
    """The costs of a computation and of what it replaces: those kept on disk for a key, else timed now and kept."""
    found = costs_of(choices.recall(device, *key) or "")
    if found is None:
        with uncounted():
            found = costs(computations, device)
        text = " ".join(str(value) for cost in found for value in (cost.host, cost.device))
        choices.remember(device, text, *key)
    return found


def reason_to_stay_stock(
    computations: Sequence[Callable[[], Any]], device: torch.device, replayed: bool, *key: Hashable
) -> str:
    """Why a fused computation, the first of two, is not worth it by its time, kept for a key; "" if it is.

    Args:
        computations: It, and what it replaces. They run without gradients, and do not warn: no user asked for them.
        device: Where they run.
        replayed: As in :func:`reason_without_gain`.
        key: As in :func:`kept_costs`.
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

    Args:
        fused: What it takes.
        stock: What the computation that it replaces takes.
        replayed: Whether steps that wait for the host become CUDA graphs, so that only the device counts. Else the
            larger of the two does: what the step waits for.
    """
    mine, other = [cost.device if replayed else max(cost.host, cost.device) for cost in (fused, stock)]
    return "" if mine <= HYSTERESIS * other else f"fused it takes {fused}, as it is written {stock}: no gain"


def costs(computations: Sequence[Callable[[], Any]], device: torch.device) -> list[Cost]:
    """Times computations in turns, a few milliseconds in all unless a single call takes longer: then fewer calls."""
    for compute in computations:  # loads and compiles
        compute()
    single = [_seconds(compute, device) for compute in computations]
    if max(single) > _LONG:
        return [Cost(took * 1e6, took * 1e6) for took in single]
    if device.type == "cuda":
        return _on_gpu(computations, device, calls=min(_GPU_CALLS, 1 + int(_BUDGET / max(single))))
    fastest = [float("inf")] * len(computations)
    other_work = _OtherWork()
    began = time.perf_counter()
    for number in range(_MOST_TURNS):
        for i, compute in enumerate(computations):
            other_work()
            started = time.perf_counter()
            compute()
            _finish(device)
            fastest[i] = min(fastest[i], time.perf_counter() - started)
        if number >= _LEAST_TURNS and time.perf_counter() - began > _BUDGET:
            break
    return [Cost(took * 1e6, took * 1e6) for took in fastest]


class _OtherWork:
    """What stands between two calls in a model: their code and data are no longer in the nearest caches.

    Called again and again at once, a computation of much Python code takes less than half of the time that it takes
    in a model, and one of few large functions nearly all of it.
    """

    def __init__(self) -> None:
        self._x, self._weight = torch.ones(64, 64), torch.ones(192, 64)
        self._data = torch.ones(1 << 16)

    def __call__(self) -> None:
        F.linear(F.silu(self._x), self._weight).chunk(6, dim=-1)
        self._data.sum()


def _seconds(compute: Callable[[], Any], device: torch.device) -> float:
    """What a single call takes, with the host and the device one after the other."""
    _finish(device)
    began = time.perf_counter()
    compute()
    _finish(device)
    return time.perf_counter() - began


def _finish(device: torch.device) -> None:
    if device.type != "cpu" and device.type == getattr(torch.accelerator.current_accelerator(), "type", None):
        torch.accelerator.synchronize(device)


def _on_gpu(computations: Sequence[Callable[[], Any]], device: torch.device, calls: int) -> list[Cost]:
    stream = torch.cuda.current_stream(device)
    turns: list[list[tuple[float, torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in computations]
    with torch.cuda.device(device):
        for _ in range(_ROUNDS):
            for compute, mine in zip(computations, turns, strict=True):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(_SLEEP)
                start.record(stream)
                began = time.perf_counter()
                for _ in range(calls):
                    compute()
                host = time.perf_counter() - began
                end.record(stream)
                mine.append((host, start, end))
        stream.synchronize()
    return [
        Cost(
            min(host for host, _, _ in mine) * 1e6 / calls,
            min(start.elapsed_time(end) for _, start, end in mine) * 1e3 / calls,
        )
        for mine in turns
    ]
