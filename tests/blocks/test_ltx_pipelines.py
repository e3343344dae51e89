"""The pipelines of LTX-Video that start from images: timesteps of each token, and everything fused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import LTXConditionPipeline, LTXImageToVideoPipeline, LTXPipeline
from diffusers.pipelines.ltx.pipeline_ltx_condition import LTXVideoCondition
from PIL import Image
from torch import Tensor

from diffkern import inject_optimized_kernels
from diffkern.bench.measure import psnr

TINY = Path(__file__).parents[2] / "examples" / "ltx_video" / "tiny"
SIZE, STEPS = 128, 4


@pytest.fixture(scope="module")
def pipe() -> LTXPipeline:
    """The tiny LTX-Video that draws, in float32."""
    loaded = LTXPipeline.from_pretrained(TINY, torch_dtype=torch.float32, local_files_only=True)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def picture(colour: tuple[int, int, int] = (224, 20, 30)) -> Image.Image:
    """A square on white."""
    image = Image.new("RGB", (SIZE, SIZE), (242, 242, 242))
    image.paste(Image.new("RGB", (40, 40), colour), (20, 44))
    return image


def run(pipeline: Any, **arguments: Any) -> Tensor:
    frames: Tensor = pipeline(
        prompt="a red square moving right on a white background",
        num_frames=9,
        height=SIZE,
        width=SIZE,
        num_inference_steps=STEPS,
        guidance_scale=3.0,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
        **arguments,
    ).frames
    return frames.float()


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (LTXPipeline, {}),
        (LTXImageToVideoPipeline, {"image": picture()}),
        (LTXConditionPipeline, {"image": picture(), "frame_index": 0}),
        (LTXConditionPipeline, {"conditions": [LTXVideoCondition(image=picture(), frame_index=8, strength=0.8)]}),
    ],
    ids=["text", "image", "condition on the first frame", "condition on a later frame"],
)
def test_every_pipeline_runs_fused_and_goes_back(pipe: LTXPipeline, kind: Any, arguments: dict[str, Any]) -> None:
    components = dict(pipe.components)
    if kind is LTXConditionPipeline:  # which passes no shift on to the scheduler
        components["scheduler"] = type(pipe.scheduler).from_config(pipe.scheduler.config, use_dynamic_shifting=False)
    pipeline = kind(**components)
    pipeline.set_progress_bar_config(disable=True)
    stock = run(pipeline, **arguments)
    for numerics in ("exact", "fast"):
        report = inject_optimized_kernels(pipeline, numerics=numerics)
        assert not report.failed or numerics == "exact"
        fused = run(pipeline, **arguments)
        if numerics == "exact":
            assert torch.equal(fused, stock)
        else:
            calls = report.calls()
            blocks = [calls[f"transformer.transformer_blocks.{i}"] for i in range(4)]
            assert [count["fused"] for count in blocks] == [4 * STEPS] * 4
            assert calls["transformer"]["fused"] == STEPS
            assert not any(count["stock"] or count["stock_pieces"] for count in calls.values())
            assert psnr(fused, stock) >= 60
        report.restore()
    assert torch.equal(run(pipeline, **arguments), stock)
