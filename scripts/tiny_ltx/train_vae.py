"""Trains the autoencoder to give back what it was shown, through latents that are nearly normal."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLLTXVideo
from torch import Tensor

from tiny_ltx.optimizer import Optimizer
from tiny_ltx.progress import Average, Training
from tiny_ltx.scenes import draw, random_scenes

#: Weight of the divergence from the standard normal, per latent, against the error per pixel.
DIVERGENCE_WEIGHT = 1e-5
#: How much more a pixel of the shape counts than one of the background.
SHAPE_WEIGHT = 4.0


def train_vae(
    vae: AutoencoderKLLTXVideo, training: Training, batch_size: int, video: tuple[int, int, int], seed: int
) -> None:
    """Trains ``vae`` in place on videos of ``(num_frames, height, width)``."""
    device = next(vae.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    vae.train().to(memory_format=torch.channels_last_3d)  # which is what the tensor cores convolve in
    parameters = list(vae.parameters())
    optimizer = Optimizer(
        [parameter for parameter in parameters if parameter.ndim > 1],
        [parameter for parameter in parameters if parameter.ndim == 1],
        matrix_rate=0.02,
        rate=3e-3,
    )
    average = Average(parameters, decay=0.99)
    for step, share in training.run():
        videos = draw(random_scenes(batch_size, generator), *video)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            posterior = vae.encode(videos.to(memory_format=torch.channels_last_3d)).latent_dist
            noise = torch.randn(posterior.mean.shape, generator=generator, device=device)
            drawn = vae.decode(posterior.mean + posterior.std * noise, return_dict=False)[0]
        shape = (videos - videos[..., :1, :1]).abs().amax(dim=1, keepdim=True) > 0.1
        square = (drawn.float() - videos).square()
        weighted = (square * (1 + SHAPE_WEIGHT * shape)).mean()
        divergence = _divergence(posterior.mean.float(), posterior.logvar.float())
        (2 * weighted + DIVERGENCE_WEIGHT * divergence).backward()
        optimizer.step(share)
        average.update(step)
        training.say(step, 100, square=square.mean(), weighted=weighted, divergence=divergence)
    average.put()
    vae.eval()


def _divergence(mean: Tensor, logvar: Tensor) -> Tensor:
    """Kullback-Leibler divergence of the posterior from the standard normal, per latent."""
    return 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()


@torch.no_grad()
def encode(vae: AutoencoderKLLTXVideo, videos: Tensor) -> Tensor:
    """The mean latents of videos, in float32."""
    with torch.autocast(videos.device.type, torch.bfloat16, enabled=videos.is_cuda):
        return vae.encode(videos.to(memory_format=torch.channels_last_3d)).latent_dist.mode().float()


@torch.no_grad()
def measure_latents(vae: AutoencoderKLLTXVideo, video: tuple[int, int, int], seed: int, n: int = 256) -> float:
    """Sets the mean and the deviation of each latent channel, with which the pipeline normalises.

    Returns:
        The peak signal to noise ratio of what the autoencoder makes of videos that it has not seen, in dB.
    """
    device = next(vae.parameters()).device
    videos = draw(random_scenes(n, torch.Generator(device).manual_seed(seed)), *video)
    latents = encode(vae, videos)
    channels = latents.transpose(0, 1).flatten(1)
    # As they will be stored, so that training and generation agree.
    vae.latents_mean.copy_(channels.mean(dim=1).bfloat16())
    vae.latents_std.copy_(channels.std(dim=1).bfloat16())
    some = min(n, 16)
    drawn = vae.decode(latents[:some], return_dict=False)[0]
    return float(10 * torch.log10(4 / F.mse_loss(drawn.float(), videos[:some])))
