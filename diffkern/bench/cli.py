"""``diffkern bench``: a step, a pipeline, ops and attention, arm against arm on this machine."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diffkern.cli_options import (
    EXIT_CODES,
    NAMES,
    VAES,
    Device,
    JsonFile,
    Quiet,
    device_of,
    dtype_of,
    epilog,
    fail,
    require_known,
    require_writable,
    room_lacking,
    say_why,
)

if TYPE_CHECKING:
    from rich.console import Console

    from diffkern.bench.arms import Arm

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure on this machine.", epilog=EXIT_CODES)


Plot = Annotated[Path | None, typer.Option(help="Draw the arms as bars into this PNG; needs matplotlib.")]


def _console(output: Path | None, width: int = 160) -> Console:
    """Where tables go: nowhere, if the JSON goes to the standard output."""
    from rich.console import Console

    return Console(width=width if not Console().is_terminal else None, quiet=str(output) == "-")


@app.command(
    "ops",
    short_help="Time every op against its byte floor and its rivals.",
    epilog=epilog("bench ops", "bench ops --op rms_norm --op rope --json ops.json"),
)
def bench_ops(
    only: Annotated[list[str] | None, typer.Option("--op", help="Only this op; may be repeated.")] = None,
    repetitions: Annotated[int, typer.Option(min=5, help="Timed calls per arm.")] = 40,
    output: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(help="Draw times over floors into this PNG; needs matplotlib.")] = None,
    quiet: Quiet = False,
) -> None:
    """Time every op on this GPU against its byte floor and its rivals."""
    import torch

    if not torch.cuda.is_available():
        fail("bench ops", "torch sees no CUDA or ROCm GPU here, and on a CPU there is no byte floor")
    from diffkern.bench import ops

    require_writable("bench ops", json=output, plot=plot)
    device = torch.device("cuda", torch.cuda.current_device())
    card = torch.cuda.get_device_name(device)
    try:
        results = ops.run(
            device, only or (), repetitions, say=lambda case: None if quiet else typer.echo(case, err=True)
        )
    except ValueError as error:
        fail("bench ops", error, 2)
    _console(output, 200).print(ops.table(results, f"{card}, bfloat16, us (times the floor)"))
    if output is not None:
        ops.save(results, device, output)
    if plot is not None:
        ops.plot(results, card, plot)


@app.command(
    "step",
    short_help="Time a step of whole denoisers, or a decode, arm against arm.",
    epilog=epilog(
        "bench step --model flux", "bench step --model wan --arm stock --arm fast --json -", "bench step --all"
    ),
)
def bench_step(
    model: Annotated[
        list[str] | None, typer.Option(help=f"{NAMES}, {VAES}; may be repeated. Without: all denoisers.")
    ] = None,
    arm: Annotated[list[str] | None, typer.Option(help="Only this arm, e.g. 'fast + graph'; may be repeated.")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every denoiser of diffusers at its real width, with two layers.")
    ] = False,
    repetitions: Annotated[int, typer.Option(min=2, help="Timed steps per arm.")] = 10,
    device: Device = "",
    output: JsonFile = None,
    plot: Plot = None,
    quiet: Quiet = False,
) -> None:
    """Time steps of whole denoisers, or decodes, with random weights: stock, compiled and injected, interleaved."""
    import torch

    from diffkern.bench import breadth, steps
    from diffkern.bench.environment import describe_device, describe_environment
    from diffkern.bench.models import AUTOENCODERS, DENOISERS
    from diffkern.bench.results import write_json

    if every and model:
        fail("bench step", "--all runs every denoiser: leave --model out, or name models without --all", 2)
    known = breadth.BREADTH if every else {**DENOISERS, **AUTOENCODERS}
    require_known("bench step", "model", model or (), known)
    require_writable("bench step", json=output, plot=plot)
    chosen = _arms("bench step", arm) if arm or not every else breadth.ARMS
    where = device_of("bench step", device)
    console = _console(output)
    names = model or list(known if every else DENOISERS)
    rows: dict[str, dict[str, object]] = {}
    for name in names:
        denoiser = known[name]
        if not quiet:
            slow = ", where a step at full width takes minutes" if where.type == "cpu" else ""
            typer.echo(f"{name} on {where}{slow}: {', '.join(each.name for each in chosen)}", err=True)
        rows[name] = {"what": denoiser.what, "layers": dict(denoiser.layers), "arms": []}
        layers = ", ".join(f"{key}={value}" for key, value in denoiser.layers.items())
        title = f"{denoiser.what} {layers}, bfloat16, {describe_device(where)}"
        try:
            lacking = room_lacking(denoiser.build(torch.device("meta")), where)
            if lacking and not every:
                fail(f"bench step --model {name}", lacking)
            if lacking:
                raise MemoryError(lacking)
            results = steps.run(denoiser, chosen, where, repetitions, keep_going=every)
            rows[name]["arms"] = [result.to_dict() for result in results]
            console.print(steps.table(results, title))
            if plot is not None and not all(result.unavailable for result in results):
                steps.plot(results, title, plot if len(names) == 1 else plot.with_stem(f"{plot.stem}_{name}"))
        except Exception as error:
            if not every or getattr(error, "name", "") == "diffusers":  # which is not installed
                raise
            rows[name]["failed"] = steps.why(error)
            console.print(f"{title}\nnot run: {rows[name]['failed']}")
        steps.release(where)
        # After each model, so that an interrupted run leaves something.
        if output is not None and (str(output) != "-" or len(rows) == len(names)):
            write_json(output, {"environment": describe_environment(where), "breadth" if every else "models": rows})


@app.command(
    "pipeline",
    short_help="Time calls of a whole pipeline, arm against arm.",
    epilog=epilog("bench pipeline ./folder", "bench pipeline ./folder --arm stock --arm fast --plot bars.png"),
)
def bench_pipeline(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A saved pipeline; nothing is downloaded.")],
    arm: Annotated[list[str] | None, typer.Option(help="Only this arm, e.g. 'fast + graph'; may be repeated.")] = None,
    prompt: Annotated[str, typer.Option(help="What to draw.")] = "a lighthouse in a storm",
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps.")] = 20,
    height: Annotated[int | None, typer.Option(help="Pixels; default: the pipeline's.")] = None,
    width: Annotated[int | None, typer.Option(help="Pixels; default: the pipeline's.")] = None,
    frames: Annotated[int | None, typer.Option(help="Of a video; default: the pipeline's.")] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Timed calls per arm.")] = 3,
    device: Device = "",
    output: JsonFile = None,
    plot: Plot = None,
    quiet: Quiet = False,
) -> None:
    """Time calls of a whole pipeline, from the prompt to the decoded result: the arms in turn, on shared weights."""
    from diffkern.bench import pipelines, results
    from diffkern.bench.environment import describe_device, describe_environment

    require_writable("bench pipeline", json=output, plot=plot)
    chosen = _arms("bench pipeline", arm)
    where = device_of("bench pipeline", device)
    call = {"prompt": prompt, "num_inference_steps": steps, "height": height, "width": width, "num_frames": frames}
    try:
        pipe = pipelines.load(folder, where)
    except (OSError, ValueError) as error:
        fail("bench pipeline", say_why(error), 2)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # loading raises what it likes at what it reads
        fail("bench pipeline", f"{folder} cannot be loaded: {type(error).__name__}: {say_why(error)}", 2)
    try:
        measured, left_out = pipelines.run(pipe, chosen, where, call, repetitions)
    except Exception as error:  # pipelines raise what they like at what they are called with
        fail("bench pipeline", f"{type(pipe).__name__} does not run with these options: {say_why(error)}")
    if not measured:
        fail("bench pipeline", "; ".join(f"{name}: {reason}" for name, reason in left_out.items()))
    title = f"{type(pipe).__name__}, {steps} steps, {describe_device(where)}"
    console = _console(output)
    console.print(title)
    console.print(results.table(measured))
    for name, reason in left_out.items():
        console.print(f"Left out: {name}, {reason}.")
    if plot is not None and measured:
        results.plot(measured, title, plot)
    if output is not None:
        stock = results.baseline_of(measured)
        arms = [result.to_dict(stock) for result in measured]
        environment = describe_environment(where)
        results.write_json(output, {"environment": environment, "call": call, "arms": arms, "left_out": left_out})


def _arms(command: str, names: list[str] | None) -> tuple[Arm, ...]:
    """The arms of these names, or those that are always compared; ends the program where there is none such."""
    from diffkern.bench.arms import DEFAULT, NAMED

    require_known(command, "arm", names or (), NAMED)
    return tuple(NAMED[name] for name in names) if names else DEFAULT


@app.command(
    "attention",
    short_help="Compare implementations of attention: time, memory, error.",
    epilog=epilog("bench attention --shape 1x4096x24x128", "bench attention --shape 2x1024/77x20x64 --mask bool"),
)
def bench_attention(
    shape: Annotated[
        list[str],
        typer.Option(help="BxSxHxD; BxS/TxHxD with T keys, BxSxH/GxD with G key heads. May be repeated."),
    ],
    backend: Annotated[
        list[str] | None,
        typer.Option(help="Only this one, by name or as 'org/repo@revision:function'; may be repeated."),
    ] = None,
    device: Device = "",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    mask: Annotated[str, typer.Option(help="none, bool or additive.")] = "none",
    causal: Annotated[bool, typer.Option("--causal", help="Queries see no later keys.")] = False,
    dropout: Annotated[float, typer.Option(min=0, max=0.99, help="Share of weights that is dropped.")] = 0.0,
    backward: Annotated[bool, typer.Option("--backward", help="Time the backward, too.")] = False,
    output: JsonFile = None,
    plot: Plot = None,
    quiet: Quiet = False,
) -> None:
    """Compare the implementations of attention on given shapes: time, memory, error against float64."""
    from diffkern.bench import attention
    from diffkern.bench.environment import describe_device, describe_environment
    from diffkern.bench.results import write_json

    require_writable("bench attention", json=output, plot=plot)
    where, kind = device_of("bench attention", device), dtype_of("bench attention", dtype)
    # It is timed as diffusers calls it, and torch would say at length that compiled it is faster.
    warnings.filterwarnings("ignore", "flex_attention called without", UserWarning)
    try:
        shapes = [attention.Shape.parse(text) for text in shape]
        calls = [(str(s), s.call(where, kind, mask, causal, dropout, backward)) for s in shapes]
        runs = [attention.run(call, name, backend or ()) for name, call in calls]
    except ValueError as error:
        fail("bench attention", error, 2)
    except RuntimeError as error:
        fail("bench attention", error)
    console = _console(output)
    for results in runs:
        console.print(attention.table(results, f"{results[0].shape}, {dtype}, {describe_device(where)}"))
    if plot is not None:
        attention.plot([one for results in runs for one in results], f"{dtype}, {describe_device(where)}", plot)
    if output is not None:
        options = {"dtype": dtype, "mask": mask, "causal": causal, "dropout": dropout, "backward": backward}
        rows = [asdict(result) for results in runs for result in results]
        write_json(output, {"environment": describe_environment(where), "options": options, "results": rows})
