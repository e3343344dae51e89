"""The command line: ``diffkern inspect``, ``verify``, ``doctor``, ``build``, ``bench`` and ``hub``."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup
from typing_extensions import override

from diffkern.bench.cli import app as bench
from diffkern.cli_options import (
    EXIT_CODES,
    NAMES,
    Device,
    Json,
    Quiet,
    device_of,
    dtype_of,
    epilog,
    fail,
    require_known,
    room_lacking,
    say_why,
)
from diffkern.hub.cli import app as hub

#: Packages that diffkern is installed without unless they are asked for, and what to install for them.
_OPTIONAL = dict.fromkeys(("diffusers", "transformers", "accelerate"), "diffusers transformers accelerate")


class _Commands(TyperGroup):
    """The commands; a package that is missing is one line."""

    @override
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            if error.name not in _OPTIONAL:
                raise
            fail(str(ctx.invoked_subcommand), f"{error.name} is not installed: pip install {_OPTIONAL[error.name]}")


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Fused kernels for diffusers pipelines: see what runs, prove it, measure it, build it.",
    epilog=EXIT_CODES,
)
app.add_typer(bench, name="bench")


def _version(value: bool) -> None:
    if value:
        from diffkern import __version__

        typer.echo(f"diffkern {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Fused kernels for diffusers pipelines: see what runs, prove it, measure it, build it."""


app.add_typer(hub, name="hub", short_help="Pin, fetch, check and publish kernels of the Hub.")

_Model = Annotated[str, typer.Argument(metavar="MODEL|PATH", help=f"A config.json, a folder, or a name: {NAMES}.")]
_Dtype = Annotated[str, typer.Option(help="bfloat16, float16 or float32.")]
_Layers = Annotated[int | None, typer.Option(min=1, help="Keep so many layers of each kind, with random weights.")]
_Numerics = Annotated[str, typer.Option(help="fast, exact or fp8.")]


