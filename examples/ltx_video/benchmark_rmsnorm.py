"""RMSNorm with weight, bf16, at the shapes of LTX-Video and its neighbours, against every rival there is.

    python examples/ltx_video/benchmark_rmsnorm.py --json benchmarks/rms_norm_h100.json

All rivals of a shape are timed in one run, in turns, with the L2 cache overwritten in between. ``copy`` is
``copy_`` of the same tensor: it reads and writes the same bytes, so nothing can be much faster.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from diffkern.bench.environment import describe_environment
from diffkern.bench.kernels import time_calls, time_host
from diffkern.bench.results import write_json
from diffkern.cli_options import unwritable
from diffkern.ops import rms_norm
from diffkern.providers import explain

SHAPES = (
    (1, 1024, 2048),
    (2, 1024, 2048),
    (4, 1024, 2048),
    (2, 4096, 3072),
    (4, 4096, 3072),
    (2, 8064, 2048),
    (1, 32760, 5120),
    (1, 4608, 24, 128),
)
EPS = 1e-6


def main(
    json: Annotated[Path | None, typer.Option(help="Write everything measured to this file.")] = None,
    repetitions: Annotated[int, typer.Option(help="Timed calls per rival and shape.")] = 60,
) -> None:
    """Time RMSNorm against its rivals and print microseconds and the share of copy speed."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("this benchmark needs a CUDA or ROCm GPU, and torch sees none")
    if json is not None and (reason := unwritable(json)):
        raise typer.BadParameter(f"--json {json} {reason}")
    device = torch.device("cuda", torch.cuda.current_device())
    environment = describe_environment(device)
    results = [measure(shape, device, repetitions) for shape in SHAPES]
    names = list(dict.fromkeys(name for result in results for name in result["microseconds"]))
    table = Table(title=f"RMSNorm bf16 on {environment['device']}, us (times copy)", title_justify="left", box=None)
    table.add_column("shape")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("diffkern GB/s", justify="right")
    for result in results:
        times = result["microseconds"]
        cells = [f"{times[n]:.1f} ({times[n] / times['copy']:.2f})" if n in times else "-" for n in names]
        ours = min(times[name] for name in times if name.startswith("diffkern"))
        table.add_row("x".join(map(str, result["shape"])), *cells, f"{result['bytes'] / ours / 1e3:.0f}")
    Console(width=200).print(table)
    host = host_times(device)
    Console(width=200).print("host time per call, us: " + ", ".join(f"{n} {t:.1f}" for n, t in host.items()))
    if json is not None:
        write_json(json, {"environment": environment, "dtype": "bfloat16", "rms_norm": results, "host_us": host})


def measure(shape: tuple[int, ...], device: torch.device, repetitions: int) -> dict[str, object]:
    """Times every rival at one shape."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(shape, device=device, generator=generator).bfloat16()
    weight = torch.randn(shape[-1], device=device, generator=generator).bfloat16()
    torch._dynamo.reset()
    with torch.no_grad():
        times = time_calls(rivals(x, weight), device, repetitions)
    return {"shape": shape, "bytes": 2 * x.numel() * x.element_size(), "microseconds": times}


def rivals(x: Tensor, weight: Tensor) -> dict[str, Callable[[], object]]:
    """Everything that computes the norm here, and the copy that bounds it."""
    target = torch.empty_like(x)
    calls: dict[str, Callable[[], object]] = {"copy": partial(target.copy_, x)}
    for provider in ("compiled", "triton"):
        if explain("rms_norm", x.device, (x.dtype,))[provider] is None:
            calls[f"diffkern {provider}"] = partial(rms_norm, x, weight, eps=EPS, provider=provider)
    calls["F.rms_norm"] = partial(F.rms_norm, x, x.shape[-1:], weight, EPS)
    calls["torch.compile"] = partial(torch.compile(chain, dynamic=False), x, weight)
    try:
        from diffusers.models.normalization import RMSNorm

        module = RMSNorm(x.shape[-1], EPS).to(x.device, x.dtype)
        module.weight.data.copy_(weight)
        calls["diffusers RMSNorm"] = partial(module, x)
    except ImportError:
        pass
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        calls["Liger"] = partial(LigerRMSNormFunction.apply, x, weight, EPS, 0.0, "llama", False)
    except ImportError:
        pass
    return calls


def chain(x: Tensor, weight: Tensor) -> Tensor:
    """The norm as a model writes it, for the compiler to fuse."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.float()).to(x.dtype)


def host_times(device: torch.device) -> dict[str, float]:
    """Host time of one call at a size where the GPU takes no time."""
    x = torch.randn(64, 2048, device=device).bfloat16()
    weight = torch.randn(2048, device=device).bfloat16()
    with torch.no_grad():
        calls = {"aten add": partial(torch.add, x, x), **rivals(x, weight)}
        for call in calls.values():
            call()
        return time_host(calls, device)


if __name__ == "__main__":
    typer.run(main)
