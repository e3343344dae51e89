"""Times single kernels on a GPU, rivals side by side in one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

#: Written between two timed calls, to drive the inputs out of the L2 cache (50 MB on an H100).
_FLUSH_BYTES = 256 << 20

#: Clock cycles that the GPU waits before each timed call, about 0.2 ms: the host is ahead by then, even
#: with a call that costs it 0.1 ms, so that host time is not measured.
_HEAD_START = 400_000

#: Untimed calls of each before the timed ones; calls between two looks at the host's clock, and how often one looks.
_WARM_UP, _BATCH, _BATCHES = 5, 10, 100


def time_calls(calls: Mapping[str, Callable[[], object]], device: torch.device, repetitions: int) -> dict[str, float]:
    """Times GPU calls with CUDA events and returns the median of each, in microseconds.

    The calls take turns, so that clock changes meet all of them alike. Before each one the L2 cache is
    overwritten and the GPU given something to do while the host launches.

    Raises:
        ValueError: ``device`` is no GPU.
    """
    if device.type != "cuda":
        raise ValueError(f"kernels are timed with GPU events, which {device} does not have")
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)
    for call in calls.values():
        for _ in range(_WARM_UP):
            call()
    torch.cuda.synchronize(device)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for _ in range(repetitions):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            torch.cuda._sleep(_HEAD_START)
            start.record()
            call()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize(device)
    return {name: median(start.elapsed_time(end) for start, end in pairs) * 1000 for name, pairs in events.items()}


def time_host(calls: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Times asynchronous calls on the host, and returns the median of each over batches of ten, in microseconds.

    The batches take turns, so that a slower or busier while of the host meets all of them alike. Each waits for
    ``device`` first.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_BATCHES):
        for name, call in calls.items():
            torch.cuda.synchronize(device)
            started = time.perf_counter()
            for _ in range(_BATCH):
                call()
            samples[name].append((time.perf_counter() - started) / _BATCH)
    torch.cuda.synchronize(device)
    return {name: median(times) * 1e6 for name, times in samples.items()}
