"""Clocks, peak memory, and how far one tensor is from another."""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor


def synchronize(device: torch.device) -> None:
    """Waits until ``device`` has done everything asked of it; nothing to wait for on a CPU."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def wall_clock(device: torch.device) -> float:
    """Seconds of the host's clock at a moment when ``device`` has finished all work given to it."""
    synchronize(device)
    return time.perf_counter()


class StepClock:
    """Marks points in a device's work without making the host wait for it.

    On a CUDA or ROCm device a mark is an event in the current stream, elsewhere the time itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[torch.cuda.Event | float] = []

    def mark(self) -> None:
        """Marks this point."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)
        else:
            self._marks.append(wall_clock(self._device))

    def intervals_per_second(self) -> float | None:
        """Intervals between the first and the last mark, per second; None if there are fewer than two."""
        if len(self._marks) < 2:
            return None
        synchronize(self._device)
        first, last = self._marks[0], self._marks[-1]
        if isinstance(first, float) or isinstance(last, float):
            seconds = float(last) - float(first)  # type: ignore[arg-type]
        else:
            seconds = first.elapsed_time(last) / 1000
        return (len(self._marks) - 1) / seconds


def reset_peak_memory(device: torch.device) -> None:
    """Starts a new peak memory measurement on ``device``."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int | None:
    """Most bytes allocated by torch since :func:`reset_peak_memory`; None where torch does not count them."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def relative_error(value: Tensor, reference: Tensor) -> float:
    r"""Relative L2 distance :math:`\|v - r\|_2 / \|r\|_2`, computed in float64.

    Raises:
        ValueError: the shapes differ.
    """
    _check_shapes(value, reference)
    reference = reference.double()
    return float((value.double() - reference).norm() / reference.norm())


def psnr(value: Tensor, reference: Tensor, peak: float = 1.0) -> float:
    r"""Peak signal to noise ratio :math:`10 \log_{10}(p^2 / \overline{(v - r)^2})` in dB; inf if equal.

    Raises:
        ValueError: the shapes differ.
    """
    _check_shapes(value, reference)
    mean_square = float((value.double() - reference.double()).square().mean())
    return math.inf if mean_square == 0 else 10 * math.log10(peak**2 / mean_square)


def _check_shapes(value: Tensor, reference: Tensor) -> None:
    if value.shape != reference.shape:
        raise ValueError(f"shapes differ: {tuple(value.shape)} and {tuple(reference.shape)}")
