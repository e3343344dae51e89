"""One step of a denoiser, arm against arm, interleaved in one process."""

from __future__ import annotations

import copy
import gc
import math
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from diffkern.bench.arms import NAMED, Arm, ArmUnavailableError, applied, unavailable_reason
from diffkern.bench.measure import peak_memory, relative_error, reset_peak_memory, wall_clock
from diffkern.bench.models import Denoiser
from diffkern.bench.profile import profiled

if TYPE_CHECKING:
    from rich.table import Table

    from diffkern import InjectionReport

#: Differences below this share of the time are called no gain.
NOISE = 0.01
#: Calls of an arm before it is timed: by then times have decided whether its steps are a CUDA graph.
SETTLING = 8
#: Steps of each arm that are profiled, in turn as the timed ones are: a card at its limit of power changes its clock.
PROFILES = 3


@dataclass(frozen=True)
class StepResult:
    """What one arm's step took.

    Attributes:
        arm: Name of the arm.
        wall_ms: Median of the steps, from the call until the device is idle.
        spread_ms: Distance between the first and the third quartile of the same.
        kernel_ms: Time of all kernels of one step, by family: of :data:`PROFILES` profiled steps the median one.
        host_ms: Median time until the call returns, the device still working.
        first_call_s: The first call, with whatever compiles or is measured in it.
        setup_s: Injection, or the call of ``torch.compile``.
        peak_bytes: Most memory allocated during a step, or None where torch does not count.
        error: Relative L2 distance of the result from the first arm's; NaN if that did not run.
        unavailable: Why the arm did not run, or "".
        as_graph: Whether the steps of what was injected are replayed from a CUDA graph.
    """

    arm: str
    wall_ms: float = 0.0
    spread_ms: float = 0.0
    kernel_ms: Mapping[str, float] | None = None
    host_ms: float = 0.0
    first_call_s: float = 0.0
    setup_s: float = 0.0
    peak_bytes: int | None = None
    error: float = 0.0
    unavailable: str = ""
    as_graph: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "") and value is not False}


def run(
    denoiser: Denoiser, arms: Sequence[Arm], device: torch.device, repetitions: int = 10, *, keep_going: bool = False
) -> list[StepResult]:
    """Times a step of every arm, each in turn.

    All arms share the weights. Each has a module tree of its own, so that no arm waits for another's compiler. The
    first is the baseline. With ``keep_going`` an arm that raises is one that did not run, for this reason.
    """
    with torch.no_grad(), ExitStack() as stack:
        prepared = _Prepared(denoiser, device, stack, keep_going)
        for arm in arms:
            prepared.add(arm)
        return prepared.measure(repetitions)


