"""Every architecture end to end: injected runs are as accurate as stock ones, and restored ones are stock."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor

from diffkern import InjectionReport, inject_optimized_kernels
from diffkern.bench.measure import relative_error
from diffkern.rewrite import AllowedInStrict
from tests.pipelines.tiny import BUILDERS, build, in_float64, models, run

SEEDS = (0, 1, 2)

#: How much larger than the stock run's the error of an injected run may be.
ERROR_RATIO = 1.2
ERROR_SLACK = 1e-6


@dataclass(frozen=True)
class Experiment:
    """One pipeline, run stock, in float64, injected, and stock again, with each seed."""

    stock: list[Tensor]
    reference: list[Tensor]
    injected: list[Tensor]
    restored: Tensor
    report: InjectionReport
    calls: dict[str, dict[str, Any]]
    state_dict_keys: tuple[list[str], list[str], list[str]]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(scope="module", params=list(BUILDERS))
def experiment(request: pytest.FixtureRequest, dtype: torch.dtype, device: str) -> Experiment:
    pipe, call = build(request.param, dtype)
    pipe.to(device)
    stock = [run(pipe, call, seed) for seed in SEEDS]
    before = _state_dict_keys(pipe)
    reference_pipe = in_float64(pipe)
    reference = [run(reference_pipe, call, seed) for seed in SEEDS]
    report = inject_optimized_kernels(pipe)
    injected = [run(pipe, call, seed) for seed in SEEDS]
    during = _state_dict_keys(pipe)
    calls = report.calls()
    report.restore()
    return Experiment(
        stock,
        reference,
        injected,
        run(pipe, call, SEEDS[0]),
        report,
        calls,
        (before, during, _state_dict_keys(pipe)),
    )


def test_an_injected_run_gives_finite_results_of_the_stock_shape_and_dtype(experiment: Experiment) -> None:
    for injected, stock in zip(experiment.injected, experiment.stock, strict=True):
        assert injected.shape == stock.shape
        assert injected.dtype == stock.dtype
        assert injected.isfinite().all()


def test_an_injected_run_is_as_close_to_float64_as_the_stock_run(experiment: Experiment) -> None:
    stock = mean(map(relative_error, experiment.stock, experiment.reference))
    injected = mean(map(relative_error, experiment.injected, experiment.reference))
    assert injected <= ERROR_RATIO * stock + ERROR_SLACK


def test_the_denoiser_runs_fused_and_no_site_fails(experiment: Experiment) -> None:
    assert experiment.report.failed == []
    denoiser = {path: calls for path, calls in experiment.calls.items() if path.startswith(("transformer", "unet"))}
    assert sum(calls["fused"] for calls in denoiser.values()) > 0
    reasons = {reason for calls in denoiser.values() for reason in calls["stock_reasons"]}
    failures = {reason for reason in reasons if not isinstance(reason, AllowedInStrict)}
    assert all(reason.startswith("it has fewer than 4 rows") for reason in failures), (
        "all but pooled texts, of which there is one to a sample, and what lies apart, ran fused"
    )


def test_a_restored_run_is_bit_identical_to_the_stock_run(experiment: Experiment) -> None:
    assert torch.equal(experiment.restored, experiment.stock[0])


def test_state_dict_keys_never_change(experiment: Experiment) -> None:
    before, during, after = experiment.state_dict_keys
    assert before == during == after


def _state_dict_keys(pipe: Any) -> list[str]:
    return [f"{name}.{key}" for name, model in models(pipe).items() for key in model.state_dict()]
