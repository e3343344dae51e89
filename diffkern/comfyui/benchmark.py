"""Is an optimized model faster than the stock one? On inputs of the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from diffkern.bench.environment import describe_device
from diffkern.bench.measure import StepClock, peak_memory, reset_peak_memory
from diffkern.comfyui.optimize import without_diffkern
from diffkern.comfyui.sampling import denoise

#: Differences below this share are never called a gain.
_LEAST = 0.02


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

    Args:
        model: An optimized model.
        positive: The conditioning.
        latent: A latent.
        steps: Steps of a run, at least 2: the first one, which may load the model, does not count.
        runs: Timed runs of each model.
        seed: Of the noise.
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
