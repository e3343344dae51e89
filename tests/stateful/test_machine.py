"""Random sequences of what users do: a patched model and its untouched twin compute the same after every step."""

from __future__ import annotations

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


def explore(name: str, steps: int, sequences: int, seed: int, *, compiles: bool = False) -> None:
    """Runs random sequences of steps on one model and prints how to see them again."""
    seed = int(os.environ.get(SEED_VARIABLE) or seed)
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
    """The same steps in every run; other ones are for the longer test."""
    explore(os.environ.get(MODEL_VARIABLE) or _NAMES[slot], steps=40, sequences=2, seed=slot)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SUBJECTS)
def test_200_random_steps_on_every_model(name: str) -> None:
    explore(name, steps=200, sequences=2, seed=random.SystemRandom().randrange(2**32), compiles=True)
