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

#: Fixes what is otherwise drawn anew in every run; a failure prints it.
SEED_VARIABLE = "DIFFKERN_STATEFUL_SEED"

_NAMES = list(SUBJECTS)


def _today(slot: int) -> str:
    """Three models a day, in turn."""
    return _NAMES[(3 * datetime.date.today().toordinal() + slot) % len(_NAMES)]


def explore(name: str, steps: int, sequences: int) -> None:
    """Runs random sequences of steps on one model and prints how to see them again."""
    seed = int(os.environ.get(SEED_VARIABLE) or random.SystemRandom().randrange(2**32))
    print(f"to see this again: {SEED_VARIABLE}={seed} pytest 'tests/stateful/test_machine.py' -m slow -k {name}")
    machine = type(f"{name.title()}Machine", (ModelMachine,), {"subject": SUBJECTS[name]})
    settings = hypothesis.settings(
        max_examples=sequences + 1,  # the first one is the simplest, the same at every seed
        stateful_step_count=steps,
        derandomize=False,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run_state_machine_as_test(hypothesis.seed(seed)(machine), settings=settings)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("slot", range(3))
def test_forty_random_steps_on_three_models(slot: int) -> None:
    explore(_today(slot), steps=40, sequences=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", SUBJECTS)
def test_two_hundred_random_steps_on_every_model(name: str) -> None:
    explore(name, steps=200, sequences=3)
