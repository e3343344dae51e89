"""Faults that others had with modulation: ranges, broadcasts, per-token rows; and errors where torch has errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diffkern.ops import gate_residual, gate_residual_norm_modulate, norm_modulate
from tests.ops.reference import INTERPRETED, relative_error


def test_half_inputs_near_the_end_of_their_range_stay_finite(provider: str, device: str) -> None:
    for norm in ("rms", None):
        x = torch.full((1, 64), 300.0, dtype=torch.float16, device=device)
        y = norm_modulate(x, norm=norm, provider=provider)
        assert torch.equal(y, torch.ones_like(x) if norm else x)
    x = torch.full((1, 64), 60000.0, dtype=torch.float16, device=device)
    scale, shift = (torch.linspace(-2, 2, 64, device=device).half() for _ in range(2))
    y = norm_modulate(x, scale, shift, provider=provider)
    assert y.isfinite().all()
    torch.testing.assert_close(y[0].double(), 1.0 + scale.double() + shift.double(), rtol=1e-3, atol=1e-3)


def test_infinities_and_nans_are_those_of_the_chain(provider: str, device: str) -> None:
    special = torch.tensor([1.0, 60000.0, -60000.0, 0.0, torch.inf, -torch.inf, torch.nan, 6e-8], device=device).half()
    x, scale = (grid.reshape(1, 64) for grid in torch.meshgrid(special, special, indexing="ij"))
    shift = special.repeat(8)[None]
    y = norm_modulate(x, scale, shift, norm=None, rounding="each", provider=provider)
    _assert_same_with_nans(y, x * (1 + scale) + shift)
    _assert_same_with_nans(gate_residual(shift, x, scale, rounding="each", provider=provider), shift + scale * x)
    # In float32 fewer values overflow, none more, and what is NaN is so for the same reason.
    once = norm_modulate(x, scale, norm=None, provider=provider)
    stock = x * (1 + scale)
    assert not (once.isinf() & ~stock.isinf()).any()
    assert torch.equal(once.isnan(), stock.isnan())


def _assert_same_with_nans(y: Tensor, expected: Tensor) -> None:
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.nan_to_num(1.0, 2.0, 3.0), expected.nan_to_num(1.0, 2.0, 3.0))


def test_each_sample_is_modulated_by_its_own_row(provider: str, device: str) -> None:
    x = torch.ones(2, 5, 16, device=device)
    per_sample = torch.tensor([1.0, 3.0], device=device)[:, None, None].expand(2, 1, 16)
    shift = torch.randn(2, 1, 16, device=device)
    for norm in ("rms", None):
        y = norm_modulate(x, per_sample, shift, norm=norm, eps=0.0, provider=provider)
        torch.testing.assert_close(y[0], x[0] * 2 + shift[0])
        torch.testing.assert_close(y[1], x[1] * 4 + shift[1])


@pytest.mark.parametrize(
    "shape",
    [(16,), (1, 16), (1, 1, 16), (2, 1, 16), (2, 5, 16), (5, 16), (5, 1), (2, 5, 1), (1,), (), (2, 1, 1)],
)
def test_every_shape_broadcasts_as_torch_broadcasts_it(shape: tuple[int, ...], provider: str, device: str) -> None:
    x, residual = (torch.randn(2, 5, 16, device=device) for _ in range(2))
    scale = torch.randn(shape, device=device)
    for other in (torch.randn(16, device=device), torch.randn(2, 5, 16, device=device), scale):
        y = norm_modulate(x, scale, other, norm=None, provider=provider)
        assert torch.equal(y, x * (1 + scale) + other)
    assert torch.equal(gate_residual(residual, x, scale, provider=provider), residual + scale * x)
    new, y = gate_residual_norm_modulate(residual, x, scale, scale, norm=None, provider=provider)
    assert torch.equal(new, residual + scale * x)
    assert torch.equal(y, new * (1 + scale))


def test_the_input_broadcasts_too(provider: str, device: str) -> None:
    x = torch.randn(5, 16, device=device)
    scale = torch.randn(3, 1, 16, device=device)
    y = norm_modulate(x, scale, provider=provider)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (16,), eps=1e-6) * (1 + scale))
    assert torch.equal(norm_modulate(x[:, :1], scale, norm=None, provider=provider), x[:, :1] * (1 + scale))
    assert torch.equal(gate_residual(x, x[:1], scale, provider=provider), x + scale * x[:1])


@pytest.mark.parametrize("shape", [(2, 16), (15,), (3, 1, 16), (2, 5, 8), (2, 4, 16)])
def test_what_torch_does_not_broadcast_is_an_error(shape: tuple[int, ...], provider: str, device: str) -> None:
    x = torch.randn(2, 5, 16, device=device)
    other = torch.randn(shape, device=device)
    with pytest.raises(RuntimeError):
        _ = x * (1 + other)
    for norm in ("rms", None):
        with pytest.raises(RuntimeError):
            norm_modulate(x, other, norm=norm, provider=provider)
        with pytest.raises(RuntimeError):
            norm_modulate(x, None, other, norm=norm, provider=provider)
    with pytest.raises(RuntimeError):
        gate_residual(x, x, other, provider=provider)
    with pytest.raises(RuntimeError):
        gate_residual_norm_modulate(x, x, None, other, provider=provider)


def test_each_token_is_modulated_by_its_own_row(provider: str, device: str) -> None:
    batch, tokens, first_frame, width = 2, 12, 4, 32
    for dtype in (torch.float32, torch.float16 if INTERPRETED else torch.bfloat16):
        table = torch.randn(6, width, device=device, dtype=dtype)
        temb = torch.randn(batch, tokens, 6 * width, device=device, dtype=dtype)
        values = table[None, None] + temb.reshape(batch, tokens, 6, width)
        values[:, :first_frame] = 0
        shift, scale, gate, *_ = values.unbind(dim=2)
        assert scale.stride() == (tokens * 6 * width, 6 * width, 1)
        x, residual = (torch.randn(batch, tokens, width, device=device, dtype=dtype) for _ in range(2))

        y = norm_modulate(x, scale, shift, provider=provider)
        plain = norm_modulate(x, provider=provider)
        assert torch.equal(y[:, :first_frame], plain[:, :first_frame])
        stock = torch.nn.functional.rms_norm(x, (width,), eps=1e-6) * (1 + scale) + shift
        truth = torch.nn.functional.rms_norm(x.double(), (width,), eps=1e-6) * (1 + scale.double()) + shift.double()
        assert relative_error(y, truth) <= 1.05 * relative_error(stock, truth) + 1e-6

        new, modulated = gate_residual_norm_modulate(
            residual, x, gate, scale, shift, norm=None, rounding="each", provider=provider
        )
        assert torch.equal(new[:, :first_frame], residual[:, :first_frame])
        assert torch.equal(new, residual + gate * x)
        assert torch.equal(modulated, new * (1 + scale) + shift)


@pytest.mark.parametrize("tokens", [1, 12])
@pytest.mark.parametrize("batch", [1, 2])
def test_one_row_per_sample_or_for_all_gives_what_torch_gives(
    batch: int, tokens: int, provider: str, device: str
) -> None:
    values = torch.randn(batch, tokens, 6, 32, device=device)
    shift, scale, gate, *_ = values.unbind(dim=2)
    x, residual = (torch.randn(2, 12, 32, device=device) for _ in range(2))
    new, y = gate_residual_norm_modulate(residual, x, gate, scale, shift, norm=None, provider=provider)
    assert torch.equal(new, residual + gate * x)
    assert torch.equal(y, new * (1 + scale) + shift)


def test_one_row_per_frame_modulates_the_tokens_of_that_frame(provider: str, device: str) -> None:
    x = torch.randn(2, 3, 5, 24, device=device)
    scale, shift = (torch.randn(2, 3, 1, 24, device=device) for _ in range(2))
    y = norm_modulate(x, scale, shift, norm=None, provider=provider)
    assert torch.equal(y, x * (1 + scale) + shift)
    for frame in range(3):
        part = norm_modulate(x[:, frame], scale[:, frame], shift[:, frame], norm=None, provider=provider)
        assert torch.equal(y[:, frame], part)


def test_the_residual_that_was_passed_in_is_left_alone(provider: str, device: str) -> None:
    residual, x = (torch.randn(2, 5, 16, device=device) for _ in range(2))
    before = residual.clone()
    new, _ = gate_residual_norm_modulate(residual, x, torch.ones(16, device=device), provider=provider)
    assert torch.equal(residual, before)
    assert new.data_ptr() not in (residual.data_ptr(), x.data_ptr())
    same = norm_modulate(x, norm=None, provider=provider)
    assert torch.equal(same, x)
    assert same.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16), (2, 5, 0)])
def test_empty_inputs_give_empty_results(shape: tuple[int, ...], provider: str, device: str) -> None:
    x = torch.empty(shape, device=device)
    scale = torch.ones(shape[-1:], device=device)
    assert norm_modulate(x, scale, scale, provider=provider).shape == shape
    assert gate_residual(x, x, scale, provider=provider).shape == shape
    new, y = gate_residual_norm_modulate(x, x, scale, scale, norm="layer", provider=provider)
    assert new.shape == y.shape == shape


def test_eps_none_is_that_of_the_precision_computed_in(provider: str, device: str) -> None:
    x = 1e-4 * torch.randn(3, 32, device=device)
    y = norm_modulate(x.half(), eps=None, out_dtype=torch.float32, provider=provider)
    stock = torch.nn.functional.rms_norm(x.half().float(), (32,), eps=torch.finfo(torch.float32).eps)
    torch.testing.assert_close(y, stock, rtol=1e-5, atol=1e-6)


def test_bad_arguments_are_named(device: str) -> None:
    x = torch.randn(2, 5, 16, device=device)
    with pytest.raises(ValueError, match="norm is 'batch': choose one of None, 'rms', 'layer'"):
        norm_modulate(x, norm="batch")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rounding is 'twice'"):
        norm_modulate(x, rounding="twice")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gate_activation is 'relu'"):
        gate_residual(x, x, x, gate_activation="relu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the weight has shape"):
        norm_modulate(x, weight=torch.ones(8, device=device))
    with pytest.raises(ValueError, match="belongs to a norm"):
        norm_modulate(x, bias=torch.ones(16, device=device), norm=None)
    with pytest.raises(TypeError, match="floating point"):
        norm_modulate(x.int())
    with pytest.raises(TypeError, match="floating point"):
        norm_modulate(x, x.int())
    with pytest.raises(ValueError, match="scalar"):
        norm_modulate(torch.ones((), device=device))
    with pytest.raises(ValueError, match="the scale is on meta"):
        norm_modulate(x, torch.ones(16, device="meta"))


@pytest.mark.parametrize("who", ["eager", "compiled"])
def test_a_tensor_without_dimensions_does_not_widen_the_result(who: str) -> None:
    residual, x, gate = torch.randn(4, 8).bfloat16(), torch.tensor(1.5), torch.randn(8).bfloat16()
    for given, chain in ((None, residual + x), (gate, residual + gate * x)):
        y = gate_residual(residual, x, given, provider=who)
        assert y.dtype == chain.dtype == torch.bfloat16
        torch.testing.assert_close(y, chain, rtol=2e-2, atol=2e-2)
        both = gate_residual_norm_modulate(residual, x, given, provider=who)
        assert [part.dtype for part in both] == [torch.bfloat16] * 2


@pytest.mark.parametrize("who", ["eager", "compiled"])
def test_a_weight_has_the_size_of_the_new_residual(who: str) -> None:
    residual, x, weight = torch.randn(4, 1), torch.randn(4, 8), torch.randn(8)
    new, y = gate_residual_norm_modulate(residual, x, weight=weight, eps=1e-6, provider=who)
    assert torch.equal(new, residual + x)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(new, (8,), weight, 1e-6))
    with pytest.raises(ValueError, match="8 elements are normalised together"):
        gate_residual_norm_modulate(residual, x, weight=torch.randn(1), provider=who)
