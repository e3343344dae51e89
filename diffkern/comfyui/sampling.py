"""One run of ComfyUI's sampler, to compare two clones of a model by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import comfy.sample
import torch
from torch import Tensor

_SAMPLER, _SCHEDULER = "euler", "simple"


def denoise(
    model: Any,
    positive: Any,
    latent: Mapping[str, Any],
    steps: int,
    seed: int,
    callback: Callable[[int, Any, Any, int], None] | None = None,
) -> Tensor:
    """Denoises a latent with the Euler sampler and without guidance: one call of the model for each step.

    Args:
        model: A model patcher; loaded if it is not.
        positive: The conditioning.
        latent: A latent, as nodes hand it on.
        steps: Number of steps.
        seed: Of the noise.
        callback: Called after each step.

    Returns:
        The result, in float32 on the CPU; streams that are packed into one latent one after the other.
    """
    image = comfy.sample.fix_empty_latent_channels(model, latent["samples"])
    noise = comfy.sample.prepare_noise(image, seed, latent.get("batch_index"))
    result = comfy.sample.sample(
        model, noise, steps, 1.0, _SAMPLER, _SCHEDULER, positive, positive, image,
        noise_mask=latent.get("noise_mask"), callback=callback, disable_pbar=True, seed=seed,
    )  # fmt: skip
    parts = result.unbind() if getattr(result, "is_nested", False) else [result]
    return torch.cat([part.float().flatten().cpu() for part in parts])
