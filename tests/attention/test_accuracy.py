"""The yardstick itself: the exact attention, against PyTorch's in float64, and what counts as an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from diffkern.attention import BACKENDS, AttentionCall, accuracy
from diffkern.attention.accuracy import seconds

Make = Callable[..., AttentionCall]


@pytest.mark.parametrize(("mask", "causal"), [("none", False), ("none", True), ("bool", False), ("additive", False)])
def test_the_reference_is_pytorchs_in_float64(mask: str, causal: bool, make_call: Make) -> None:
    call = make_call(mask=mask, causal=causal, scale=0.4)
    query, key, value = (x.double().transpose(1, 2) for x in (call.query, call.key, call.value))
    other = call.mask if mask != "additive" else call.mask.double()  # type: ignore[union-attr]
    expected = F.scaled_dot_product_attention(
        query, key, value, other, is_causal=causal, scale=0.4, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(accuracy.reference(call), expected, rtol=1e-12, atol=1e-12)
    rows = torch.tensor([0, 4, 8])
    torch.testing.assert_close(accuracy.reference(call, rows), expected[:, rows], rtol=1e-12, atol=1e-12)


def test_long_calls_are_compared_at_some_queries(make_call: Make) -> None:
    rows = accuracy.spread(make_call(queries=1000, keys=5, batch=1))
    assert len(rows) == accuracy.QUERIES and rows[0] == 0 and rows[-1] == 999
    assert accuracy.spread(make_call(queries=1)).tolist() == [0]


def test_an_error_between_the_compared_queries_is_not_all_that_is_seen(make_call: Make) -> None:
    call = make_call()

    def off(call: AttentionCall) -> torch.Tensor:
        return BACKENDS["native"].compute(replace(call, scale=0.36))

    assert accuracy.errors(call, (off,))[0] > 1e-3
    assert accuracy.gradient_errors(call, (off,))[0] > 1e-3


def test_queries_that_see_no_key_have_no_right_answer(make_call: Make) -> None:
    call = make_call(mask="bool")
    hidden = replace(call, mask=torch.zeros_like(call.mask[:, :, :1]))  # type: ignore[index]
    assert accuracy.errors(hidden, (BACKENDS["native"].compute,)) == [0.0]


def test_masks_are_cut_as_the_call_is(make_call: Make) -> None:
    call = make_call(queries=200, keys=300, batch=1, mask="bool")
    cut = accuracy.first_positions(call)
    assert cut.mask is not None and call.mask is not None
    assert torch.equal(cut.mask, call.mask[..., :128, :128])
    row = replace(call, mask=call.mask[:, :, :1])
    assert accuracy.first_positions(row).mask.shape == (1, 1, 1, 128)  # type: ignore[union-attr]


@pytest.mark.parametrize("gradients", [False, True])
def test_a_time_is_a_time(gradients: bool, make_call: Make) -> None:
    call = make_call(gradients=gradients)
    assert 0 < seconds(BACKENDS["native"].compute, call) < 10
    assert call.query.grad is None
