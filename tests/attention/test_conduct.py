"""Foreign kernels that do more, or less, than compute an attention: the proof sees it, and no tensor of the user's."""

from __future__ import annotations

import re
import signal
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diffkern import StrictModeError, inject_optimized_kernels
from diffkern.attention import BACKENDS, AttentionCall, Backend, Route
from tests.attention.test_route import backend
from tests.hub import kernels
from tests.pipelines.tiny import build as build_pipeline
from tests.pipelines.tiny import run
from tests.transformers.models import build, inputs, logits

Make = Callable[..., AttentionCall]

stock = BACKENDS["native"].compute


def zeroes_values_first(call: AttentionCall) -> Tensor:
    call.value.zero_()
    return stock(call)


def zeroes_queries_last(call: AttentionCall) -> Tensor:
    y = stock(call).clone()
    call.query.zero_()
    return y


def overwrites_the_mask(call: AttentionCall) -> Tensor:
    y = stock(call)
    if call.mask is not None:
        call.mask.fill_(True)
    return y


def writes_its_result_over_queries(call: AttentionCall) -> Tensor:
    return call.query.copy_(stock(call))


def hands_a_value_through(call: AttentionCall) -> Tensor:
    return call.value if call.key.shape[1] == 1 else stock(call)


class OneBuffer:
    """Returns the same memory at every call."""

    def __init__(self) -> None:
        self.buffers: dict[torch.Size, Tensor] = {}

    def __call__(self, call: AttentionCall) -> Tensor:
        return self.buffers.setdefault(call.query.shape, torch.empty(call.query.shape)).copy_(stock(call))


