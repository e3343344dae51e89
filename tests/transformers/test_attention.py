"""Routes in transformers' models: masks, grouped queries, windows, dropout, caches; and what is left afterwards."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import diffkern
from diffkern import StrictModeError, inject_optimized_kernels
from diffkern.attention import BACKENDS, AttentionCall
from diffkern.bench.measure import relative_error
from tests.attention.conftest import kernel as kernel
from tests.transformers.models import build, in_float64, inputs, logits, step

DECODERS = ("llama", "qwen2", "qwen3", "mistral", "gemma", "phi3")  # Gemma 2 caps its scores, and knows no sdpa

#: Leaves the norms and the rest alone: what is seen then comes from the attention.
ALONE = {"rms_norm": None, "glu": None, "rope": None}


def implementation(model: Any) -> str:
    return str(model.config._attn_implementation)


@pytest.mark.parametrize("wish", ["_native_math", "_native_flash", "auto"])
@pytest.mark.parametrize("padding", ["", "left"])
@pytest.mark.parametrize("name", DECODERS)
def test_evaluation(name: str, padding: str, wish: str) -> None:
    model, batch = build(name), inputs(name, padding)
    stock = logits(model, batch)
    report = inject_optimized_kernels(model, attention=wish, config=ALONE)
    y = logits(model, batch)
    seen = slice(3, None) if padding else slice(None)  # padding attends to nothing, and anything is right there
    torch.testing.assert_close(y[:, seen], stock[:, seen], rtol=1e-4, atol=1e-5)
    counts = report.calls()[""]
    assert counts["fused"] + counts["stock"] == 2 and (wish == "auto" or counts["fused"] == 2)
    assert report.restore() == 1
    assert implementation(model) == "sdpa" and torch.equal(logits(model, batch), stock)


@pytest.mark.parametrize("name", DECODERS)
def test_generation(name: str) -> None:
    model, batch = build(name), inputs(name, "left")
    options = {"max_new_tokens": 7, "do_sample": False}
    stock = model.generate(**batch, **options)
    report = inject_optimized_kernels(model, attention="_native_math")
    assert torch.equal(model.generate(**batch, **options), stock)
    assert report.calls()[""]["fused"] == 14 and report.calls()[""]["stock"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_training(dtype: torch.dtype) -> None:
    model, batch = build("llama", dtype).train(), inputs("llama", "right")
    exact, stock = step(in_float64(model), batch), step(model, batch)
    report = inject_optimized_kernels(model, attention="_native_math", config=ALONE)
    fused = step(model, batch)
    assert relative_error(fused, exact) <= 1.2 * relative_error(stock, exact) + 1e-6
    site = next(site for site in report.patched if site.op == "attention")
    assert report.calls()[""]["fused"] == 2 and [m.passed for m in site.measurements] == [True]


def test_dropout_is_dropped_by_who_can(kernel: str) -> None:
    model, batch = build("llama", attention_dropout=0.3).train(), inputs("llama")
    stock = step(model, batch)
    with_dropout = inject_optimized_kernels(model, attention="_native_math", config=ALONE)
    assert not torch.allclose(step(model, batch), step(model, batch, seed=5))
    assert with_dropout.calls()[""]["fused"] == 4
    with_dropout.restore()
    without = inject_optimized_kernels(model, attention=f"{kernel}:bare", config=ALONE)
    assert torch.equal(step(model, batch), stock)
    assert without.calls()[""]["fused"] == 0
    model.eval()
    assert relative_error(logits(model, batch), logits(build("llama"), batch)) < 1e-6


def test_a_kernel_without_masks_serves_the_calls_without_one(kernel: str) -> None:
    model = build("llama")
    report = inject_optimized_kernels(model, attention=f"{kernel}:flash_attn_func")
    logits(model, inputs("llama"))
    assert report.calls()[""]["fused"] == 2
    logits(model, inputs("llama", "left"))
    assert report.calls()[""]["stock_reasons"] == {f"{kernel}:flash_attn_func applies no mask": 2}
    strict = build("llama")
    inject_optimized_kernels(strict, attention=f"{kernel}:flash_attn_func", strict=True)
    logits(strict, inputs("llama"))
    with pytest.raises(StrictModeError, match="applies no mask"):
        logits(strict, inputs("llama", "left"))


def test_auto_takes_what_is_faster_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stock attention that sleeps loses to any other."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.003)
        return sdpa(*arguments, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", slow)
    model, batch = build("llama"), inputs("llama")
    report = inject_optimized_kernels(model, attention="auto")
    logits(model, batch)
    assert report.calls()[""]["fused"] == 2
    site = next(site for site in report.patched if site.op == "attention")
    assert "4/2 heads of 8 in float32 on cpu, causal: _native_flash (10 x 10)" in site.reason
    assert "_native_flash (10 x 10)" in str(report).replace("\n         ", " ")


def test_what_is_no_plain_attention_runs_as_before() -> None:
    """T5 adds a learned bias to its scores."""
    model, batch = build("t5"), inputs("t5")
    stock = logits(model, batch)
    if implementation(model) != "sdpa":
        pytest.skip("this transformers gives T5 an attention of its own")
    report = inject_optimized_kernels(model, attention="_native_math", config=ALONE)
    assert torch.equal(logits(model, batch), stock)
    reasons = {reason for count in report.calls().values() for reason in count["stock_reasons"]}
    assert reasons <= {"the call has a position_bias"} and reasons


@pytest.mark.parametrize("name", ["eager", "flex_attention"])
def test_another_implementation_is_left_alone(name: str) -> None:
    model = build("llama", attn_implementation=name)
    report = inject_optimized_kernels(model, attention="_native_math", config=ALONE)
    (site,) = [site for site in report.skipped if site.op == "attention"]
    assert f"runs with attn_implementation='{name}'" in site.reason
    assert implementation(model) == name


def test_models_that_ask_for_their_attention_by_name_are_left_alone() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2))
    report = inject_optimized_kernels(model, attention="_native_math")
    assert "its code asks for its attention by name, and would not know this one" in {s.reason for s in report.skipped}
    assert implementation(model) == "sdpa"


def test_each_model_with_a_configuration_of_its_own_is_a_site() -> None:
    """An encoder and a decoder, or the eyes and the tongue of one model."""
    model = build("t5")
    report = diffkern.plan(model, attention="_native_math")
    paths = {site.path for site in report.patched if site.op == "attention"}
    assert paths == {"", "encoder", "decoder"}


def test_other_models_keep_their_attention() -> None:
    model, other = build("llama"), build("llama")
    inject_optimized_kernels(model, attention="_native_math")
    assert implementation(other) == "sdpa" and implementation(model) != "sdpa"


def test_what_is_saved_says_nothing_of_it(tmp_path: Path) -> None:
    model, batch = build("llama"), inputs("llama")
    inject_optimized_kernels(model, attention="_native_math")
    model.save_pretrained(tmp_path)
    assert "diffkern" not in json.dumps(json.loads((tmp_path / "config.json").read_text(encoding="utf-8")))
    again = type(model).from_pretrained(tmp_path)
    assert implementation(again) == "sdpa"
    torch.testing.assert_close(logits(again, batch), logits(model, batch), rtol=1e-4, atol=1e-5)


def test_copies_are_routed_and_restored_on_their_own() -> None:
    model, batch = build("llama"), inputs("llama")
    stock = logits(model, batch)
    report = inject_optimized_kernels(model, attention="_native_math")
    duplicate = copy.deepcopy(model)
    routed = logits(model, batch)
    assert torch.equal(logits(duplicate, batch), routed)
    assert diffkern.restore(duplicate) == len(report.patched)
    assert torch.equal(logits(duplicate, batch), stock) and torch.equal(logits(model, batch), routed)


def test_what_a_user_sets_afterwards_is_kept() -> None:
    model = build("llama")
    report = inject_optimized_kernels(model, attention="_native_math", config=ALONE)
    model.set_attn_implementation("eager")
    assert report.restore() == 0 and implementation(model) == "eager"


def test_compiled_without_a_break() -> None:
    model, batch = build("llama"), inputs("llama", "left")
    inject_optimized_kernels(model, attention="_native_math")
    eager = logits(model, batch)
    torch._dynamo.reset()
    # Norms are left to the compiler, and round as torch's own.
    compiled = logits(torch.compile(model, fullgraph=True, backend="aot_eager"), batch)
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-6)
    torch._dynamo.reset()


def test_gradient_checkpointing() -> None:
    model, batch = build("llama").train(), inputs("llama")
    stock = step(model, batch)
    inject_optimized_kernels(model, attention="auto")
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(step(model, batch), stock, rtol=1e-4, atol=1e-6)


def test_the_fused_rotation_and_the_route_work_together() -> None:
    model, batch = build("qwen3"), inputs("qwen3", "left")
    stock = logits(model, batch)
    report = inject_optimized_kernels(model, attention="_native_math")
    torch.testing.assert_close(logits(model, batch)[:, 3:], stock[:, 3:], rtol=1e-4, atol=1e-5)
    calls = report.calls()
    assert calls[""]["fused"] == 2 and calls["model.layers.0.self_attn"]["fused"] == 1


def test_a_gradient_that_is_wrong_keeps_training_on_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    right = BACKENDS["native"].compute

    def wrong(call: AttentionCall) -> Tensor:
        from dataclasses import replace

        return right(replace(call, key=call.key.detach() + 0 * call.key))

    from diffkern.injection import attention

    monkeypatch.setattr(attention, "find_backend", lambda *_: diffkern.attention.Backend("wrong", lambda: wrong))
    model, batch = build("llama"), inputs("llama")
    stock = step(copy.deepcopy(model), batch)
    report = inject_optimized_kernels(model, attention="native", config=ALONE)
    with pytest.warns(UserWarning, match="wrong gradients: has an error"):
        assert torch.equal(step(model, batch), stock)
    logits(model, batch)
    assert report.calls()[""] == {
        "fused": 2,
        "stock": 2,
        "stock_reasons": report.calls()[""]["stock_reasons"],
        "stock_pieces": {},
    }
