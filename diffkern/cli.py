"""The command line: ``diffkern doctor``, ``diffkern build`` and ``diffkern bench``."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from diffkern.hub.cli import app as hub

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Fused kernels for diffusers pipelines: see what runs, and build it.",
)

bench = typer.Typer(no_args_is_help=True, help="Measure on this machine.")
app.add_typer(bench, name="bench")
app.add_typer(hub, name="hub")


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List every provider on every device of this machine: available, or why not and what to do about it."""
    from diffkern.doctor import examine

    checkup = examine()
    if as_json:
        typer.echo(json.dumps(checkup.to_dict(), indent=2))
        return
    console = Console(highlight=False)
    console.print(", ".join(f"{name} {version}" for name, version in checkup.versions.items()))
    for setting in checkup.settings:
        console.print(setting, style="yellow")
    for device, rows in groupby(checkup.rows, key=lambda row: row.device):
        console.print(f"\n{device}", style="bold")
        console.print(f"  {checkup.platforms[device]}")
        for preferred in checkup.preferences[device]:
            console.print(f"  {preferred}")
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for row in rows:
            table.add_row(f"  {row.provider}", f"serves {', '.join(row.ops)}" if row.ops else "serves nothing")
            if row.reason:
                table.add_row("", Text(f"why not, and what to do: {row.reason}"))
        console.print(table)


