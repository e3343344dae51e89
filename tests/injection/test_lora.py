"""Adapters come and go around a patched model: they have their effect, and leave the patched model as it was."""

from __future__ import annotations

import peft
import pytest
import torch
from torch import nn

from diffkern import inject_optimized_kernels
from tests.injection.models import run, tiny_ltx

CONFIG = peft.LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "net.0.proj", "net.2"], init_lora_weights=False)


def patched(model: nn.Module) -> int:
    """How many modules carry a patch."""
    return sum("_diffkern" in vars(module) for module in model.modules())


def add_adapter(model: nn.Module, name: str, seed: int) -> None:
    """Adds an adapter with weights that depend on the seed alone."""
    model.add_adapter(CONFIG, adapter_name=name)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if f".{name}." in path:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


@pytest.mark.parametrize("adapter_first", [True, False])
def test_adapters_have_their_effect_and_unloading_leaves_the_patched_model(adapter_first: bool) -> None:
    stock, model = tiny_ltx(), tiny_ltx()
    plain = run(stock)
    if not adapter_first:
        report = inject_optimized_kernels(model)
        baseline = run(model)
    add_adapter(stock, "one", 1)
    add_adapter(model, "one", 1)
    if adapter_first:
        report = inject_optimized_kernels(model)
    count = patched(model)
    assert count == len(report.patched) == 23
    with_one = run(stock)
    assert (with_one - plain).abs().max() > 0.01
    torch.testing.assert_close(run(model), with_one, rtol=1e-3, atol=1e-4)

    add_adapter(stock, "two", 2)
    add_adapter(model, "two", 2)
    for names in ("two", ["one", "two"]):
        stock.set_adapters(names)
        model.set_adapters(names)
        torch.testing.assert_close(run(model), run(stock), rtol=1e-3, atol=1e-4)
    model.disable_adapters()
    torch.testing.assert_close(run(model), plain, rtol=1e-3, atol=1e-4)
    model.enable_adapters()

    model.unload_lora()
    assert patched(model) == count
    if not adapter_first:
        assert torch.equal(run(model), baseline)
    assert report.restore() == 23
    assert torch.equal(run(model), plain)
