"""Layers that are not plain, in models of half precision, in every order: the result is that of the stock twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffkern import inject_optimized_kernels
from tests.injection.models import run, tiny_ltx
from tests.verify.layers import KINDS

HALF = torch.bfloat16

#: What is done to the model, one after the other.
ORDERS = ("cast layers inject", "inject layers cast", "layers inject cast", "cast inject step layers")
CASES = [*((kind, order) for kind in KINDS for order in ORDERS[:2]), *(("LoRA", order) for order in ORDERS[2:])]


@pytest.fixture(autouse=True)
def quiet() -> None:
    """Diffusers warns of every cast."""
    import diffusers

    diffusers.utils.logging.set_verbosity_error()


def injected(kind: str, order: str, numerics: str) -> tuple[Any, Any, Any]:
    """A stock model, one that is injected, and the report."""
    if kind == "torchao":
        pytest.importorskip("torchao")
    stock, model, report = tiny_ltx(1), tiny_ltx(1), None
    for step in order.split():
        if step == "inject":
            report = inject_optimized_kernels(model, numerics=numerics)
        elif step == "step":
            run(model, dtype=HALF)
        else:
            for each in (stock, model):
                each.to(HALF) if step == "cast" else KINDS[kind](each)
    return stock, model, report


@pytest.mark.parametrize(("kind", "order"), CASES)
def test_every_order_computes_what_the_stock_twin_computes(kind: str, order: str) -> None:
    stock, model, report = injected(kind, order, "fast")
    expected = run(stock, dtype=HALF).double()
    for _ in range(2):
        result = run(model, dtype=HALF).double()
        assert (result - expected).norm() <= 0.02 * expected.norm()
    assert not report.failed and sum(count["fused"] for count in report.calls().values())
    report.restore()
    assert torch.equal(run(model, dtype=HALF).double(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_exact_keeps_every_bit(kind: str) -> None:
    stock, model, _ = injected(kind, "cast layers inject", "exact")
    assert torch.equal(run(model, dtype=HALF), run(stock, dtype=HALF))