@app.command()
def build(
    cpu: Annotated[bool, typer.Option("--cpu", help="Build for this machine's CPU family.")] = False,
    cuda: Annotated[bool, typer.Option("--cuda", help="Build for NVIDIA GPUs; needs nvcc.")] = False,
    rocm: Annotated[bool, typer.Option("--rocm", help="Build for AMD GPUs; needs hipcc.")] = False,
    arch: Annotated[
        list[str] | None,
        typer.Option(help="GPU architecture, e.g. sm_90 or gfx942; may be repeated; 'all' for the full list."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Directory to build into; default: inside the package.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Compile even if the same build is there.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the compiler commands.")] = False,
) -> None:
    """Compile the kernels. Without a choice of platform, everything this machine has a compiler for."""
    from diffkern.build import BuildError, ToolchainError, available_backends, build_kernels

    backends = [name for name, wanted in (("cpu", cpu), ("cuda", cuda), ("rocm", rocm)) if wanted]
    if arch and backends == ["cpu"]:
        _fail("--arch names GPU architectures, and --cpu builds for none: leave one out, or add --cuda or --rocm")
    if arch and not backends and available_backends() == ("cpu",):
        _fail("--arch names GPU architectures, and no GPU compiler was found: --cuda or --rocm says what is missing")
    try:
        results = build_kernels(backends or "auto", archs=arch or None, output=output, force=force, verbose=verbose)
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (BuildError, ToolchainError, ValueError) as error:
        _fail(str(error))
    for result in results:
        archs = f" for {', '.join(result.archs)}" if result.archs else ""
        if result.directory is None:
            typer.echo(f"{result.backend}: failed: {result.reason}", err=True)
        elif result.fresh:
            typer.echo(f"{result.backend}: built{archs} in {result.seconds:.0f} s: {result.directory}")
        else:
            typer.echo(f"{result.backend}: already there{archs}: {result.directory}")
        for note in result.notes:
            typer.echo(f"  {note}")
    if not results:
        typer.echo("nothing to build: no compiler was found; diffkern doctor says which ones are looked for", err=True)
    # Backends that were named raise above. Architectures that were named speak of every GPU's backend.
    failed_by_name = arch and any(result.directory is None and result.backend != "cpu" for result in results)
    if failed_by_name or not any(result.directory for result in results):
        raise typer.Exit(1)


def _fail(message: str, command: str = "build") -> NoReturn:
    typer.echo(f"diffkern {command}: {message}", err=True)
    raise typer.Exit(1)


@bench.command("ops")
def bench_ops(
    only: Annotated[list[str] | None, typer.Option("--op", help="Only this op; may be repeated.")] = None,
    output: Annotated[Path, typer.Option(help="Directory for the JSON file and the plot.")] = Path("benchmarks"),
    repetitions: Annotated[int, typer.Option(min=5, help="Timed calls per arm.")] = 40,
) -> None:
    """Time every op on this GPU against its byte floor and its rivals."""
    import torch

    if not torch.cuda.is_available():
        typer.echo(
            "diffkern bench ops: torch sees no CUDA or ROCm GPU here, and on a CPU there is no byte floor", err=True
        )
        raise typer.Exit(1)
    from diffkern.bench import ops

    device = torch.device("cuda", torch.cuda.current_device())
    console = Console(width=200)
    results = ops.run(device, only or (), repetitions, say=lambda case: typer.echo(case, err=True))
    console.print(ops.table(results, f"{torch.cuda.get_device_name(device)}, bfloat16, us (times the floor)"))
    for path in ops.save(results, device, output):
        typer.echo(f"wrote {path}")


@bench.command("step")
def bench_step(
    model: Annotated[list[str] | None, typer.Option(help="Model by name; may be repeated. Without: all.")] = None,
    arm: Annotated[list[str] | None, typer.Option(help="Only this arm, e.g. 'fast + graph'; may be repeated.")] = None,
    repetitions: Annotated[int, typer.Option(min=2, help="Timed steps per arm.")] = 10,
    device: Annotated[str, typer.Option(help="Device; default: the GPU if there is one.")] = "",
    output: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
) -> None:
    """Time a step of whole denoisers with random weights: stock, compiled and injected, interleaved."""
    import torch

    from diffkern.bench import arms, steps
    from diffkern.bench.environment import describe_device, describe_environment
    from diffkern.bench.models import DENOISERS
    from diffkern.bench.results import write_json

    known = {each.name: each for each in arms.ARMS}
    for name in model or ():
        if name not in DENOISERS:
            _fail(f"model {name!r} is not known: choose from {', '.join(DENOISERS)}", "bench step")
    for name in arm or ():
        if name not in known:
            _fail(f"arm {name!r} is not known: choose from {', '.join(known)}", "bench step")
    chosen = tuple(known[name] for name in arm) if arm else steps.default_arms()
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    console = Console(width=160 if not Console().is_terminal else None)
    rows: dict[str, object] = {}
    for name in model or DENOISERS:
        denoiser = DENOISERS[name]
        results = steps.run(denoiser, chosen, where, repetitions)
        layers = ", ".join(f"{key}={value}" for key, value in denoiser.layers.items())
        console.print(steps.table(results, f"{denoiser.what} {layers}, bfloat16, {describe_device(where)}"))
        rows[name] = {
            "what": denoiser.what,
            "layers": dict(denoiser.layers),
            "arms": [result.to_dict() for result in results],
        }
        if output is not None:
            write_json(output, {"environment": describe_environment(where), "models": rows})


@bench.command("attention")
def bench_attention(
    shape: Annotated[
        list[str],
        typer.Option(help="BxSxHxD; BxS/TxHxD with T keys, BxSxH/GxD with G key heads. May be repeated."),
    ],
    backend: Annotated[
        list[str] | None,
        typer.Option(help="Only this one, by name or as 'org/repo@revision:function'; may be repeated."),
    ] = None,
    device: Annotated[str, typer.Option(help="Device; default: the GPU if there is one.")] = "",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    mask: Annotated[str, typer.Option(help="none, bool or additive.")] = "none",
    causal: Annotated[bool, typer.Option("--causal", help="Queries see no later keys.")] = False,
    dropout: Annotated[float, typer.Option(min=0, max=0.99, help="Share of weights that is dropped.")] = 0.0,
    backward: Annotated[bool, typer.Option("--backward", help="Time the backward, too.")] = False,
    output: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
) -> None:
    """Compare the implementations of attention on given shapes: time, memory, error against float64."""
    import torch

    from diffkern.bench import attention
    from diffkern.bench.environment import describe_device, describe_environment
    from diffkern.bench.results import write_json

    try:
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        kind = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[dtype]
        shapes = [attention.Shape.parse(text) for text in shape]
        calls = [(str(s), s.call(where, kind, mask, causal, dropout, backward)) for s in shapes]
        runs = [attention.run(call, name, backend or ()) for name, call in calls]
    except KeyError:
        _fail(f"dtype={dtype!r}: choose bfloat16, float16 or float32", "bench attention")
    except (ValueError, RuntimeError) as error:
        _fail(str(error), "bench attention")
    console = Console(width=160 if not Console().is_terminal else None)
    for results in runs:
        console.print(attention.table(results, f"{results[0].shape}, {dtype}, {describe_device(where)}"))
    if output is not None:
        options = {"dtype": dtype, "mask": mask, "causal": causal, "dropout": dropout, "backward": backward}
        rows = [result.to_dict() for results in runs for result in results]
        write_json(output, {"environment": describe_environment(where), "options": options, "results": rows})


if __name__ == "__main__":
    app()
