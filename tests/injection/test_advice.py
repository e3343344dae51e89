"""The second lines of a report: what was gained, and what to do next."""

from __future__ import annotations

import copy

import pytest
import torch

from diffkern import KernelConfig, inject_optimized_kernels, plan
from diffkern.graph.timing import StepTime
from diffkern.injection.report import InjectionReport
from tests.injection.models import ltx_inputs, run, tiny_ltx
from tests.package.test_cli import invoke

HOST_BOUND, GPU_BOUND = StepTime(host=50.0, gpu=51.0), StepTime(host=20.0, gpu=100.0)


def test_what_to_do_next_follows_what_was_done() -> None:
    model = tiny_ltx()
    assert plan(model).next_step().startswith("inject, run, and print the report")
    report = inject_optimized_kernels(model)
    assert report.next_step().startswith("run it, and print the report again")
    run(model)
    assert report.next_step() == "diffkern bench pipeline compares whole calls with stock"
    assert f"next: {report.next_step()}" in str(report) and report.to_dict()["next"] == report.next_step()
    assert copy.deepcopy(report).gain() == report.gain() == ""
    report.restore()
    assert report.next_step() == "" and "next:" not in str(report)


def test_times_of_steps_are_the_gain_and_decide_what_is_next(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffkern.injection import report as reports

    model = tiny_ltx()
    report = inject_optimized_kernels(model)
    run(model)
    monkeypatch.setattr(reports, "_device", lambda sites: torch.device("cuda"))  # of the card that has these times
    monkeypatch.setattr(reports, "fp8_unavailable_reason", lambda device: None)
    report.steps["a step of transformer (1x8)"] = HOST_BOUND, StepTime(2.0, 40.0)
    assert report.gain() == "a step of transformer (1x8) takes 40.0 ms as a CUDA graph, 51.0 ms without (1.27x)"
    assert report.next_step() == "cuda_graph='auto' where the GPU waits for the host", "no graph site is in this report"
    report.steps["a step of transformer (1x8)"] = GPU_BOUND, None
    report.notes.append("component 'vae': not asked for")
    assert report.gain() == ""
    assert report.next_step().split("; or ") == [
        "compile_repeated_blocks(): the GPU is busy, and the compiler fuses what no rule does",
        "numerics='fp8', if its error is small enough for you",
        "cuda_graph='auto' where the GPU waits for the host",
        "the VAE too, by components=None",
    ]


@pytest.mark.parametrize("verdict", ["", "no gain"])
def test_sites_that_were_timed_and_stay_keep_their_costs(verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffkern.rewrite import verify

    monkeypatch.setattr(verify, "reason_without_gain", lambda *costs: verdict)  # whatever this machine's clock says
    model = tiny_ltx()
    report = inject_optimized_kernels(model, config=KernelConfig(measure=True))
    run(model)
    fusions = [site._state.fusion for site in report.active if site.how == "source"]  # type: ignore[union-attr]
    sites = [site for fusion in fusions for site in fusion._sites() if site.gains]
    assert sites and all((site.cost is None) == bool(verdict) for site in sites)
    assert not any(fusion.timed_sites for fusion in fusions), "times of a CPU say too little for a report"


def test_calls_of_clocks_and_proofs_are_not_counted() -> None:
    """The norm inside a fused site is called once where the site stays as it is written, else not at all."""
    model = tiny_ltx()
    report = inject_optimized_kernels(model, config=KernelConfig(measure=True))
    run(model)
    counts = report.calls()["norm_out"]
    assert counts["fused"] + counts["stock"] <= 1


def test_inspect_says_what_to_expect_of_a_card() -> None:
    said = " ".join(invoke("inspect", "sd3", "--card", "H100").output.split())
    assert "gain: on one H100, by bytes and operations and not measured: glue moves" in said
    assert InjectionReport("Model", "fast", expected="1.1x").gain() == "1.1x"


@pytest.mark.gpu
def test_a_card_times_the_sites_that_the_report_speaks_of() -> None:
    model = tiny_ltx().cuda()
    report = inject_optimized_kernels(model, config=KernelConfig(measure=True), cuda_graph=False)
    inputs = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in ltx_inputs().items()}
    with torch.no_grad():
        model(**inputs)
    assert report.gain() == "" or "as fast as they are written" in report.gain()
