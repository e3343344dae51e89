"""The pipeline of the example, and one call of it, with clocks on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import typer
from ranks import Ranks
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from diffkern.bench import measure, results
from diffkern.bench.arms import Arm
from diffkern.bench.environment import dtype_argument
from diffkern.bench.profile import Profile, profiled

if TYPE_CHECKING:
    from diffusers import LTXPipeline

FRAMES_PER_SECOND = 24

#: Denoising steps of a warm-up call. Every shape of the timed call occurs in each of its steps.
WARMUP_STEPS = 3


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

    prompts: tuple[str, ...]
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
    """The videos of this rank's prompts, on the CPU, and what they took."""

    latents: torch.Tensor
    frames: torch.Tensor
    seconds: float
    steps_per_second: float | None


@dataclass(frozen=True)
class Setting:
    """A pipeline on the device of its rank, what it shall generate, and where to say how far it is."""

    pipe: LTXPipeline
    ranks: Ranks
    video: Video
    console: Console

    @property
    def device(self) -> torch.device:
        """Where the pipeline runs."""
        return self.ranks.device


# --- the pipeline ---------------------------------------------------------------------------------------


def load_pipeline(
    model: str, random_weights: Size | None, device: torch.device, dtype: torch.dtype, seed: int, console: Console
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
        return LTXPipeline.from_pretrained(model, **dtype_argument(dtype))
    except OSError as error:
        raise typer.BadParameter(
            f"could not load {model}: {error}\n"
            "Give --model the folder of a saved LTXPipeline, or use --tiny: it downloads nothing."
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


# --- running it -----------------------------------------------------------------------------------------


def run_arm(
    arm: Arm, setting: Setting, warmup_iterations: int, iterations: int
) -> tuple[results.ArmResult, Generation]:
    """Warms the arm up and times it; returns its result and the last generation."""
    device = setting.device
    warmup = shortened(setting)
    first_call: float | None = None
    generations = []
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=setting.console,
    ) as progress:

        def run(setting: Setting, description: str) -> Generation:
            calls = len(setting.ranks.share(setting.video.prompts))
            task = progress.add_task(f"{arm.name}: {description}", total=setting.video.steps * calls)
            return generate(setting, on_step=lambda _: progress.advance(task))

        for index in range(warmup_iterations):
            seconds = run(warmup, f"warm-up {index + 1}").seconds
            first_call = seconds if first_call is None else first_call
        measure.reset_peak_memory(device)
        for index in range(iterations):
            generations.append(run(setting, f"run {index + 1}"))
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


def shortened(setting: Setting) -> Setting:
    """The setting with the few steps of a warm-up, for one prompt of each rank."""
    video = setting.video
    prompts = video.prompts[: 1 if setting.ranks.split else setting.ranks.count]
    return replace(setting, video=replace(video, prompts=prompts, steps=min(video.steps, WARMUP_STEPS)))


def generate(setting: Setting, on_step: Callable[[int], object] = lambda step: None) -> Generation:
    """Calls the pipeline once for each prompt of this rank.

    The noise is drawn on the CPU, by a seed for each prompt, so that a seed means the same video on every machine and
    on every number of ranks. The latents are those that the last step leaves, before they are decoded.

    Args:
        setting: What to call, and with what.
        on_step: Called with the number of each step when it has been launched.
    """
    start = setting.ranks.wait()
    calls = [
        _call(setting, prompt, setting.video.seed + number, on_step)
        for number, prompt in setting.ranks.share(setting.video.prompts)
    ]
    seconds = setting.ranks.wait() - start
    latents, frames, rates = zip(*calls, strict=True)
    rate = None if None in rates else sum(rates) / len(rates)
    result = Generation(torch.cat(latents).float().cpu(), torch.cat(frames).float().cpu(), seconds, rate)
    if not bool(result.frames.isfinite().all()):
        raise FloatingPointError(
            "the frames are not finite numbers: try --dtype bfloat16 or float32, "
            "and report it if --no-optimized-kernels gives finite ones."
        )
    return result


def _call(
    setting: Setting, prompt: str, seed: int, on_step: Callable[[int], object]
) -> tuple[torch.Tensor, torch.Tensor, float | None]:
    """The final latents and the frames of one call, and its steps per second."""
    video = setting.video
    clock = measure.StepClock(setting.device)
    latents: dict[str, torch.Tensor] = {}

    def on_step_end(_pipe: Any, step: int, _timestep: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        clock.mark()
        latents["final"] = state["latents"]
        on_step(step)
        return {}

    frames = setting.pipe(
        prompt=[prompt] * video.batch_size,
        negative_prompt=[video.negative_prompt] * video.batch_size,
        num_frames=video.num_frames,
        height=video.height,
        width=video.width,
        num_inference_steps=video.steps,
        guidance_scale=video.guidance_scale,
        generator=torch.Generator("cpu").manual_seed(seed),
        callback_on_step_end=on_step_end,
        callback_on_step_end_tensor_inputs=["latents"],
        output_type="pt",
    ).frames
    return latents["final"], frames, clock.intervals_per_second()


def profile_arm(setting: Setting, trace: Path) -> Profile:
    """Profiles one short call of an arm that is warm, and writes its Chrome trace."""
    with profiled(setting.device, trace) as profile:
        generate(shortened(setting))
    return profile


def difference(generation: Generation, stock: Generation) -> results.Difference:
    """How far a generation is from the stock pipeline's with the same seed."""
    return results.Difference(
        latents=measure.relative_error(generation.latents, stock.latents),
        frames=measure.relative_error(generation.frames, stock.frames),
        psnr=measure.psnr(generation.frames, stock.frames),
        ssim=measure.ssim(generation.frames, stock.frames),
    )


def write_videos(frames: torch.Tensor, output: Path) -> list[Path]:
    """Writes one mp4 per video of ``frames``, shaped [batch, frames, channels, height, width] in 0 to 1."""
    from diffusers.utils import export_to_video

    paths = []
    for index, clip in enumerate(frames):
        path = output if len(frames) == 1 else output.with_stem(f"{output.stem}_{index}")
        images: list[np.ndarray] = list(clip.permute(0, 2, 3, 1).numpy())
        export_to_video(images, str(path), fps=FRAMES_PER_SECOND)
        paths.append(path)
    return paths
