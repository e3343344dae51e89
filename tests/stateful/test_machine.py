"""Random sequences of what users do: a patched model and its untouched twin compute the same after every step."""

from __future__ import annotations

import datetime
import os
import random

import hypothesis
import pytest
import torch
from hypothesis.stateful import run_state_machine_as_test

from tests.stateful.machine import ModelMachine
from tests.stateful.models import SUBJECTS

#: Fix what is otherwise drawn in every run, and chosen by the day; a failure prints them.
SEED_VARIABLE, MODEL_VARIABLE = "DIFFKERN_STATEFUL_SEED", "DIFFKERN_STATEFUL_MODEL"

_NAMES = list(SUBJECTS)


def _today(slot: int) -> str:
    """Three models a day, in turn."""
    if name := os.environ.get(MODEL_VARIABLE):
        return name
    return _NAMES[(3 * datetime.date.today().toordinal() + slot) % len(_NAMES)]


def explore(name: str, steps: int, sequences: int, *, compiles: bool = False) -> None:
    """Runs random sequences of steps on one model and prints how to see them again."""
    seed = int(os.environ.get(SEED_VARIABLE) or random.SystemRandom().randrange(2**32))
    variables = f"{SEED_VARIABLE}={seed} {MODEL_VARIABLE}={name}"
    print(f"to see this again: {variables} pytest tests/stateful/test_machine.py -k {steps}")
    kind = type(f"{name.title()}Machine", (ModelMachine,), {"subject": SUBJECTS[name], "compiles": compiles})
    settings = hypothesis.settings(
        max_examples=sequences + 1,  # the first one is the simplest, the same at every seed
        stateful_step_count=steps,
        derandomize=False,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run_state_machine_as_test(hypothesis.seed(seed)(kind), settings=settings)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("slot", range(3))
def test_40_random_steps_on_three_models(slot: int) -> None:
    explore(_today(slot), steps=40, sequences=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SUBJECTS)
def test_200_random_steps_on_every_model(name: str) -> None:
    explore(name, steps=200, sequences=4, compiles=True)
