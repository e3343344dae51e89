"""The headline of a report says what the model computes now: its contract, what ran fused, what ran stock and why."""

from __future__ import annotations

import copy
import json
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diffkern import inject_optimized_kernels, plan, restore, use_provider
from diffkern.providers import registry
from diffkern.providers.compiled import PROVIDER as COMPILED
from tests.injection.models import ltx_inputs, run, tiny_ltx


def headline(report: object) -> str:
    return " ".join(re.split(r"\n(?:gain:|next:|state) ", str(report))[0].split())


@pytest.fixture
def nothing_but_pytorch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As after ``pip install`` on a machine without a compiler and without a GPU."""
    monkeypatch.setenv("DIFFKERN_KERNELS", str(tmp_path))
    COMPILED.reset()
    registry.reset()
    yield
    monkeypatch.undo()
    COMPILED.reset()
    registry.reset()


def test_before_a_run_and_after_it() -> None:
    model = tiny_ltx()
    assert headline(plan(model)).startswith("would patch 23 modules of LTXVideoTransformer3DModel (")
    report = inject_optimized_kernels(model)
    assert "patched 23 modules" in headline(report) and "not run yet" in headline(report)
    run(model)
    assert "10 ran fused (" in headline(report) and "13 not called themselves" in headline(report)
    assert "not run yet" not in headline(report)
    assert "at transformer_blocks.*; calls so far: 8 fused" in " ".join(str(report).split())
    assert json.loads(report.to_json())["summary"] == report.summary()
    for record in (copy.deepcopy(report), pickle.loads(pickle.dumps(report))):
        assert record.summary() == report.summary() and record.calls() == report.calls()
        assert record.restore() == 0
    assert report.restore() == 23
    assert headline(report) == "restored: all 23 modules of LTXVideoTransformer3DModel run stock again"


def test_a_partial_restore_shows() -> None:
    model = tiny_ltx()
    report = inject_optimized_kernels(model)
    restore(model.transformer_blocks[0])
    gone = len(report.restored)
    assert gone == 9 and f"patched {23 - gone} modules" in headline(report) and f"{gone} restored" in headline(report)
    assert len(report.patched) == 23 and len(report.active) == 23 - gone


def test_a_model_in_which_nothing_can_run_fused_shows_after_a_run() -> None:
    model = nn.Sequential(nn.LayerNorm(16), nn.RMSNorm(16)).double()
    report = inject_optimized_kernels(model)
    model(torch.randn(3, 16, dtype=torch.float64))
    assert ": nothing ran fused, 2 ran stock (the input is float64; " in headline(report)
    assert "(2 by compiled)" not in headline(report)
    assert str(report).count("ran stock 1x: note 1") == 2 and "note 1: the input is float64" in str(report)
    assert report.explain("1").endswith("1 calls ran stock: " + next(iter(report.calls()["1"]["stock_reasons"])) + ".")


def test_a_model_under_autocast_shows_after_a_run() -> None:
    model = nn.Sequential(nn.LayerNorm(16))
    report = inject_optimized_kernels(model)
    x = torch.randn(3, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x)
    assert "nothing ran fused, 1 ran stock (autocast is on for cpu" in headline(report)
    with torch.no_grad():
        model(x)
    assert "1 ran fused (1 by compiled), 1 of them stock at times (autocast is on for cpu" in headline(report)


def test_a_graph_without_a_gpu_shows_after_a_run() -> None:
    model = tiny_ltx(layers=1)
    report = inject_optimized_kernels(model, cuda_graph=True)
    run(model)
    assert "1 ran stock (its inputs are not all on one GPU)" in headline(report)


def test_compiled_calls_are_said_to_be_uncounted() -> None:
    model = nn.Sequential(nn.LayerNorm(16))
    report = inject_optimized_kernels(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        compiled(torch.randn(3, 16))
    assert "run by torch.compile, which counts no calls" in headline(report) and "not run yet" not in headline(report)


def test_another_contract_over_patches_is_refused_and_changes_nothing() -> None:
    """Otherwise a report would say "exact" of a model that computes "fast"."""
    model, x = tiny_ltx(), ltx_inputs()
    first = inject_optimized_kernels(model)
    fused = run(model)
    for over in ({}, {"config": {"*": None}}, {"cuda_graph": True}):
        for call in (inject_optimized_kernels, plan):
            with pytest.raises(ValueError, match=r"already patched with numerics='fast': call restore\(\) first"):
                call(model, numerics="exact", **over)
    with pytest.raises(ValueError, match=r"numerics='fp8', but 23 modules"):
        inject_optimized_kernels(model, numerics="fp8")
    with torch.no_grad():
        assert torch.equal(model(**x)[0], fused)
    assert first.restore() == 23
    assert inject_optimized_kernels(model, numerics="exact").patched


def test_parts_may_be_injected_one_after_the_other() -> None:
    model = tiny_ltx()
    inject_optimized_kernels(model.transformer_blocks[0])
    report = inject_optimized_kernels(model)
    assert report.already == 9 and "patched 14 more modules" in headline(report)
    assert headline(report).endswith("9 were patched before: restore() first to change them; numerics 'fast'")


def test_what_was_not_verified_is_said() -> None:
    report = inject_optimized_kernels(tiny_ltx(layers=1), verify=False)
    assert headline(report).endswith("; numerics 'fast', not verified")


def test_nothing_to_patch_says_what_is_looked_for() -> None:
    text = headline(inject_optimized_kernels(nn.Linear(4, 4)))
    assert text.startswith("patched 0 modules of Linear") and text.endswith("it runs stock")
    assert "RMS and layer norms" in text and "diffusers and transformers" in text


def test_fp8_without_a_gpu_that_has_it_is_said_first() -> None:
    text = headline(inject_optimized_kernels(tiny_ltx(layers=1), numerics="fp8"))
    assert text.startswith("patched 0 modules") and "compute capability 8.9" in text and text.endswith("it runs stock")


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_graphs_are_forced_forbidden_or_decided_by_time(value: Any) -> None:
    with pytest.raises(TypeError, match=f"cuda_graph={value!r}: expected True, False or 'auto'"):
        inject_optimized_kernels(nn.LayerNorm(4), cuda_graph=value)
    for wrong in (0, -1.5, True, "1GB"):
        with pytest.raises(ValueError, match=f"graph_memory={wrong!r}: expected GiB"):
            inject_optimized_kernels(nn.LayerNorm(4), graph_memory=wrong)


@pytest.mark.parametrize("name", ["verify", "strict", "dry_run"])
def test_switches_are_true_or_false(name: str) -> None:
    model = tiny_ltx(layers=1)
    before = dict(vars(model.norm_out))
    for value in ("yes", 1, None):
        with pytest.raises(TypeError, match=f"{name}={value!r}: expected True or False"):
            inject_optimized_kernels(model, **{name: value})
    assert vars(model.norm_out) == before


def test_plain_pytorch_replaces_no_pytorch(nothing_but_pytorch: None) -> None:
    model = tiny_ltx()
    stock = run(model)
    report = inject_optimized_kernels(model)
    assert {site.op for site in report.patched} == {"caption", "ltx_rope", "asked_once"}, (
        "those keep what they computed"
    )
    assert "22 stay stock: only plain PyTorch could serve it" in headline(report)
    assert "run `diffkern build --cpu`" in headline(report)
    assert torch.equal(run(model), stock)
    report = inject_optimized_kernels(nn.Sequential(nn.LayerNorm(16)))
    text = headline(report)
    assert text.startswith("patched 0 modules") and "run `diffkern build --cpu`" in text and text.endswith("runs stock")


def test_a_missing_provider_is_said_to_be_missing_and_no_proof_to_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    registry.reset()
    try:
        report = inject_optimized_kernels(tiny_ltx(), config={"*": "triton"})
    finally:
        registry.reset()
    said = headline(report)
    assert "22 stay stock: triton: Triton is not installed" in said and "pip install triton" in said
    assert "failed" not in str(report)
    assert "is served by no provider and runs stock" in report.explain("norm_out")


def test_plain_pytorch_serves_whoever_asks_for_it(nothing_but_pytorch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def provider_of(config: dict[str, str] | None = None) -> list[str | None]:
        model = nn.Sequential(nn.LayerNorm(16))
        report = inject_optimized_kernels(model, config=config)
        model(torch.randn(2, 16))
        assert all(count["fused"] for count in report.calls().values())
        return [site.provider for site in report.patched]

    assert provider_of({"layer_norm": "eager"}) == ["eager"]
    with use_provider("eager"):
        assert provider_of() == ["eager"]
    monkeypatch.setenv("DIFFKERN_PROVIDER", "eager")
    registry.reset()
    assert provider_of() == ["eager"]


def test_plain_pytorch_is_no_choice_at_first_use_either() -> None:
    """A module that was injected where kernels are, and is called where they are not."""
    model = nn.Sequential(nn.LayerNorm(16))
    report = inject_optimized_kernels(model)
    (site,) = report.patched
    site._state.proven.clear()
    site._state.fusion = type(site._state.fusion)(site._state.fusion.semantics)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(COMPILED), "unavailable_reason", lambda self, device: "not built for cpu")
        registry.reset()
        model(torch.randn(2, 16))
    registry.reset()
    assert "only plain PyTorch could serve it" in next(iter(report.calls()["0"]["stock_reasons"]))
