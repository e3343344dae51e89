"""Random calls, the same in every run unless a seed is given; and that the fuzz finds what it is for.

A slow machine makes fewer of them, and no machine makes others: a gate that draws new calls fails on a change that has
nothing to do with what it found. ``scripts/fuzz_ops.py`` draws new ones.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from torch import Tensor

from diffkern.ops import norm
from diffkern.providers import eager, registry
from tests.fuzz.cases import GENERATORS
from tests.fuzz.check import Mismatch, run_case

#: How long all of it may take, and how many calls are made at most, in each half.
_SECONDS = float(os.environ.get("DIFFKERN_FUZZ_SECONDS", "20"))
_CASES = int(os.environ.get("DIFFKERN_FUZZ_CASES", "4000"))
_SEED = int(os.environ.get("DIFFKERN_FUZZ_SEED", "0"))


@pytest.mark.parametrize("half", [0, 1])
def test_random_calls_are_right_and_do_not_depend_on_those_before(half: int, device: str) -> None:
    """Two halves, for two cores. ``DIFFKERN_FUZZ_SEED`` repeats them, ``scripts/fuzz_ops.py`` a single case."""
    print(f"seed {_SEED}")
    names = sorted(GENERATORS)[half::2]
    stop, seed = time.monotonic() + _SECONDS / 2, _SEED
    while time.monotonic() < stop and seed < _SEED + _CASES:
        run_case(seed, names[seed % len(names)], device)
        seed += 1
    assert seed > _SEED


def _first_mismatch(op: str, cases: int = 60) -> str | None:
    registry.reset()
    try:
        for seed in range(cases):
            run_case(seed, op, "cpu", budget=2000)
    except Mismatch as error:
        return str(error)
    finally:
        registry.reset()
    return None


def test_the_fuzz_finds_a_cache_that_looks_at_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is not asked for, and a wrong value, are seen within a few cases."""
    monkeypatch.setattr(
        norm._rms_norm, "_prepared", lambda operands, options: norm._rms_norm._prepare(*operands, *options)
    )
    found = _first_mismatch("rms_norm")
    assert found is not None and "with another device" in found


def test_the_fuzz_finds_a_last_element_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = eager._KERNELS["rms_norm"]

    def wrong(x: Tensor, *args: Any) -> Tensor:
        y = right(x, *args)
        if y.numel():
            y[(-1,) * y.ndim] *= 1 + 2**-6
        return y

    monkeypatch.setitem(eager._KERNELS, "rms_norm", wrong)
    found = _first_mismatch("rms_norm", 120)
    assert found is not None and "1 of " in found
