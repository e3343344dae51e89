"""What a comparison found: one result per arm, as a table for people and as JSON for machines."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from diffkern.bench.arms import Arm

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Difference:
    """How far an arm's result is from the stock arm's with the same seed.

    Attributes:
        latents: Relative L2 distance of the final latents.
        frames: Relative L2 distance of the decoded frames.
        psnr: Of the decoded frames, in dB; inf if they are equal.
    """

    latents: float
    frames: float
    psnr: float


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

    def to_dict(self, baseline: ArmResult | None) -> dict[str, Any]:
        """The result as plain data, with its speed-up over ``baseline``."""
        return {
            "name": self.arm.name,
            "injected": self.arm.injected,
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
    """How many times faster than ``baseline`` the whole call was, or None without a baseline."""
    return None if baseline is None else baseline.median_seconds / result.median_seconds


def baseline_of(results: Sequence[ArmResult]) -> ArmResult | None:
    """The result of the stock arm, if it ran."""
    return next((result for result in results if not (result.arm.injected or result.arm.compiled)), None)


def table(results: Sequence[ArmResult]) -> Table:
    """The results as a table to print with rich, one row per arm.

    Error and PSNR are those of the frames against the stock arm's; ``first s`` is the first warm-up call.
    """
    from rich import box
    from rich.table import Table

    rendered = Table(box=box.SIMPLE, padding=0)
    rendered.add_column("arm", no_wrap=True)
    for column in ("s total", "it/s", "first s", "peak mem", "speed-up", "error", "PSNR dB"):
        rendered.add_column(column, justify="right")
    baseline = baseline_of(results)
    for result in results:
        difference = result.difference
        rendered.add_row(
            result.arm.name,
            f"{result.median_seconds:.2f}",
            _number(result.steps_per_second, ".2f"),
            _number(result.first_call_seconds, ".2f"),
            "-" if result.peak_memory_bytes is None else f"{result.peak_memory_bytes / 2**30:.2f} GiB",
            _number(speedup(result, baseline), ".2f", "x"),
            _number(None if difference is None else difference.frames, ".1e"),
            _number(None if difference is None else difference.psnr, ".1f"),
        )
    return rendered


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes ``content`` to ``path``, making its folder first.

    JSON has neither infinity nor NaN: such numbers become null, as the PSNR of equal frames does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_finite(content), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
