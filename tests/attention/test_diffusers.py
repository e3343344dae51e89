"""Routes in diffusers' models: same results, nothing global touched, everything given back."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from diffusers import LTXVideoTransformer3DModel
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, attention_backend
from torch import Tensor

import diffkern
from diffkern import InjectionError, StrictModeError, inject_optimized_kernels
from tests.injection.models import ltx_inputs, tiny_ltx
from tests.pipelines.tiny import build, run

Model = LTXVideoTransformer3DModel


@pytest.fixture
def model() -> Model:
    return tiny_ltx()


def output(model: Any, **options: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(**ltx_inputs(**options))[0]
    return result


def backends(model: Model) -> list[object]:
    """What each processor carries itself, missing ones included."""
    return [vars(processor).get("_attention_backend", "missing") for processor in model.attn_processors.values()]


@pytest.mark.parametrize("wish", ["_native_math", "_native_flash", "native", "flex", "auto"])
def test_a_model_computes_the_same(wish: str, model: Model) -> None:
    stock = output(model)
    report = inject_optimized_kernels(model, attention=wish)
    site = next(site for site in report.patched if site.op == "attention")
    assert (site.path, site.provider) == ("", wish)
    torch.testing.assert_close(output(model), stock, rtol=1e-4, atol=1e-4)
    calls = report.calls()[""]
    assert calls["fused"] + calls["stock"] == 4  # two blocks, each with itself and with the text
    if wish.startswith("_native"):
        assert calls["fused"] == 4 and all(m.passed for m in site.measurements) and len(site.measurements) == 2
    if wish == "flex":
        assert calls["stock_reasons"] == {"flex applies no mask": 2}
    if wish == "auto":
        assert "fastest by measurement" in site.reason
    report.restore()
    assert torch.equal(output(model), stock)


def test_restore_gives_back_what_each_processor_had(model: Model) -> None:
    processors = list(model.attn_processors.values())
    processors[0]._attention_backend = AttentionBackendName._NATIVE_MATH
    processors[1]._attention_backend = None
    before = backends(model)
    assert before[2:] == ["missing", "missing"]
    report = inject_optimized_kernels(model, attention="_native_flash")
    assert not set(map(str, backends(model))) & set(map(str, before))
    output(model)
    report.restore()
    assert backends(model) == before


def test_the_backend_of_the_process_stays(model: Model) -> None:
    """``set_attention_backend`` sets it for every model, and ``reset_attention_backend`` leaves it set."""
    other, before = tiny_ltx(), _AttentionBackendRegistry.get_active_backend()
    with inject_and_restore(model, "_native_math"):
        assert _AttentionBackendRegistry.get_active_backend() == before
        assert backends(other) == ["missing"] * 4
    assert _AttentionBackendRegistry.get_active_backend() == before


def inject_and_restore(model: Model, wish: str) -> Any:
    return diffkern.optimized(model, attention=wish)


def test_what_a_user_sets_afterwards_is_kept(model: Model) -> None:
    report = inject_optimized_kernels(model, attention="_native_math")
    for processor in model.attn_processors.values():
        processor._attention_backend = AttentionBackendName._NATIVE_FLASH
    report.restore()
    assert backends(model) == [AttentionBackendName._NATIVE_FLASH] * 4


def test_the_fallback_is_the_backend_of_the_moment(model: Model, kernel: str) -> None:
    """Calls that the route declines go where a processor without one would send them at that time."""
    stock = output(model)
    report = inject_optimized_kernels(model, attention=f"{kernel}:bare")
    with attention_backend("_native_math"):
        torch.testing.assert_close(output(model), stock, rtol=1e-4, atol=1e-4)
    assert report.calls()[""]["stock_reasons"] == {f"{kernel}:bare applies no mask": 2}


def test_copies_are_routed_and_restored_on_their_own(model: Model) -> None:
    stock = output(model)
    report = inject_optimized_kernels(model, attention="_native_math")
    duplicate = copy.deepcopy(model)
    routed = output(model)
    assert torch.equal(output(duplicate), routed)
    assert diffkern.restore(duplicate) == len(report.patched)
    assert torch.equal(output(duplicate), stock) and torch.equal(output(model), routed)
    again = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(output(again), stock, rtol=1e-4, atol=1e-4)


def test_a_second_injection_leaves_the_first(model: Model) -> None:
    first = inject_optimized_kernels(model, attention="_native_math")
    second = inject_optimized_kernels(model, attention="_native_flash")
    assert {site.reason for site in second.skipped if site.op == "attention"} == {"already patched by diffkern"}
    assert second.restore() == 0
    assert first.calls()[""]["fused"] == 0
    output(model)
    assert first.calls()[""]["fused"] == 4


def test_compiled_without_a_break(model: Model) -> None:
    inject_optimized_kernels(model, attention="_native_math")
    eager = output(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(output(compiled), eager)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    output(compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    torch._dynamo.reset()


def test_a_graph_takes_the_choice_of_earlier_calls(model: Model) -> None:
    """Before any call there is none, and the stock attention is traced."""
    stock = output(model)
    inject_optimized_kernels(model, attention="_native_math", config={"*": "eager"})
    torch._dynamo.reset()
    torch.testing.assert_close(
        output(torch.compile(model, fullgraph=True, backend="aot_eager")), stock, rtol=1e-4, atol=1e-4
    )
    torch._dynamo.reset()


def test_strict(model: Model, kernel: str) -> None:
    with pytest.raises(InjectionError, match="flash: needs the package flash_attn"):
        inject_optimized_kernels(model, attention="flash", strict=True)
    assert backends(model) == ["missing"] * 4
    inject_optimized_kernels(model, attention=f"{kernel}:bare", strict=True)
    with pytest.raises(StrictModeError, match="applies no mask"):
        output(model)


def test_a_backend_that_is_not_here_is_a_failure_with_a_reason(model: Model) -> None:
    report = inject_optimized_kernels(
        model, attention="_native_cudnn" if not torch.cuda.is_available() else "_native_npu"
    )
    (failed,) = report.failed
    assert failed.op == "attention" and "only, and the model on" in failed.reason
    assert backends(model) == ["missing"] * 4


def test_a_plan_changes_nothing(model: Model) -> None:
    report = diffkern.plan(model, attention="_native_math")
    assert [site.op for site in report.patched].count("attention") == 1
    assert backends(model) == ["missing"] * 4


def test_nothing_stays_if_an_injection_fails_half_way(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffkern.attention import in_diffusers

    def fail(*arguments: object) -> None:
        raise RuntimeError("stop")

    monkeypatch.setattr(in_diffusers, "_register", fail)
    stock = output(model)
    with pytest.raises(RuntimeError, match="stop"):
        inject_optimized_kernels(model, attention="_native_math")
    assert torch.equal(output(model), stock) and backends(model) == ["missing"] * 4


def test_an_unknown_name_is_a_mistake_also_where_nothing_can_be_routed() -> None:
    with pytest.raises(ValueError, match="unknown attention backend 'flsh'"):
        inject_optimized_kernels(torch.nn.LayerNorm(8), attention="flsh")
    for wish, said in (("Auto", "did you mean 'auto'"), (True, "unknown attention backend True: choose one of")):
        with pytest.raises(ValueError, match=said):
            inject_optimized_kernels(torch.nn.LayerNorm(8), attention=wish)  # type: ignore[arg-type]
    report = inject_optimized_kernels(torch.nn.LayerNorm(8), attention="native")
    assert "attention='native': no model here lets its attention be chosen" in report.notes


@pytest.mark.parametrize("name", ["flux", "wan", "qwenimage", "hunyuan_video"])
def test_pipelines(name: str) -> None:
    """Masks of several forms, joint and cross attention, image and text encoders beside."""
    pipe, call = build(name)
    stock = run(pipe, call)
    report = inject_optimized_kernels(pipe, attention="_native_math")
    torch.testing.assert_close(run(pipe, call), stock, rtol=1e-2, atol=2e-3)
    calls = report.calls()["transformer"]
    assert calls["fused"] > 0 and calls["stock"] == 0
    assert report.restore() == len(report.patched)
    assert torch.equal(run(pipe, call), stock)


def test_processors_that_ask_no_dispatcher_are_left_alone() -> None:
    pipe, _ = build("sd15")
    report = inject_optimized_kernels(pipe, attention="_native_math", components=["unet"])
    reasons = {site.reason for site in report.skipped if site.op == "attention"}
    assert reasons == {"its AttnProcessor2_0 calls PyTorch's attention itself, and asks no dispatcher"}
    assert not [site for site in report.patched if site.op == "attention"]


def test_context_parallel_calls_run_as_before(model: Model) -> None:
    """A route knows the tokens of this process alone; the dispatcher's own backends know the ring."""
    report = inject_optimized_kernels(model, attention="_native_math")
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    backend = backends(model)[0]
    q = torch.randn(1, 4, 2, 8)

    class Configuration:
        context_parallel_config = None

    with pytest.raises(AttributeError):  # what the stock backend makes of this configuration
        dispatch_attention_fn(q, q, q, backend=backend, parallel_config=Configuration())  # type: ignore[arg-type]
    assert report.calls()[""]["stock_reasons"] == {"the call has a parallel_config": 1}