class WrongOnce:
    """Wrong at its second call alone."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, call: AttentionCall) -> Tensor:
        self.calls += 1
        return stock(call) * (1.01 if self.calls == 2 else 1.0)


def wrong_for_few_keys(call: AttentionCall) -> Tensor:
    return stock(call) * (1.0 if call.key.shape[1] > 8 else 1.01)


def spreads_nan(call: AttentionCall) -> Tensor:
    return stock(call) + 0 * call.query.sum()


def sets_the_default_dtype(call: AttentionCall) -> Tensor:
    torch.set_default_dtype(torch.float64)
    return stock(call)


def leaves_gradients_off(call: AttentionCall) -> Tensor:
    torch.set_grad_enabled(True)
    return stock(call)


@pytest.mark.parametrize(
    ("compute", "arguments", "said"),
    [
        (zeroes_values_first, {}, "it changed its input"),
        (zeroes_queries_last, {}, "it changed its input"),
        (overwrites_the_mask, {"mask": "bool"}, "it changed its input"),
        (writes_its_result_over_queries, {}, "it changed its input"),
        (hands_a_value_through, {"queries": 1, "keys": 1, "kv_heads": 4}, "its result shares memory with its input"),
        (OneBuffer(), {}, "it returns the same memory at every call"),
        (WrongOnce(), {}, "has an error of 1.00e-02"),
        (wrong_for_few_keys, {}, "has an error of 1.00e-02 .* on a short sequence"),
        (spreads_nan, {}, "spreads NaN from one query to others"),
        (sets_the_default_dtype, {}, "it changed the default dtype"),
        (leaves_gradients_off, {}, "it changed whether gradients are enabled"),
    ],
)
def test_a_kernel_that_misbehaves_is_refused_and_touches_nothing_of_the_users(
    compute: Callable[[AttentionCall], Tensor], arguments: dict[str, Any], said: str, make_call: Make
) -> None:
    call = make_call(**arguments)
    before = [x.clone() for x in (call.query, call.key, call.value)]
    expected, route = stock(call), Route([backend(compute)])
    for _ in range(2):
        assert torch.equal(route(call, stock), expected)
    assert all(torch.equal(x, y) for x, y in zip((call.query, call.key, call.value), before, strict=True))
    (reason,) = route.stock_calls
    assert route.fused_calls == 0 and re.search(said, reason)
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()


def test_a_kernel_that_writes_into_its_input_where_gradients_are_wanted_is_refused(make_call: Make) -> None:
    def writes(call: AttentionCall) -> Tensor:
        y = stock(call)
        if call.value.requires_grad:
            call.value.data.zero_()
        return y

    call, route = make_call(gradients=True, kv_heads=4), Route([backend(writes)])
    before = call.value.detach().clone()
    route(call, stock)
    assert torch.equal(call.value, before)
    assert list(route.stock_calls) == ["mine failed: it changed its input"]


def test_views_reach_a_kernel_with_the_strides_that_they_have(make_call: Make) -> None:
    """A part of packed queries, keys and values; keys that all samples share."""
    packed = torch.randn(2, 9, 3, 4, 8)
    query, key = packed[:, :, 0], packed[:1, :, 1].expand(2, -1, -1, -1)
    seen: list[tuple[int, ...]] = []

    def watches(call: AttentionCall) -> Tensor:
        seen.extend((call.query.stride(), call.key.stride()))
        return stock(call)

    Route([backend(watches)])(AttentionCall(query, key, packed[:, :, 2]), stock)
    assert seen[:2] == [query.stride(), key.stride()]


def test_a_kernel_that_raises_later_gives_way_to_the_stock_attention(make_call: Make) -> None:
    calls: list[int] = []

    def breaks(call: AttentionCall) -> Tensor:
        calls.append(1)
        if len(calls) > 3:
            raise RuntimeError("misaligned address\nframes")
        return stock(call)

    route, call = Route([backend(breaks)]), make_call()
    for _ in range(3):
        assert torch.equal(route(call, stock), stock(call))
    assert dict(route.stock_calls) == {"mine failed: RuntimeError: misaligned address": 3} and len(calls) == 4
    assert [proof.reason for proof in route.measurements] == ["", "failed: RuntimeError: misaligned address"]
    calls.clear()
    strict = Route([backend(breaks)], strict=True, error=StrictModeError)
    with pytest.raises(StrictModeError, match="misaligned address"):
        strict(call, stock)


def test_what_is_wrong_with_a_call_is_no_fault_of_the_backend(make_call: Make) -> None:
    call = make_call(kv_heads=4)
    wrong = replace(call, mask=torch.ones(2, 1, 9, 5, dtype=torch.bool))
    route = Route([backend(stock)])
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"expanded size|broadcast|must match"):
            route(wrong, stock)
    right = replace(call, mask=torch.ones(2, 1, 9, 12, dtype=torch.bool))
    route(right, stock)
    with pytest.raises(RuntimeError, match=r"expanded size|broadcast|must match"):
        route(wrong, stock)
    route(right, stock)
    assert route.fused_calls == 2 and not route.stock_calls and [proof.reason for proof in route.measurements] == [""]


def test_a_timeout_of_the_users_is_no_refusal(make_call: Make) -> None:
    def stop(number: int, frame: object) -> None:
        raise TimeoutError("the user's")

    def waits(call: AttentionCall) -> Tensor:
        signal.raise_signal(signal.SIGALRM)
        return stock(call)

    before = signal.signal(signal.SIGALRM, stop)
    try:
        with pytest.raises(TimeoutError, match="the user's"):
            Route([backend(waits)])(make_call(), stock)
    finally:
        signal.signal(signal.SIGALRM, before)


# --- in models -----------------------------------------------------------------------------------------------

SOURCE = """
    import torch.nn.functional as F

    def right(q, k, v, causal=False, softmax_scale=None):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        groups = q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=groups)
        return y.transpose(1, 2)

    def zeroes(q, k, v, causal=False, softmax_scale=None):
        v.zero_()
        return 0 * q

    def zeroes_afterwards(q, k, v, causal=False, softmax_scale=None):
        y = right(q, k, v, causal, softmax_scale).clone()
        q.zero_(), k.zero_()
        return y
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    for name, data in kernels.kernel(textwrap.dedent(SOURCE)).items():
        target = tmp_path / "kernel" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return f"{tmp_path}/kernel"


@pytest.mark.parametrize("function", ["zeroes", "zeroes_afterwards"])
def test_a_language_model_keeps_its_logits(function: str, path: str) -> None:
    model, batch = build("llama"), inputs("llama")
    expected = logits(model, batch)
    report = inject_optimized_kernels(model, attention=f"{path}:{function}", config={"*": "eager"})
    with pytest.warns(UserWarning, match="it changed its input"):
        y = logits(model, batch)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    assert report.calls()[""]["fused"] == 0


def test_a_pipeline_keeps_its_images(path: str) -> None:
    pipe, call = build_pipeline("flux")
    expected = run(pipe, call)
    report = inject_optimized_kernels(pipe, attention=f"{path}:zeroes", config={"*": "eager"})
    with pytest.warns(UserWarning, match="it changed its input"):
        y = run(pipe, call)
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-4)
    assert report.calls()["transformer"]["fused"] == 0


def test_lossy_backends_are_held_to_their_conduct(make_call: Make) -> None:
    lossy: Backend = backend(zeroes_values_first, lossy="on purpose")
    route = Route([lossy])
    route(make_call(), stock)
    assert list(route.stock_calls) == ["mine failed: it changed its input"]
