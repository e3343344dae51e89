"""ComfyUI itself in this process, on the CPU, from the checkout that ``COMFYUI_ROOT`` names."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.comfyui.checkpoints import TEXT

ROOT = os.environ.get("COMFYUI_ROOT", "")

#: Latents of a tiny run.
LATENTS = {
    "ltx": (1, 128, 2, 4, 5),
    "ltx2": (1, 128, 2, 4, 5),
    "flux": (1, 16, 10, 12),
    "hunyuan": (1, 16, 2, 6, 8),
    "wan": (1, 16, 2, 6, 8),
}
#: The audio of LTX-2.
AUDIO = (1, 8, 9, 16)


def start() -> None:
    """Makes ``import comfy`` work, with the options of ``--cpu``."""
    declare_torchvision()
    sys.path.insert(0, ROOT)
    from comfy.cli_args import args

    args.cpu = True
    args.use_pytorch_cross_attention = True  # the default on a CPU opens files, which breaks compiled graphs


def declare_torchvision() -> None:
    """Declares what torchvision registers kernels for, if its own library is built for another torch."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def load(path: Path, **options: Any) -> Any:
    """Loads a checkpoint as the node "Load Diffusion Model" does."""
    import comfy.sd

    return comfy.sd.load_diffusion_model(str(path), model_options=options)


def conditioning(seed: int = 1) -> list[Any]:
    """A random text embedding, as text encoders give it."""
    generator = torch.Generator("cpu").manual_seed(seed)
    text = torch.randn(1, 7, TEXT, generator=generator)
    pooled = torch.randn(1, 16, generator=generator)
    return [[text, {"pooled_output": pooled, "attention_mask": torch.ones(1, 7, dtype=torch.long)}]]


def sample(model: Any, kind: str, steps: int = 2) -> Tensor:
    """Runs the sampler as the node "KSampler" does."""
    import comfy.sample

    latent: Any = torch.zeros(LATENTS[kind])
    if kind == "ltx2":
        from comfy.nested_tensor import NestedTensor

        latent = NestedTensor((latent, torch.zeros(AUDIO)))
    noise = comfy.sample.prepare_noise(latent, 5, None)
    result = comfy.sample.sample(
        model, noise, steps, 3.0, "euler", "simple", conditioning(1), conditioning(2), latent,
        denoise=1.0, disable_pbar=True, seed=5,
    )  # fmt: skip
    parts = result.unbind() if kind == "ltx2" else [result]
    return torch.cat([part.flatten() for part in parts])
