"""``train()`` and ``eval()``: what is proven, by whom it is computed, and what happens where gradients are wrong."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffkern import inject_optimized_kernels, ops
from diffkern.bench.measure import relative_error
from diffkern.injection.patching import patch_state
from diffkern.verify import gradients
from tests.transformers.models import build, inputs, logits, step


def state(model: Any) -> Any:
    """What the first norm's patch knows."""
    return patch_state(model.model.layers[0].input_layernorm)


def test_gradients_are_proven_when_they_are_first_wanted() -> None:
    model, batch = build("llama"), inputs("llama")
    stock = step(copy.deepcopy(model).train(), batch)
    report = inject_optimized_kernels(model)
    logits(model, batch)
    assert not state(model).proven_gradients
    model.train()
    torch.testing.assert_close(step(model, batch), stock, rtol=1e-4, atol=1e-6)
    assert len(state(model).proven_gradients) == 1
    model.eval()
    logits(model, batch)
    torch.testing.assert_close(step(model, batch), stock, rtol=1e-4, atol=1e-6)  # also in evaluation, with gradients
    assert len(state(model).proven_gradients) == 1
    assert all(count["stock"] == 0 for count in report.calls().values())


def test_wrong_gradients_send_training_to_stock_and_leave_inference_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that computes the right thing and cannot say how it changes."""
    right = ops.glu

    def half_right(value: Tensor, gate: Tensor, *options: Any, **more: Any) -> Tensor:
        return right(value.detach() + 0.5 * (value - value.detach()), gate, *options, **more)

    monkeypatch.setattr(ops, "glu", half_right)
    model, batch = build("llama"), inputs("llama")
    stock = step(copy.deepcopy(model), batch)
    report = inject_optimized_kernels(model)
    logits(model, batch)
    assert report.calls()["model.layers.0.mlp"]["fused"] == 1
    model.train()
    with pytest.warns(UserWarning, match="LlamaMLP runs stock wherever gradients are wanted: with its gradients"):
        torch.testing.assert_close(step(model, batch), stock, rtol=1e-4, atol=1e-6)
    counts = report.calls()["model.layers.0.mlp"]
    assert counts["fused"] == 1 and counts["stock"] == 1
    model.eval()
    logits(model, batch)
    assert report.calls()["model.layers.0.mlp"]["fused"] == 2


def test_the_provider_follows_the_mode() -> None:
    model, batch = build("llama"), inputs("llama")
    rule, others = {"training": "eager", "inference": ""}, dict.fromkeys(("glu", "rope", "gate_residual_norm_modulate"))
    report = inject_optimized_kernels(model, config={"rms_norm": rule, **others})
    logits(model, batch)
    assert {(count["fused"], count["stock"]) for count in report.calls().values()} == {(0, 1)}
    model.train()
    step(model, batch)
    assert {(count["fused"], count["stock"]) for count in report.calls().values()} == {(1, 1)}
    model.eval()
    logits(model, batch)
    assert {(count["fused"], count["stock"]) for count in report.calls().values()} == {(1, 2)}


def test_frozen_weights_ask_for_gradients_of_the_input_alone() -> None:
    model = build("llama").requires_grad_(False)
    norm = model.model.norm
    inject_optimized_kernels(model)
    x = torch.randn(2, 3, 32)
    assert not gradients.wanted(norm, x) and gradients.wanted(norm, x.clone().requires_grad_())
    norm(x)
    assert not patch_state(norm).proven_gradients  # type: ignore[union-attr]
    norm(x.requires_grad_()).sum().backward()
    assert patch_state(norm).proven_gradients  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "make", [lambda: nn.RMSNorm(16), lambda: nn.LayerNorm(16), lambda: nn.LayerNorm(16, bias=False)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_norms_of_torch_prove_their_gradients(make: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = make().to(dtype)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(5, 16, dtype=dtype, requires_grad=True)
    stock = torch.autograd.grad(norm(x).float().square().sum(), [x, *norm.parameters()])
    inject_optimized_kernels(norm)
    fused = torch.autograd.grad(norm(x).float().square().sum(), [x, *norm.parameters()])
    assert not patch_state(norm).no_gradients and patch_state(norm).proven_gradients  # type: ignore[union-attr]
    for ours, theirs in zip(fused, stock, strict=True):
        assert ours.dtype == theirs.dtype and relative_error(ours, theirs) <= 1e-2


def test_exact_holds_for_gradients_too() -> None:
    """Ours are more accurate than those of the chain in bfloat16, and so not the same."""
    model, batch = build("llama", torch.bfloat16), inputs("llama")
    stock = step(copy.deepcopy(model), batch)
    inject_optimized_kernels(model, numerics="exact")
    with pytest.warns(UserWarning, match="with its gradients it is not bit-identical to stock"):
        assert torch.equal(step(model, batch), stock)


def test_gradients_that_are_no_numbers_are_wrong_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error over the finite elements alone would find nothing wrong with them."""
    right = ops.glu

    def endless(*operands: Any, **options: Any) -> Tensor:
        y = right(*operands, **options)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * torch.nan)
        return y

    monkeypatch.setattr(ops, "glu", endless)
    model, batch = build("llama").train(), inputs("llama")
    stock = step(copy.deepcopy(model), batch)
    report = inject_optimized_kernels(model)
    with pytest.warns(UserWarning, match="LlamaMLP runs stock wherever gradients are wanted: .* error of inf"):
        torch.testing.assert_close(step(model, batch), stock, rtol=1e-4, atol=1e-6)
    assert report.calls()["model.layers.0.mlp"]["fused"] == 0


def test_the_report_has_the_errors_of_gradients() -> None:
    model, batch = build("llama", torch.bfloat16).train(), inputs("llama")
    report = inject_optimized_kernels(model)
    assert not [proof for site in report.patched for proof in site.measurements if proof.gradients]
    step(model, batch)
    proven = set()
    for site in report.patched:
        for proof in [proof for proof in site.measurements if proof.gradients]:
            assert proof.passed and proof.provider == site.provider
            assert 0 < proof.fused <= 1.05 * proof.stock + torch.finfo(torch.bfloat16).eps
            proven.add(site.op)
    assert proven == {"rms_norm", "glu", "rope", "gate_residual_norm_modulate"}
