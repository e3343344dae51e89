"""Generates a video with LTX-Video on diffkern's kernels, and measures what they change.

    python generate_video.py --prompt "A lighthouse in a storm"
    python generate_video.py --random-weights full --num-frames 49 --steps 30 --compare
    python generate_video.py --random-weights tiny --compare            # offline, on any machine

The first line loads LTX-Video, from the Hugging Face Hub unless ``--model`` names a folder. The other two
build the pipeline in memory with random weights and download nothing.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from diffkern.bench import measure, results
from diffkern.bench.arms import ARMS, STOCK, Arm, applied, arm_of, compiler_unavailable_reason
from diffkern.bench.environment import describe_device, describe_environment

if TYPE_CHECKING:
    from diffusers import LTXPipeline

FRAMES_PER_SECOND = 24
SPATIAL_COMPRESSION = 32
TEMPORAL_COMPRESSION = 8

#: Denoising steps of a warm-up call. Every shape of the timed call occurs in each of its steps.
WARMUP_STEPS = 3

#: A pipe or a file has no width of its own; the tables need this much.
console = Console(width=None if sys.stdout.isatty() else 100)


class Size(str, Enum):
    """Which of the pipelines of random weights to build."""

    TINY = "tiny"
    FULL = "full"


class Offload(str, Enum):
    """Where the weights wait while they are not needed."""

    NONE = "none"
    MODEL = "model"
    SEQUENTIAL = "sequential"
    GROUP = "group"


class Dtype(str, Enum):
    """Precision of the weights and activations."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    def on(self, device: torch.device) -> torch.dtype:
        """The torch dtype; bfloat16 on a GPU and float32 on a CPU for ``auto``."""
        if self is Dtype.AUTO:
            return torch.float32 if device.type == "cpu" else torch.bfloat16
        return getattr(torch, self.value)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Video:
    """What to generate."""

    prompt: str
    negative_prompt: str
    num_frames: int
    height: int
    width: int
    steps: int
    guidance_scale: float
    seed: int
    batch_size: int


@dataclass(frozen=True)
class Generation:
    """One call of the pipeline: its result, on the CPU, and what it took."""

    latents: torch.Tensor
    frames: torch.Tensor
    seconds: float
    steps_per_second: float | None


