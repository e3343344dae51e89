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
from diffkern.bench.measure import StepClock, psnr, relative_error

CPU = torch.device("cpu")


def test_relative_error_is_the_ratio_of_lengths() -> None:
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)


def test_psnr_of_a_tenth_is_twenty_decibels_and_of_equal_tensors_infinite() -> None:
    zeros = torch.zeros(8, dtype=torch.float64)
    assert psnr(zeros + 0.1, zeros) == pytest.approx(20)
    assert psnr(zeros, zeros) == math.inf


def test_errors_refuse_to_broadcast() -> None:
    for function in (relative_error, psnr):
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
    compiled = results.ArmResult(COMPILED, (1.5,), 20.0, 30.0, 2**30, results.Difference(0.0, 0.0, math.inf))
    assert results.baseline_of([compiled, stock]) is stock
    assert results.speedup(compiled, stock) == 2.0
    assert results.speedup(compiled, None) is None


def test_json_holds_null_for_what_json_cannot_write(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    results.write_json(path, {"psnr": math.inf, "list": [math.nan, 1.5], "tuple": (1,)})
    assert json.loads(path.read_text()) == {"psnr": None, "list": [None, 1.5], "tuple": [1]}
