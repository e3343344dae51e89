"""One call patches, the report says what, and restore gives everything back bit for bit."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from diffusers import LTXVideoTransformer3DModel
from torch import Tensor, nn

import diffkern.injection.inject as inject_module
from diffkern import (
    InjectionError,
    KernelConfig,
    StrictModeError,
    inject_optimized_kernels,
    optimized,
    plan,
    restore,
)
from diffkern.providers import registry
from diffkern.providers.base import mark_file_errors
from tests.injection.models import all_fused, ltx_inputs, randomise, run, tiny_ltx
from tests.pipelines import tiny


def snapshot(model: nn.Module) -> list[tuple[str, dict[str, object], list[str]]]:
    """Everything an injection could leave behind: attributes, hooks and state dict keys of each module."""
    return [
        (name, {key: id(value) for key, value in module.__dict__.items()}, list(module.state_dict()))
        for name, module in model.named_modules()
    ]


def test_counts_on_the_real_ltx_configuration() -> None:
    with torch.device("meta"):
        model = LTXVideoTransformer3DModel()
    report = plan(model)
    by_class = {}
    for site in report.patched:
        by_class[site.class_name] = by_class.get(site.class_name, 0) + 1
    assert by_class == {
        "diffusers.models.normalization.RMSNorm": 56,
        "torch.nn.modules.normalization.RMSNorm": 112,
        "torch.nn.modules.normalization.LayerNorm": 1,
        "diffusers.models.transformers.transformer_ltx.LTXVideoTransformer3DModel": 1,
        "diffusers.models.transformers.transformer_ltx.LTXVideoTransformerBlock": 28,
        "diffusers.models.transformers.transformer_ltx.LTXAttention": 56,
        "diffusers.models.transformers.transformer_ltx.LTXVideoRotaryPosEmbed": 1,
        "diffusers.models.embeddings.PixArtAlphaTextProjection": 1,
        "diffusers.models.embeddings.Timesteps": 1,
    }
    recipes = {"ltx_rope", "caption"}
    assert {site.op for site in report.patched if site.how == "recipe"} == recipes
    assert {site.how for site in report.patched if site.op not in recipes} == {"source", "table", "twin"}


def test_injection_runs_fused_and_restore_is_bit_identical() -> None:
    model = tiny_ltx()
    before, stock = snapshot(model), run(model)
    report = inject_optimized_kernels(model)
    fused = run(model)
    assert len(report.patched) == 2 + 2 + 4 + 4 + 8 + 1 + 1 + 1 and not report.failed
    assert all_fused(report), report.calls()
    torch.testing.assert_close(fused, stock, rtol=1e-4, atol=1e-5)
    assert report.restore() == 23
    assert snapshot(model) == before
    assert torch.equal(run(model), stock)


def test_a_second_call_adds_nothing_and_says_so() -> None:
    model = tiny_ltx()
    first = inject_optimized_kernels(model)
    second = inject_optimized_kernels(model)
    assert not second.patched
    assert sum(site.reason == "already patched by diffkern" for site in second.skipped) == 23
    assert "patched 0 more modules" in second.summary() and "23 were patched before" in second.summary()
    assert second.restore() == 0
    assert first.restore() == 23


def test_nested_and_partial_restores() -> None:
    model = tiny_ltx()
    stock = run(model)
    inner = inject_optimized_kernels(model.transformer_blocks[0])
    outer = inject_optimized_kernels(model)
    assert len(inner.patched) + len(outer.patched) == 23
    assert outer.restore() == len(outer.patched)
    assert sum("fused" in count for count in inner.calls().values()) == len(inner.patched)
    with optimized(model) as around:
        assert len(around.patched) == len(outer.patched)
    assert restore(model.transformer_blocks[0].attn1) == 3
    assert restore(model) == len(inner.patched) - 3
    assert restore(model) == 0
    assert torch.equal(run(model), stock)


def test_restoring_one_report_leaves_a_later_patch_of_the_same_module() -> None:
    model = tiny_ltx()
    first = inject_optimized_kernels(model)
    restore(model)
    second = inject_optimized_kernels(model)
    assert first.restore() == 0
    assert second.restore() == 23


def test_a_failure_half_way_rolls_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_ltx()
    before, stock = snapshot(model), run(model)
    real, calls = inject_module.patch, []

    def patch(module: nn.Module, state: object) -> None:
        calls.append(module)
        real(module, state)
        if len(calls) == 7:
            raise RuntimeError("power cut")

    monkeypatch.setattr(inject_module, "patch", patch)
    with pytest.raises(RuntimeError, match="power cut"):
        inject_optimized_kernels(model)
    assert len(calls) == 7
    assert snapshot(model) == before
    assert torch.equal(run(model), stock)


def test_only_the_injected_model_changes() -> None:
    one, other = tiny_ltx(), tiny_ltx()
    shared = one.transformer_blocks[1]
    other.transformer_blocks[1] = shared
    stock, class_forward = run(other), type(shared.norm1).forward
    before = snapshot(other.transformer_blocks[0])
    report = inject_optimized_kernels(one.transformer_blocks[0])
    assert snapshot(other.transformer_blocks[0]) == before
    assert torch.equal(run(other), stock)
    assert (
        type(shared.norm1).forward is class_forward
        and nn.LayerNorm.forward.__module__ == "torch.nn.modules.normalization"
    )
    report.restore()


def test_a_deep_copy_uses_its_own_weights_and_is_restored_alone() -> None:
    model = tiny_ltx()
    inject_optimized_kernels(model)
    norm = model.transformer_blocks[0].attn1.norm_q
    twin = copy.deepcopy(model)
    twin_norm = twin.transformer_blocks[0].attn1.norm_q
    with torch.no_grad():
        twin_norm.weight.fill_(5)
    x = torch.randn(3, 32)
    torch.testing.assert_close(twin_norm(x), 5 * nn.functional.rms_norm(x, (32,), None, norm.eps))
    torch.testing.assert_close(norm(x), nn.functional.rms_norm(x, (32,), norm.weight, norm.eps))
    assert restore(twin) == 23
    assert "forward" in norm.__dict__ and "forward" not in twin_norm.__dict__
    assert restore(model) == 23


def test_a_pickled_model_comes_back_stock() -> None:
    model = tiny_ltx()
    stock = run(model)
    inject_optimized_kernels(model)
    loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(run(loaded), stock)
    assert inject_optimized_kernels(loaded).patched
    assert restore(loaded) == 23
    assert torch.equal(run(loaded), stock)


def test_weights_keys_and_saved_files_are_untouched(tmp_path: Path) -> None:
    model = tiny_ltx()
    model.save_pretrained(f"{tmp_path}/before")
    parameters, keys = {name: id(p) for name, p in model.named_parameters()}, list(model.state_dict())
    inject_optimized_kernels(model)
    run(model)
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    assert list(model.state_dict()) == keys
    model.save_pretrained(f"{tmp_path}/during")
    for file in ("diffusion_pytorch_model.safetensors", "config.json"):
        assert (tmp_path / "before" / file).read_bytes() == (tmp_path / "during" / file).read_bytes(), file
    assert torch.equal(run(LTXVideoTransformer3DModel.from_pretrained(f"{tmp_path}/during").eval()), run(tiny_ltx()))


def test_weights_loaded_later_are_used() -> None:
    model, other = tiny_ltx(seed=0), tiny_ltx(seed=5)
    inject_optimized_kernels(model)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(run(model), run(other), rtol=1e-4, atol=1e-5)


def test_the_report_speaks_to_people_and_machines() -> None:
    model = nn.Sequential(nn.LayerNorm(16), nn.GroupNorm(2, 16), nn.Linear(16, 16))
    report = inject_optimized_kernels(model)
    text = str(report)
    assert "LayerNorm" in text and "GroupNorm" in text and "group normalisation" in text
    assert "patched 1 module of Sequential" in text
    data = json.loads(report.to_json())
    assert data["patched"][0]["path"] == "0" and data["patched"][0]["op"] == "layer_norm"
    assert data["patched"][0]["measurements"][0]["passed"] is True
    assert data["skipped"][0]["class_name"] == "torch.nn.modules.normalization.GroupNorm"
    assert "<pre" in report._repr_html_()


def test_config_chooses_leaves_alone_and_names_the_nearest_key() -> None:
    model = tiny_ltx()
    report = inject_optimized_kernels(
        model, config={"rms_norm": "eager", "transformer_blocks.0.*": None, "transformer_blocks.0.norm1": "eager"}
    )
    by_path = {site.path: site for site in report.patched}
    assert by_path["transformer_blocks.1.norm1"].provider == "eager"
    assert "transformer_blocks.0.norm2" not in by_path and "transformer_blocks.0.norm1" in by_path
    assert sum(site.reason == "left alone by config" for site in report.skipped) == 8
    report.restore()
    with pytest.raises(ValueError, match="Did you mean 'rms_norm'"):
        inject_optimized_kernels(model, config={"rmsnorm": "eager"})
    with pytest.raises(ValueError, match="Did you mean 'eager'"):
        KernelConfig({"rms_norm": "eagre"})
    assert restore(model) == 0


def test_bad_arguments_say_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"pass the pipeline itself"):
        inject_optimized_kernels([1, 2])
    with pytest.raises(ValueError, match="exact, fast, fp8"):
        inject_optimized_kernels(tiny_ltx(), numerics="bf8")
    with pytest.raises(ValueError, match="single LTXVideoTransformer3DModel"):
        inject_optimized_kernels(tiny_ltx(), components=["vae"])


def test_fp8_says_what_it_needs() -> None:
    report = inject_optimized_kernels(tiny_ltx(), numerics="fp8")
    assert not report.patched and sum("fp8" in site.reason for site in report.skipped) == 25


def test_exact_patches_only_what_is_bit_identical() -> None:
    model = tiny_ltx()
    stock = run(model)
    report = inject_optimized_kernels(model, numerics="exact")
    assert all(m.bit_identical for site in report.patched for m in site.measurements)
    assert torch.equal(run(model), stock)
    assert all("not bit-identical" in site.reason for site in report.failed)
    assert len(report.patched) + len(report.failed) == 21
    assert [site.path for site in report.skipped if "keeps tensors between calls" in site.reason] == ["rope"]


def test_strict_refuses_a_fallback_and_changes_nothing() -> None:
    model = nn.Sequential(nn.LayerNorm(16))
    before = snapshot(model)
    with pytest.raises(InjectionError, match="triton"):
        inject_optimized_kernels(model, strict=True, config={"layer_norm": "triton"})
    assert snapshot(model) == before


def test_a_reason_of_several_sites_of_a_module_is_said_once() -> None:
    pipe, _ = tiny.build("sd15")
    report = inject_optimized_kernels(pipe, components=["vae"], numerics="exact")
    reasons = [str(site.reason).split("; ") for site in report.failed]
    assert reasons and all(len(parts) == len(set(parts)) for parts in reasons)


def test_a_strict_injection_lets_a_text_of_one_row_be() -> None:
    pipe, call = tiny.build("flux")
    report = inject_optimized_kernels(pipe, strict=True)
    tiny.run(pipe, call)
    [reason] = report.calls()["transformer.time_text_embed.text_embedder"]["stock_reasons"]
    assert "fewer than 4 rows" in reason
    assert report.calls()["transformer.transformer_blocks.0"]["fused"] > 0


def test_a_forward_that_is_put_in_the_place_of_a_class_s_own_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.LayerNorm(16), nn.RMSNorm(16))
    randomise(model)

    def doubled(self: nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
        return 2 * nn.functional.rms_norm(x, (16,), self.weight, self.eps)

    monkeypatch.setattr(nn.RMSNorm, "forward", doubled)
    x = torch.randn(4, 16)
    expected = model(x)
    report = inject_optimized_kernels(model)
    assert [site.path for site in report.patched] == ["0"]
    assert any("was replaced by" in (site.reason or "") for site in report.skipped)
    torch.testing.assert_close(model(x), expected)


def test_first_use_on_a_new_dtype_is_proven_then() -> None:
    model = nn.Sequential(nn.LayerNorm(64))
    report = inject_optimized_kernels(model)
    assert {m.dtype for m in report.patched[0].measurements} == {"float32"}
    model.half()
    with torch.no_grad():
        model(torch.randn(2, 64).half())
    assert report.calls()["0"]["fused"] == 1


def test_a_site_that_loses_its_proof_at_first_use_goes_back_to_stock_and_says_so() -> None:
    class Odd(nn.LayerNorm):
        pass

    model = nn.Sequential(nn.LayerNorm(64))
    report = inject_optimized_kernels(model)
    state = model[0]._diffkern
    state.proven.clear()
    state.verifier._ledger.clear()
    forward = nn.LayerNorm.forward
    try:
        nn.LayerNorm.forward = lambda self, input: forward(self, input) * 2
        state.stock = nn.LayerNorm.forward  # as if it had always been that
        x = torch.randn(3, 64)
        with pytest.warns(UserWarning, match="lost its proof at first use"):
            y = model[0](x)
        assert torch.equal(y, model[0](x)) and torch.equal(y, forward(model[0], x) * 2)
    finally:
        nn.LayerNorm.forward = forward
    counts = report.calls()["0"]
    assert counts["fused"] == 0 and counts["stock"] == 2 and "lost its proof" in next(iter(counts["stock_reasons"]))


def test_errors_of_the_users_making_look_as_in_stock() -> None:
    model = nn.Sequential(nn.LayerNorm(64))
    x = torch.randn(2, 32)
    with pytest.raises(RuntimeError) as stock:
        model(x)
    inject_optimized_kernels(model)
    with pytest.raises(RuntimeError) as patched:
        model(x)
    assert str(stock.value) == str(patched.value)
    with pytest.raises(TypeError):
        model[0](x, x)


def test_no_warning_and_no_random_state_is_consumed() -> None:
    model = tiny_ltx()
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inject_optimized_kernels(model)
        run(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_default_device_is_not_meant_for_proofs() -> None:
    model = tiny_ltx()
    torch.set_default_device("meta")
    try:
        report = inject_optimized_kernels(model)
    finally:
        torch.set_default_device(None)
    assert len(report.patched) == 23


def test_the_report_keeps_no_model_alive() -> None:
    import gc
    import weakref

    model = tiny_ltx()
    report = inject_optimized_kernels(model)
    alive = weakref.ref(model.transformer_blocks[0].norm1)
    del model
    gc.collect()
    assert alive() is None
    assert report.restore() == 0


def test_lora_trains_with_the_same_gradients() -> None:
    peft = pytest.importorskip("peft")
    gradients = []
    for inject in (False, True):
        model = tiny_ltx()
        model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q", "to_k"], init_lora_weights="gaussian"))
        randomise_lora(model)
        if inject:
            report = inject_optimized_kernels(model)
        model.train()
        model(**ltx_inputs())[0].square().mean().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad})
    assert all_fused(report)
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) == 2 * 2 * 2 * 2
    for name, expected in gradients[0].items():
        assert expected.abs().max() > 0
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-3, atol=1e-6)


def randomise_lora(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


@pytest.mark.parametrize("strict", [False, True])
def test_a_kernel_that_finds_no_place_for_its_code_costs_the_speed_and_not_the_run(
    strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = tiny_ltx(layers=1), ltx_inputs()
    stock = run(model)
    report = inject_optimized_kernels(model, config={"qk_norm_rope": "eager"}, strict=False)
    site = next(site for site in report.patched if site.path == "transformer_blocks.0.attn1")
    run(model)

    @mark_file_errors
    def unwritable(*args: object) -> Tensor:
        raise PermissionError(13, "Permission denied", "/cache/triton/kernel.so.tmp")

    # Triton compiles at the first call of a kind, be that long after the proofs.
    real = registry.kernel_for
    monkeypatch.setattr(
        "diffkern.ops.registration.kernel_for",
        lambda op, *args: unwritable if op == "qk_norm_rope" else real(op, *args),
    )
    registry.dispatch_cache.clear()
    if strict:
        site._state.strict = True
        with (
            pytest.raises(StrictModeError, match=r"cannot run fused: .*/cache/triton/kernel\.so\.tmp"),
            torch.no_grad(),
        ):
            model(**x)
        return
    with pytest.warns(UserWarning, match="runs stock from now on") as warned:
        torch.testing.assert_close(run(model), stock)
    assert "/cache/triton/kernel.so.tmp" in str(warned[0].message)
    torch.testing.assert_close(run(model), stock)  # without another word
    counts = report.calls()["transformer_blocks.0.attn1"]
    assert (counts["fused"], counts["stock"]) == (1, 2)
    assert "/cache/triton/kernel.so.tmp" in site.reason and site.revoked
    report.restore()
    assert torch.equal(run(model), stock)


def test_a_file_error_of_a_users_hook_reaches_the_user_once_and_costs_no_kernel() -> None:
    """A hook that reads offloaded weights from a disk that is gone is no kernel that could not be written."""
    model, x = tiny_ltx(layers=1), ltx_inputs()
    expected, calls, gone = run(model), [], OSError(5, "Input/output error", "/mnt/weights.safetensors")

    def read_from_disk(module: nn.Module, args: object) -> None:
        calls.append(module)
        if len(calls) == 1:
            raise gone

    report = inject_optimized_kernels(model, strict=False)
    handle = model.transformer_blocks[0].ff.net[2].register_forward_pre_hook(read_from_disk)
    with pytest.raises(OSError) as raised, torch.no_grad():
        model(**x)
    assert raised.value is gone and len(calls) == 1 and raised.value.__context__ is None
    assert not report.failed and not any(count["stock"] for count in report.calls().values())
    torch.testing.assert_close(run(model), expected, rtol=1e-4, atol=1e-5)
    assert len(calls) == 2 and report.calls()["transformer_blocks.0"]["fused"] == 7
    handle.remove()


def test_a_file_that_a_layer_misses_is_no_fault_of_the_kernels() -> None:
    model = tiny_ltx(layers=1)
    stock = run(model)
    report = inject_optimized_kernels(model)

    def missing(*args: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", "/offloaded/weights.safetensors")

    handle = model.transformer_blocks[0].attn1.to_q.register_forward_pre_hook(missing)
    with warnings.catch_warnings(), pytest.raises(FileNotFoundError, match="offloaded"):
        warnings.simplefilter("error")
        run(model)
    handle.remove()
    torch.testing.assert_close(run(model), stock)
    counts = report.calls()["transformer_blocks.0"]
    assert counts["stock"] == 0 and not any(site.revoked for site in report.patched)
