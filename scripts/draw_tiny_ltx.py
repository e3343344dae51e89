"""Draws what the tiny LTX-Video makes of a few prompts, stock and with kernels, side by side.

python scripts/draw_tiny_ltx.py --output docs/images/tiny_ltx.png
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import matplotlib
import torch
import typer
from diffusers import LTXPipeline
from torch import Tensor

from diffkern import optimized
from diffkern.bench.environment import dtype_argument
from diffkern.bench.measure import psnr

matplotlib.use("Agg")

import matplotlib.pyplot as plt

TINY = Path(__file__).parents[1] / "examples" / "ltx_video" / "tiny"
PROMPTS = (
    "a red circle moving right on a white background",
    "a yellow triangle moving up on a black background",
    "a blue square moving left on a white background",
)
SHOWN_FRAMES = (0, 12, 24)


def main(output: Annotated[Path, typer.Option(help="The PNG to write.")], seed: int = 0) -> None:
    """Generate every prompt with both pipelines, in bfloat16, and write the picture."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pipe = LTXPipeline.from_pretrained(TINY, **dtype_argument(torch.bfloat16), local_files_only=True).to(device)
    pipe.set_progress_bar_config(disable=True)
    stock = generate(pipe, seed)
    with optimized(pipe):
        fast = generate(pipe, seed)

    columns = 2 * len(SHOWN_FRAMES)
    figure, axes = plt.subplots(len(PROMPTS), columns, figsize=(1.5 * columns, 1.78 * len(PROMPTS)), squeeze=False)
    for row, prompt in enumerate(PROMPTS):
        for arm, videos in enumerate((stock, fast)):
            for place, frame in enumerate(SHOWN_FRAMES):
                panel = axes[row, arm * len(SHOWN_FRAMES) + place]
                panel.imshow(videos[row, frame].permute(1, 2, 0).numpy())
                panel.set_xticks([])
                panel.set_yticks([])
        axes[row, 1].set_title(f"stock: {prompt}", fontsize=8)
        axes[row, 4].set_title(f"fast: {psnr(fast[row], stock[row]):.1f} dB from stock", fontsize=8)
    figure.tight_layout(pad=0.4)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=100)


def generate(pipe: LTXPipeline, seed: int) -> Tensor:
    """The videos of all prompts, [prompts, frames, 3, height, width] from 0 to 1, on the CPU."""
    videos = pipe(
        prompt=list(PROMPTS),
        num_frames=25,
        height=128,
        width=128,
        num_inference_steps=20,
        guidance_scale=3.0,
        generator=torch.Generator("cpu").manual_seed(seed),
        output_type="pt",
    ).frames
    return videos.float().cpu()


if __name__ == "__main__":
    typer.run(main)