def main(
    model: Annotated[str, typer.Option(help="Hub id or local folder of the pipeline.")] = "Lightricks/LTX-Video",
    random_weights: Annotated[
        Size | None,
        typer.Option(help="Build the pipeline with random weights instead; downloads nothing."),
    ] = None,
    prompt: Annotated[str, typer.Option(help="What the video shows.")] = (
        "A lighthouse on a cliff in a storm, waves breaking on the rocks, gulls in the wind, film grain"
    ),
    negative_prompt: Annotated[str, typer.Option(help="What it does not show.")] = (
        "worst quality, inconsistent motion, blurry, jittery, distorted"
    ),
    num_frames: Annotated[
        int | None, typer.Option(min=1, help="Of the form 8 k + 1. Default: 161, or 17 for tiny.")
    ] = None,
    height: Annotated[
        int | None, typer.Option(min=32, help="Pixels, a multiple of 32. Default: 512, or 192 for tiny.")
    ] = None,
    width: Annotated[
        int | None, typer.Option(min=32, help="Pixels, a multiple of 32. Default: 768, or 192 for tiny.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps. Default: 50, or 8 for tiny.")] = None,
    guidance_scale: Annotated[float, typer.Option(help="Classifier-free guidance; 1 turns it off.")] = 4.5,
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
    compile: Annotated[bool, typer.Option("--compile", help="Compile the transformer's blocks.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run every arm: stock, compiled, injected, injected + compiled.")
    ] = False,
    baseline: Annotated[
        bool, typer.Option(help="Run the stock pipeline first, for the speed-up and the error.")
    ] = True,
    offload: Annotated[Offload, typer.Option(help="Keep weights on the CPU until needed.")] = Offload.NONE,
    dtype: Annotated[Dtype, typer.Option(help="auto: bfloat16 on a GPU, float32 on a CPU.")] = Dtype.AUTO,
    output: Annotated[Path, typer.Option(help="The mp4 to write.")] = Path("outputs/ltx_video.mp4"),
    json: Annotated[Path | None, typer.Option(help="Write everything measured here, too.")] = None,
) -> None:
    """Generate a video with LTX-Video on diffkern's kernels and show what they change."""
    tiny = random_weights is Size.TINY
    video = Video(
        prompt=prompt,
        negative_prompt=negative_prompt,
        num_frames=num_frames or (17 if tiny else 161),
        height=height or (192 if tiny else 512),
        width=width or (192 if tiny else 768),
        steps=steps or (8 if tiny else 50),
        guidance_scale=guidance_scale,
        seed=seed,
        batch_size=batch_size,
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_video(video)
    if random_weights is None:
        check_model(model)
    check_placement(offload, device)
    check_video_writer()
    arms, left_out = choose_arms(
        compare=compare,
        baseline=baseline,
        injected=use_optimized_kernels,
        compiled=compile,
        offload=offload,
        device=device,
    )
    check_files(output, json)

    pipe = load_pipeline(model, random_weights, device, dtype.on(device), seed)
    place(pipe, offload, device)
    pipe.set_progress_bar_config(disable=True)

    measured: list[results.ArmResult] = []
    shown: Generation | None = None
    stock: Generation | None = None
    report: dict[str, Any] | None = None
    timed = iterations or (3 if compare else 1)
    for arm in arms:
        with applied(arm, pipe, pipe.transformer) as injection:
            result, generation = run_arm(arm, pipe, video, device, warmup_iterations, timed)
            if injection is not None:
                result = replace(result, calls=total_calls(injection.calls()))
                if report is None:
                    report = injection.to_dict()
                    console.print(injection)
        if stock is not None:
            result = replace(result, difference=difference(generation, stock))
        measured.append(result)
        if arm == STOCK:
            stock = generation
        if shown is None or arm == arm_of(injected=use_optimized_kernels, compiled=compile):
            shown = generation

    assert shown is not None  # there is always an arm
    written = write_videos(shown.frames, output)
    console.print(describe_run(video, device, pipe), highlight=False)
    console.print(results.table(measured))
    if tiny and device.type == "cpu" and len(measured) > 1:
        console.print("Tiny weights on a CPU: speed-ups mean nothing at this size.", highlight=False)
    for name, reason in left_out.items():
        console.print(f"Left out: {name}, {reason}.", highlight=False)
    for path in written:
        console.print(f"Wrote {path}", highlight=False)
    if json is not None:
        reference = results.baseline_of(measured)
        content = {
            "environment": describe_environment(device),
            "config": {
                **asdict(video),
                "model": f"random weights, {random_weights.value}" if random_weights else model,
                "dtype": str(pipe.transformer.dtype).removeprefix("torch."),
                "offload": offload.value,
                "warmup_iterations": warmup_iterations,
                "iterations": timed,
            },
            "arms": [result.to_dict(reference) for result in measured],
            "left_out": left_out,
            "report": report,
        }
        results.write_json(json, content)
        console.print(f"Wrote {json}", highlight=False)


# --- what can be asked for ------------------------------------------------------------------------------


def check_video(video: Video) -> None:
    """Refuses sizes that LTX cannot generate, and says which ones it can."""
    for name, value in (("height", video.height), ("width", video.width)):
        if value % SPATIAL_COMPRESSION:
            below = value // SPATIAL_COMPRESSION * SPATIAL_COMPRESSION
            raise typer.BadParameter(
                f"--{name} {value} is not a multiple of {SPATIAL_COMPRESSION}: "
                f"use {below} or {below + SPATIAL_COMPRESSION}."
            )
    if video.num_frames % TEMPORAL_COMPRESSION != 1:
        below = (video.num_frames - 1) // TEMPORAL_COMPRESSION * TEMPORAL_COMPRESSION + 1
        raise typer.BadParameter(
            f"--num-frames {video.num_frames} is not of the form {TEMPORAL_COMPRESSION} k + 1: "
            f"use {below} or {below + TEMPORAL_COMPRESSION}."
        )


def check_model(model: str) -> None:
    """Refuses what is neither a folder nor the id of a model on the Hub."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    folder = Path(model)
    if folder.is_dir():
        return
    advice = "give the folder of a saved LTXPipeline or a Hub id such as Lightricks/LTX-Video, or use --random-weights."
    if folder.exists():
        raise typer.BadParameter(f"--model {model} is a file: {advice}")
    try:
        validate_repo_id(model)
    except HFValidationError as error:
        raise typer.BadParameter(f"--model {model}: there is no such folder, and it is no Hub id: {advice}") from error


def check_files(output: Path, json: Path | None) -> None:
    """Refuses files that could not be written in the end; makes their folders."""
    files = [(option, path) for option, path in (("--output", output), ("--json", json)) if path is not None]
    for option, path in files:
        if path.is_dir():
            raise typer.BadParameter(f"{option} {path} is a folder: name a file in it.")
    if output.suffix.lower() != ".mp4":
        raise typer.BadParameter(f"--output {output} does not end in .mp4: use {output.with_suffix('.mp4')}.")
    for option, path in files:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:
            raise typer.BadParameter(f"{option} {path} cannot be written: {error.strerror}.") from error
        if path.exists() and not os.access(path, os.W_OK):
            raise typer.BadParameter(f"{option} {path} cannot be written: the file is read-only.")


def check_placement(offload: Offload, device: torch.device) -> None:
    """Refuses to offload from a machine that has nothing to offload from."""
    if offload is not Offload.NONE and device.type == "cpu":
        raise typer.BadParameter(
            f"--offload {offload.value} moves weights between a GPU and the CPU, and torch sees no GPU here: "
            "use --offload none, or install a torch build for your GPU."
        )


def check_video_writer() -> None:
    """Refuses to start when the video could not be written in the end."""
    try:
        import imageio_ffmpeg

        imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError) as error:
        raise typer.BadParameter(
            f'no ffmpeg to write the mp4 with ({error}): run pip install ".[examples]" in the folder of the project.'
        ) from error


def choose_arms(
    *, compare: bool, baseline: bool, injected: bool, compiled: bool, offload: Offload, device: torch.device
) -> tuple[list[Arm], dict[str, str]]:
    """Returns the arms to run, stock first, and the arms of a comparison that cannot run, with reasons."""
    wanted = arm_of(injected=injected, compiled=compiled)
    if compare:
        arms = [arm for arm in ARMS if injected or not arm.injected]
    else:
        arms = [STOCK, wanted] if baseline and wanted != STOCK else [wanted]
    if offload is Offload.SEQUENTIAL:
        reason: str | None = "torch.compile does not see weights that --offload sequential moves; use model or group"
    else:
        reason = compiler_unavailable_reason(device)
    if reason is None:
        return arms, {}
    if compiled:
        raise typer.BadParameter(f"--compile: {reason}.")
    return [arm for arm in arms if not arm.compiled], {arm.name: reason for arm in arms if arm.compiled}


# --- the pipeline ---------------------------------------------------------------------------------------


def load_pipeline(
    model: str, random_weights: Size | None, device: torch.device, dtype: torch.dtype, seed: int
) -> LTXPipeline:
    """Builds or loads the pipeline; says so before anything is downloaded."""
    if random_weights is not None:
        with console.status(f"Building the {random_weights.value} pipeline with random weights"):
            from random_weights import build_pipeline  # imports diffusers, which takes seconds

            return build_pipeline(random_weights.value, device, dtype, seed)
    from diffusers import LTXPipeline

    if not Path(model).is_dir():
        from huggingface_hub.constants import HF_HUB_CACHE

        console.print(
            f"Loading {model} from the Hugging Face Hub. Files that are not yet in {HF_HUB_CACHE} are downloaded now.",
            highlight=False,
        )
    try:
        return LTXPipeline.from_pretrained(model, torch_dtype=dtype)
    except OSError as error:
        raise typer.BadParameter(
            f"could not load {model}: {error}\n"
            "Give --model the folder of a saved LTXPipeline, or use --random-weights: it downloads nothing."
        ) from error


def place(pipe: LTXPipeline, offload: Offload, device: torch.device) -> None:
    """Puts the pipeline on ``device``, or leaves it on the CPU with hooks that bring each part over."""
    if offload is Offload.NONE:
        pipe.to(device)
    elif offload is Offload.MODEL:
        pipe.enable_model_cpu_offload(device=device)
    elif offload is Offload.SEQUENTIAL:
        pipe.enable_sequential_cpu_offload(device=device)
    else:
        pipe.enable_group_offload(onload_device=device, offload_type="leaf_level", use_stream=True)


# --- running an arm -------------------------------------------------------------------------------------


def run_arm(
    arm: Arm, pipe: LTXPipeline, video: Video, device: torch.device, warmup_iterations: int, iterations: int
) -> tuple[results.ArmResult, Generation]:
    """Warms the arm up and times it; returns its result and the last generation."""
    warmup = replace(video, steps=min(video.steps, WARMUP_STEPS))
    first_call: float | None = None
    generations = []
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        for index in range(warmup_iterations):
            seconds = generate(pipe, warmup, device, progress, f"{arm.name}: warm-up {index + 1}").seconds
            first_call = seconds if first_call is None else first_call
        measure.reset_peak_memory(device)
        for index in range(iterations):
            generations.append(generate(pipe, video, device, progress, f"{arm.name}: run {index + 1}"))
        peak = measure.peak_memory(device)
    rates = [generation.steps_per_second for generation in generations if generation.steps_per_second]
    result = results.ArmResult(
        arm=arm,
        seconds=tuple(generation.seconds for generation in generations),
        steps_per_second=median(rates) if rates else None,
        first_call_seconds=first_call,
        peak_memory_bytes=peak,
    )
    return result, generations[-1]


def generate(pipe: LTXPipeline, video: Video, device: torch.device, progress: Progress, description: str) -> Generation:
    """Calls the pipeline once.

    The noise is drawn on the CPU, so that a seed means the same video on every machine. The latents are
    those that the last step leaves, before they are decoded.
    """
    task = progress.add_task(description, total=video.steps)
    clock = measure.StepClock(device)
    latents: dict[str, torch.Tensor] = {}

    def on_step_end(_pipe: Any, _step: int, _timestep: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        clock.mark()
        latents["final"] = state["latents"]
        progress.advance(task)
        return {}

    start = measure.wall_clock(device)
    output = pipe(
        prompt=[video.prompt] * video.batch_size,
        negative_prompt=[video.negative_prompt] * video.batch_size,
        num_frames=video.num_frames,
        height=video.height,
        width=video.width,
        num_inference_steps=video.steps,
        guidance_scale=video.guidance_scale,
        generator=torch.Generator("cpu").manual_seed(video.seed),
        callback_on_step_end=on_step_end,
        callback_on_step_end_tensor_inputs=["latents"],
        output_type="pt",
    )
    seconds = measure.wall_clock(device) - start
    frames = output.frames.float().cpu()
    if not bool(frames.isfinite().all()):
        raise FloatingPointError(
            f"{description} gave frames that are not finite numbers: try --dtype bfloat16 or float32, "
            "and report it if --no-optimized-kernels gives finite ones."
        )
    return Generation(latents["final"].float().cpu(), frames, seconds, clock.intervals_per_second())


def total_calls(calls: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Adds up the calls of all sites."""
    return {kind: sum(site[kind] for site in calls.values()) for kind in ("fused", "stock")}


def difference(generation: Generation, stock: Generation) -> results.Difference:
    """How far a generation is from the stock pipeline's with the same seed."""
    return results.Difference(
        latents=measure.relative_error(generation.latents, stock.latents),
        frames=measure.relative_error(generation.frames, stock.frames),
        psnr=measure.psnr(generation.frames, stock.frames),
    )


# --- what comes out -------------------------------------------------------------------------------------


def write_videos(frames: torch.Tensor, output: Path) -> list[Path]:
    """Writes one mp4 per video of ``frames``, shaped [batch, frames, channels, height, width] in 0 to 1."""
    from diffusers.utils import export_to_video

    output.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    for index, clip in enumerate(frames):
        path = output if len(frames) == 1 else output.with_stem(f"{output.stem}_{index}")
        images: list[np.ndarray] = list(clip.permute(0, 2, 3, 1).numpy())
        export_to_video(images, str(path), fps=FRAMES_PER_SECOND)
        paths.append(path)
    return paths


def describe_run(video: Video, device: torch.device, pipe: LTXPipeline) -> str:
    """One line: card, dtype, resolution, frames, steps."""
    dtype = str(pipe.transformer.dtype).removeprefix("torch.")
    return (
        f"{describe_device(device)}, {dtype}, {video.width}x{video.height}, "
        f"{video.num_frames} frames, {video.steps} steps, batch {video.batch_size}"
    )


if __name__ == "__main__":
    typer.run(main)
