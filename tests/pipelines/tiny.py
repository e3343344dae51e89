"""Building and running the tiny pipelines: ``build``, ``run``, and ``in_float64`` for the reference."""

from __future__ import annotations

import contextlib
import copy
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from tests.pipelines import image, unet, video

STEPS = 2

BUILDERS: dict[str, Callable[[], tuple[DiffusionPipeline, dict[str, Any]]]] = {
    builder.__name__: builder
    for builder in (
        video.ltx,
        image.flux,
        video.wan,
        unet.sdxl,
        unet.sd15,
        image.sd3,
        video.cogvideox,
        video.hunyuan_video,
        image.qwenimage,
        image.sana,
        image.pixart,
        image.dit,
        video.mochi,
    )
}


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[DiffusionPipeline, dict[str, Any]]:
    """Builds a pipeline with random weights and the keyword arguments of its call.

    The weights are drawn in float32 and reach ``dtype`` as a user's do: saved, and loaded with that dtype,
    which leaves in float32 what the model wants kept there.
    """
    torch.manual_seed(seed)
    pipe, call = BUILDERS[name]()
    for component, model in models(pipe).items():
        make_visible(model)
        if dtype != torch.float32:
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                model = type(model).from_pretrained(folder, dtype=dtype)
            pipe.register_modules(**{component: model})
        model.eval().requires_grad_(False)
    pipe.set_progress_bar_config(disable=True)
    return pipe, {"output_type": "pt", "num_inference_steps": STEPS, **call}


def models(pipe: DiffusionPipeline) -> dict[str, Any]:
    """The pipeline's components that are models, by name."""
    return {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}


def run(pipe: DiffusionPipeline, call: dict[str, Any], seed: int = 0) -> Tensor:
    """Calls the pipeline and returns its images or frames; the noise depends on ``seed`` alone."""
    with torch.no_grad(), noise_of_any_dtype(pipe):
        output = pipe(generator=torch.Generator().manual_seed(seed), **call)
    return torch.as_tensor(output.frames if hasattr(output, "frames") else output.images)


def in_float64(pipe: DiffusionPipeline) -> DiffusionPipeline:
    """A copy of the pipeline with the same weights in float64: the reference for what rounding does.

    What the stock code pins to float32 by itself stays there, in every run alike: the tables of positional
    and timestep embeddings, the norms that convert to float32, the latents between the steps.
    """
    reference = copy.deepcopy(pipe)
    for model in models(reference).values():
        nn.Module.to(model, torch.float64)
    return reference


def make_visible(model: nn.Module, noise: float = 0.1, gain: float = 0.75) -> None:
    """Redraws weights so that an error anywhere in the model shows at its end.

    Parameters that are one constant, the ones of norms and the zeros of biases and gates, get noise: a wrong
    kernel would hide behind a weight of ones, and a whole block behind a gate of zeros. Linear layers get a
    higher gain than torch's 0.58, with which every layer fades what came before it; with 1 some pipelines
    amplify the rounding of bfloat16 to a fifth of the result.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=gain * module.in_features**-0.5)
    for parameter in model.parameters():
        values = parameter.data
        if values.numel() > 1 and bool((values == values.flatten()[0]).all()):
            values.add_(torch.randn_like(values), alpha=noise)


@contextlib.contextmanager
def noise_of_any_dtype(pipe: DiffusionPipeline) -> Iterator[None]:
    """Lets the pipeline draw noise that bfloat16, float32 and float64 represent exactly, and alike.

    torch draws other numbers for other dtypes, and not every pipeline takes ``latents``.
    """

    def draw(
        shape: tuple[int, ...],
        generator: torch.Generator | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(device=device, dtype=dtype)

    with patch.object(sys.modules[type(pipe).__module__], "randn_tensor", draw):
        yield