@app.command(
    short_help="Show what would be fused in a model, and why the rest is left.",
    epilog=epilog("inspect flux", "inspect ./my-pipeline", "inspect wan --card H100"),
)
def inspect(
    model: _Model,
    numerics: _Numerics = "fast",
    dtype: _Dtype = "bfloat16",
    explain: Annotated[str, typer.Option(metavar="MODULE", help="Say in a sentence what happens to this one.")] = "",
    card: Annotated[str, typer.Option(help="Say what fusing can gain on it, by bytes: H100, A100, T4, ...")] = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show what would be fused in a model, by which op and provider, and why the rest is left.

    Needs no weights and no memory for them: a config.json is enough, and the model is made on torch's meta device.
    """
    import torch

    from diffkern import plan
    from diffkern.bench.estimate import CARDS
    from diffkern.inspection import ModelError, expected_gain, load_model

    kind = dtype_of("inspect", dtype)
    _require_numerics("inspect", numerics)
    require_known("inspect", "card", [card] if card else [], CARDS)
    try:
        loaded = load_model(model, torch.device("meta"), kind)
        report = plan(loaded, numerics=numerics)
        if card:
            report.expected = expected_gain(model, loaded, kind, card)
        said = report.explain(explain) if explain else str(report)
    except (ModelError, ValueError) as error:
        fail("inspect", error, 2)
    typer.echo(report.to_json() if as_json else said)


@app.command(
    short_help="Prove every fused site, and compare the whole model.",
    epilog=epilog("verify ltx --layers 2", "verify ./model --inputs step.pt", "verify wan --device cuda --json"),
)
def verify(
    model: _Model,
    numerics: _Numerics = "fast",
    dtype: _Dtype = "bfloat16",
    device: Device = "",
    layers: _Layers = None,
    inputs: Annotated[
        Path | None, typer.Option(help="Keyword arguments of one call, a dict by torch.save. Names have theirs.")
    ] = None,
    float64: Annotated[bool, typer.Option(help="Also run the whole model in float64 (4x its memory).")] = True,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Prove every fused site of a model, and compare the whole model: stock, injected, exact, restored."""
    import torch

    from diffkern.bench.models import DENOISERS
    from diffkern.inspection import ModelError, first_call, load_model, read_inputs, verify_model

    where, kind = device_of("verify", device), dtype_of("verify", dtype)
    _require_numerics("verify", numerics)
    try:
        if model in DENOISERS:
            weightless = cast(Any, load_model(model, torch.device("meta"), kind, layers))
            if reason := room_lacking(weightless, where):
                fail(f"verify {model}", reason)
        arguments = DENOISERS[model].step(where, kind) if model in DENOISERS else None
        if inputs is not None:
            arguments = read_inputs(inputs, where)
        loaded = load_model(model, where, kind, layers)
    except ModelError as error:
        fail("verify", error, 2)
    component, remark = "", ""
    if isinstance(loaded, SimpleNamespace) and inputs is None:
        try:
            component, arguments = first_call(Path(model), loaded, kind)
        except ModelError as error:
            remark = str(error)
    try:
        result = verify_model(loaded, arguments, numerics, float64, component)
        result.remark = remark or result.remark
    except (RuntimeError, TypeError, ValueError) as error:
        fail("verify", f"{type(loaded).__name__} does not run on these inputs: {say_why(error)}")
    typer.echo(json.dumps(result.to_dict(), indent=2) if as_json else str(result))
    if not result.report.patched:
        fail("verify", "nothing was patched, so there is nothing to verify")
    if result.broken:
        raise typer.Exit(1)


def _require_numerics(command: str, numerics: str) -> None:
    if numerics not in ("fast", "exact", "fp8"):
        fail(command, f"numerics={numerics!r}: choose one of exact, fast, fp8", 2)


@app.command(
    short_help="List every provider on this machine, or why it is missing.",
    epilog=epilog("doctor", "doctor --json > doctor.json"),
)
def doctor(as_json: Json = False, quiet: Quiet = False) -> None:
    """List every provider on every device of this machine: available, or why not and what to do about it."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from diffkern.doctor import examine

    checkup = examine()
    if as_json:
        typer.echo(json.dumps(asdict(checkup), indent=2))
        return
    console = Console(highlight=False)
    console.print(", ".join(f"{name} {version}" for name, version in checkup.versions.items()))
    for setting in checkup.settings:
        console.print(setting, style="yellow")
    for device, rows in groupby(checkup.rows, key=lambda row: row.device):
        console.print(f"\n{device}", style="bold")
        console.print(f"  {checkup.platforms[device]}")
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for row in rows:
            table.add_row(f"  {row.provider}", f"serves {', '.join(row.ops)}" if row.ops else "serves nothing")
            if row.reason:
                table.add_row("", Text(f"why not, and what to do: {row.reason}"))
        console.print(table)


@app.command(epilog=epilog("build", "build --cpu", "build --cuda --arch sm_90"))
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
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compile the kernels. Without a choice of platform, everything this machine has a compiler for."""
    from diffkern.build import ArchError, BuildError, OutputError, ToolchainError, build_kernels

    backends = [name for name, wanted in (("cpu", cpu), ("cuda", cuda), ("rocm", rocm)) if wanted]
    try:
        results = build_kernels(backends or "auto", archs=arch or None, output=output, force=force, verbose=verbose)
    except OSError as error:
        fail("build", say_why(error))
    except (ValueError, ArchError, OutputError) as error:
        fail("build", error, 2)
    except (BuildError, ToolchainError) as error:
        fail("build", error)
    if as_json:
        typer.echo(json.dumps([asdict(result) for result in results], indent=2, default=str))
    for result in () if as_json else results:
        archs = f" for {', '.join(result.archs)}" if result.archs else ""
        done = f"built{archs} in {result.seconds:.0f} s" if result.fresh else f"already there{archs}"
        if result.directory is None:
            typer.echo(f"{result.backend}: failed: {result.reason}", err=True)
        else:
            typer.echo(f"{result.backend}: {done}: {result.directory}")
        for note in result.notes:
            typer.echo(f"  {note}")
    if not results:
        typer.echo("nothing to build: no compiler was found; diffkern doctor says which ones are looked for", err=True)
    # Backends that were named raise above. Architectures that were named speak of every GPU's backend.
    failed_by_name = arch and any(result.directory is None and result.backend != "cpu" for result in results)
    if failed_by_name or not any(result.directory for result in results):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
