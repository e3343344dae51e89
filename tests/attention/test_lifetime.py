"""What routes leave behind: nothing in registries, memory or pickles; and an attention that was replaced is called."""

from __future__ import annotations

import copy
import gc
import io
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from diffkern import inject_optimized_kernels
from diffkern.attention import in_diffusers
from tests.transformers.models import build, inputs, logits

ALONE = {"*": None}


def tiny_flux() -> FluxTransformer2DModel:
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    ).eval()  # fmt: skip


def flux_output(model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        result: Tensor = model(
            hidden_states=torch.randn(1, 6, 4, generator=generator),
            encoder_hidden_states=torch.randn(1, 3, 32, generator=generator),
            pooled_projections=torch.randn(1, 32, generator=generator),
            timestep=torch.tensor([0.5]), img_ids=torch.zeros(6, 3), txt_ids=torch.zeros(3, 3),
        )[0]  # fmt: skip
    return result


def run(model: Any) -> Tensor:
    return flux_output(model) if isinstance(model, FluxTransformer2DModel) else logits(model, inputs("llama"))


def registered() -> tuple[int, ...]:
    """Entries of every table that routes are in, places that are free not counted."""
    gc.collect()
    registry = _AttentionBackendRegistry
    tables: tuple[Any, ...] = (
        registry._backends, registry._constraints, registry._supported_arg_names, in_diffusers._before,
        type(next(iter(registry._backends)))._value2member_map_, ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS,
    )  # fmt: skip
    return tuple(len(table) - len(in_diffusers._free) * (number < 3) for number, table in enumerate(tables))


def cycles(model: nn.Module, count: int) -> int:
    """Injects, runs and restores; returns how many objects there are afterwards."""
    for _ in range(count):
        report = inject_optimized_kernels(model, attention="native", config=ALONE)
        run(model)
        assert report.restore() == 1 and report.calls()[""]["fused"] > 0
        del report
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.parametrize("make", [tiny_flux, lambda: build("llama")], ids=["flux", "llama"])
def test_cycles_of_injection_and_restore_leave_nothing(make: Any) -> None:
    model = make()
    run(model)
    cycles(model, 2)
    before, objects, places = registered(), cycles(model, 1), len(_AttentionBackendRegistry._backends)
    assert cycles(model, 8) - objects < 8  # less than one object a cycle
    assert registered() == before and len(_AttentionBackendRegistry._backends) == places


@pytest.mark.parametrize("make", [tiny_flux, lambda: build("llama")], ids=["flux", "llama"])
def test_a_route_lives_as_long_as_a_copy_of_its_model(make: Any) -> None:
    before, model = registered(), make()
    expected = run(model)
    report = inject_optimized_kernels(model, attention="_native_math", config=ALONE)
    routed, twin = run(model), copy.deepcopy(model)
    report.restore()
    assert torch.equal(run(model), expected)
    del model, report
    gc.collect()
    assert registered() != before
    assert torch.equal(run(twin), routed)
    del twin
    gc.collect()
    assert registered() == before


@pytest.mark.parametrize("make", [tiny_flux, lambda: build("llama")], ids=["flux", "llama"])
def test_a_model_that_is_thrown_away_with_its_route_leaves_nothing(make: Any) -> None:
    before, model = registered(), make()
    inject_optimized_kernels(model, attention="native", config=ALONE)
    kept = weakref.ref(model)
    del model
    assert registered() == before and kept() is None


def test_places_in_the_registry_stay_and_are_taken_again() -> None:
    """Guards of ``torch.compile`` count them."""
    models, before = [tiny_flux() for _ in range(3)], registered()
    reports = [inject_optimized_kernels(model, attention="native", config=ALONE) for model in models[:2]]
    places = list(_AttentionBackendRegistry._backends)
    reports.pop(0).restore()
    gc.collect()
    assert list(_AttentionBackendRegistry._backends) == places and len(in_diffusers._before) == before[3] + 1
    reports.append(inject_optimized_kernels(models[2], attention="native", config=ALONE))
    assert list(_AttentionBackendRegistry._backends) == places
    assert torch.equal(flux_output(models[2]), flux_output(models[0]))
    for report in reports:
        report.restore()
    del reports, report
    assert registered() == before


@pytest.mark.parametrize("restored", [True, False])
def test_an_image_adapter_is_freed_with_its_model(restored: bool) -> None:
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    before, model = registered(), tiny_flux()
    attention = model.transformer_blocks[0].attn
    attention.processor = FluxIPAdapterAttnProcessor(32, 32, (4,))
    weight = weakref.ref(attention.processor.to_k_ip[0].weight)
    for _ in range(5):
        inject_optimized_kernels(model, attention="native", config=ALONE).restore()
    if not restored:
        inject_optimized_kernels(model, attention="native", config=ALONE)
    del attention, model
    gc.collect()
    assert weight() is None and registered() == before


def test_models_that_were_saved_whole_run_stock_where_there_is_no_diffkern(tmp_path: Path) -> None:
    models = {"flux": tiny_flux(), "llama": build("llama")}
    first, second = models["flux"].transformer_blocks[0].attn.processor, models["flux"].single_transformer_blocks[0]
    first._attention_backend = AttentionBackendName._NATIVE_MATH
    expected = {name: run(model) for name, model in models.items()}
    for model in models.values():
        inject_optimized_kernels(model, attention="_native_flash", config=ALONE)
    torch.save((models, expected), tmp_path / "models.pt")
    assert second.attn.processor._attention_backend is not None
    code = f"""
import sys, torch
sys.modules["diffkern"] = None
models, expected = torch.load({str(tmp_path / "models.pt")!r}, weights_only=False)
flux, llama = models["flux"], models["llama"]
print(flux.transformer_blocks[0].attn.processor._attention_backend.value)
print(flux.single_transformer_blocks[0].attn.processor._attention_backend, llama.config._attn_implementation)
with torch.no_grad():
    print(torch.equal(llama(**{inputs_of_llama()}).logits, expected["llama"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["_native_math", "None", "sdpa", "True"], done.stderr


def inputs_of_llama() -> str:
    """The arguments of a call, as source."""
    return "{" + ", ".join(f"{k!r}: torch.tensor({v.tolist()})" for k, v in inputs("llama").items()) + "}"


def test_a_model_that_was_saved_whole_runs_stock_in_this_process() -> None:
    model = build("llama")
    expected = logits(model, inputs("llama"))
    inject_optimized_kernels(model, attention="native")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert again.config._attn_implementation == "sdpa" and model.config._attn_implementation != "sdpa"
    assert torch.equal(logits(again, inputs("llama")), expected)


# --- who watches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"attention": "native"}])
def test_an_eager_attention_that_was_replaced_after_the_injection_is_called(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, twin = (build("llama", attn_implementation="eager") for _ in range(2))
    batch = inputs("llama")
    inject_optimized_kernels(model, **options)
    logits(model, batch)
    stock, calls = modeling_llama.eager_attention_forward, []

    def scaled(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return stock(module, 0.5 * query, key, value, *args, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", scaled)
    expected = logits(twin, batch)
    y = logits(model, batch)
    assert len(calls) == 4
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)


def test_an_attention_of_transformers_that_was_replaced_after_the_injection_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, twin = (build("llama") for _ in range(2))
    batch = inputs("llama")
    report = inject_optimized_kernels(model, attention="_native_math", config=ALONE)
    logits(model, batch)
    stock = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def scaled(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return stock(module, 0.5 * query, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", scaled)
    assert torch.equal(logits(model, batch), logits(twin, batch))
    assert report.calls()[""]["stock_reasons"] == {"the stock attention was replaced after the injection": 2}


def test_an_attention_of_diffusers_that_was_replaced_after_the_injection_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, twin = tiny_flux(), tiny_flux()
    report = inject_optimized_kernels(model, attention="_native_math", config=ALONE)
    flux_output(model)
    name, stock = _AttentionBackendRegistry.get_active_backend()

    def scaled(query: Tensor, **kwargs: Any) -> Tensor:
        result: Tensor = stock(query=0.5 * query, **kwargs)
        return result

    monkeypatch.setitem(_AttentionBackendRegistry._backends, name, scaled)
    assert torch.equal(flux_output(model), flux_output(twin))
    assert report.calls()[""]["stock_reasons"] == {"the stock attention was replaced after the injection": 2}
