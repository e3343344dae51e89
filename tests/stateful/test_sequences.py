"""Sequences of steps in which the state machine found the patched model and its twin apart."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from tests.stateful.machine import ModelMachine
from tests.stateful.models import SUBJECTS


@pytest.fixture
def state(request: pytest.FixtureRequest) -> Iterator[ModelMachine]:
    """A machine for the model that the test names."""
    kind = type("Machine", (ModelMachine,), {"subject": SUBJECTS[request.param]})
    machine: ModelMachine = kind()
    yield machine
    machine.teardown()


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("state", SUBJECTS, indirect=True)
def test_the_first_calls_and_gradients_of_every_model(state: ModelMachine, numerics: str) -> None:
    state.inject(numerics=numerics)
    state.steps(count=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state.train(checkpointing=False, weights=False)


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("part", ["rows", "all"])
@pytest.mark.parametrize("state", ["ltx"], indirect=True)
def test_weights_of_the_text_written_through_data(state: ModelMachine, numerics: str, part: str) -> None:
    state.inject(numerics=numerics)
    state.steps(count=4)
    state.write_weight("transformer_blocks.1.attn2.to_v", part)


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("state", ["ltx"], indirect=True)
def test_a_text_written_through_numpy(state: ModelMachine, numerics: str) -> None:
    state.inject(numerics=numerics)
    state.steps(count=4)
    state.write_text_through_numpy()


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("state", ["ltx", "ltx2"], indirect=True)
def test_averaged_weights_are_swapped_in_and_out(state: ModelMachine, numerics: str) -> None:
    state.inject(numerics=numerics)
    state.steps(count=4)
    state.swap_in_averaged_weights()
    state.swap_out_averaged_weights()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("inject_first", [True, False])
@pytest.mark.parametrize("state", ["ltx", "ltx2"], indirect=True)
def test_an_adapter_in_a_model_of_half_precision(state: ModelMachine, dtype: torch.dtype, inject_first: bool) -> None:
    if inject_first:
        state.inject(numerics="fast")
        state.add_lora(number=1, dora=False)
        state.cast(dtype=dtype)
    else:
        state.cast(dtype=dtype)
        state.add_lora(number=1, dora=False)
        state.inject(numerics="fast")
    state.steps(count=3)


@pytest.mark.parametrize("state", ["ltx2"], indirect=True)
def test_a_forward_set_over_a_patch_and_deleted(state: ModelMachine) -> None:
    state.inject(numerics="exact")
    state.replace_forward(number=1048, wrap=False)
    state.both_compute_the_same()
    state.take_off_the_last_hook()
    state.both_compute_the_same()
    assert [site.path for site in state.twins.live[0].report.restored] == ["transformer_blocks.1.audio_attn1"]
