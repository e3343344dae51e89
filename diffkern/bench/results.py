"""What a comparison found: one result per arm, as a table for people and as JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from diffkern.bench.arms import STOCK, Arm

if TYPE_CHECKING:
    from rich.table import Table


#: Timed runs of each of two arms below which their ratio says nothing, and none is printed.
MIN_RUNS = 3


@dataclass(frozen=True)
class Difference:
    """How far an arm's result is from the stock arm's with the same seed.

    Relative L2 distances of the final latents and of the decoded frames; of these also PSNR, in dB, inf if they are
    equal, and structural similarity, 1 if they are equal.
    """

    latents: float
    frames: float
    psnr: float
    ssim: float


@dataclass(frozen=True)
class ArmResult:
    """What one arm took, and how far from the stock arm its result is.

    Attributes:
        arm: The arm.
        seconds: Seconds of each timed run, from the call of the pipeline to its result.
        steps_per_second: Denoising steps per second of each timed run, or None if it had one step only.
        first_call_seconds: Seconds of the first call, with compilation and verification, or None if
            there was no warm-up.
        peak_memory_bytes: Most memory allocated during the timed runs, or None where it is not counted.
        difference: From the stock arm, or None if that did not run or is this one.
        calls: Calls that a kernel served and calls that the stock code of a patched module served, outside
            of compiled graphs; None if the arm injects nothing.
    """

    arm: Arm
    seconds: tuple[float, ...]
    steps_per_second: float | None
    first_call_seconds: float | None
    peak_memory_bytes: int | None
    difference: Difference | None = None
    calls: Mapping[str, int] | None = None

    @property
    def median_seconds(self) -> float:
        """The median of :attr:`seconds`."""
        return median(self.seconds)

    @property
    def spread_seconds(self) -> float | None:
        """The largest of :attr:`seconds` less the smallest, or None for a single run."""
        return max(self.seconds) - min(self.seconds) if len(self.seconds) > 1 else None

    def to_dict(self, baseline: ArmResult | None) -> dict[str, Any]:
        """The result as plain data, with its speed-up over ``baseline``."""
        return {
            "name": self.arm.name,
            "numerics": self.arm.numerics,
            "cuda_graph": self.arm.cuda_graph,
            "compiled": self.arm.compiled,
            "seconds": list(self.seconds),
            "median_seconds": self.median_seconds,
            "steps_per_second": self.steps_per_second,
            "first_call_seconds": self.first_call_seconds,
            "peak_memory_bytes": self.peak_memory_bytes,
            "speedup": speedup(self, baseline),
            "difference_from_stock": None if self.difference is None else asdict(self.difference),
            "calls": None if self.calls is None else dict(self.calls),
        }


def speedup(result: ArmResult, baseline: ArmResult | None) -> float | None:
    """How many times faster than ``baseline`` the whole call was; None without one, or with too few runs to say."""
    if baseline is None or min(len(result.seconds), len(baseline.seconds)) < MIN_RUNS:
        return None
    return baseline.median_seconds / result.median_seconds


def baseline_of(results: Sequence[ArmResult]) -> ArmResult | None:
    """The result of the stock arm, if it ran."""
    return next((result for result in results if result.arm == STOCK), None)


#: What of a difference is printed, and how.
_DIFFERENCES = {"frames": ".1e", "psnr": ".1f", "ssim": ".4f"}


def table(results: Sequence[ArmResult]) -> Table:
    """The results as a table to print with rich, one row per arm.

    Error, PSNR and SSIM are those of the frames against the stock arm's; ``spread`` is the longest timed
    call less the shortest, ``first s`` the first warm-up call. No speed-up is printed of fewer than three timed calls,
    and none where the times of the two arms overlap.
    """
    from rich import box
    from rich.table import Table

    rendered = Table(box=box.SIMPLE, padding=0)
    rendered.add_column("arm", no_wrap=True)
    for column in ("s total", "spread", "it/s", "first s", "peak mem", "speed-up", "error", "PSNR dB", "SSIM"):
        rendered.add_column(column, justify="right")
    baseline = baseline_of(results)
    for result in results:
        rendered.add_row(
            result.arm.name,
            f"{result.median_seconds:.2f}",
            _number(result.spread_seconds, ".2f"),
            _number(result.steps_per_second, ".2f"),
            _number(result.first_call_seconds, ".2f"),
            "-" if result.peak_memory_bytes is None else f"{result.peak_memory_bytes / 2**30:.2f} GiB",
            _speedup(result, baseline),
            *(_number(getattr(result.difference, name, None), form) for name, form in _DIFFERENCES.items()),
        )
    return rendered


def _speedup(result: ArmResult, baseline: ArmResult | None) -> str:
    ratio = speedup(result, baseline)
    if ratio is None or baseline is None:
        return "-"
    overlap = min(result.seconds) <= max(baseline.seconds) and min(baseline.seconds) <= max(result.seconds)
    return "unclear" if overlap and result is not baseline else f"{ratio:.2f}x"


def plot(results: Sequence[ArmResult], title: str, path: Path) -> None:
    """Draws the seconds of one or more arms as bars and writes a PNG; beside a stock arm each says its speed-up."""
    baseline = baseline_of(results)
    labels = [f"{result.median_seconds:.2f} s  {_number(speedup(result, baseline), '.2f', 'x')}" for result in results]
    bars([result.arm for result in results], [result.median_seconds for result in results], labels, title, path)


def bars(arms: Sequence[Arm | str], values: Sequence[float], labels: Sequence[str], title: str, path: Path) -> None:
    """Draws a bar for every arm, or other name, with a label behind it, and writes them as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = [(False, False) if isinstance(arm, str) else (arm.injected, arm.compiled) for arm in arms]
    names = [arm if isinstance(arm, str) else arm.name for arm in arms]
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.42 * len(arms)))
    drawn = axes.barh(names, values, color=[_BAR_COLORS[kind] for kind in kinds], height=0.65)
    axes.bar_label(drawn, labels, padding=4, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(values))
    axes.set_xlabel("the shorter, the faster")
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=140)
    plt.close(figure)


#: By whether kernels are injected and whether the compiler ran.
_BAR_COLORS = {
    (False, False): "#9a9a9a",
    (False, True): "#5b84b1",
    (True, False): "#e4632d",
    (True, True): "#a1487a",
}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes ``content`` to ``path``; to the standard output where the path is ``-``.

    JSON has neither infinity nor NaN: such numbers become null, as the PSNR of equal frames does.
    """
    finite = json.loads(json.dumps(content), parse_constant=lambda name: None)
    text = json.dumps(finite, indent=2, allow_nan=False)
    if str(path) == "-":
        print(text)
        return
    path.write_text(text + "\n", encoding="utf-8")


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
