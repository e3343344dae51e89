"""What a step counts that was to be captured, and could not be."""

from __future__ import annotations

import pytest
import torch

from diffkern import StrictModeError, inject_optimized_kernels
from diffkern.graph import ModuleSnapshot, steps
from diffkern.graph.capture import CaptureError
from diffkern.graph.steps import FIRST_CALL
from diffkern.injection import graph_fusion
from diffkern.injection.patching import patches
from tests.injection.models import run, tiny_ltx


@pytest.mark.parametrize("strict", [False, True])
def test_a_capture_that_fails_is_counted_as_the_stock_call_it_was(
    monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    """There is no capture on the CPU, so it always fails here, once the guards let a call through to it."""
    for guard in ("unfit_call", "unsafe"):
        monkeypatch.setattr(graph_fusion, guard, lambda *args: None)
    monkeypatch.setattr(ModuleSnapshot, "unfit", lambda self: None)
    monkeypatch.setattr(steps, "capture", raise_capture_error)
    model = tiny_ltx()
    stock = run(model)
    report = inject_optimized_kernels(model, cuda_graph=True, numerics="exact")
    next(patches(model)).strict = strict
    assert torch.equal(run(model), stock)
    if strict:
        with pytest.raises(StrictModeError, match="cannot run as a CUDA graph: it cannot be captured: no GPU"):
            run(model)
        return
    assert all(torch.equal(run(model), stock) for _ in range(3))
    count = report.calls()["(cuda_graph)" if "(cuda_graph)" in report.calls() else ""]
    assert count["fused"] == 0
    assert count["stock_reasons"] == {FIRST_CALL: 2, "cannot be captured: no GPU": 2}, "first a step, then its blocks"


def raise_capture_error(*args: object) -> None:
    raise CaptureError("no GPU")
