"""Rows of fp8 that the op before a product writes: who has them written, and that nothing computed changes by it.

On the CPU ``"eager"`` computes the ops and multiplies the numbers behind fp8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffkern import KernelConfig, inject_optimized_kernels
from diffkern.blocks import fp8
from diffkern.injection import fp8_fusion, planning
from diffkern.rewrite import site
from diffkern.verify.measures import relative_error

EAGER = KernelConfig(
    {op: "eager" for op in ("linear_fp8", "norm_modulate", "gate_residual_norm_modulate")}, measure=False
)


class Block(nn.Module):
    """A modulated norm, and another one behind a residual; two layers read each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(64, elementwise_affine=False) for _ in range(2))
        self.to_q, self.to_k, self.up, self.gate = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        y = self.norm1(x) * (1 + scale) + shift
        x = x + scale * (self.to_q(y) + self.to_k(y))
        z = self.norm2(x) * (1 + scale) + shift
        return x + self.up(z) * self.gate(z)


@pytest.fixture(autouse=True)
def _small_layers_on_this_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_fusion, "LEAST_FEATURES", 32)
    monkeypatch.setattr(fp8_fusion, "LEAST_ROWS", 8)
    monkeypatch.setattr(planning, "fp8_unavailable_reason", lambda device: None)


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What wrote rows of inputs: "apart" for a kernel of its own, else the op."""
    seen: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any, **options: Any) -> Any:
            x = args[0] if args else options["x"]
            if x.shape[-2:] != (64, 64):  # a weight
                seen.append(name)
            return function(*args, **options)

        note.__name__ = function.__name__
        return note

    monkeypatch.setattr(fp8, "activation_fp8", noted("apart", fp8.activation_fp8))
    both = {op: noted(op, function) for op, function in site.WITH_ROWS.items()}
    monkeypatch.setattr(site, "WITH_ROWS", both)
    return seen


def model_and_inputs(rows: int = 32) -> tuple[Block, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = Block().to(torch.bfloat16).eval().requires_grad_(False)
    x, scale, shift = torch.randn(2, rows, 64), torch.randn(2, 1, 64), torch.randn(2, 1, 64)
    return model, (x.bfloat16(), scale.bfloat16(), shift.bfloat16())


def test_from_the_second_call_on_the_op_before_a_product_writes_its_rows(quantised: list[str]) -> None:
    model, inputs = model_and_inputs()
    report = inject_optimized_kernels(model, numerics="fp8", config=EAGER)
    with torch.no_grad():
        results = [model(*inputs) for _ in range(3)]
    ops = ["norm_modulate", "gate_residual_norm_modulate"]
    assert quantised == ["apart", "apart", *ops, *ops]
    assert all(torch.equal(results[0], y) for y in results[1:]), "to the bit"
    calls = report.calls()
    assert all(calls[name]["fused"] == 3 for name in ("to_q", "to_k", "up", "gate"))
    report.restore()
    assert not fp8._shared


def test_what_was_written_into_since_is_quantised_again(quantised: list[str]) -> None:
    model, inputs = model_and_inputs()
    inject_optimized_kernels(model, numerics="fp8", config=EAGER)
    twin, _ = model_and_inputs()

    def negate(layer: nn.Module, args: tuple[Tensor]) -> None:
        args[0].neg_()

    with torch.no_grad():
        for _ in range(2):
            model(*inputs)
        handles = [one.to_k.register_forward_pre_hook(negate) for one in (model, twin)]
        first, second = model(*inputs), model(*inputs)
        assert torch.equal(first, second)
        wanted, unwritten = twin(*inputs), model_and_inputs()[0](*inputs)
        assert relative_error(first, wanted.double()) < 0.1 < relative_error(first, unwritten.double())
        assert quantised.count("norm_modulate") == 3, "the other layer reads what the op wrote"
    for handle in handles:
        handle.remove()


def test_an_op_whose_rows_are_not_read_stops_to_write_them(quantised: list[str]) -> None:
    model, inputs = model_and_inputs()
    _, few = model_and_inputs(rows=2)
    inject_optimized_kernels(model, numerics="fp8", config=EAGER)
    seen = []
    with torch.no_grad():
        for given in (inputs, inputs, few, few, inputs, inputs):
            model(*given)
            seen.append(quantised.copy())
            quantised.clear()
    ops = ["norm_modulate", "gate_residual_norm_modulate"]
    assert seen == [["apart"] * 2, ops, ops, [], ["apart"] * 2, ops]


def test_calls_with_gradients_and_without_fp8_write_no_rows(quantised: list[str]) -> None:
    model, inputs = model_and_inputs()
    report = inject_optimized_kernels(model, numerics="fp8", config=EAGER)
    with torch.no_grad():
        model(*inputs), model(*inputs)
    quantised.clear()
    x = inputs[0].requires_grad_()
    model(x, *inputs[1:]).sum().backward()
    assert x.grad is not None and not quantised
    report.restore()
    inject_optimized_kernels(model)
    with torch.no_grad():
        model(*inputs), model(*inputs)
    assert not quantised
