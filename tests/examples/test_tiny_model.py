"""The tiny trained LTX-Video: it draws what it is asked for, and whole trajectories hold kernels to account.

Here errors have twelve steps of guidance to grow in. All arms start from the same weights and noise in bfloat16; the
yardstick is the same pipeline in float32.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from types import ModuleType

import pytest
import torch
from diffusers import LTXPipeline
from torch import Tensor

from diffkern import KernelConfig, optimized
from diffkern.bench.measure import psnr, relative_error, ssim
from diffkern.providers.eager.fp8 import fp8_unavailable_reason

pytestmark = pytest.mark.exhaustive  # twelve steps in five arms take minutes

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "ltx_video" / "tiny"
STEPS = 12


#: Of the final frame against float32; fp8 changes where and how fast a shape moves a little.
FP8_SSIM = 0.9


@pytest.fixture(scope="module")
def judge() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        yield importlib.import_module("tiny_ltx.judge")


@pytest.fixture(scope="module")
def asked(judge: ModuleType) -> list[tuple[str, str, str, str]]:
    """Colour, shape, direction and background of each video."""
    return [
        ("red", "circle", "right", "white"),
        ("blue", "square", "up", "black"),
        ("green", "triangle", "left", "white"),
    ]


@pytest.fixture(scope="module")
def videos(asked: list[tuple[str, str, str, str]]) -> dict[str, Tensor]:
    """The frames of each arm, [prompts, frames, 3, height, width] from 0 to 1."""
    prompts = [f"a {c} {s} moving {d} on a {b} background" for c, s, d, b in asked]
    frames = {"float32": generate(load(torch.float32), prompts)}
    pipe = load(torch.bfloat16)
    frames["stock"] = generate(pipe, prompts)
    for numerics in ("exact", "fast"):
        with optimized(pipe, numerics=numerics) as report:
            frames[numerics] = generate(pipe, prompts)
            assert report.patched
            assert numerics == "exact" or not report.failed
    frames["stock again"] = generate(pipe, prompts)
    return frames


def load(dtype: torch.dtype, device: str = "cpu") -> LTXPipeline:
    pipe = LTXPipeline.from_pretrained(TINY, torch_dtype=dtype, local_files_only=True).to(device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe: LTXPipeline, prompts: list[str]) -> Tensor:
    return (
        pipe(
            prompt=prompts,
            num_frames=25,
            height=128,
            width=128,
            num_inference_steps=STEPS,
            guidance_scale=3.0,
            generator=torch.Generator().manual_seed(0),
            output_type="pt",
        )
        .frames.float()
        .cpu()
    )


@pytest.mark.parametrize("arm", ["float32", "stock", "fast"])
def test_the_videos_show_what_was_asked_for(
    judge: ModuleType, asked: list[tuple[str, str, str, str]], videos: dict[str, Tensor], arm: str
) -> None:
    assert [astuple(judge.look(video)) for video in videos[arm]] == asked


def test_exact_kernels_give_every_video_bit_for_bit_and_take_themselves_back(videos: dict[str, Tensor]) -> None:
    assert torch.equal(videos["exact"], videos["stock"])
    assert torch.equal(videos["stock again"], videos["stock"])


def test_fast_kernels_stay_within_forty_decibels_of_stock_over_whole_trajectories(videos: dict[str, Tensor]) -> None:
    final_fast, final_stock = videos["fast"][:, -1], videos["stock"][:, -1]
    for fast, stock in zip(final_fast, final_stock, strict=True):
        assert psnr(fast, stock) >= 40
        assert ssim(fast, stock) >= 0.99


def test_fast_kernels_are_no_further_from_float32_than_stock(videos: dict[str, Tensor]) -> None:
    reference = videos["float32"]
    fast, stock = (relative_error(videos[arm], reference) for arm in ("fast", "stock"))
    assert fast <= stock
    for arm in ("stock", "exact", "fast"):
        assert ssim(videos[arm][:, -1], reference[:, -1]) >= 0.99


@pytest.mark.gpu
def test_every_tier_on_a_gpu(judge: ModuleType, asked: list[tuple[str, str, str, str]]) -> None:
    prompts = [f"a {c} {s} moving {d} on a {b} background" for c, s, d, b in asked]
    reference = generate(load(torch.float32, "cuda"), prompts)
    pipe = load(torch.bfloat16, "cuda")
    stock = generate(pipe, prompts)
    tiers = ["exact", "fast"]
    if fp8_unavailable_reason(torch.device("cuda")) is None:
        tiers.append("fp8")
    for numerics in tiers:
        small = ("*transformer_blocks.*",) if numerics == "fp8" else ()  # layers of this model, which gain nothing
        with optimized(pipe, numerics=numerics, config=KernelConfig(fp8_include=small)) as report:
            frames = generate(pipe, prompts)
            assert report.patched
        assert any("fp8" in str(site.op) for site in report.patched) is (numerics == "fp8")
        assert [astuple(judge.look(video)) for video in frames] == asked
        final, of_float32, of_stock = frames[:, -1], reference[:, -1], stock[:, -1]
        if numerics == "exact" and not report.failed:
            assert torch.equal(frames, stock)
        if numerics == "fast":
            assert all(psnr(a, b) >= 40 for a, b in zip(final, of_stock, strict=True))
        assert psnr(final, of_stock) >= 30
        assert ssim(final, of_float32) >= (FP8_SSIM if numerics == "fp8" else 0.99)
        print(numerics, psnr(final, of_float32), ssim(final, of_float32))
    assert torch.equal(generate(pipe, prompts), stock)
