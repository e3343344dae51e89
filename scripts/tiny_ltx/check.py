"""Generates a video for every kind of prompt and measures which of them show what was asked for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch
from diffusers import LTXPipeline
from PIL import Image
from torch import Tensor

from tiny_ltx.judge import Sight, look
from tiny_ltx.scenes import BACKGROUNDS, COLOURS, DIRECTIONS, SHAPES, caption

GUIDANCE_SCALE = 3.0


@dataclass(frozen=True)
class Checked:
    """One generated video, [frames, 3, height, width] from 0 to 1, with what was asked for and what it shows."""

    asked: Sight
    shown: Sight
    video: Tensor


def check(pipe: LTXPipeline, prompts: int, steps: int, video: tuple[int, int, int], seed: int) -> list[Checked]:
    """Generates a video for each of the first ``prompts`` combinations of colour, shape and direction.

    Args:
        pipe: The pipeline, on its device.
        prompts: How many; the backgrounds take turns.
        steps: Denoising steps.
        video: Frames, height and width.
        seed: Of the noise.
    """
    grounds = itertools.cycle(BACKGROUNDS)
    combinations = list(itertools.product(COLOURS, SHAPES, DIRECTIONS))
    stride = max(1, len(combinations) // prompts)
    asked = [Sight(*c, next(grounds)) for c in combinations[::stride][:prompts]]
    num_frames, height, width = video
    videos = pipe(
        prompt=[caption(*astuple(sight)) for sight in asked],
        num_frames=num_frames,
        height=height,
        width=width,
        num_inference_steps=steps,
        guidance_scale=GUIDANCE_SCALE,
        generator=torch.Generator("cpu").manual_seed(seed),
        output_type="pt",
    ).frames
    videos = videos.float().cpu()
    return [Checked(sight, look(video), video) for sight, video in zip(asked, videos, strict=True)]


def summary(checked: Sequence[Checked]) -> dict[str, float]:
    """The share of videos that agree with their prompts: in each property, and in all."""
    agreements = torch.tensor([c.asked.agreement(c.shown) for c in checked]).float()
    shares = {field.name: float(share) for field, share in zip(fields(Sight), agreements.mean(dim=0), strict=True)}
    return {**shares, "all": float(agreements.prod(dim=1).mean())}


def table(checked: Sequence[Checked]) -> str:
    """The shares of :func:`summary`, and every video that does not agree, as text."""
    lines = [f"{name:<12}{share:7.1%}" for name, share in summary(checked).items()]
    lines += [
        f"asked for {caption(*astuple(c.asked))!r}, shows {caption(*astuple(c.shown))!r}"
        for c in checked
        if c.asked != c.shown
    ]
    return "\n".join(lines)


def contact_sheet(checked: Sequence[Checked], path: Path, columns: int = 3) -> None:
    """Writes the first, the middle and the last frame of each video side by side, ``columns`` videos a row."""
    strips = [torch.cat(list(c.video[[0, len(c.video) // 2, -1]]), dim=-1) for c in checked]
    strips += [torch.ones_like(strips[0])] * (-len(strips) % columns)
    rows = [torch.cat(strips[start : start + columns], dim=-1) for start in range(0, len(strips), columns)]
    picture = (torch.cat(rows, dim=-2) * 255).round().byte().permute(1, 2, 0).numpy()
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture).save(path)
