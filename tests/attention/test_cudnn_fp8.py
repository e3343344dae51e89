"""Attention on e4m3: its numbers in plain PyTorch, when it steps aside, and that it is never chosen unasked."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from diffkern import inject_optimized_kernels
from diffkern.attention import BACKENDS, AttentionCall, Route, accuracy, cudnn_fp8
from diffkern.attention import route as routes
from diffkern.hub.policy import Policy
from tests.injection.models import ltx_inputs, tiny_ltx
from tests.ops.test_attention_fp8 import unrotated

Make = Callable[..., AttentionCall]

stock = BACKENDS["native"].compute

#: The backend on the CPU, where its op computes the same numbers in plain PyTorch.
HERE = replace(
    BACKENDS["cudnn_fp8"],
    load=lambda: cudnn_fp8.attend,
    device_types=None,
    capability=None,
    package="",
    timed=False,  # it would not gain
)


@pytest.fixture
def call(make_call: Make) -> AttentionCall:
    return make_call(batch=1, queries=200, keys=300, head_dim=128, dtype=torch.bfloat16)


def error_of(call: AttentionCall) -> float:
    with torch.no_grad():
        return accuracy.distance(cudnn_fp8.attend(call), accuracy.reference(call))


def test_random_calls_keep_the_stated_error(call: AttentionCall) -> None:
    assert 0.02 < error_of(call) < 0.07 < HERE.max_error
    assert error_of(replace(call, scale=0.05)) < 0.07


def test_what_all_keys_have_in_common_costs_no_digits(call: AttentionCall) -> None:
    shift = 8 * torch.randn(128, generator=torch.Generator().manual_seed(1)).to(call.key.dtype)
    assert error_of(replace(call, key=call.key + shift)) < 0.08


def test_what_all_values_have_in_common_costs_no_digits(call: AttentionCall) -> None:
    shift = 8 * torch.randn(128, generator=torch.Generator().manual_seed(1)).to(call.value.dtype)
    assert error_of(replace(call, value=call.value + shift)) < 0.004


def test_small_channels_of_values_are_as_exact_as_large_ones(call: AttentionCall) -> None:
    factors = torch.logspace(-6, 3, 128)
    result = cudnn_fp8.attend(replace(call, value=(call.value * factors).to(call.value.dtype)))
    exact = accuracy.reference(replace(call, value=(call.value * factors).to(call.value.dtype)))
    assert accuracy.distance(result[..., :8], exact[..., :8]) < 0.07


def test_a_query_that_is_not_finite_reaches_no_other(call: AttentionCall) -> None:
    query = call.query.clone()
    query[0, 3, 1], query[0, 5, 2, 7] = torch.nan, torch.inf
    y, plain = cudnn_fp8.attend(replace(call, query=query)), cudnn_fp8.attend(call)
    assert y[0, 3, 1].isnan().all() and y[0, 5, 2].isnan().all()
    finite = y.isfinite().all(-1)
    assert finite.sum() == finite.numel() - 2
    assert accuracy.distance(y[finite], plain[finite].double()) < 0.05


def test_a_route_serves_within_the_stated_error_and_steps_aside_beyond(call: AttentionCall) -> None:
    route = Route([HERE])
    with torch.no_grad():
        route(call, stock)
        assert route.fused_calls == 1
        sharp, route = replace(call, query=8 * call.query, key=2 * call.key), Route([HERE])
        assert torch.equal(route(sharp, stock), stock(sharp))
    assert route.fused_calls == 0
    assert "and states one of up to 0.1" in next(iter(route.stock_calls))


def test_values_that_do_not_fit_unrotated_queries_and_keys_are_left_to_the_call_as_it_is_written() -> None:
    x, value = unrotated("cpu", (20, 30), 128)
    query, key = (side.bfloat16() for side in x.rotated())
    route = Route([HERE])
    with torch.no_grad():
        assert route.attend_unrotated(x, value, None) is None  # no such call was tried
        for dtype in (torch.bfloat16, torch.float16):
            route(AttentionCall(query.to(dtype), key.to(dtype), value.to(dtype)), stock)
        assert route.attend_unrotated(x, value.half(), None) is None
        assert route.attend_unrotated(x, value[:, 1:], None) is None
        y = route.attend_unrotated(x, value, None)
    assert y is not None and torch.equal(y, cudnn_fp8.attend_unrotated(x, value, None))


def gains_from(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the backend take half of the time where there are that many keys, and twice the time elsewhere."""

    def seconds(compute: object, call: AttentionCall) -> float:
        return 2.0 if (compute is stock) == (call.key.shape[1] >= keys) else 1.0

    monkeypatch.setenv("DIFFKERN_CHOICES", "0")
    monkeypatch.setattr(routes, "seconds", seconds)


