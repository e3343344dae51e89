"""Exported programs hold the stock model, in every mode, so that they load where there is no diffkern."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from diffkern import inject_optimized_kernels
from diffkern.attention import BACKENDS, AttentionCall, Route
from tests.injection.models import ltx_inputs, tiny_ltx

NOTE = "exported as stock"

#: Loads a program where diffkern cannot be imported, and compares what it computes.
LOADER = """
import sys
sys.modules["diffkern"] = None
import torch
inputs, expected = torch.load(sys.argv[2])
with torch.no_grad():
    (result,) = torch.export.load(sys.argv[1]).module()(**inputs)
assert torch.equal(result, expected), (result - expected).abs().max()
"""


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("ran_before", [False, True])
def test_both_modes_export_the_stock_model_and_say_so(strict: bool, ran_before: bool) -> None:
    model = nn.Sequential(nn.RMSNorm(32, eps=1e-6), nn.LayerNorm(32)).eval()
    x = torch.randn(4, 32)
    with torch.no_grad():
        stock = model(x)
        report = inject_optimized_kernels(model)
        if ran_before:
            model(x)
        with pytest.warns(UserWarning, match=NOTE):
            program = torch.export.export(model, (x,), strict=strict)
        assert not [node for node in program.graph.nodes if "diffkern" in str(node.target)]
        assert sum(NOTE in note for note in report.notes) == 1 and NOTE in str(report)
        assert torch.equal(program.module()(x), stock)
        model(x)
    assert [count["fused"] for count in report.calls().values()] == [1 + ran_before] * 2


def test_an_export_loads_in_a_process_without_diffkern(tmp_path: Path) -> None:
    model, inputs = tiny_ltx(layers=1), ltx_inputs(seed=3)
    with torch.no_grad():
        expected = model(**inputs)[0]
        inject_optimized_kernels(model, attention="native")
        with pytest.warns(UserWarning, match=NOTE):
            torch.export.save(torch.export.export(model, (), ltx_inputs()), tmp_path / "ltx.pt2")
    torch.save((inputs, expected), tmp_path / "values.pt")
    arguments = [sys.executable, "-c", LOADER, str(tmp_path / "ltx.pt2"), str(tmp_path / "values.pt")]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_jit_trace_holds_the_stock_model_and_says_so() -> None:
    model = nn.Sequential(nn.RMSNorm(32, eps=1e-6), nn.LayerNorm(32))
    x = torch.randn(4, 32)
    with torch.no_grad():
        stock = model(x)
        report = inject_optimized_kernels(model)
        with pytest.warns(UserWarning, match=NOTE):
            traced = torch.jit.trace(model, x)
        assert torch.equal(traced(x), stock)
    assert "diffkern" not in str(traced.inlined_graph) and sum(NOTE in note for note in report.notes) == 1


def test_attention_that_has_a_route_is_traced_as_stock() -> None:
    """Whatever backend a route chose for calls of a kind, a program may be loaded where there is none."""
    route, q = Route([BACKENDS["_native_math"]]), torch.randn(1, 6, 2, 8)

    def stock(call: AttentionCall) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (call.query, call.key, call.value))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    def attention(q: torch.Tensor) -> torch.Tensor:
        return route(AttentionCall(q, q, q, None, 0.0, False, None), stock)

    with torch.no_grad():
        attention(q)
        assert route.fused_calls == 1
        expected = stock(AttentionCall(q, q, q, None, 0.0, False, None))
        assert torch.equal(torch.jit.trace(attention, q, check_trace=False)(q), expected)
    assert route.fused_calls == 1 and not route.stock_calls
