"""Several threads inject, run and restore one model: one set of patches, right counts, no exception."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from diffkern import inject_optimized_kernels, restore
from diffkern.cache import memory
from diffkern.injection.patching import patches
from diffkern.injection.state import LOCK
from diffkern.verify.counts import CallCounts
from tests.injection.models import ltx_inputs, run, tiny_ltx


@pytest.fixture(autouse=True)
def quick_switches() -> Iterator[None]:
    """Threads take turns every microsecond, so that what can interleave does."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def in_threads(*functions: Callable[[], None]) -> None:
    """Runs functions at once; raises the first error of any."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(functions))

    def guarded(function: Callable[[], None]) -> None:
        try:
            start.wait()
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def norms() -> nn.Sequential:
    return nn.Sequential(*[nn.LayerNorm(16) for _ in range(8)], *[nn.RMSNorm(16) for _ in range(8)])


def test_four_threads_that_inject_one_model_patch_it_once() -> None:
    model, reports = norms(), []
    in_threads(*[lambda: reports.append(inject_optimized_kernels(model))] * 4)
    assert sorted((len(report.patched), report.already) for report in reports) == [(0, 16)] * 3 + [(16, 0)]
    assert all(len(list(patches(norm))) == 1 for norm in model)
    assert sum("were patched before" in report.summary() for report in reports) == 3
    assert restore(model) == 16 and not any("forward" in vars(norm) for norm in model)


def test_threads_that_inject_and_restore_lose_no_patch_and_no_report() -> None:
    model, x = norms(), torch.randn(2, 16)
    with torch.no_grad():
        stock = model(x)
    patched: list[int] = []
    restored: list[int] = []

    def rounds() -> None:
        for _ in range(20):
            report = inject_optimized_kernels(model, verify=False)
            patched.append(len(report.patched))
            with torch.no_grad():
                model(x)
            restored.append(report.restore())

    in_threads(rounds, rounds, rounds)
    assert sum(patched) == sum(restored) > 0 and len(patched) == 60
    assert not any("_diffkern" in vars(norm) or "forward" in vars(norm) for norm in model)
    with torch.no_grad():
        assert torch.equal(model(x), stock)


def test_counts_of_calls_are_right_under_threads() -> None:
    counts = CallCounts()

    def add() -> None:
        for _ in range(20_000):
            counts.add_fused()
            counts.add_stock("a reason")
            counts.add_pieces(("ff",))

    in_threads(*[add] * 4)
    assert counts.fused_calls == 80_000
    assert dict(counts.stock_calls) == {"a reason": 80_000} and dict(counts.stock_pieces) == {"ff": 80_000}


def test_a_first_use_in_several_threads_is_proven_once() -> None:
    model = nn.Sequential(nn.LayerNorm(64))
    report = inject_optimized_kernels(model)
    model.half()
    model[0]._diffkern.proven.clear()
    arrived = threading.Barrier(5)

    def call() -> None:
        arrived.wait()
        model(torch.randn(4, 64).half())

    def hold() -> None:
        with LOCK:
            arrived.wait()
            time.sleep(0.3)  # in which all four find the call not proven

    in_threads(hold, *[call] * 4)
    assert report.calls()["0"]["fused"] == 4
    proofs = [proof.gradients for proof in report.patched[0].measurements if proof.dtype == "float16"]
    assert sorted(proofs) == [False, True]


def test_threads_with_different_inputs_compute_what_they_compute_alone() -> None:
    model, steps = tiny_ltx(), 6
    report = inject_optimized_kernels(model)
    cases = [{"seed": seed, "batch": 1 + seed % 2, "frames": 1 + seed} for seed in range(4)]
    expected = [run(model, **case) for case in cases]
    before = report.calls()["transformer_blocks.1"]["fused"]

    def calls(index: int) -> None:
        for _ in range(steps):
            assert torch.equal(run(model, **cases[index]), expected[index]), f"thread {index}"

    in_threads(*[lambda index=index: calls(index) for index in range(4)])
    assert report.calls()["transformer_blocks.1"]["fused"] == before + 4 * 4 * steps
    assert not report.calls()["transformer_blocks.1"]["stock"]


def test_tables_are_returned_that_were_checked_whatever_another_thread_keeps_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_ltx()
    inject_optimized_kernels(model)
    expected = run(model)
    cache = memory(model.rope)["tables"]
    kind, holds = type(cache.kept), type(cache.kept).holds

    def meanwhile(kept: Any, *given: Any) -> Any:
        found = holds(kept, *given)
        cache.kept = None  # as of a thread that calls with another grid
        return found

    monkeypatch.setattr(kind, "holds", meanwhile)
    assert torch.equal(run(model), expected) and cache.kept is None


def inject_run_and_restore(seconds: float) -> int:
    """Two threads inject, run and restore one model all the time; returns how many runs there were."""
    model, x = tiny_ltx(layers=1), ltx_inputs()
    stock = run(model)
    end, reports, runs = time.monotonic() + seconds, [], []

    def work() -> None:
        while time.monotonic() < end or not runs:
            report = inject_optimized_kernels(model, verify=False)
            reports.append(report)
            for _ in range(3):
                with torch.no_grad():
                    torch.testing.assert_close(model(**x)[0], stock, rtol=1e-4, atol=1e-5)
                runs.append(1)
            report.restore()

    in_threads(work, work)
    counts = [report.calls().get("transformer_blocks.0", {}) for report in reports]
    assert 0 < sum(count.get("fused", 0) for count in counts) <= 4 * len(runs)
    assert not any(count.get("stock") for count in counts)
    assert restore(model) == 0 and torch.equal(run(model), stock)
    return len(runs)


def test_a_model_that_is_run_while_others_inject_and_restore_it() -> None:
    assert inject_run_and_restore(seconds=2) >= 6