def test_a_compiled_graph_takes_the_choice_for_images_and_for_texts(
    make_call: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both differ in their number of keys alone, and the text comes last."""
    gains_from(1024, monkeypatch)
    images = make_call(batch=1, queries=9, keys=1024, heads=1, kv_heads=1, head_dim=128, dtype=torch.bfloat16)
    text = replace(images, key=images.key[:, :20], value=images.value[:, :20])
    route = Route([replace(HERE, timed=True)])

    def compute(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return route(AttentionCall(query, key, value), stock)

    with torch.no_grad():
        for call in (images, text):
            route(call, stock)
        compiled = torch.compile(compute, fullgraph=True, backend="eager")
        assert torch.equal(compiled(images.query, images.key, images.value), cudnn_fp8.attend(images))
        assert torch.equal(compiled(text.query, text.key, text.value), stock(text))


def test_it_serves_only_where_it_gains(call: AttentionCall, monkeypatch: pytest.MonkeyPatch) -> None:
    assert BACKENDS["cudnn_fp8"].timed
    gains_from(300, monkeypatch)
    short = replace(call, key=call.key[:, :9], value=call.value[:, :9])

    route = Route([replace(HERE, timed=True)], strict=True)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(route(call, stock), cudnn_fp8.attend(call))
            assert torch.equal(route(short, stock), stock(short))
        assert route.fused_calls == 2 and dict(route.stock_calls) == {"measured to be the best": 2}
        # Each length is compared with float64 by itself, and the reason of a refusal is said.
        sharp = replace(short, query=8 * short.query, key=8 * short.key)
        route = Route([replace(HERE, timed=True)])
        route(call, stock)
        route(sharp, stock)
        assert "and states one of up to 0.1" in next(iter(route.stock_calls))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"head_dim": 64}, "takes heads of 128 only, not 64"),
        ({"mask": "bool"}, "applies no mask"),
        ({"causal": True, "queries": 12}, "has no causal mask"),
        ({"dropout": 0.1}, "has no dropout"),
        ({"gradients": True}, "has no backward"),
        ({"dtype": torch.float32}, "takes bfloat16 and float16 only, not float32"),
    ],
    ids=str,
)
def test_what_it_cannot_do_is_said(arguments: dict[str, object], reason: str, make_call: Make) -> None:
    signature = make_call(**{"head_dim": 128, "dtype": torch.bfloat16, **arguments}).signature()
    assert HERE.refusal(signature) == reason


def test_values_of_another_size_are_refused(call: AttentionCall) -> None:
    signature = replace(call.signature(), value_dim=64)
    assert HERE.refusal(signature) == "takes heads of 128 only, not 64"


def test_auto_measures_it_only_if_it_is_named(call: AttentionCall, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffkern.injection import attention

    monkeypatch.setitem(BACKENDS, "cudnn_fp8", HERE)
    model = tiny_ltx()
    for wish, named in (("auto", False), (("auto", "cudnn_fp8"), True), ("cudnn_fp8", True)):
        report = inject_optimized_kernels(model, attention=wish, config={"*": "eager"}, dry_run=True)
        site = next(site for site in report.patched if site.op == attention.OP)
        assert ("cudnn_fp8" in site.provider) == named, site
    assert HERE not in attention._backends("auto", torch.device("cpu"), Policy())


@pytest.mark.skipif(BACKENDS["cudnn_fp8"].missing() is None, reason="nvidia-cudnn-frontend is installed")
def test_a_missing_package_names_its_extra_and_the_model_runs_as_before() -> None:
    model, inputs = tiny_ltx(), ltx_inputs()
    with torch.no_grad():
        expected = model(**inputs)[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = inject_optimized_kernels(model, attention="cudnn_fp8", config={"*": "eager"})
        assert "pip install 'diffkern[cudnn]'" in str([site.reason for site in report.failed])
        report.restore()
        assert torch.equal(model(**inputs)[0], expected)


def test_an_empty_choice_is_an_error() -> None:
    with pytest.raises(ValueError, match="names no backend"):
        inject_optimized_kernels(tiny_ltx(), attention=())


def test_graphs_hold_one_op(call: AttentionCall) -> None:
    def compute(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return HERE.compute(AttentionCall(query, key, value))

    with torch.no_grad():
        compiled = torch.compile(compute, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(call.query, call.key, call.value), cudnn_fp8.attend(call))


def test_plans_are_kept_for_a_bounded_number_of_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[torch.Size] = []

    def build(cudnn: object, handle: object, query: torch.Size, key: torch.Size, scale: float) -> cudnn_fp8._Plan:
        built.append(query)
        return cudnn_fp8._Plan(None, 0)

    monkeypatch.setattr(cudnn_fp8, "_build", build)
    monkeypatch.setattr(cudnn_fp8, "_plans", type(cudnn_fp8._plans)())

    def plan(length: int) -> cudnn_fp8._Plan:
        shape = torch.Size((1, length, 2, 128))
        return cudnn_fp8._plan(None, None, torch.device("cuda", 0), shape, shape, 0.1)

    for length in range(cudnn_fp8.PLANS):
        plan(length)
    plan(0)
    assert len(built) == cudnn_fp8.PLANS
    plan(cudnn_fp8.PLANS)
    assert len(cudnn_fp8._plans) == cudnn_fp8.PLANS
    plan(0)  # used lately, so another one had to go
    assert len(built) == cudnn_fp8.PLANS + 1
    captured = plan(2)
    captured.captured = True
    for length in range(3, 3 + 2 * cudnn_fp8.PLANS):
        plan(length)
    assert plan(2) is captured and len(cudnn_fp8._plans) == cudnn_fp8.PLANS + 1
