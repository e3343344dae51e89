"""The proof of a site compares its op with the source in float64, whatever the source is."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from diffkern import KernelConfig, inject_optimized_kernels
from diffkern.rewrite import Rewriter, Rewritten
from tests.pipelines import tiny
from tests.rewrite.modules import SIZE, block, leaves, rewritten, written

NAMES = "x, scale, shift"


def test_a_site_whose_op_computes_something_else_runs_the_expression() -> None:
    module = block(NAMES, "return self.norm(x) * (1 + scale) + shift")
    found = rewritten(module)
    (site,) = found.sites
    site.plan = replace(site.plan, options={"scale_offset": 2.0})  # as if the match had read 2 + scale
    assert torch.equal(found.function(module, **leaves(NAMES)), module(**leaves(NAMES)))
    assert list(site.reasons.values()) == ["in float64 its op does not compute what the source says"]


def test_a_site_is_not_proven_while_proxies_trace() -> None:
    module, given = block(NAMES, "return self.norm(x) * (1 + scale) + shift"), leaves(NAMES)
    found = rewritten(module)
    with torch.no_grad():
        graph = make_fx(lambda x: found.function(module, **{**given, "x": x}))(given["x"])
        assert not found.sites[0].ways
        other = given["x"] * 2
        assert torch.equal(graph(other), module(**{**given, "x": other}))
        found.function(module, **given)
    assert found.sites[0].fused_calls == 1


def test_an_activation_that_the_source_does_not_name_is_found_by_the_proof() -> None:
    from diffusers.models.activations import GELU

    module = GELU(32, 32, approximate="tanh").eval().requires_grad_(False)
    found, x = rewritten(module), leaves("x")["x"]
    torch.testing.assert_close(found.function(module, x), module(x))
    (way,) = found.sites[0].ways.values()
    assert way is not None and way.options == {"approximate": "tanh"}


def test_the_reference_lifts_the_casts_inside_of_a_norm() -> None:
    from diffusers.models.normalization import RMSNorm

    from diffkern.rewrite.reference import CastsLifted, float64_twin

    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = RMSNorm(32, eps=1e-6)

    x = leaves("x")["x"].double()
    with CastsLifted():
        y = float64_twin(Holder(), [("norm",)]).norm(x)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert (y - expected).norm() <= 1e-14 * expected.norm()


_ACTIVATED = """
class Written(Block):
    def gelu(self, x):
        return F.gelu(x, approximate=self.mode)
    def forward(self, x):
        return self.gelu(self.proj(x))
"""


def _activated(*modes: str) -> list[nn.Module]:
    """Modules of one class that differ in a setting."""
    cls, modules = written(_ACTIVATED)["Written"], []
    for mode in modes:
        module = cls().eval().requires_grad_(False)
        module.mode = mode
        modules.append(module)
    return modules


def test_modules_that_differ_in_a_setting_that_a_method_reads_are_proven_apart() -> None:
    rewriter, x = Rewriter(), leaves("x")["x"]
    seen: list[Rewritten] = []
    for module in _activated("tanh", "none"):
        found = rewriter.rewrite(module)
        assert isinstance(found, Rewritten) and found not in seen
        seen.append(found)
        torch.testing.assert_close(found.function(module, x), module(x), rtol=0, atol=3e-6)
        assert [site.fused_calls for site in found.sites] == [1]


def test_a_setting_that_changes_after_the_injection_is_read_by_the_method() -> None:
    (module,), x = _activated("tanh"), leaves("x")["x"]
    found = rewritten(module)
    found.function(module, x)
    module.mode = "none"  # type: ignore[assignment]
    assert torch.equal(found.function(module, x), module(x))


def test_exact_results_are_laid_out_as_those_of_stock() -> None:
    module = block("r, y, gate", "return r + gate * y", torch.bfloat16)
    arguments = leaves("r, y, gate", torch.bfloat16)
    found = rewritten(module, "exact")
    rows = found.function(module, **arguments)
    assert rows.is_contiguous() and found.sites[0].fused_calls == 1  # a proof for rows says nothing of columns
    columns = {name: value.mT.contiguous().mT for name, value in arguments.items()}
    result, stock = found.function(module, **columns), module(**columns)
    assert torch.equal(result, stock) and result.stride() == stock.stride()


def test_exact_norms_are_the_bits_of_stock_in_many_rows() -> None:
    module = block("x, scale, shift", "return self.norm(x) * (1 + scale) + shift", torch.bfloat16)
    arguments = leaves("x, scale, shift", torch.bfloat16)
    found = rewritten(module, "exact")
    found.function(module, **arguments)
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        arguments["x"] = (0.4 + torch.randn(2, 640, SIZE, generator=generator)).bfloat16()
        assert torch.equal(found.function(module, **arguments), module(**arguments))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_exact_proof_for_few_numbers_sees_many(count: int) -> None:
    module = block("x, y, gate", "return (x.float() + gate * y.float()).type_as(x)", torch.bfloat16)
    arguments = leaves("x, y, gate", torch.bfloat16)
    found = rewritten(module, "exact")
    found.function(module, **{name: leaf[:1, :1, :count] for name, leaf in arguments.items()})
    assert torch.equal(found.function(module, **arguments), module(**arguments))


def test_what_has_no_site_is_read_once_for_all_modules_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    module = block("x", "return self.proj(x)")
    reason = Rewriter().rewrite(module)
    monkeypatch.setattr("diffkern.rewrite.rewriter.plan", None)  # a second reading would call it
    assert Rewriter().rewrite(copy.deepcopy(module)) == reason


@pytest.mark.parametrize(
    ("body", "dtype", "passed"),
    [
        ("return x + gate * y", torch.bfloat16, None),
        ("return (x.float() + gate * y.float()).type_as(x)", torch.bfloat16, None),
        ("return self.norm(x) * (1 + scale) + shift", torch.float32, None),
        ("return x + gate.float() * y", torch.bfloat16, torch.float32),
    ],
)
def test_the_dtype_of_a_result_is_passed_only_where_the_op_would_choose_another(
    body: str, dtype: torch.dtype, passed: torch.dtype | None
) -> None:
    names = "x, scale, shift, gate, y"
    module = block(names, body, dtype)
    found: Any = Rewriter().rewrite(module)
    with torch.no_grad():
        result, stock = found.function(module, **leaves(names, dtype)), module(**leaves(names, dtype))
    (way,) = found.sites[0].ways.values()
    assert found.sites[0].fused_calls == 1 and result.dtype == stock.dtype
    assert way.options.get("out_dtype") == passed


@pytest.mark.parametrize("name", ["flux", "cogvideox"])
def test_sites_are_proven_in_inference_mode_as_without_it(name: str) -> None:
    calls = []
    for mode in (torch.no_grad, torch.inference_mode):
        pipe, call = tiny.build(name)
        with mode():
            report = inject_optimized_kernels(pipe, config=KernelConfig(measure=False))
            pipe(**call)
        calls.append(report.calls())
    assert calls[0] == calls[1]
    assert sum(each["fused"] for each in calls[1].values()) > 40
