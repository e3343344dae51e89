"""Whole language models: as accurate as stock in evaluation, training and generation, and stock again afterwards."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from diffkern import inject_optimized_kernels
from diffkern.bench.measure import relative_error
from tests.transformers.models import BUILDERS, SITES, all_is_fused, build, in_float64, inputs, logits, step

#: How much larger than stock's an error may be, end to end.
RATIO, SLACK = 1.2, 1e-6

models = pytest.mark.parametrize("name", list(BUILDERS))
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def in_place(model: Any, reference: Any) -> None:
    """The weights of the reference are those of the model, rounded as they are."""
    assert all(torch.equal(a.double(), b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


@models
@dtypes
@pytest.mark.parametrize("padding", ["", "right"], ids=["full", "padded"])
def test_evaluation(name: str, dtype: torch.dtype, padding: str, device: str) -> None:
    model, batch = build(name, dtype, device), inputs(name, padding, device)
    reference = in_float64(model)
    in_place(model, reference)
    exact, stock = logits(reference, batch), logits(model, batch)
    keys = list(model.state_dict())
    report = inject_optimized_kernels(model)
    assert Counter(site.op for site in report.patched) == SITES[name]
    assert not report.failed and list(model.state_dict()) == keys
    fused = logits(model, batch)
    assert fused.dtype == stock.dtype
    assert relative_error(fused, exact) <= RATIO * relative_error(stock, exact) + SLACK
    assert all_is_fused(name, report)
    assert report.restore() == len(report.patched)
    assert torch.equal(logits(model, batch), stock)


@models
@dtypes
def test_training(name: str, dtype: torch.dtype, device: str) -> None:
    model, batch = build(name, dtype, device).train(), inputs(name, "right", device)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    exact, stock = step(in_float64(model), batch), step(model, batch)
    report = inject_optimized_kernels(model)
    fused = step(model, batch)
    assert relative_error(fused, exact) <= RATIO * relative_error(stock, exact) + SLACK
    assert all_is_fused(name, report)
    report.restore()
    assert torch.equal(step(model, batch), stock)


@models
def test_generation(name: str, device: str) -> None:
    model, batch = build(name, device=device), inputs(name, "left", device)
    batch.pop("decoder_input_ids", None)
    options = {"max_new_tokens": 6, "do_sample": False}
    stock = model.generate(**batch, **options)
    with_kernels = inject_optimized_kernels(model)
    assert torch.equal(model.generate(**batch, **options), stock)
    counts = with_kernels.calls().values()
    assert max(count["fused"] for count in counts) >= 6 and not any(count["stock"] for count in counts)


@pytest.mark.parametrize("name", ["llama", "gemma", "phi3"])
def test_exact_keeps_every_bit(name: str) -> None:
    model, batch = build(name, torch.bfloat16), inputs(name)
    stock = logits(model, batch)
    report = inject_optimized_kernels(model, numerics="exact")
    assert torch.equal(logits(model, batch), stock)
    assert "rope" in {site.op for site in report.patched}


def test_dropout_draws_what_stock_draws() -> None:
    model, batch = build("llama", attention_dropout=0.3).train(), inputs("llama")
    stock = step(model, batch)
    assert not torch.allclose(step(model, batch, seed=4), stock)
    inject_optimized_kernels(model)
    torch.testing.assert_close(step(model, batch), stock, rtol=1e-4, atol=1e-6)


def test_gradient_checkpointing() -> None:
    model, batch = build("llama").train(), inputs("llama")
    stock = step(model, batch)
    inject_optimized_kernels(model)
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(step(model, batch), stock, rtol=1e-4, atol=1e-6)


def test_compiled_without_a_break() -> None:
    model, batch = build("llama"), inputs("llama", "right")
    inject_optimized_kernels(model)
    eager = logits(model, batch)
    torch._dynamo.reset()
    # Norms are left to the compiler, and round as torch's own.
    compiled = logits(torch.compile(model, fullgraph=True, backend="aot_eager"), batch)
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-6)
    torch._dynamo.reset()