class _Prepared:
    """A model, its step, and the arms that are applied to copies of its modules until ``stack`` is closed."""

    def __init__(self, denoiser: Denoiser, device: torch.device, stack: ExitStack, keep_going: bool) -> None:
        self.denoiser, self.device, self.stack, self.keep_going = denoiser, device, stack, keep_going
        self.model, self.inputs = denoiser.build(device), denoiser.step(device)
        #: Of each arm, by name: what is known so far; its model, if it runs; what was injected into that.
        self.results: dict[str, StepResult] = {}
        self.running: dict[str, nn.Module] = {}
        self.reports: dict[str, InjectionReport] = {}

    def add(self, arm: Arm) -> None:
        """Applies an arm and calls it once, with whatever compiles or is measured then."""
        reason = unavailable_reason(arm, self.device)
        if reason is not None:
            self.results[arm.name] = StepResult(arm.name, unavailable=reason)
            return
        own = sharing_weights(self.model)
        started = wall_clock(self.device)
        try:
            with ExitStack() as attempt:
                report = attempt.enter_context(applied(arm, self.denoiser.injected(own), own))
                setup = wall_clock(self.device) - started
                own(**self.inputs)
                first = wall_clock(self.device) - started - setup
                self.stack.enter_context(attempt.pop_all())
        except Exception as error:  # models and compilers raise what they like
            if not (self.keep_going or isinstance(error, ArmUnavailableError)):
                raise
            self.results[arm.name] = StepResult(arm.name, unavailable=why(error))
            return
        self.results[arm.name] = StepResult(arm.name, setup_s=setup, first_call_s=first)
        self.running[arm.name] = own
        if report is not None:
            self.reports[arm.name] = report

    def measure(self, repetitions: int) -> list[StepResult]:
        """Times so many steps of every arm, and profiles :data:`PROFILES`.

        The arms take turns in random order, and each timed step follows one of its own arm: a card at its limit of
        power runs a step more slowly behind one that has drawn more.
        """
        for name, own in self.running.items():
            for _ in range(SETTLING if name in self.reports else 2):
                _timed(own, self.inputs, self.device)
        first = next(iter(self.results))
        baseline = first_tensor(self.running[first](**self.inputs)) if first in self.running else None
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in self.running}
        for turn in range(repetitions):
            for name in random.Random(turn).sample(list(self.running), len(self.running)):
                _timed(self.running[name], self.inputs, self.device)  # leaves the clock that the arm's own power allows
                times[name].append(_timed(self.running[name], self.inputs, self.device))
        profiles: dict[str, list[Mapping[str, float]]] = {name: [] for name in self.running}
        for _ in range(PROFILES):
            for name, own in self.running.items():
                _timed(own, self.inputs, self.device)
                with profiled(self.device) as profile:
                    own(**self.inputs)
                profiles[name].append(profile.milliseconds)
        for name, own in self.running.items():
            wall = [1e3 * seconds for seconds, _ in times[name]]
            first_quartile, _, third_quartile = quantiles(wall, n=4) if len(wall) > 1 else (wall[0],) * 3
            reset_peak_memory(self.device)
            output = first_tensor(own(**self.inputs)).clone()
            peak = peak_memory(self.device)
            patched = self.reports[name].patched if name in self.reports else ()
            self.results[name] = replace(
                self.results[name],
                wall_ms=median(wall),
                spread_ms=third_quartile - first_quartile,
                kernel_ms=sorted(profiles[name], key=lambda each: sum(each.values()))[PROFILES // 2],
                host_ms=median(1e3 * seconds for _, seconds in times[name]),
                peak_bytes=peak,
                error=math.nan if baseline is None else relative_error(output, baseline),
                as_graph=any(site.op == "cuda_graph" for site in patched),
            )
        return list(self.results.values())


def why(error: Exception) -> str:
    """What went wrong, on one line."""
    said = " ".join(str(error).split())[:300]
    return said if isinstance(error, ArmUnavailableError) else f"{type(error).__name__}: {said}"


def release(device: torch.device) -> None:
    """Gives back the memory of models that are gone."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def sharing_weights(model: nn.Module) -> nn.Module:
    """Copies the module tree; parameters and buffers have the original's memory until its layout changes."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    plain = [weight for weight in model.parameters() if type(weight) is nn.Parameter]
    shared |= {id(weight): nn.Parameter(weight.detach(), weight.requires_grad) for weight in plain}
    return copy.deepcopy(model, shared)


def first_tensor(output: Any) -> Tensor:
    """The first tensor in a model's output."""
    while not isinstance(output, Tensor):
        output = output[0]
    return output


def _timed(model: nn.Module, inputs: Mapping[str, Any], device: torch.device) -> tuple[float, float]:
    """Seconds until the device is done, and until the call has returned."""
    started = wall_clock(device)
    model(**inputs)
    returned = time.perf_counter()
    return wall_clock(device) - started, returned - started


def table(results: Iterable[StepResult], title: str) -> Table:
    """The results as a table; the first is the baseline."""
    from rich.table import Table

    shown = Table(title=title, title_justify="left")
    for column in ("arm", "step ms", "+-", "x", "kernels ms", "host ms", "first call s", "peak MiB", "error"):
        shown.add_column(column, justify="left" if column == "arm" else "right")
    baseline: StepResult | None = None
    for result in results:
        if result.unavailable:
            shown.add_row(result.arm, f"not run: {result.unavailable}")
            continue
        baseline = baseline or result
        shown.add_row(
            result.arm + " (as a graph)" * (result.as_graph and not NAMED[result.arm].cuda_graph),
            f"{result.wall_ms:.2f}",
            f"{result.spread_ms:.2f}",
            _speedup(result, baseline),
            f"{sum((result.kernel_ms or {}).values()):.2f}",
            f"{result.host_ms:.2f}",
            f"{result.setup_s + result.first_call_s:.1f}",
            "" if result.peak_bytes is None else f"{result.peak_bytes / 2**20:.0f}",
            f"{result.error:.1e}",
        )
    return shown


def _speedup(result: StepResult, baseline: StepResult) -> str:
    ratio = baseline.wall_ms / result.wall_ms
    if result is not baseline and abs(ratio - 1) < NOISE:
        return "no gain"
    return f"{ratio:.3f}"


def plot(results: Iterable[StepResult], title: str, path: Path) -> None:
    """Draws the step of every arm that ran as a bar, with its gain, and writes a PNG."""
    from diffkern.bench.results import bars

    ran = [result for result in results if not result.unavailable]
    labels = [f"{result.wall_ms:.1f} ms  {_speedup(result, ran[0])}" for result in ran]
    bars([NAMED[result.arm] for result in ran], [result.wall_ms for result in ran], labels, title, path)
