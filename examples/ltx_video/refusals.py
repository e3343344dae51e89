"""What cannot be asked for, refused before anything is loaded or generated, with what to ask for instead."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import typer
from generation import Offload, Video

from diffkern.cli_options import unwritable

SPATIAL_COMPRESSION = 32
TEMPORAL_COMPRESSION = 8


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


def check_schedule(video: Video, scheduler: Any) -> None:
    """Refuses a single step where the last one is stretched to a noise of its own, which needs a first one besides."""
    if video.steps == 1 and scheduler.config.get("shift_terminal"):
        raise typer.BadParameter("--steps 1 is too few for the schedule of this model: use 2 or more.")


def check_model(model: str) -> None:
    """Refuses what is neither a folder nor the id of a model on the Hub."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    folder = Path(model)
    if folder.is_dir():
        return
    advice = "give the folder of a saved LTXPipeline or a Hub id such as Lightricks/LTX-Video, or use --tiny."
    if folder.exists():
        raise typer.BadParameter(f"--model {model} is a file: {advice}")
    try:
        validate_repo_id(model)
    except HFValidationError as error:
        raise typer.BadParameter(f"--model {model}: there is no such folder, and it is no Hub id: {advice}") from error


def check_files(files: Mapping[str, tuple[Path | None, str]]) -> None:
    """Refuses files that could not be written in the end; makes their folders.

    Args:
        files: By option, the path that was given, if any, and the ending that it must have.
    """
    given = [(option, path, ending) for option, (path, ending) in files.items() if path is not None]
    for option, path, ending in given:
        if path.is_dir():
            raise typer.BadParameter(f"{option} {path} {unwritable(path)}.")
        if path.suffix.lower() != ending:
            raise typer.BadParameter(f"{option} {path} does not end in {ending}: use {path.with_suffix(ending)}.")
    for option, path, _ in given:
        with contextlib.suppress(OSError):  # the next line says why
            path.parent.mkdir(parents=True, exist_ok=True)
        if reason := unwritable(path):
            raise typer.BadParameter(f"{option} {path} {reason}.")


def check_folder(option: str, folder: Path | None) -> None:
    """Refuses a folder that cannot be made."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise typer.BadParameter(f"{option} {folder} is no folder to write to: {error.strerror}.") from error


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
