"""What is fused inside of forwards: which classes are known, and what keeps a call stock."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.glm.modeling_glm import GlmAttention
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3Attention, Phi3MLP
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLMLP
from transformers.models.t5.modeling_t5 import T5Attention

from diffkern import inject_optimized_kernels, plan
from diffkern.blocks import inner_recipe_for
from diffkern.blocks.source import body, normalised
from tests.transformers.models import build, inputs, logits, step


@pytest.mark.parametrize("cls", [LlamaMLP, GemmaMLP, Phi3MLP, Qwen2_5_VLMLP])
def test_gated_feed_forwards_are_known_by_their_text(cls: type[nn.Module]) -> None:
    recipe = inner_recipe_for(cls)
    assert recipe is not None and recipe.op == "glu"


@pytest.mark.parametrize("cls", [LlamaAttention, Phi3Attention])
def test_rotations_are_known_by_their_text(cls: type[nn.Module]) -> None:
    recipe = inner_recipe_for(cls)
    assert recipe is not None and recipe.op == "rope"


@pytest.mark.parametrize("cls", [GlmAttention, T5Attention, nn.Linear, nn.Module])
def test_others_are_not(cls: type[nn.Module]) -> None:
    """GLM turns neighbours, in a function of the same name."""
    assert inner_recipe_for(cls) is None


def test_a_subclass_with_a_forward_of_its_own_is_another_class() -> None:
    class Mine(LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    assert inner_recipe_for(Mine) is None


def test_text_is_compared_and_not_layout() -> None:
    assert normalised("def f(self, hidden):\n  '''Doc.'''\n  y: int = (hidden +  1)\n  return y  # why") == normalised(
        "def g(self, x):\n    y = x + 1\n    return y"
    )
    assert body(LlamaMLP.forward) != body(LlamaAttention.forward)
    assert body(len) is None


def test_the_functions_of_the_library_stay_as_they_are() -> None:
    """Patching is per model: another one, and the file that both come from, see nothing."""
    rotate, forward = modeling_llama.apply_rotary_pos_emb, LlamaAttention.forward
    other, batch = build("llama"), inputs("llama")
    stock = logits(other, batch)
    model = build("llama")
    report = inject_optimized_kernels(model)
    logits(model, batch)
    assert modeling_llama.apply_rotary_pos_emb is rotate and LlamaAttention.forward is forward
    assert torch.equal(logits(other, batch), stock)
    assert report.calls()["model.layers.0.self_attn"]["fused"] == 1


def test_an_activation_that_no_kernel_computes_is_left_alone() -> None:
    report = plan(build("llama", hidden_act="relu"))
    reasons = {site.reason for site in report.skipped if site.class_name.endswith("MLP")}
    assert reasons == {"its activation is a ReLU, which no kernel computes"}


def test_a_hook_on_the_activation_is_called() -> None:
    model, batch = build("llama"), inputs("llama")
    stock = logits(model, batch)
    report = inject_optimized_kernels(model)
    seen: list[int] = []
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(logits(model, batch), stock, rtol=1e-4, atol=1e-5)
    assert seen and report.calls()["model.layers.0.mlp"]["stock_reasons"] == {
        "its activation has a hook, or another forward": 1
    }


def test_layers_around_the_inside_are_called_as_they_are() -> None:
    """Adapters and hooks on projections keep their effect, in training too."""
    from peft import LoraConfig, get_peft_model

    model, batch = build("llama"), inputs("llama")
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj", "up_proj"], r=2, init_lora_weights=False))
    stock, gradients = logits(wrapped, batch), step(wrapped, batch)
    report = inject_optimized_kernels(wrapped)
    torch.testing.assert_close(logits(wrapped, batch), stock, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(step(wrapped, batch), gradients, rtol=1e-4, atol=1e-6)
    assert all(count["stock"] == 0 for count in report.calls().values())


def test_a_cache_by_its_old_name_is_not_lost() -> None:
    """A decorator of the stock forward translates it."""
    model, batch = build("llama"), inputs("llama")
    attention = model.model.layers[0].self_attn
    renamed = inner_recipe_for(LlamaAttention).renamed  # type: ignore[union-attr]
    if not renamed:
        pytest.skip("this transformers has no old names here")
    report = inject_optimized_kernels(model)
    x = torch.randn(1, 4, 32)
    tables = model.model.rotary_emb(x, torch.arange(4)[None])

    class Cache:
        def update(self, keys: Any, values: Any, *_: Any, **__: Any) -> Any:
            return keys, values

    with pytest.warns(FutureWarning), torch.no_grad():
        attention(x, position_embeddings=tables, attention_mask=None, **{next(iter(renamed)): Cache()})
    reason = "it is called with other arguments than the recipe knows"
    assert report.calls()["model.layers.0.self_attn"]["stock_reasons"] == {reason: 1}
    assert batch


def test_tables_of_another_dtype_run_stock() -> None:
    """The stock products would be of the wider dtype."""
    model = build("llama", torch.bfloat16)
    attention = model.model.layers[0].self_attn
    report = inject_optimized_kernels(model)
    x = torch.randn(1, 4, 32, dtype=torch.bfloat16)
    tables = model.model.rotary_emb(x.float(), torch.arange(4)[None])
    with pytest.raises(RuntimeError), torch.no_grad():
        attention(x, position_embeddings=tables, attention_mask=None)  # stock refuses to attend in two dtypes
    reason = "its rotary tables have another dtype than the hidden states, or are elsewhere"
    assert report.calls()["model.layers.0.self_attn"]["stock_reasons"] == {reason: 1}


def test_autocast_runs_stock() -> None:
    model, batch = build("llama"), inputs("llama")
    report = inject_optimized_kernels(model)
    with torch.autocast("cpu", torch.bfloat16):
        logits(model, batch)
    for path in ("model.layers.0.mlp", "model.layers.0.self_attn"):
        reasons = report.calls()[path]["stock_reasons"]
        assert list(reasons) == ["autocast is on for cpu, and the stock forward follows its rules"]


def test_an_activation_whose_class_was_replaced_or_that_is_gone_runs_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = build("llama"), inputs("llama")
    mlp = model.model.layers[0].mlp
    report = inject_optimized_kernels(model)
    cls, stock = type(mlp.act_fn), type(mlp.act_fn).forward
    monkeypatch.setattr(cls, "forward", lambda self, x: 3 * stock(self, x))
    replaced = logits(model, batch)
    assert report.calls()["model.layers.0.mlp"]["fused"] == 0
    report.restore()
    torch.testing.assert_close(logits(model, batch), replaced, rtol=1e-4, atol=1e-5)
    monkeypatch.undo()
    report = inject_optimized_kernels(model)
    expected = logits(model, batch)
    del mlp.act_fn
    mlp.act_fn = nn.functional.silu
    torch.testing.assert_close(logits(model, batch), expected, rtol=1e-4, atol=1e-5)
    assert report.calls()["model.layers.0.mlp"]["stock"] == 1


def test_modules_of_other_classes_share_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.activations import SiLUActivation

    stock = SiLUActivation.forward
    monkeypatch.setattr(SiLUActivation, "forward", lambda self, x: 3 * stock(self, x))
    for first, second in ((nn.SiLU(), SiLUActivation()), (SiLUActivation(), nn.SiLU())):
        one, other = build("llama").model.layers[0].mlp, build("llama").model.layers[0].mlp
        one.act_fn, other.act_fn = first, second
        both, x = nn.ModuleList([one, other]), torch.randn(2, 32)
        with torch.no_grad():
            expected = [mlp(x) for mlp in both]
            inject_optimized_kernels(both)
            for mlp, y in zip(both, expected, strict=True):
                torch.testing.assert_close(mlp(x), y, rtol=1e-4, atol=1e-5)
