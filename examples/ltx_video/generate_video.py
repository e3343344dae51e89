"""Generates a video with LTX-Video on diffkern's kernels, and measures what they change.

    python generate_video.py --tiny --prompt "a red circle moving right"    # offline, on any machine
    python generate_video.py --prompt "A lighthouse in a storm"
    python generate_video.py --random-weights full --num-frames 49 --steps 30 --compare

The first line runs the small LTX-Video of the folder ``tiny``, which draws coloured shapes on the move. The second
loads LTX-Video, from the Hugging Face Hub unless ``--model`` names a folder. The third builds the pipeline in memory
with random weights and downloads nothing. Under ``torchrun`` several GPUs share the work, see ``ranks.py``.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from generation import (
    WARMUP_STEPS,
    Dtype,
    Generation,
    Offload,
    Setting,
    Size,
    Video,
    difference,
    load_pipeline,
    place,
    profile_arm,
    run_arm,
    shortened,
    write_videos,
)
from ranks import ContextParallel, Ranks, split_videos, start, stop
from refusals import (
    check_files,
    check_folder,
    check_model,
    check_placement,
    check_schedule,
    check_video,
    check_video_writer,
)
from rich.console import Console

from diffkern.bench import profile as profiles
from diffkern.bench import results
from diffkern.bench.arms import ARMS, STOCK, Arm, ArmUnavailableError, applied, unavailable_reason
from diffkern.bench.environment import describe_device, describe_environment

HUB_MODEL = "Lightricks/LTX-Video"
TINY_MODEL = Path(__file__).parent / "tiny"

#: Seconds that torch.compile takes for the blocks of the transformer, on two cores.
COMPILING = 20

#: A pipe or a file has no width of its own; the tables need this much.
WIDTH = None if sys.stdout.isatty() else 100


@dataclass(frozen=True)
class Defaults:
    """What a kind of model generates unless told otherwise."""

    prompts: tuple[str, ...]
    negative_prompt: str
    num_frames: int
    height: int
    width: int
    steps: int
    guidance_scale: float


LTX_VIDEO = Defaults(
    prompts=("A lighthouse on a cliff in a storm, waves breaking on the rocks, gulls in the wind, film grain",),
    negative_prompt="worst quality, inconsistent motion, blurry, jittery, distorted",
    num_frames=161,
    height=512,
    width=768,
    steps=50,
    guidance_scale=4.5,
)
TINY = Defaults(("a red circle moving right on a white background",), "", 25, 128, 128, 20, 3.0)
RANDOM_TINY = replace(LTX_VIDEO, num_frames=17, height=192, width=192, steps=8)


class Numerics(str, Enum):
    """The contracts that kernels can keep."""

    FAST = "fast"
    EXACT = "exact"
    FP8 = "fp8"


def main(
    model: Annotated[
        str | None, typer.Option(help=f"Hub id or local folder of the pipeline. Default: {HUB_MODEL}.")
    ] = None,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="The small trained LTX-Video beside this script: shapes on the move.")
    ] = False,
    random_weights: Annotated[
        Size | None,
        typer.Option(help="Build the pipeline with random weights instead; downloads nothing."),
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="What the video shows; may be repeated, for a video each.")
    ] = None,
    negative_prompt: Annotated[str | None, typer.Option(help="What it does not show.")] = None,
    num_frames: Annotated[
        int | None, typer.Option(min=1, help="Of the form 8 k + 1. Default: 161, or 25 for --tiny.")
    ] = None,
    height: Annotated[
        int | None, typer.Option(min=32, help="Pixels, a multiple of 32. Default: 512, or 128 for --tiny.")
    ] = None,
    width: Annotated[
        int | None, typer.Option(min=32, help="Pixels, a multiple of 32. Default: 768, or 128 for --tiny.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps. Default: 50, or 20 for --tiny.")] = None,
    guidance_scale: Annotated[
        float | None, typer.Option(help="Classifier-free guidance; 1 turns it off. Default: 4.5, or 3 for --tiny.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the initial noise, and of random weights.")] = 42,
    batch_size: Annotated[int, typer.Option(min=1, help="Videos per call.")] = 1,
    warmup_iterations: Annotated[
        int, typer.Option(min=0, help=f"Calls of {WARMUP_STEPS} steps before the clock starts.")
    ] = 2,
    iterations: Annotated[
        int | None,
        typer.Option(min=1, help="Timed calls; the median counts. Default: 1, or 3 with --compare."),
    ] = None,
    use_optimized_kernels: Annotated[
        bool,
        typer.Option("--use-optimized-kernels/--no-optimized-kernels", help="Inject diffkern's kernels."),
    ] = True,
    numerics: Annotated[Numerics, typer.Option(help="The contract of the kernels.")] = Numerics.FAST,
    cuda_graph: Annotated[bool, typer.Option("--cuda-graph", help="Capture the steps as CUDA graphs, too.")] = False,
    compile: Annotated[bool, typer.Option("--compile", help="Compile the transformer's blocks.")] = False,
    compare: Annotated[
        bool,
        typer.Option("--compare", help=f"Run every arm: {', '.join(arm.name for arm in ARMS)}."),
    ] = False,
    baseline: Annotated[
        bool, typer.Option(help="Run the stock pipeline first, for the speed-up and the error.")
    ] = True,
    context_parallel: Annotated[
        ContextParallel | None, typer.Option(help="Under torchrun: split each video over the ranks, not the prompts.")
    ] = None,
    offload: Annotated[Offload, typer.Option(help="Keep weights on the CPU until needed.")] = Offload.NONE,
    dtype: Annotated[Dtype, typer.Option(help="auto: bfloat16 on a GPU, float32 on a CPU.")] = Dtype.AUTO,
    output: Annotated[Path, typer.Option(help="The mp4 to write.")] = Path("outputs/ltx_video.mp4"),
    json: Annotated[Path | None, typer.Option(help="Write everything measured here, too.")] = None,
    chart: Annotated[Path | None, typer.Option(help="Draw the seconds of the arms as bars into this PNG.")] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="Folder for a table of the time by kernel family, stock and injected, and for both traces."),
    ] = None,
) -> None:
    """Generate a video with LTX-Video on diffkern's kernels and show what they change."""
    if tiny and random_weights is not None:
        raise typer.BadParameter("--tiny is a trained model and --random-weights is not: choose one.")
    if model is not None and (tiny or random_weights is not None):
        raise typer.BadParameter("--model names another model than --tiny and --random-weights: choose one.")
    defaults = TINY if tiny else RANDOM_TINY if random_weights is Size.TINY else LTX_VIDEO
    given = {
        "prompts": tuple(prompt) if prompt else None,
        "negative_prompt": negative_prompt,
        "num_frames": num_frames,
        "height": height,
        "width": width,
        "steps": steps,
        "guidance_scale": guidance_scale,
    }
    chosen = {**asdict(defaults), **{name: value for name, value in given.items() if value is not None}}
    video = Video(**chosen, seed=seed, batch_size=batch_size)
    model = str(TINY_MODEL) if tiny else model or HUB_MODEL
    check_video(video)
    if random_weights is None:
        check_model(model)
    ranks = start(len(video.prompts), context_parallel)
    device, console = ranks.device, Console(width=WIDTH, quiet=not ranks.first)
    check_placement(offload, device)
    check_video_writer()
    wanted = Arm(
        numerics=numerics.value if use_optimized_kernels else None,
        cuda_graph=cuda_graph and use_optimized_kernels,
        compiled=compile,
    )
    arms, left_out = choose_arms(wanted, ranks, compare=compare, baseline=baseline, offload=offload)
    check_files({"--output": (output, ".mp4"), "--json": (json, ".json"), "--chart": (chart, ".png")})
    check_folder("--profile", profile)

    pipe = load_pipeline(model, random_weights, device, dtype.on(device), seed, console)
    check_schedule(video, pipe.scheduler)
    place(pipe, offload, device)
    split_videos(pipe, ranks)
    pipe.set_progress_bar_config(disable=True)
    setting = Setting(pipe, ranks, video, console)

    measured: list[results.ArmResult] = []
    generations: dict[Arm, Generation] = {}
    recorded: dict[str, profiles.Profile] = {}
    report: dict[str, Any] | None = None
    timed = iterations or (3 if compare else 1)
    console.print(
        f"{describe_run(setting)}. Runs {', '.join(arm.name for arm in arms)}, one after the other; each: "
        f"{warmup_iterations} warm-up calls of up to {WARMUP_STEPS} steps, {timed} timed of {video.steps}.",
        highlight=False,
    )
    started = time.perf_counter()
    for number, arm in enumerate(arms):
        if number == 1 and len(arms) > 2:
            console.print(time_to_go(time.perf_counter() - started, arms[1:]), highlight=False)
        try:
            with applied(arm, pipe, pipe.transformer) as injection:
                result, generation = run_arm(arm, setting, warmup_iterations, timed)
                if injection is not None:
                    result = replace(result, calls=total_calls(injection.calls()))
                if arm == wanted and injection is not None:
                    report = injection.to_dict()
                    console.print(injection)
                if profile is not None and arm in (STOCK, wanted):
                    rank = "" if ranks.first else f"_rank{ranks.number}"
                    trace = profile / f"{arm.name.replace(' + ', '_')}{rank}.json.gz"
                    recorded[arm.name] = profile_arm(setting, trace)
        except ArmUnavailableError as error:
            if not compare:
                raise typer.BadParameter(f"the arm {arm.name!r} cannot run: {error}.") from error
            left_out[arm.name] = str(error)
            continue
        if STOCK in generations:
            result = replace(result, difference=difference(generation, generations[STOCK]))
        measured.append(result)
        generations[arm] = generation

    shown_arm = wanted if wanted in generations else next(iter(generations))
    frames = ranks.gather(generations[shown_arm].frames, batch_size)
    stop(ranks)
    if not ranks.first:
        return
    description = describe_run(setting)
    console.print(description, highlight=False)
    console.print(results.table(measured))
    if defaults is not LTX_VIDEO and device.type == "cpu" and len(measured) > 1:
        console.print("A tiny model on a CPU: speed-ups mean nothing at this size.", highlight=False)
    for name, reason in left_out.items():
        console.print(f"Left out: {name}, {reason}.", highlight=False)
    videos = write_videos(frames, output)
    written = [*videos]
    if profile is not None:
        table = profiles.markdown(recorded)
        steps_profiled = shortened(setting).video.steps
        console.print(
            f"One call of {steps_profiled} steps, with its decoding, by kernel family:\n{table}", highlight=False
        )
        (profile / "profile.md").write_text(f"{description}\n\nOne call of {steps_profiled} steps.\n\n{table}")
        written += sorted(profile.iterdir())
    if chart is not None:
        results.plot(measured, description, chart)
        written.append(chart)
    if json is not None:
        reference = results.baseline_of(measured)
        content = {
            "environment": describe_environment(device),
            "config": {
                **asdict(video),
                "model": f"random weights, {random_weights.value}" if random_weights else "tiny" if tiny else model,
                "dtype": str(pipe.transformer.dtype).removeprefix("torch."),
                "offload": offload.value,
                "warmup_iterations": warmup_iterations,
                "iterations": timed,
            },
            "arms": [result.to_dict(reference) for result in measured],
            "left_out": left_out,
            "profile": {name: asdict(recording) for name, recording in recorded.items()},
            "report": report,
        }
        results.write_json(json, content)
        written.append(json)
    for path in written:
        of = f": the video of the arm {shown_arm.name}" if path in videos else ""
        console.print(f"Wrote {path}{of}", highlight=False)


