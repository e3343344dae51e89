"""What an injection gains, measured or expected, and what to do next: the second lines of its report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from diffkern.providers.eager.fp8 import fp8_unavailable_reason

if TYPE_CHECKING:
    from diffkern.injection.report import InjectionReport

#: A GPU that takes longer than this many times the host's time for a step is what the step waits for.
_BUSY = 1.25


def gain(report: InjectionReport) -> str:
    """Says what was measured while the model ran, else what was expected of it, else ""."""
    said = []
    for what, (step, replay) in report.steps.items():
        if replay is not None:
            said.append(
                f"{what} takes {replay.step:.1f} ms as a CUDA graph, {step.step:.1f} ms without "
                f"({step.step / replay.step:.2f}x)"
            )
    fused, stock = (sum(times) for times in zip((0.0, 0.0), *_timed(report), strict=True))
    if fused:
        said.append(f"timed sites run {stock / fused:.1f}x as fast as they are written")
    return "; ".join(said) or report.expected


def next_step(report: InjectionReport) -> str:
    """Says what to do next, or "" where nothing is patched."""
    if not report.active:
        return ""
    if report.dry_run:
        return "inject, run, and print the report: it says what ran fused"
    device = _device(report)
    ran = report.traced or any(site.fused_calls or site.stock_calls for site in report.active)
    if device is None or not ran:
        return "run it, and print the report again: it says what ran fused"
    if device.type == "cpu":
        return "diffkern bench pipeline compares whole calls with stock"
    said = []
    graphs = [site for site in report._accepted if site.op == "cuda_graph"]
    if any(site.waiting for site in graphs) and not report.steps:
        said.append("some more steps: then their times decide about CUDA graphs")
    busy = any(step.gpu > _BUSY * step.host for step, _ in report.steps.values())
    if busy and not report.traced:
        said.append("compile_repeated_blocks(): the GPU is busy, and the compiler fuses what no rule does")
    if busy and report.numerics == "fast" and fp8_unavailable_reason(device) is None:
        said.append("numerics='fp8', if its error is small enough for you")
    if not graphs and not report.traced:
        said.append("cuda_graph='auto' where the GPU waits for the host")
    if any(note.startswith("component 'vae'") for note in report.notes):
        said.append("the VAE too, by components=None")
    return "; or ".join(said) or "diffkern bench pipeline compares whole calls with stock"


def _timed(report: InjectionReport) -> Iterator[tuple[float, float]]:
    """What the calls of each timed site took, and would have taken as written, in microseconds."""
    seen: set[int] = set()
    for site in report.active:
        for part in getattr(getattr(site._state, "fusion", None), "timed_sites", ()):
            if id(part) not in seen and part.cost is not None:
                seen.add(id(part))
                fused, stock = part.cost
                yield part.fused_calls * fused.device, part.fused_calls * stock.device


def _device(report: InjectionReport) -> torch.device | None:
    """Where the patched modules are, or None if none is left."""
    modules: list[nn.Module] = [m for site in report.active if (m := site.module) is not None]
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return next((tensor.device for tensor in tensors), None)
