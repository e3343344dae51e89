"""Clocks, peak memory, and how far one tensor is from another."""

from __future__ import annotations

import math
import time

import torch
import torch.nn.functional as F
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


def psnr(value: Tensor, reference: Tensor) -> float:
    r"""Peak signal to noise ratio :math:`-10 \log_{10} \overline{(v - r)^2}` of values up to 1 in dB; inf if equal.

    Raises:
        ValueError: the shapes differ.
    """
    _check_shapes(value, reference)
    mean_square = float((value.double() - reference.double()).square().mean())
    return math.inf if mean_square == 0 else -10 * math.log10(mean_square)


def ssim(value: Tensor, reference: Tensor) -> float:
    r"""Structural similarity of images, averaged over all of them and all places; 1 if they are equal.

    Wang et al., "Image Quality Assessment: From Error Visibility to Structural Similarity", 2004: a Gaussian window
    of 11 x 11 pixels with a deviation of 1.5, :math:`C_1 = 0.01^2`, :math:`C_2 = 0.03^2`; computed in float64.

    Args:
        value: Images, [..., height, width], each channel an image of its own; at least 11 x 11, values up to 1.
        reference: What to compare with.

    Raises:
        ValueError: the shapes differ, or the images are smaller than the window.
    """
    _check_shapes(value, reference)
    if min(value.shape[-2:]) < _SSIM_WINDOW:
        raise ValueError(f"images of {tuple(value.shape[-2:])} are smaller than the window of {_SSIM_WINDOW} pixels")
    a, b = (images.double().reshape(-1, 1, *images.shape[-2:]) for images in (value, reference))
    places = torch.arange(_SSIM_WINDOW, dtype=torch.float64, device=a.device) - _SSIM_WINDOW // 2
    weights = torch.exp(-places.square() / (2 * 1.5**2))
    weights = weights / weights.sum()

    def local_mean(images: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(images, weights.view(1, 1, -1, 1)), weights.view(1, 1, 1, -1))

    mean_a, mean_b = local_mean(a), local_mean(b)
    variance_a = local_mean(a * a) - mean_a * mean_a
    variance_b = local_mean(b * b) - mean_b * mean_b
    covariance = local_mean(a * b) - mean_a * mean_b
    c1, c2 = 0.01**2, 0.03**2
    luminance = (2 * mean_a * mean_b + c1) / (mean_a * mean_a + mean_b * mean_b + c1)
    structure = (2 * covariance + c2) / (variance_a + variance_b + c2)
    return float((luminance * structure).mean())


_SSIM_WINDOW = 11


def _check_shapes(value: Tensor, reference: Tensor) -> None:
    if value.shape != reference.shape:
        raise ValueError(f"shapes differ: {tuple(value.shape)} and {tuple(reference.shape)}")
