"""How far a training is, by its steps or by the clock, and what it said on the way."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch


@dataclass
class Training:
    """Counts the steps of one training until its steps or its seconds are used up.

    Attributes:
        name: Of the model, for the log.
        seconds: Time that it may take.
        steps: Steps that it may take.
        warmup: Steps in which the learning rate rises to its peak; then it falls to 0 along a cosine.
        log: Step, seconds, and each loss of every line printed.
    """

    name: str
    seconds: float
    steps: int
    warmup: int = 50
    log: list[dict[str, float]] = field(default_factory=list)

    def run(self) -> Iterator[tuple[int, float]]:
        """Yields the number of each step and the share of the learning rates that it shall use."""
        self._start = time.perf_counter()
        step, done = 0, 0.0
        while done < 1:
            yield step, min(1.0, (step + 1) / self.warmup) * 0.5 * (1 + math.cos(math.pi * done))
            step += 1
            done = max(step / self.steps, self.elapsed / self.seconds)
        print(f"{self.name}: {step} steps in {self.elapsed:.1f} s", flush=True)

    @property
    def elapsed(self) -> float:
        """Seconds since the first step."""
        return time.perf_counter() - self._start

    def say(self, step: int, every: int, **losses: torch.Tensor) -> None:
        """Prints and keeps the losses of each ``every``-th step; reading them waits for the device."""
        if step % every == 0:
            values = {name: float(loss.detach()) for name, loss in losses.items()}
            self.log.append({"step": step, "seconds": round(self.elapsed, 2), **values})
            text = ", ".join(f"{name} {value:.5f}" for name, value in values.items())
            print(f"{self.name} {step:5d} {self.elapsed:6.1f} s: {text}", flush=True)


class Average:
    """Exponential moving average of parameters, which generates better than the last ones."""

    def __init__(self, parameters: list[torch.nn.Parameter], decay: float) -> None:
        self._live = [parameter.data for parameter in parameters]
        self._mean = [parameter.data.clone() for parameter in parameters]
        self._decay = decay

    def update(self, step: int) -> None:
        """Takes the parameters of this step in; the first steps are forgotten sooner."""
        decay = min(self._decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._mean, self._live, 1 - decay)

    def put(self) -> None:
        """Puts the mean into the parameters."""
        torch._foreach_copy_(self._live, self._mean)
