"""The semantics of rms_norm and layer_norm: rounding order, eps, offsets, dtypes, range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from diffkern.ops import layer_norm, rms_norm
from diffkern.providers import NoProviderError, registry
from tests.ops import reference
from tests.ops.checks import check_call
from tests.ops.layouts import make, make_parameter
from tests.ops.reference import EXACT_HALF

# --- dtypes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_the_output_dtype_is_the_one_asked_for_whatever_the_weight(op: str, provider: str, device: str) -> None:
    function = {"rms_norm": rms_norm, "layer_norm": layer_norm}[op]
    half, single = torch.bfloat16, torch.float32
    for x_dtype, weight_dtype in ((half, single), (single, half), (half, half), (half, None)):
        x = make("matrix", 1, 3, 64, x_dtype, device)
        weight = None if weight_dtype is None else make_parameter("plain", 64, weight_dtype, device)
        assert function(x, weight, provider=provider).dtype == x_dtype
        for out_dtype in (half, single, torch.float16):
            assert function(x, weight, out_dtype=out_dtype, provider=provider).dtype == out_dtype


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_mixed_dtypes_are_converted_and_never_reinterpreted(op: str, provider: str, device: str) -> None:
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    for x_dtype in dtypes:
        for weight_dtype in dtypes:
            for bias_dtype in dtypes:
                weight = make_parameter("plain", 64, weight_dtype, device)
                bias = make_parameter("plain", 64, bias_dtype, device, seed=2)
                check_call(op, make("matrix", 1, 5, 64, x_dtype, device), weight, bias, provider=provider)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_a_float64_weight_is_served_rightly_or_refused_with_the_reason(op: str, provider: str, device: str) -> None:
    function = {"rms_norm": rms_norm, "layer_norm": layer_norm}[op]
    x = make("matrix", 1, 5, 64, torch.bfloat16, device)
    weight = make_parameter("plain", 64, torch.float64, device)
    if provider == "eager":
        check_call(op, x, weight, provider=provider)
    else:
        with pytest.raises(NoProviderError, match=f"{provider}.*float64"):
            function(x, weight, provider=provider)
    chosen_freely = function(x, weight, eps=1e-6)
    reference.assert_within(chosen_freely, getattr(reference, op)(x, weight, None, 1e-6))


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_every_rank_from_one_up_goes_the_same_way(op: str, provider: str, device: str) -> None:
    weight = make_parameter("plain", 64, torch.float32, device)
    for shape in ((64,), (3, 64), (2, 3, 64), (2, 1, 3, 64), (2, 2, 1, 3, 64)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
        check_call(op, x, weight, provider=provider)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_one_kernel_is_called_once_whatever_the_rank(
    op: str, provider: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = {"rms_norm": rms_norm, "layer_norm": layer_norm}[op]
    weight = make_parameter("plain", 64, torch.float32, device)
    registry.reset()
    monkeypatch.setattr(registry, "_kernels", {})
    function(torch.ones(64, device=device), weight, provider=provider)
    ((key, kernel),) = registry._kernels.items()
    shapes: list[tuple[int, ...]] = []

    def counting(x: Tensor, *args: Any) -> Tensor:
        shapes.append(tuple(x.shape))
        return kernel(x, *args)

    registry._kernels[key] = counting
    registry.dispatch_cache.clear()
    for leading in ((), (3,), (2, 3), (2, 1, 3), (2, 2, 1, 3)):
        for requires_grad in (False, True):
            shapes.clear()
            x = torch.ones(*leading, 64, device=device, requires_grad=requires_grad)
            assert function(x, weight, provider=provider).shape == x.shape
            assert shapes == [tuple(x.shape)]
    assert list(registry._kernels) == [key]


# --- rounding order, offset, eps ------------------------------------------------------------------------


def test_the_rounding_order_is_the_callers(provider: str, device: str) -> None:
    for dtype in EXACT_HALF:
        x = make("matrix", 1, 64, 4096, dtype, device)
        weight = make_parameter("plain", 4096, dtype, device)
        assert weight is not None
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        round_first, multiply_first = normed.to(dtype) * weight, (normed * weight.float()).to(dtype)
        assert (round_first != multiply_first).float().mean() > 0.2
        for round_dtype, expected in ((dtype, round_first), (None, multiply_first)):
            y = rms_norm(x, weight, round_dtype=round_dtype, provider=provider)
            # Another order of summation may move a value that lies next to a rounding boundary, and few do.
            assert (y != expected).float().mean() < 2e-3
            torch.testing.assert_close(y, expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_eps_none_is_the_epsilon_of_the_precision_computed_in(provider: str, device: str) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.full((1, 64), 1e-4, dtype=dtype, device=device)
        y = rms_norm(x, eps=None, provider=provider)
        assert y.float().mean().item() == pytest.approx(0.2785, abs=2e-3)
        torch.testing.assert_close(y, F.rms_norm(x, (64,)), rtol=2 * reference.half_unit(dtype), atol=0)


def test_eps_none_for_float64_is_the_epsilon_of_float64() -> None:
    x = torch.full((1, 64), 1e-8, dtype=torch.float64)
    y = rms_norm(x, eps=None, provider="eager")
    torch.testing.assert_close(y, x / (1e-16 + torch.finfo(torch.float64).eps) ** 0.5, rtol=1e-12, atol=0)


def test_the_weight_offset_makes_zero_centred_weights_right(provider: str, device: str) -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]], device=device)
    y = rms_norm(x, torch.zeros(4, device=device), weight_offset=1.0, provider=provider)
    torch.testing.assert_close(y, torch.tensor([[0.3651, 0.7303, 1.0954, 1.4606]], device=device), rtol=0, atol=1e-4)
    torch.testing.assert_close(rms_norm(x, torch.zeros(4, device=device), provider=provider), torch.zeros_like(x))


def test_the_offset_is_added_in_float32(provider: str, device: str) -> None:
    weight = torch.tensor([0.00390625, 15.8125], dtype=torch.bfloat16, device=device)
    x = torch.ones(1, 2, dtype=torch.bfloat16, device=device, requires_grad=True)
    y = rms_norm(x, weight, eps=0.0, weight_offset=1.0, out_dtype=torch.float32, provider=provider)
    expected = torch.tensor([[1.00390625, 16.8125]], device=device)
    torch.testing.assert_close(y.detach(), expected, rtol=1e-6, atol=0)
    # x / rms(x) does not change along x itself, so the gradient is the scale less its mean.
    (grad,) = torch.autograd.grad(y[:, 1].sum(), x)
    torch.testing.assert_close(grad.float(), torch.tensor([[-16.8125, 16.8125]], device=device) / 2, rtol=4e-3, atol=0)


def test_clamped_eps_bounds_the_length_and_is_not_added(provider: str, device: str) -> None:
    for x in (torch.full((2, 8), 1e-4), torch.zeros(2, 8), torch.full((2, 8), 1e-14)):
        x = x.to(device)
        y = rms_norm(x, eps=1e-12, clamp_eps=True, provider=provider)
        torch.testing.assert_close(y, F.normalize(x, dim=-1, eps=1e-12) * 8**0.5, rtol=1e-6, atol=0)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_weight_and_bias_may_each_be_absent(op: str, provider: str, device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = make("contiguous", 2, 5, 64, dtype, device)
        weight = make_parameter("plain", 64, dtype, device)
        bias = make_parameter("plain", 64, dtype, device, seed=2)
        for given in ((None, None), (weight, None), (None, bias), (weight, bias)):
            assert check_call(op, x, *given, provider=provider).dtype == dtype


# --- range ----------------------------------------------------------------------------------------------


def test_large_half_values_do_not_overflow_in_the_sum_of_squares(provider: str, device: str) -> None:
    # The plain call is torch's own fused op in the eager provider; the others are chains of torch ops.
    zeros = torch.zeros(64, dtype=torch.float16, device=device)
    offset = {"weight": zeros, "weight_offset": 1.0}
    rounded = {"weight": zeros + 1, "round_dtype": torch.float16}
    wide = {"out_dtype": torch.float32}
    for value in (300.0, 60000.0):
        x = torch.full((1, 64), value, dtype=torch.float16, device=device)
        for options in ({}, offset, rounded, wide, offset | rounded | {"weight": zeros}, offset | wide, rounded | wide):
            y = rms_norm(x, provider=provider, **options)
            ones = torch.ones(1, 64, dtype=options.get("out_dtype", torch.float16), device=device)
            torch.testing.assert_close(y, ones, rtol=2e-7 if y.dtype == torch.float32 else 0, atol=0)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_nan_and_inf_appear_exactly_where_the_torch_chain_has_them(op: str, provider: str, device: str) -> None:
    function = {"rms_norm": rms_norm, "layer_norm": layer_norm}[op]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = make("matrix", 1, 6, 96, dtype, device)
        x[1, 5], x[2, 95], x[3, 0], x[4] = torch.nan, torch.inf, -torch.inf, 0.0
        weight = torch.ones(96, dtype=dtype, device=device)
        weight[7], weight[8] = torch.inf, torch.finfo(dtype).max
        wide = x.float()
        if op == "rms_norm":
            normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        else:
            centred = wide - wide.mean(-1, keepdim=True)
            normed = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-6)
        expected = (normed * weight.float()).to(dtype)
        y = function(x, weight, eps=1e-6, provider=provider)
        assert torch.equal(y.isnan(), expected.isnan())
        if reference.INTERPRETED and dtype == torch.bfloat16:
            continue  # truncation keeps the largest bfloat16 below infinity
        assert torch.equal(y.isposinf(), expected.isposinf())
        assert torch.equal(y.isneginf(), expected.isneginf())


def test_a_nan_survives_the_clamped_eps(provider: str, device: str) -> None:
    x = make("matrix", 1, 3, 40, torch.float32, device)
    x[1, 5] = torch.nan
    y = rms_norm(x, eps=1e-12, clamp_eps=True, provider=provider)
    assert torch.equal(y.isnan().all(-1), torch.tensor([False, True, False], device=device))
    assert torch.equal(y.isnan().any(-1), torch.tensor([False, True, False], device=device))


# --- errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [rms_norm, layer_norm])
def test_bad_arguments_are_named(function: Callable[..., Tensor], device: str) -> None:
    x = torch.randn(2, 8, device=device)
    with pytest.raises(ValueError, match="weight has shape \\(7,\\), but 8 elements"):
        function(x, torch.ones(7, device=device))
    with pytest.raises(ValueError, match="bias has shape \\(7,\\), but 8 elements"):
        function(x, torch.ones(8, device=device), torch.ones(7, device=device))
    with pytest.raises(ValueError, match="dim 2 is out of range for an input of 2 dimensions"):
        function(x, dim=2)
    with pytest.raises(ValueError, match="does not fit an input"):
        function(x, torch.ones(3, 8, device=device))
    with pytest.raises(ValueError, match="weight is on meta"):
        function(x, torch.ones(8, device="meta"))
    with pytest.raises(ValueError, match="at least one dimension"):
        function(torch.tensor(1.0, device=device))
    with pytest.raises(TypeError, match=r"floating point tensors, got torch\.int64"):
        function(torch.ones(2, 8, dtype=torch.int64, device=device))
    with pytest.raises(ValueError, match="unknown provider 'cuda'"):
        function(x, provider="cuda")
