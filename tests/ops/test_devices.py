"""Operands on another device than the first: refused at every call, whatever was called before."""

from __future__ import annotations

import pytest
import torch

from diffkern import ops
from diffkern.providers import registry, use_provider
from tests.fuzz.cases import GENERATORS, Case
from tests.fuzz.check import call
from tests.fuzz.draw import Draw


def _calls(op: str, device: str) -> list[Case]:
    """Calls with every optional operand, of more than one form where the op has several."""
    drawn = (GENERATORS[op](Draw(seed, device, everything=True)) for seed in range(6))
    return [case.changed(lambda _, t: t.float() if t.dtype in (torch.float16, torch.bfloat16) else t) for case in drawn]


def test_every_public_op_is_called() -> None:
    assert set(GENERATORS) == set(ops.__all__)


@pytest.mark.parametrize("op", sorted(GENERATORS))
def test_an_operand_on_another_device_is_refused_after_a_remembered_call(op: str, device: str) -> None:
    foreign = "meta" if device == "cpu" else "cpu"
    for case in _calls(op, device):
        registry.reset()
        for _ in range(2):
            call(case, None)
        first, *others = case.tensors()
        for chosen in others:
            moved = case.changed(lambda name, t, chosen=chosen: t.to(foreign) if name == chosen else t)
            for _ in range(2):
                with pytest.raises(ValueError, match=r"is on .*, and .* on .*: move one of them") as caught:
                    call(moved, None)
                assert foreign in str(caught.value) and device in str(caught.value)
        if others:
            moved = case.changed(lambda name, t, first=first: t.to(foreign) if name == first else t)
            for _ in range(2):
                with pytest.raises(ValueError, match=r"is on .*, and .* on .*: move one of them"):
                    call(moved, None)
        call(case, None)


@pytest.mark.gpu
@pytest.mark.parametrize("op", sorted(GENERATORS))
def test_a_host_tensor_never_reaches_a_kernel_of_the_gpu(op: str, provider: str, device: str) -> None:
    with use_provider(provider):
        for case in _calls(op, device):
            try:
                call(case, None)
            except registry.NoProviderError as error:
                pytest.skip(str(error))
            for chosen in list(case.tensors())[1:]:
                moved = case.changed(lambda name, t, chosen=chosen: t.cpu() if name == chosen else t)
                with pytest.raises(ValueError, match="move one of them"):
                    call(moved, None)
            call(case, None)
            torch.cuda.synchronize()
