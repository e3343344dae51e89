"""What an attention takes: time, and memory where torch counts it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from diffkern.attention.call import AttentionCall
from diffkern.providers.foreign import copy_of
from diffkern.verify.gain import SLEEP

#: Timed runs, and the seconds after which there are no more of them.
RUNS, ENOUGH = 7, 0.2


def seconds(compute: Callable[[AttentionCall], Tensor], call: AttentionCall) -> float:
    """Returns the median time of a call in seconds, with its backward if gradients are wanted.

    The first run, which loads and compiles, is not counted.
    """
    run = runner(compute, call)
    run()
    times: list[float] = []
    while len(times) < RUNS and (len(times) < 3 or sum(times) < ENOUGH):
        times.append(_clock(run, call.query.device))
    return median(times)


def peak_bytes(compute: Callable[[AttentionCall], Tensor], call: AttentionCall) -> int | None:
    """Returns the bytes that a call has allocated at its peak, besides its arguments; None if not counted."""
    device = call.query.device
    if device.type != "cuda":
        return None
    run = runner(compute, call)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def runner(compute: Callable[[AttentionCall], Tensor], call: AttentionCall) -> Callable[[], None]:
    """Returns a function that runs a copy of a call, with its backward if gradients are wanted."""
    gradients = call.signature().gradients
    leaves = [copy_of(x) for x in (call.query, call.key, call.value)]

    def run() -> None:
        with torch.set_grad_enabled(gradients), unobserved():
            tensors = [leaf.detach().requires_grad_() for leaf in leaves] if gradients else leaves
            y = compute(replace(call, query=tensors[0], key=tensors[1], value=tensors[2]))
            if gradients:
                torch.autograd.grad(y, tensors, torch.ones_like(y))

    return run


def unobserved() -> AbstractContextManager[Any]:
    """Keeps what is saved for a backward of ours from hooks around the user's call, as checkpointing has them."""
    return torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _clock(run: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(device):
            # Meanwhile the host gets ahead: in a model, or a graph, the GPU seldom waits for it.
            torch.cuda._sleep(SLEEP)
        start.record(torch.cuda.current_stream(device))
        run()
        end.record(torch.cuda.current_stream(device))
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    started = time.perf_counter()
    run()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - started
