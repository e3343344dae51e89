"""Attention modules without anything to fuse ask once which arguments their processor takes, and compute as before."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffkern import InjectionReport, inject_optimized_kernels
from diffkern.injection.signature_fusion import OP
from scripts.check_models.denoisers import DENOISERS
from scripts.check_models.model import Draw


class Asked:
    """Counts who asks for a signature."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = 0
        ask = inspect.signature

        def counted(*args: Any, **kwargs: Any) -> inspect.Signature:
            self.times += 1
            return ask(*args, **kwargs)

        monkeypatch.setattr(inspect, "signature", counted)


class Doubling:
    """A processor that takes another argument than those of diffusers."""

    def __call__(self, attn: nn.Module, hidden_states: Tensor, factor: float = 2.0, **ignored: Any) -> Tensor:
        return hidden_states * factor


@pytest.fixture
def pixart() -> tuple[nn.Module, nn.Module, dict[str, Any], InjectionReport]:
    stock = DENOISERS["pixart"].build()
    injected = copy.deepcopy(stock)
    draw = Draw(torch.Generator().manual_seed(1), torch.device("cpu"), torch.float32)
    inputs = DENOISERS["pixart"].inputs(draw, 8)
    return stock, injected, inputs, inject_optimized_kernels(injected)


def _own(report: InjectionReport) -> list[str]:
    return [site.path for site in report.patched if site.op == OP]


@torch.no_grad()
def test_the_signature_of_a_processor_is_asked_for_once(pixart: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, injected, inputs, report = pixart
    assert _own(report) == [f"transformer_blocks.{block}.attn{number}" for block in (0, 1) for number in (1, 2)]
    for _ in range(3):
        injected(**inputs)
    asked = Asked(monkeypatch)
    torch.testing.assert_close(injected(**inputs), stock(**inputs), rtol=1e-4, atol=1e-5)
    assert asked.times == 4, "by stock alone"
    assert [report.calls()[path] for path in _own(report)] == [
        {"fused": 4, "stock": 0, "stock_reasons": {}, "stock_pieces": {}}
    ] * 4


@torch.no_grad()
def test_an_attention_module_computes_the_bits_of_stock(pixart: Any) -> None:
    stock, injected, _, _ = pixart
    attention, twin = (model.transformer_blocks[0].attn1 for model in (injected, stock))
    x = torch.randn(2, 7, attention.to_q.in_features)
    assert all(torch.equal(attention(x), twin(x)) for _ in range(3))


@torch.no_grad()
def test_a_processor_set_later_is_asked_for_its_own_arguments(pixart: Any) -> None:
    _, injected, _, _ = pixart
    attention = injected.transformer_blocks[0].attn1
    x = torch.randn(2, 7, attention.to_q.in_features)
    for _ in range(3):
        attention(x)
    attention.processor = Doubling()
    assert torch.equal(attention(x, factor=3.0), 3 * x)


@torch.no_grad()
def test_a_signature_set_on_the_function_later_counts(pixart: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, injected, _, _ = pixart
    attention = injected.transformer_blocks[0].attn1
    attention.processor = Doubling()
    x = torch.randn(2, 7, attention.to_q.in_features)
    assert torch.equal(attention(x, factor=3.0), 3 * x)
    without = inspect.Signature([inspect.Parameter("attn", inspect.Parameter.POSITIONAL_OR_KEYWORD)])
    monkeypatch.setattr(Doubling.__call__, "__signature__", without, raising=False)
    assert torch.equal(attention(x, factor=3.0), 2 * x), "an argument that it does not take is dropped"


@torch.no_grad()
def test_a_forward_of_the_class_replaced_later_runs(pixart: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, injected, _, _ = pixart
    attention = injected.transformer_blocks[0].attn1
    x = torch.randn(2, 7, attention.to_q.in_features)
    for _ in range(3):
        attention(x)
    monkeypatch.setattr(type(attention), "forward", lambda self, x: x + 1)
    assert torch.equal(attention(x), x + 1)


def test_gradients_are_those_of_stock(pixart: Any) -> None:
    stock, injected, _, _ = pixart
    x = torch.randn(2, 7, stock.transformer_blocks[0].attn1.to_q.in_features, requires_grad=True)
    mine, other = (torch.autograd.grad(m.transformer_blocks[0].attn1(x).square().sum(), x) for m in (injected, stock))
    assert torch.equal(*mine, *other)


def test_restore_leaves_no_forward_behind(pixart: Any) -> None:
    _, injected, _, report = pixart
    report.restore()
    assert not any("forward" in module.__dict__ for module in injected.modules())
