"""What is fused inside of the forwards of language models, and what keeps a call of them stock."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.activations import GELUActivation
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from diffkern import inject_optimized_kernels, plan
from diffkern.rewrite import Rewriter, Rewritten
from tests.transformers.models import build, inputs, logits, step


def found_in(module: nn.Module) -> list[str]:
    """The rules of the sites in a module's forward."""
    rewritten = Rewriter().rewrite(module)
    return [site.plan.rule.name for site in rewritten.sites] if isinstance(rewritten, Rewritten) else []


@pytest.mark.parametrize("name", ["llama", "gemma", "phi3", "qwen3"])
def test_gated_feed_forwards_and_rotations_are_found_in_their_source(name: str) -> None:
    layer = build(name).model.layers[0]
    assert found_in(layer.mlp) == ["gated linear unit"]
    assert found_in(layer.self_attn) == ["rotation"]


def test_a_rotation_of_neighbours_whose_table_is_read_by_half_is_left_alone() -> None:
    from transformers import GlmConfig, GlmForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 61, "pad_token_id": 0}
    model, batch = GlmForCausalLM(GlmConfig(**sizes, **more)).eval(), inputs("glm")
    stock = logits(model, batch)
    report = inject_optimized_kernels(model)
    assert "model.layers.0.self_attn" not in {site.path for site in report.patched}
    (left,) = [site for site in report.skipped if site.path == "model.layers.0.self_attn"]
    assert "in float64 its op does not compute what the source says" in left.reason and not report.failed
    inject_optimized_kernels(GlmForCausalLM(model.config), strict=True)
    torch.testing.assert_close(logits(model, batch), stock, rtol=1e-4, atol=1e-5)


def test_a_subclass_with_a_forward_of_its_own_is_read_as_it_is_written() -> None:
    class Mine(LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    assert found_in(Mine(build("llama").config)) == []


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
    assert not {site.path for site in report.patched if site.class_name.endswith("MLP")}


def test_a_hook_on_the_activation_is_called() -> None:
    model, batch = build("llama"), inputs("llama")
    stock = logits(model, batch)
    report = inject_optimized_kernels(model)
    seen: list[int] = []
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(logits(model, batch), stock, rtol=1e-4, atol=1e-5)
    (reason,) = report.calls()["model.layers.0.mlp"]["stock_reasons"]
    assert seen and "act_fn has a hook, or is another module than it was" in reason


def test_hidden_states_and_attentions_are_recorded_as_in_stock() -> None:
    """transformers replaces the forwards of layers for the time of a call that asks for them."""
    model, batch = build("llama"), inputs("llama")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        stock = model(**batch, output_hidden_states=True, output_attentions=True)
        inject_optimized_kernels(model)
        fused = model(**batch, output_hidden_states=True, output_attentions=True)
    for ours, theirs in ((fused.hidden_states, stock.hidden_states), (fused.attentions, stock.attentions)):
        assert len(ours) == len(theirs) > 0
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_layers_around_the_sites_are_called_as_they_are() -> None:
    """Adapters and hooks on projections keep their effect, in training too."""
    from peft import LoraConfig, get_peft_model

    model, batch = build("llama"), inputs("llama")
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj", "up_proj"], r=2, init_lora_weights=False))
    stock, gradients = logits(wrapped, batch), step(wrapped, batch)
    report = inject_optimized_kernels(wrapped)
    torch.testing.assert_close(logits(wrapped, batch), stock, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(step(wrapped, batch), gradients, rtol=1e-4, atol=1e-6)
    assert all(count["stock"] == 0 for count in report.calls().values())


def test_a_cache_by_its_old_name_is_used() -> None:
    """A decorator of the stock forward translates it, and decorates the rewritten one as well."""
    model = build("llama")
    attention = model.model.layers[0].self_attn
    report = inject_optimized_kernels(model)
    x = torch.randn(1, 4, 32)
    tables = model.model.rotary_emb(x, torch.arange(4)[None])
    seen = []

    class Cache:
        def update(self, keys: Any, values: Any, *_: Any, **__: Any) -> Any:
            seen.append(keys.shape)
            return keys, values

    forward: Any = LlamaAttention.forward
    if not hasattr(forward, "__wrapped__"):
        pytest.skip("this transformers has no old names here")
    with pytest.warns(FutureWarning), torch.no_grad():
        attention(x, position_embeddings=tables, attention_mask=None, past_key_values=Cache())
    assert len(seen) == 1 and report.calls()["model.layers.0.self_attn"]["fused"] == 1


def test_tables_of_another_dtype_run_stock() -> None:
    """The stock products are of the wider dtype."""
    model = build("llama", torch.bfloat16)
    attention = model.model.layers[0].self_attn
    report = inject_optimized_kernels(model)
    x = torch.randn(1, 4, 32, dtype=torch.bfloat16)
    tables = model.model.rotary_emb(x.float(), torch.arange(4)[None])
    with pytest.raises(RuntimeError), torch.no_grad():
        attention(x, position_embeddings=tables, attention_mask=None)  # stock refuses to attend in two dtypes
    (reason,) = report.calls()["model.layers.0.self_attn"]["stock_reasons"]
    assert "gives torch.bfloat16" in reason and "instead of torch.float32" in reason


def test_autocast_runs_stock() -> None:
    model, batch = build("llama"), inputs("llama")
    report = inject_optimized_kernels(model)
    with torch.autocast("cpu", torch.bfloat16):
        logits(model, batch)
    for path in ("model.layers.0.mlp", "model.layers.0.self_attn"):
        reasons = report.calls()[path]["stock_reasons"]
        assert list(reasons) == ["autocast is on, and the stock forward follows its rules"]


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


def test_a_function_that_an_activation_holds_is_part_of_what_it_computes() -> None:
    """One class of transformers computes GELU by torch or by a chain in Python, as its attribute says."""
    config = build("gemma").config
    config.hidden_act = config.hidden_activation = "gelu"
    one, other, x = GemmaMLP(config), GemmaMLP(config), torch.randn(4, 32)
    other.act_fn = GELUActivation(use_gelu_python=True)
    rewriter = Rewriter()
    first, second = rewriter.rewrite(one), rewriter.rewrite(other)
    assert isinstance(first, Rewritten) and isinstance(second, Rewritten) and first is not second
    report = inject_optimized_kernels(one)
    with torch.no_grad():
        torch.testing.assert_close(one(x), type(one).forward(one, x), rtol=1e-4, atol=1e-5)
        one.act_fn.act = torch.tanh
        torch.testing.assert_close(one(x), type(one).forward(one, x), rtol=0, atol=0)
    assert report.calls()[""]["stock_reasons"] == {"act_fn computes another function": 1}


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
