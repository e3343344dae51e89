"""What users do to the attention of a model, before and after injection, does to a fused one what it does to stock."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_flux import (
    FluxAttention,
    FluxAttnProcessor,
    FluxIPAdapterAttnProcessor,
)
from peft import LoraConfig
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from diffkern import inject_optimized_kernels
from scripts.check_models.denoisers import DENOISERS
from scripts.check_models.rewritten import batch_of_two, run


class FusedOps(TorchDispatchMode):
    """Counts the ops that join two streams."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += "joint_qk_norm_rope" in func._schema.name
        return func(*args, **(kwargs or {}))


def _lora(model: Any) -> None:
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["to_q", "add_k_proj", "proj_mlp"], init_lora_weights=False)
    torch.manual_seed(2)
    model.add_adapter(config)
    model.requires_grad_(False)


class Louder(FluxAttnProcessor):
    """A subclass whose result is another."""

    def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(attn, 1.5 * hidden_states, *args, **kwargs)


#: What is done to the model, and whether its attention is still fused.
FEATURES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "lora": (_lora, True),
    "backend": (lambda model: model.set_attention_backend("native"), True),
    "processor": (lambda model: model.set_attn_processor(FluxAttnProcessor()), True),
    "subclass": (lambda model: model.set_attn_processor(Louder()), False),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("feature", FEATURES)
def test_a_change_of_the_attention_changes_what_it_changes_in_stock(feature: str, when: str) -> None:
    change, fused = FEATURES[feature]
    torch.manual_seed(0)
    stock = DENOISERS["flux"].build().requires_grad_(False).eval()
    model, given = copy.deepcopy(stock), batch_of_two(DENOISERS["flux"], torch.float32)
    given["joint_attention_kwargs"] = {"scale": 1.0}
    unchanged = run(stock, given)
    change(stock)
    if when == "before":
        change(model)
    inject_optimized_kernels(model)
    if when == "after":
        run(model, given)
        change(model)
    expected = run(stock, given)
    torch.testing.assert_close(run(model, given), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(expected, unchanged) == (feature in ("backend", "processor"))
    with FusedOps() as ops:
        run(model, given)
    assert (ops.calls > 0) == fused


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_ip_adapter_adds_what_it_adds_to_stock(when: str) -> None:
    torch.manual_seed(0)
    stock = FluxAttention(32, 2, 16, added_kv_proj_dim=32, context_pre_only=False, bias=True).requires_grad_(False)
    for parameter in stock.parameters():
        nn.init.normal_(parameter, 0.5, 0.3)
    model, processor = copy.deepcopy(stock), FluxIPAdapterAttnProcessor(32, 32).requires_grad_(False)
    stock.set_processor(processor)
    if when == "before":
        model.set_processor(processor)
    inject_optimized_kernels(model)
    model.set_processor(processor)
    angles = torch.randn(17, 16)
    given = (torch.randn(2, 12, 32), torch.randn(2, 5, 32), None, (angles.cos(), angles.sin()))
    words = {"ip_hidden_states": [torch.randn(2, 4, 32)]}
    ours, expected = model(*given, **words), stock(*given, **words)
    assert len(ours) == 3
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
