"""Trains a tiny LTX-Video that draws a coloured shape on the move, and saves it as an ordinary diffusers folder.

    python scripts/train_tiny_ltx.py --output examples/ltx_video/tiny

All classes are those of LTX-Video; the videos are drawn on the fly (``tiny_ltx/scenes.py``), so nothing is
downloaded. Eight minutes of one H200 made the weights in examples/ltx_video/tiny. In the end it generates one video for
every colour, shape and direction, measures what they show, and prints how many agree with their prompts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from diffusers import LTXPipeline
from torch import nn

from diffkern.bench.environment import dtype_argument

sys.path.insert(0, str(Path(__file__).parent))

from tiny_ltx.check import check, contact_sheet, summary, table
from tiny_ltx.models import (
    build_pipeline,
    build_text_encoder,
    build_tokenizer,
    build_transformer,
    build_vae,
)
from tiny_ltx.progress import Training
from tiny_ltx.train_denoiser import train_denoiser
from tiny_ltx.train_vae import measure_latents, train_vae

#: Share of the time that the autoencoder gets.
VAE_SHARE = 0.35


def main(
    output: Annotated[Path, typer.Option(help="Folder to save the pipeline in.")],
    report: Annotated[Path | None, typer.Option(help="Folder for the losses and the pictures of the check.")] = None,
    minutes: Annotated[float, typer.Option(min=0.01, help="Time for both trainings together.")] = 8.0,
    vae_steps: Annotated[int, typer.Option(min=1, help="Most steps of the autoencoder.")] = 1_000_000,
    steps: Annotated[int, typer.Option(min=1, help="Most steps of the transformer.")] = 1_000_000,
    num_frames: Annotated[int, typer.Option(min=1, help="Of the form 4 k + 1.")] = 25,
    height: Annotated[int, typer.Option(min=32, help="Pixels, a multiple of 32.")] = 128,
    width: Annotated[int, typer.Option(min=32, help="Pixels, a multiple of 32.")] = 128,
    vae_batch_size: Annotated[int, typer.Option(min=1, help="Videos per step of the autoencoder.")] = 16,
    batch_size: Annotated[int, typer.Option(min=1, help="Videos per step of the transformer.")] = 128,
    pool_size: Annotated[int, typer.Option(min=1, help="Encoded videos that the transformer learns from.")] = 32768,
    check_steps: Annotated[int, typer.Option(min=1, help="Denoising steps of the check.")] = 20,
    check_prompts: Annotated[int, typer.Option(min=1, help="Prompts of the check, at most all 72.")] = 72,
    seed: Annotated[int, typer.Option(help="Of the weights, the videos and the noise.")] = 0,
) -> None:
    """Train, save, load again, and check."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    video = (num_frames, height, width)
    if num_frames % 4 != 1 or height % 32 or width % 32:
        raise typer.BadParameter("--num-frames must be of the form 4 k + 1, --height and --width multiples of 32.")
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(seed)
    vae, transformer, text_encoder = (
        build().to(device) for build in (build_vae, build_transformer, build_text_encoder)
    )
    tokenizer = build_tokenizer()

    seconds = 60 * minutes
    vae_training = Training("vae", VAE_SHARE * seconds, vae_steps)
    train_vae(vae, vae_training, vae_batch_size, video, seed)
    # From here on with the weights that will be stored, so that the transformer learns their latents.
    vae.bfloat16().float()
    psnr = measure_latents(vae, video, seed + 1, min(256, pool_size))
    print(f"vae: reconstruction {psnr:.1f} dB", flush=True)

    training = Training("transformer", (1 - VAE_SHARE) * seconds, steps)
    train_denoiser(transformer, text_encoder, tokenizer, vae, training, batch_size, pool_size, video, seed + 3)

    vae.to(memory_format=torch.contiguous_format)  # as safetensors stores them
    for model in (vae, transformer, text_encoder):
        nn.Module.bfloat16(model)
    build_pipeline(vae, transformer, text_encoder, tokenizer).save_pretrained(output)
    size = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    print(f"Saved {output}, {size / 2**20:.2f} MiB", flush=True)

    saved = LTXPipeline.from_pretrained(
        output, **dtype_argument(torch.bfloat16 if device.type == "cuda" else torch.float32)
    )
    saved.to(device).set_progress_bar_config(disable=True)
    checked = check(saved, check_prompts, check_steps, video, seed)
    print(table(checked), flush=True)
    if report is not None:
        contact_sheet(checked, report / "check.png")
        content = {
            "reconstruction_psnr": psnr,
            "agreement": summary(checked),
            "vae": vae_training.log,
            "transformer": training.log,
        }
        (report / "training.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