def choose_arms(
    wanted: Arm, ranks: Ranks, *, compare: bool, baseline: bool, offload: Offload
) -> tuple[list[Arm], dict[str, str]]:
    """Returns the arms to run, stock first, and the arms of a comparison that cannot run, with reasons."""
    if compare:
        arms = [arm for arm in ARMS if wanted.injected or not arm.injected]
        arms += [wanted] if wanted not in arms else []
    else:
        arms = [STOCK, wanted] if baseline and wanted != STOCK else [wanted]

    def reason(arm: Arm) -> str | None:
        if offload is Offload.SEQUENTIAL and arm.compiled:
            return "torch.compile does not see weights that --offload sequential moves; use model or group"
        if ranks.split is ContextParallel.ULYSSES and (arm.compiled or arm.numerics in (None, "exact")):
            return "diffusers splits the heads over the ranks, and not the mask of the text, which its attention reads"
        return unavailable_reason(arm, ranks.device)

    left_out = {arm: why for arm in arms if (why := reason(arm)) is not None}
    if wanted in left_out:
        option = "--compile" if wanted.compiled else "--cuda-graph"
        if ranks.split is ContextParallel.ULYSSES:
            option = "--context-parallel ulysses"
        elif unavailable_reason(Arm(wanted.numerics), ranks.device) is not None:
            option = f"--numerics {wanted.numerics}"
        raise typer.BadParameter(f"{option}: {left_out[wanted]}.")
    return [arm for arm in arms if arm not in left_out], {arm.name: why for arm, why in left_out.items()}


def time_to_go(first: float, arms: list[Arm]) -> str:
    """Says how long the other arms take if each takes the seconds of the first one, and the compiler as ever."""
    compiled = sum(arm.compiled for arm in arms)
    extra = f", {compiled * COMPILING} of them for the compiler in {compiled} of the arms" if compiled else ""
    return f"The first arm took {first:.0f} s; about {first * len(arms) + compiled * COMPILING:.0f} s to go{extra}."


def total_calls(calls: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Adds up the calls of all sites."""
    return {kind: sum(site[kind] for site in calls.values()) for kind in ("fused", "stock")}


def describe_run(setting: Setting) -> str:
    """One line: card, dtype, resolution, frames, steps."""
    dtype, video = str(setting.pipe.transformer.dtype).removeprefix("torch."), setting.video
    return (
        f"{describe_device(setting.device)}, {dtype}, {video.width}x{video.height}, "
        f"{video.num_frames} frames, {video.steps} steps, batch {video.batch_size}{setting.ranks.describe()}"
    )


if __name__ == "__main__":
    typer.run(main)
