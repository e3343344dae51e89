"""Where calls go: backends are tried, refused, chosen and counted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diffkern.attention import BACKENDS, AttentionCall, Backend, Route
from diffkern.attention import route as route_module
from diffkern.verify import choices

Make = Callable[..., AttentionCall]

stock = BACKENDS["native"].compute


def backend(compute: Callable[[AttentionCall], Tensor], name: str = "mine", **properties: object) -> Backend:
    return Backend(name, lambda: compute, **properties)  # type: ignore[arg-type]


def counting(compute: Callable[[AttentionCall], Tensor] = stock) -> tuple[Callable[[AttentionCall], Tensor], list[int]]:
    calls: list[int] = []

    def counted(call: AttentionCall) -> Tensor:
        calls.append(1)
        return compute(call)

    return counted, calls


def test_a_right_backend_serves_and_is_tried_once(make_call: Make) -> None:
    compute, calls = counting()
    route = Route([backend(compute)])
    call = make_call()
    first, second = route(call, stock), route(call, stock)
    assert torch.equal(first, stock(call)) and torch.equal(second, first)
    assert (route.fused_calls, sum(route.stock_calls.values()), len(calls)) == (
        2,
        0,
        5,
    )  # tried twice and on a short call
    assert [proof.reason for proof in route.measurements] == [""] and 0 < route.measurements[0].fused < 1e-6


def test_a_wrong_backend_is_refused_with_its_error(make_call: Make) -> None:
    route = Route([backend(lambda call: stock(replace(call, scale=0.36)))])
    call = make_call()
    assert torch.equal(route(call, stock), stock(call))
    assert list(route.stock_calls) == [f"mine {route.measurements[0].reason}"]
    assert "has an error of" in route.measurements[0].reason and route.measurements[0].fused > 1e-3


def test_wrong_gradients_are_refused_where_they_are_wanted(make_call: Make) -> None:
    def detached_value(call: AttentionCall) -> Tensor:
        return stock(replace(call, value=call.value.detach() + 0 * call.value))

    route = Route([backend(detached_value)])
    route(make_call(), stock)
    route(make_call(gradients=True), stock)
    assert route.fused_calls == 1
    assert "gradients: has an error" in next(iter(route.stock_calls))


@pytest.mark.parametrize(
    ("arguments", "properties", "reason"),
    [
        ({"mask": "bool"}, {"masks": frozenset({"none"})}, "applies no mask"),
        ({"mask": "additive"}, {"masks": frozenset({"none", "bool"})}, "applies no additive mask"),
        ({"dropout": 0.1}, {"dropout": False}, "has no dropout"),
        ({"causal": True}, {"causal": False}, "has no causal mask"),
        ({"head_dim": 40}, {"head_dims": frozenset({64})}, "takes heads of 64 only, not 40"),
    ],
)
def test_calls_it_cannot_serve_run_as_before(
    arguments: dict[str, object], properties: dict[str, object], reason: str, make_call: Make
) -> None:
    compute, calls = counting()
    route = Route([backend(compute, **properties)])
    call = make_call(**arguments)
    torch.manual_seed(3)
    y = route(call, stock)
    torch.manual_seed(3)
    assert torch.equal(y, stock(call)) and not calls
    assert dict(route.stock_calls) == {f"mine {reason}": 1}
    with pytest.raises(ValueError, match=reason):
        Route([backend(compute, **properties)], strict=True, error=ValueError)(call, stock)


def test_grouped_queries_are_served_by_a_backend_that_does_not_group(make_call: Make) -> None:
    def ungrouped(call: AttentionCall) -> Tensor:
        assert call.key.shape[2] == call.query.shape[2]
        return stock(call)

    route, call = Route([backend(ungrouped, grouped=False)]), make_call(kv_heads=2)
    torch.testing.assert_close(route(call, stock), stock(call))
    assert route.fused_calls == 1


def test_causal_masks_of_unequal_lengths_are_tried_apart(make_call: Make) -> None:
    """Some count positions from the last key, which is the same only for as many queries as keys."""

    def from_the_end(call: AttentionCall) -> Tensor:
        length, keys = call.query.shape[1], call.key.shape[1]
        visible = torch.ones(length, keys, dtype=torch.bool).tril(keys - length)
        return stock(replace(call, causal=False, mask=visible) if call.causal else call)

    route = Route([backend(from_the_end)])
    route(make_call(queries=9, keys=9, causal=True), stock)
    assert route.fused_calls == 1
    call = make_call(queries=9, keys=12, causal=True)
    assert torch.equal(route(call, stock), stock(call))
    assert route.fused_calls == 1


def test_a_backend_that_raises_is_refused_with_what_it_said(make_call: Make) -> None:
    def broken(call: AttentionCall) -> Tensor:
        raise RuntimeError("no kernel image is available")

    route = Route([backend(broken)])
    route(make_call(), stock)
    assert list(route.stock_calls) == ["mine failed: no kernel image is available"]


def test_a_lossy_backend_is_measured_and_not_judged(make_call: Make) -> None:
    rough = backend(lambda call: stock(replace(call, scale=0.36)), lossy="on purpose")
    route = Route([rough])
    route(make_call(), stock)
    assert route.fused_calls == 1 and route.measurements[0].fused > 1e-3 and not route.measurements[0].reason


def test_exact_keeps_the_bits(make_call: Make) -> None:
    route = Route([backend(BACKENDS["_native_math"].compute)], exact=True)
    call = make_call(queries=64, keys=64, head_dim=64)
    assert torch.equal(route(call, stock), stock(call))
    assert list(route.stock_calls) == ["mine is not bit-identical to the stock attention here"]
    same = Route([backend(stock)], exact=True)
    same(make_call(gradients=True), stock)
    assert same.fused_calls == 1


def test_trials_draw_no_random_numbers(make_call: Make) -> None:
    route, call = Route([backend(BACKENDS["_native_math"].compute)], auto=True), make_call(dropout=0.2)
    state = torch.random.get_rng_state()
    route(call, stock)
    drawn = torch.random.get_rng_state()
    torch.random.set_rng_state(state)
    route(call, stock)
    assert torch.equal(drawn, torch.random.get_rng_state())


def test_without_verification_the_table_decides(make_call: Make) -> None:
    compute, calls = counting(lambda call: stock(replace(call, scale=0.36)))
    Route([backend(compute)], verify=False)(make_call(), stock)
    assert len(calls) == 1


def test_auto_takes_the_fastest(make_call: Make) -> None:
    def slow(call: AttentionCall) -> Tensor:
        time.sleep(0.02)
        return stock(call)

    said: list[str] = []
    route = Route([backend(slow, "slow"), backend(stock, "fast")], auto=True, on_choice=said.append)
    route(make_call(), slow)
    assert route.fused_calls == 1 and said.pop().endswith("on cpu: fast (9 x 12)")
    route = Route([backend(slow, "slow")], auto=True, strict=True, on_choice=said.append)
    assert torch.equal(route(make_call(), stock), stock(make_call()))
    assert dict(route.stock_calls) == {"measured to be the best": 1}
    assert said.pop().endswith("on cpu: the stock attention (9 x 12)")


def test_auto_takes_tomorrow_what_it_takes_today(
    make_call: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(choices.VARIABLE, str(tmp_path))
    times, said = iter([3.0, 2.0, 1.0]), []
    monkeypatch.setattr(route_module, "seconds", lambda compute, call: next(times))
    for _ in range(2):
        route = Route([backend(stock, "one"), backend(stock, "two")], auto=True, on_choice=said.append)
        route(make_call(), stock)
        assert route.fused_calls == 1 and ": two (" in said.pop()
        choices._known.clear()  # as in another process
    route = Route([backend(lambda call: stock(replace(call, scale=0.36)), "two")], auto=True)
    route(make_call(), stock)
    assert not route.fused_calls, "it is proven all the same"


def test_auto_never_takes_a_wrong_one(make_call: Make) -> None:
    def slow(call: AttentionCall) -> Tensor:
        time.sleep(0.005)
        return stock(call)

    route = Route([backend(lambda call: stock(replace(call, scale=0.36)), "wrong")], auto=True)
    assert torch.equal(route(make_call(), slow), stock(make_call()))
    assert not route.fused_calls


def test_auto_measures_again_when_lengths_double(make_call: Make) -> None:
    said: list[str] = []
    route = Route([backend(stock)], auto=True, on_choice=said.append)
    for keys in range(8, 33):  # a cache that grows
        route(make_call(queries=1, keys=keys), stock)
    assert len(said) == 3  # 8, 16 and 32
    assert len(route.measurements) == 1


@pytest.mark.parametrize("name", ["nan", "shape"])
def test_what_is_no_attention_is_refused(name: str, make_call: Make) -> None:
    def nonsense(call: AttentionCall) -> Tensor:
        y = stock(call)
        return y * math.nan if name == "nan" else y[:, :, :1]

    route, call = Route([backend(nonsense)]), make_call()
    assert torch.equal(route(call, stock), stock(call))
    assert route.fused_calls == 0


def test_tensors_of_other_classes_run_as_before(make_call: Make) -> None:
    call = make_call(kv_heads=4)
    wrapped = replace(call, query=call.query.to(torch.float64))
    route = Route([backend(stock)])
    with pytest.raises(RuntimeError):
        route(wrapped, stock)  # what the stock attention says of mixed dtypes
    assert list(route.stock_calls) == ["queries, keys and values have different dtypes"]


def test_a_learned_mask_runs_as_before(make_call: Make) -> None:
    call = make_call(mask="additive", gradients=True)
    route = Route([backend(stock)])
    route(replace(call, mask=torch.zeros(9, 12, requires_grad=True)), stock).sum().backward()
    assert list(route.stock_calls) == ["its mask is learned"]
