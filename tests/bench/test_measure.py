"""Errors and clocks against values known in closed form."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
import torch

from diffkern.bench import results
from diffkern.bench.arms import COMPILED, STOCK
from diffkern.bench.measure import StepClock, psnr, relative_error, ssim

CPU = torch.device("cpu")


def test_relative_error_is_the_ratio_of_lengths() -> None:
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)


def test_psnr_of_a_tenth_is_twenty_decibels_and_of_equal_tensors_infinite() -> None:
    zeros = torch.zeros(8, dtype=torch.float64)
    assert psnr(zeros + 0.1, zeros) == pytest.approx(20)
    assert psnr(zeros, zeros) == math.inf


def test_ssim_of_equal_images_is_one_and_of_two_plain_ones_the_closeness_of_their_levels() -> None:
    image = torch.rand(2, 3, 16, 20, generator=torch.Generator().manual_seed(0))
    assert ssim(image, image) == pytest.approx(1.0)
    assert ssim(image, 1 - image) < 0
    dark, bright = torch.full((1, 16, 16), 0.2), torch.full((1, 16, 16), 0.6)
    assert ssim(dark, bright) == pytest.approx((2 * 0.2 * 0.6 + 1e-4) / (0.2**2 + 0.6**2 + 1e-4), rel=1e-6)
    with pytest.raises(ValueError, match="smaller than the window"):
        ssim(torch.ones(10, 16), torch.ones(10, 16))


def test_errors_refuse_to_broadcast() -> None:
    for function in (relative_error, psnr, ssim):
        with pytest.raises(ValueError, match="shapes differ"):
            function(torch.ones(2, 1), torch.ones(2))


def test_the_step_clock_counts_intervals_between_marks() -> None:
    clock = StepClock(CPU)
    clock.mark()
    assert clock.intervals_per_second() is None
    for _ in range(2):
        time.sleep(0.01)
        clock.mark()
    rate = clock.intervals_per_second()
    assert rate is not None
    assert 0 < rate <= 100


def test_speedup_is_against_the_median_of_the_stock_arm() -> None:
    stock = results.ArmResult(STOCK, (4.0, 2.0, 3.0), 10.0, None, None)
    compiled = results.ArmResult(
        COMPILED, (1.5, 1.25, 2.0), 20.0, 30.0, 2**30, results.Difference(0.0, 0.0, math.inf, 1.0)
    )
    assert results.baseline_of([compiled, stock]) is stock
    assert results.speedup(compiled, stock) == 2.0
    assert results.speedup(compiled, None) is None
    once = results.ArmResult(COMPILED, (1.5,), None, None, None)
    assert results.speedup(once, stock) is None and once.spread_seconds is None, "one run says nothing"
    assert stock.spread_seconds == 2.0


def test_the_table_prints_no_ratio_of_arms_whose_times_overlap() -> None:
    def ratio(*seconds: float) -> str:
        arms = [results.ArmResult(STOCK, (4.0, 3.0, 2.0), None, None, None)]
        arms.append(results.ArmResult(COMPILED, seconds, None, None, None))
        [cells] = [column for column in results.table(arms).columns if column.header == "speed-up"]
        return str(list(cells.cells)[1])

    assert ratio(1.5, 1.4, 1.6) == "2.00x"
    assert ratio(2.5, 1.4, 1.6) == ratio(3.5, 5.0, 6.0) == "unclear"
    assert ratio(1.0, 1.1) == "-", "two runs say nothing"


def test_json_holds_null_for_what_json_cannot_write(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    results.write_json(path, {"psnr": math.inf, "list": [math.nan, 1.5], "tuple": (1,)})
    assert json.loads(path.read_text()) == {"psnr": None, "list": [None, 1.5], "tuple": [1]}


def test_the_chart_is_a_picture_with_a_bar_for_every_arm(tmp_path: Path) -> None:
    from PIL import Image

    measured = [
        results.ArmResult(arm, (seconds,), None, None, None) for arm, seconds in ((STOCK, 2.0), (COMPILED, 1.0))
    ]
    results.plot(measured, "two arms", tmp_path / "chart.png")
    with Image.open(tmp_path / "chart.png") as picture:
        colors = {color for count, color in picture.convert("RGB").getcolors(2**24) if count > 1000}
    assert {(0x9A, 0x9A, 0x9A), (0x5B, 0x84, 0xB1)} <= colors
