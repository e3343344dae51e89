"""Gradient checkpointing hands out each saved tensor once: backward formulas may not ask twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.fuzz.cases import GENERATORS, Case
from tests.fuzz.check import call
from tests.fuzz.draw import Draw

#: Ops that quantise have no gradient, and one makes tables.
OPS = [op for op in GENERATORS if not op.endswith("_fp8") and op != "expand_axes"]


def _leaves(case: Case) -> tuple[Case, list[Tensor]]:
    """The call on copies that want gradients, and these."""
    copies: list[Tensor] = []

    def copied(_: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        copies.append(tensor.detach().float().clone().requires_grad_())
        return copies[-1]

    return case.changed(copied), copies


def _gradients(case: Case, through_checkpoint: bool) -> list[Tensor]:
    own, copies = _leaves(case)

    def compute(*_: Tensor) -> list[Tensor]:
        result = call(own, None)
        return [result] if isinstance(result, Tensor) else list(result)

    results = checkpoint(compute, *copies, use_reentrant=False) if through_checkpoint else compute()
    total = torch.stack([y.double().sin().sum() for y in results if y.requires_grad]).sum()
    found = torch.autograd.grad(total, copies, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(found, copies, strict=True)]


@pytest.mark.parametrize("op", OPS)
def test_gradients_are_the_same_where_they_are_checkpointed(op: str) -> None:
    case = GENERATORS[op](Draw(7, "cpu", budget=2_000))
    plain, again = _gradients(case, False), _gradients(case, True)
    assert plain
    for one, other in zip(plain, again, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
