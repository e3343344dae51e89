"""An optimized model beside the stock one, on inputs of the user's own: does it say the same, and is it faster?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import comfy.sample
import torch
from torch import Tensor

from diffkern.bench.environment import describe_device
from diffkern.bench.measure import StepClock, peak_memory, relative_error, reset_peak_memory
from diffkern.comfyui import kitchen_backend
from diffkern.comfyui.optimize import without_diffkern
from diffkern.comfyui.patcher import patches_of

_SAMPLER, _SCHEDULER = "euler", "simple"
#: Differences of times below this share are never called a gain.
_LEAST = 0.02


def denoise(
    model: Any,
    positive: Any,
    latent: Mapping[str, Any],
    steps: int,
    seed: int,
    callback: Callable[[int, Any, Any, int], None] | None = None,
) -> Tensor:
    """Denoises a latent with the Euler sampler and without guidance: one call of the model for each step.

    Returns the result, in float32 on the CPU; streams that are packed into one latent one after the other.
    """
    image = comfy.sample.fix_empty_latent_channels(model, latent["samples"])
    noise = comfy.sample.prepare_noise(image, seed, latent.get("batch_index"))
    result = comfy.sample.sample(
        model, noise, steps, 1.0, _SAMPLER, _SCHEDULER, positive, positive, image,
        noise_mask=latent.get("noise_mask"), callback=callback, disable_pbar=True, seed=seed,
    )  # fmt: skip
    parts = result.unbind() if getattr(result, "is_nested", False) else [result]
    return torch.cat([part.float().flatten().cpu() for part in parts])


@dataclass(frozen=True)
class Verdict:
    """How far the optimized model is from the stock one after some steps.

    Attributes:
        error: Relative L2 distance of the latents; NaN if either is not finite.
        tolerance: The error that is allowed.
        patched: Modules that are patched.
        fused: Calls of theirs that ran fused, those in compiled graphs aside.
        stock: Calls that did not.
        kitchen: Calls of comfy-kitchen that were served; None if it is not to be served.
    """

    error: float
    identical: bool
    finite: bool
    stock_finite: bool
    tolerance: float
    patched: int
    fused: int
    stock: int
    kitchen: int | None

    @property
    def passed(self) -> bool:
        """Whether the optimized model may stand in for the stock one."""
        return self.identical or (self.finite and self.error <= self.tolerance)

    def __str__(self) -> str:
        if not self.stock_finite:
            state = "the stock model itself gives NaN or infinity: nothing can be said"
        elif not self.finite:
            state = "the optimized model gives NaN or infinity"
        elif self.identical:
            state = "bit for bit the stock result"
        else:
            state = f"relative error {self.error:.1e}, allowed {self.tolerance:.1e}"
        return f"{'PASS' if self.passed else 'FAIL'}: {state}; {self._what_ran()}"

    def _what_ran(self) -> str:
        parts = []
        if self.fused or self.stock:
            parts.append(f"{self.fused} calls ran fused, {self.stock} stock")
        elif self.patched:
            parts.append(f"{self.patched} modules patched, whose calls in compiled graphs are not counted")
        if self.kitchen is not None:
            parts.append(f"{self.kitchen} calls of comfy-kitchen served")
        return ", ".join(parts)


def verify(model: Any, positive: Any, latent: Mapping[str, Any], *, steps: int, seed: int, tolerance: float) -> Verdict:
    """Denoises the same latent with the stock and with the optimized model; ``tolerance`` is a relative error."""
    expected = denoise(without_diffkern(model), positive, latent, steps, seed)
    before = _calls(model)
    found = denoise(model, positive, latent, steps, seed)
    fused, stock, kitchen = (now - then for now, then in zip(_calls(model), before, strict=True))
    finite, stock_finite = (bool(torch.isfinite(result).all()) for result in (found, expected))
    error = relative_error(found, expected) if finite and stock_finite else float("nan")
    return Verdict(
        error, torch.equal(found, expected), finite, stock_finite, tolerance,
        len(patches_of(model)), fused, stock, None if kitchen_backend.service_of(model) is None else kitchen,
    )  # fmt: skip


def _calls(model: Any) -> tuple[int, int, int]:
    counts, service = [patch.counts for patch in patches_of(model).values()], kitchen_backend.service_of(model)
    fused, stock = sum(one.fused_calls for one in counts), sum(one.stock_calls.total() for one in counts)
    return fused, stock, 0 if service is None else service.counts.fused_calls


@dataclass(frozen=True)
class Arm:
    """What one model took.

    Attributes:
        milliseconds: Of a step, in each run.
        memory: Most bytes that torch had allocated, or None where it does not count them.
    """

    milliseconds: tuple[float, ...]
    memory: int | None

    @property
    def median(self) -> float:
        """Milliseconds of a step."""
        return median(self.milliseconds)

    @property
    def spread(self) -> float:
        """How far the runs are apart, as a share of the median."""
        return (max(self.milliseconds) - min(self.milliseconds)) / self.median

    def __str__(self) -> str:
        memory = "" if self.memory is None else f", at most {self.memory / 2**30:.2f} GiB"
        return f"{self.median:.1f} ms a step (runs within {self.spread:.0%}){memory}"


@dataclass(frozen=True)
class Comparison:
    """Both models, on one device."""

    device: str
    stock: Arm
    optimized: Arm

    @property
    def speedup(self) -> float:
        """How many times faster a step of the optimized model is."""
        return self.stock.median / self.optimized.median

    @property
    def verdict(self) -> str:
        """The result in words: what is within the noise of the runs is no gain."""
        noise = max(_LEAST, self.stock.spread, self.optimized.spread)
        if self.speedup > 1 + noise:
            return f"{self.speedup:.2f} times as fast"
        if self.speedup < 1 / (1 + noise):
            return f"SLOWER: {self.speedup:.2f} times as fast; bypass the node"
        return f"no gain: {self.speedup:.2f} times as fast, and the runs differ by up to {noise:.0%}"

    def __str__(self) -> str:
        return f"{self.verdict}\nstock: {self.stock}\noptimized: {self.optimized}\non {self.device}"


def benchmark(model: Any, positive: Any, latent: Mapping[str, Any], *, steps: int, runs: int, seed: int) -> Comparison:
    """Times the steps of the stock and of the optimized model in turns, after one run of each to warm up.

    The first step of a run, which may load the model, does not count: there are at least 2.
    """
    device = torch.device(model.load_device)
    arms = {"stock": without_diffkern(model), "optimized": model}
    times: dict[str, list[float]] = {name: [] for name in arms}
    memory: dict[str, int | None] = {}
    for run in range(runs + 1):
        for name, arm in arms.items():
            clock = StepClock(device)
            reset_peak_memory(device)
            denoise(arm, positive, latent, steps, seed, lambda *_, clock=clock: clock.mark())
            per_second = clock.intervals_per_second()
            if per_second is None:
                raise ValueError(f"{steps} steps are too few to time: give at least 2")
            if run > 0:
                times[name].append(1000 / per_second)
                memory[name] = peak_memory(device)
    results = {name: Arm(tuple(times[name]), memory[name]) for name in arms}
    return Comparison(describe_device(device), results["stock"], results["optimized"])
