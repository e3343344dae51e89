"""Attention from a kernel: which function, what it can do, and what is said if it cannot be had."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from diffkern import InjectionError, inject_optimized_kernels
from diffkern.attention import AttentionCall, Backend, UnavailableError, accuracy, find_backend
from tests.injection.models import ltx_inputs, tiny_ltx

Make = Callable[..., AttentionCall]

CPU = torch.device("cpu")


def output(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(**ltx_inputs())[0]
    return result


def properties(backend: Backend) -> dict[str, object]:
    return {name: getattr(backend, name) for name in ("masks", "causal", "dropout", "scale")}


def test_what_a_function_can_do_is_read_off_its_parameters(kernel: str) -> None:
    none, all_kinds = frozenset({"none"}), frozenset({"none", "bool", "additive"})
    assert properties(find_backend(kernel, CPU)) == {"masks": none, "causal": True, "dropout": True, "scale": True}
    assert properties(find_backend(f"{kernel}:bare", CPU)) == {
        "masks": none,
        "causal": False,
        "dropout": False,
        "scale": False,
    }
    pytorch = find_backend(f"{kernel}:scaled_dot_product_attention", CPU)
    assert properties(pytorch) == {"masks": all_kinds, "causal": True, "dropout": True, "scale": True}


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("flash_attn_func", {"causal": True, "queries": 12, "scale": 0.3}),
        ("bare", {"kv_heads": 1}),
        ("scaled_dot_product_attention", {"mask": "bool", "kv_heads": 4}),
    ],
)
def test_both_layouts_are_right(function: str, arguments: dict[str, object], kernel: str, make_call: Make) -> None:
    backend = find_backend(f"{kernel}:{function}", CPU)
    assert accuracy.errors(make_call(**arguments), (backend.compute,))[0] < 1e-6


def test_a_scale_that_is_the_usual_one_needs_no_parameter(kernel: str, make_call: Make) -> None:
    backend, call = find_backend(f"{kernel}:bare", CPU), make_call()
    assert backend.refusal(replace(call, scale=8**-0.5).signature()) is None
    assert backend.refusal(replace(call, scale=0.3).signature()) == "takes no scale"


def test_a_model_runs_on_it(kernel: str) -> None:
    model = tiny_ltx()
    stock = output(model)
    report = inject_optimized_kernels(model, attention=f"{kernel}:flash_attn_func")
    torch.testing.assert_close(output(model), stock, rtol=1e-4, atol=1e-4)
    calls = report.calls()[""]
    assert (calls["fused"], calls["stock"]) == (2, 2)  # the text has a mask
    assert list(calls["stock_reasons"]) == [f"{kernel}:flash_attn_func applies no mask"]


def test_a_kernel_that_means_something_else_is_refused_with_its_error(kernel: str) -> None:
    model = tiny_ltx()
    stock = output(model)
    report = inject_optimized_kernels(model, attention=f"{kernel}:wrong")
    with pytest.warns(UserWarning, match=r"wrong has an error of .* against the stock attention's"):
        y = output(model)
    torch.testing.assert_close(y, stock, rtol=1e-4, atol=1e-4)
    assert report.calls()[""]["fused"] == 0
    site = next(site for site in report.patched if site.op == "attention")
    assert [m.passed for m in site.measurements] == [False] and site.measurements[0].fused > 1e-4


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("{kernel}:nothing", "the kernel has no nothing: name one of its functions"),
        ("{kernel}:forward", "takes a module first, not queries, keys and values"),
        ("{kernel}/elsewhere", "is no directory"),
        ("diffkern-tests/no-such-kernel@v1:flash_attn_func", "cannot be"),
    ],
)
def test_a_kernel_that_cannot_be_had_is_a_reason(
    name: str, reason: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model, name = tiny_ltx(), name.format(kernel=kernel)
    stock = output(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = inject_optimized_kernels(model, attention=name)
    (failed,) = report.failed
    assert failed.op == "attention" and reason in failed.reason
    torch.testing.assert_close(output(model), stock, rtol=1e-4, atol=1e-4)
    with pytest.raises(InjectionError, match="strict injection refused"):
        inject_optimized_kernels(tiny_ltx(), attention=name, strict=True)


def test_without_the_kernels_package_there_is_a_reason(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.raises(UnavailableError, match="install 'kernels"):
        find_backend(kernel, CPU)


def test_the_switch_of_the_hub_counts(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USE_HUB_KERNELS", "OFF")
    with pytest.raises(UnavailableError, match="USE_HUB_KERNELS=OFF"):
        find_backend(kernel, CPU)


def test_a_reference_that_is_none_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="names no kernel"):
        inject_optimized_kernels(tiny_ltx(), attention="org/repo:name@v1")
