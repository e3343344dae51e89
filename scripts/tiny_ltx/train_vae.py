"""Trains the autoencoder to give back what it was shown, through latents that are nearly normal."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLLTXVideo
from torch import Tensor

from tiny_ltx.progress import Average, Training
from tiny_ltx.scenes import draw, random_scenes

#: Weight of the divergence from the standard normal, per latent, against the error per pixel.
DIVERGENCE_WEIGHT = 2e-4


def train_vae(
    vae: AutoencoderKLLTXVideo, training: Training, batch_size: int, video: tuple[int, int, int], seed: int
) -> None:
    """Trains ``vae`` in place on videos of ``(num_frames, height, width)``."""
    device = next(vae.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    vae.train().to(memory_format=torch.channels_last_3d)  # which is what the tensor cores convolve in
    parameters = list(vae.parameters())
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.98), weight_decay=0.01)
    average = Average(parameters, decay=0.99)
    for step in training.run(optimizer):
        videos = draw(random_scenes(batch_size, generator), *video)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            posterior = vae.encode(videos.to(memory_format=torch.channels_last_3d)).latent_dist
            noise = torch.randn(posterior.mean.shape, generator=generator, device=device)
            drawn = vae.decode(posterior.mean + posterior.std * noise, return_dict=False)[0]
        error = drawn.float() - videos
        absolute, square = error.abs().mean(), error.square().mean()
        divergence = _divergence(posterior.mean.float(), posterior.logvar.float())
        loss = absolute + square + DIVERGENCE_WEIGHT * divergence
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        average.update(step)
        training.say(step, 50, absolute=absolute, square=square, divergence=divergence)
    average.put()
    vae.eval().to(memory_format=torch.contiguous_format)


def _divergence(mean: Tensor, logvar: Tensor) -> Tensor:
    """Kullback-Leibler divergence of the posterior from the standard normal, per latent."""
    return 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()


@torch.no_grad()
def measure_latents(vae: AutoencoderKLLTXVideo, video: tuple[int, int, int], seed: int, n: int = 512) -> None:
    """Sets the mean and the deviation of each latent channel, with which the pipeline normalises."""
    device = next(vae.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    latents = vae.encode(draw(random_scenes(n, generator), *video)).latent_dist.mode()
    channels = latents.transpose(0, 1).flatten(1)
    # As they will be stored, so that training and generation agree.
    vae.latents_mean.copy_(channels.mean(1).bfloat16())
    vae.latents_std.copy_(channels.std(1).bfloat16())


@torch.no_grad()
def reconstruction_psnr(vae: AutoencoderKLLTXVideo, video: tuple[int, int, int], seed: int, n: int = 64) -> float:
    """Peak signal to noise ratio of videos that the autoencoder has not seen, in dB."""
    device = next(vae.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    videos = draw(random_scenes(n, generator), *video)
    drawn = vae.decode(vae.encode(videos).latent_dist.mode(), return_dict=False)[0]
    return float(10 * torch.log10(4 / F.mse_loss(drawn.float(), videos)))
