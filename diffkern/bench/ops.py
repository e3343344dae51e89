"""``diffkern bench ops``: every op against its byte floor and its rivals, as a table, JSON and a plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from diffkern.bench.environment import describe_environment
from diffkern.bench.kernels import time_calls, time_host
from diffkern.bench.op_cases import Call, OpCase, cases
from diffkern.bench.results import write_json
from diffkern.providers import explain, select
from diffkern.providers.eager.fp8 import fp8_unavailable_reason

if TYPE_CHECKING:
    from rich.table import Table

#: Ops that are made of others, and the ops that a provider must have to serve them.
_REGISTERED = {"geglu": "glu", "swiglu": "glu", "gelu": "activation"}

#: Of the arms that are diffkern's own.
OURS = "diffkern "


@dataclass(frozen=True)
class OpResult:
    """One case: microseconds of each arm, and how many the floor takes.

    Attributes:
        bytes: Fewest that the op must move.
        floor: Microseconds that ``copy_`` takes for that many bytes, read and written together.
        microseconds: Median of each arm.
    """

    op: str
    label: str
    bytes: int
    floor: float
    microseconds: dict[str, float]

    @property
    def ours(self) -> float:
        """The time of the provider that would be chosen."""
        return next(time for name, time in self.microseconds.items() if name.startswith(OURS))

    @property
    def best_rival(self) -> float:
        """The fastest of the others."""
        return min(time for name, time in self.microseconds.items() if not name.startswith(OURS))

    def to_dict(self) -> dict[str, Any]:
        """Returns everything measured, and the two ratios that matter."""
        return {
            "op": self.op,
            "case": self.label,
            "bytes": self.bytes,
            "floor_us": self.floor,
            "us": self.microseconds,
            "ours_over_floor": self.ours / self.floor,
            "ours_over_best_rival": self.ours / self.best_rival,
        }


def run(
    device: torch.device, only: Sequence[str] = (), repetitions: int = 40, say: Callable[[str], None] = print
) -> list[OpResult]:
    """Times the cases of the ops named in ``only``, or all of them, on a GPU; ``say`` is told of each before it runs.

    Raises:
        ValueError: none of the ops is among the cases.
    """
    results, seen = [], {}
    for build in cases(device):
        case = build()
        seen[case.op] = True
        if only and case.op not in only:
            continue
        say(f"{case.op} {case.label}")
        torch._dynamo.reset()
        with torch.no_grad():
            half = torch.empty(case.bytes // 2, dtype=torch.int8, device=device)
            calls: dict[str, Call] = {"copy": partial(torch.empty_like(half).copy_, half), **_arms(case, device)}
            times = time_calls(calls, device, repetitions)
        results.append(OpResult(case.op, case.label, case.bytes, times.pop("copy"), times))
    if not results:
        raise ValueError(f"--op {' '.join(only)}: choose from {', '.join(seen)}")
    return results


def _arms(case: OpCase, device: torch.device) -> dict[str, Call]:
    op = _REGISTERED.get(case.op, case.op)
    dtypes = tuple(dict.fromkeys(tensor.dtype for tensor in case.inputs))
    reasons = explain(op, device, dtypes)
    arms: dict[str, Call] = {
        f"{OURS}{name}": partial(case.fused, name) for name in ("compiled", "triton") if reasons[name] is None
    }
    if not arms:
        arms[f"{OURS}eager"] = partial(case.fused, "eager")
    arms["eager chain"] = partial(case.chain, *case.inputs)
    arms["torch.compile"] = partial(torch.compile(case.chain, dynamic=False), *case.inputs)
    return {**arms, **case.rivals}


def host_times(device: torch.device) -> dict[str, float]:
    """Host time of a call, in microseconds, at a size where the GPU takes next to no time."""
    from diffkern import ops

    x = torch.randn(64, 2048, device=device, dtype=torch.bfloat16)
    weight = torch.randn(2048, device=device, dtype=torch.bfloat16)
    kernel = select("rms_norm", device, (torch.bfloat16,)).kernel
    calls: dict[str, Call] = {
        "aten add": lambda: torch.add(x, x),
        "F.rms_norm": lambda: torch.nn.functional.rms_norm(x, (2048,), weight, 1e-6),
        "rms_norm, the op alone": lambda: kernel(x, weight, None, 1e-6, 0.0, None, None, False, False),
        "rms_norm": lambda: ops.rms_norm(x, weight),
        "norm_modulate": lambda: ops.norm_modulate(x, weight, weight),
        "gate_residual": lambda: ops.gate_residual(x, x, weight),
    }
    if fp8_unavailable_reason(device) is None:
        rows = ops.activation_fp8(x)
        calls |= {
            "norm_modulate_fp8": lambda: ops.norm_modulate_fp8(x, weight, weight),
            "gate_residual_norm_modulate_fp8": lambda: ops.gate_residual_norm_modulate_fp8(
                x, x, weight, weight, weight
            ),
            "activation_fp8": lambda: ops.activation_fp8(x, "gelu_tanh"),
            "linear_fp8": lambda: ops.linear_fp8(*rows, *rows),
        }
    with torch.no_grad():
        for call in calls.values():
            call()
        return time_host(calls, device)


def table(results: Sequence[OpResult], title: str) -> Table:
    """Returns microseconds of each arm, with the ratio to the floor in brackets."""
    from rich.table import Table

    arms = list(dict.fromkeys(name for result in results for name in result.microseconds))
    rendered = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in ("op", "case"):
        rendered.add_column(heading, no_wrap=True)
    for heading in ("floor", *arms, "to best rival"):
        rendered.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        times = result.microseconds
        cells = [f"{times[arm]:.1f} ({times[arm] / result.floor:.2f})" if arm in times else "-" for arm in arms]
        ratio = f"{result.ours / result.best_rival:.2f}"
        rendered.add_row(result.op, result.label, f"{result.floor:.1f}", *cells, ratio)
    return rendered


def save(results: Sequence[OpResult], device: torch.device, path: Path) -> None:
    """Writes all times as JSON, with what they were measured on."""
    content = {
        "environment": describe_environment(device),
        "dtype": "bfloat16",
        "host_us": host_times(device),
        "ops": [result.to_dict() for result in results],
    }
    write_json(path, content)


def plot(results: Sequence[OpResult], card: str, path: Path) -> None:
    """Draws the ratio to the byte floor of every case: diffkern, the compiler, and the eager chain."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 1 + 0.28 * len(results)))
    labels = [f"{result.op} {result.label}" for result in results]
    for position, result in enumerate(results):
        for name, time in result.microseconds.items():
            ours = name.startswith(OURS)
            marker, color = ("o", "tab:red") if ours else ("|", "tab:blue" if name == "torch.compile" else "tab:gray")
            axes.plot(time / result.floor, -position, marker, color=color, markersize=7 if ours else 10)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yticks([-position for position in range(len(results))], labels, fontsize=7)
    axes.set_xlabel("time / time to copy the fewest bytes; red: diffkern, blue: torch.compile, gray: others")
    axes.set_title(f"{card}, bfloat16")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
