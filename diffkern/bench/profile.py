"""Where the time of a piece of work goes: GPU kernels, or operators on a CPU, added up by family."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from diffkern.ops.registration import Op

#: Families, and what the names of their kernels contain; the first match counts. The names are those of cuBLAS,
#: cuDNN, CUTLASS, PyTorch, Inductor, the flash attentions and diffkern's own kernels.
FAMILIES: Mapping[str, str] = {
    "attention": r"flash|fmha|sdpa|attention|attn|sage",
    "conv": r"conv(?!ert)|fprop|wgrad|dgrad|implicit_gemm",
    "rope": r"rope|rotary",
    "norm, modulate": r"norm|modulate|rsqrt|moments|welford|rowwisemean",
    "GEMM": r"gemm|gemv|nvjet|cutlass|cublas|splitk|xmma|aten::(addmm|mm|bmm|baddbmm|_addmm_activation|linear)\b",
    "activation": r"gelu|silu|activation|glu",
    "copies": r"memcpy|memset|(?<!fused__to_)copy|convert|cat(array|\b)|nchw|transpose|aten::(clone|repeat|index)\b",
    "reductions": r"reduce|softmax|triton_red|triton_per|aten::(mean|sum)\b",
    "elementwise": r"elementwise|triton_poi|aten::(add|sub|mul|div|pow|lerp|fill|where|cos|sin|exp|neg)_?\b",
}
OTHER = "other"


def family(kernel: str) -> str:
    """The family that the kernel or operator of this name belongs to."""
    name = kernel.lower()
    return next((family for family, pattern in FAMILIES.items() if re.search(pattern, name)), OTHER)


@dataclass
class Profile:
    """What :func:`profiled` saw.

    Attributes:
        unit: What was counted: ``"kernels"`` of a GPU, or ``"operators"`` on a CPU.
        milliseconds: Time of each family; on a CPU without the operators that an operator calls.
        launches: Calls of each family.
    """

    unit: str = ""
    milliseconds: dict[str, float] = field(default_factory=dict)
    launches: dict[str, int] = field(default_factory=dict)


@contextmanager
def profiled(device: torch.device, trace: Path | None = None) -> Iterator[Profile]:
    """Profiles what runs on ``device`` inside the ``with`` block, which is left, the profile filled, when it is done.

    ``trace`` is a Chrome trace to write, for ``chrome://tracing`` or https://ui.perfetto.dev; compressed if its name
    ends in ``.gz``.
    """
    on_gpu = device.type == "cuda"
    result = Profile("kernels" if on_gpu else "operators")
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    with profile(activities=activities) as recorded:
        yield result
        if on_gpu:
            torch.cuda.synchronize(device)
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(trace))
    milliseconds, launches = defaultdict[str, float](float), defaultdict[str, int](int)
    for event in recorded.key_averages():
        if on_gpu and (event.device_type != DeviceType.CUDA or event.is_user_annotation):
            continue
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        milliseconds[family(event.key)] += microseconds / 1000
        launches[family(event.key)] += event.count
    result.milliseconds.update(milliseconds)
    result.launches.update(launches)


@contextmanager
def ranges() -> Iterator[None]:
    """Names every fused op in what a profiler records inside the ``with`` block, around the kernels of any provider.

    The name is ``diffkern::norm_modulate``, for one. ``torch.profiler`` records such ranges as they are, and Nsight
    Systems inside of ``torch.autograd.profiler.emit_nvtx()``. Each call takes some microseconds longer; outside of the
    block nothing is added to it. Graphs of ``torch.compile`` and replayed CUDA graphs call no op, and show none.
    """
    plain = Op.call

    def named(op: Op, operands: tuple[Any, ...], options: tuple[Any, ...], provider: str | None) -> Any:
        if torch.compiler.is_compiling():
            return plain(op, operands, options, provider)
        with record_function(op.op.name()):
            return plain(op, operands, options, provider)

    Op.call = named  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Op.call = plain  # type: ignore[method-assign]


def markdown(profiles: Mapping[str, Profile]) -> str:
    """Profiles side by side as a table, by family: milliseconds and launches of each."""
    unit = next(iter(profiles.values())).unit
    header = ["family", *(f"{name}, {what}" for name in profiles for what in ("ms", unit))]
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    found = [name for name in (*FAMILIES, OTHER) if any(p.launches.get(name) for p in profiles.values())]
    for title, names in (*((name, [name]) for name in found), ("all", found)):
        line = [title]
        for p in profiles.values():
            line.append(f"{sum(p.milliseconds.get(name, 0.0) for name in names):.2f}")
            line.append(str(sum(p.launches.get(name, 0) for name in names)))
        lines.append(line)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
