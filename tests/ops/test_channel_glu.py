"""channel_glu against float64 and against the stock chain, in every order of the memory."""

from __future__ import annotations

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from diffkern import ops
from tests.ops.checks import leaves_alone, strides_that_matter
from tests.ops.reference import (
    EXACT_HALF,
    FLOAT32_SLACK,
    INTERPRETED,
    assert_within,
    half_unit,
    relative_error,
)

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_EXAMPLES = 10 if INTERPRETED or torch.cuda.is_available() else 40
CASES = {"plain": False, "round_each": True}


@pytest.fixture(autouse=True)
def _served(request: pytest.FixtureRequest) -> None:
    if "provider" in request.fixturenames and request.getfixturevalue("provider") == "compiled":
        pytest.skip("Triton alone has a kernel of it")


def _image(layout: str, shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    """An image ``[B, C, H, W]`` in memory of NaN."""
    batch, channels, height, width = shape
    size, view = {
        "contiguous": (shape, lambda t: t),
        "channels_last": ((batch, height, width, channels), lambda t: t.permute(0, 3, 1, 2)),
        "rows of a wider one": ((batch, channels, height, width + 1), lambda t: t[..., :width]),
        "some of more channels": ((batch, height, width, channels + 3), lambda t: t[..., 3:].permute(0, 3, 1, 2)),
    }[layout]
    x: Tensor = view(torch.full(size, torch.nan, dtype=dtype, device=device))
    return x.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2)


def _stock(x: Tensor, bias: Tensor | None) -> Tensor:
    """As it is written behind a convolution, whose bias torch adds in a pass of its own on a GPU."""
    x = x if bias is None else x + bias.to(x.dtype).view(-1, 1, 1)
    value, gate = x.chunk(2, dim=1)
    return value * F.silu(gate)


@hypothesis.settings(max_examples=_EXAMPLES)
@hypothesis.given(
    layout=st.sampled_from(("contiguous", "channels_last", "rows of a wider one", "some of more channels")),
    shape=st.tuples(st.integers(1, 2), st.sampled_from((2, 6, 16, 40, 2064)), st.integers(1, 9), st.integers(1, 9)),
    dtypes=st.tuples(st.sampled_from(_DTYPES), st.sampled_from((*_DTYPES, None))),
    strided=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_layout_shape_and_dtypes_agree_with_float64(
    provider: str,
    device: str,
    layout: str,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, torch.dtype | None],
    strided: bool,
    seed: int,
) -> None:
    x, bias = _image(layout, shape, dtypes[0], device, seed), None
    if dtypes[1] is not None:
        bias = torch.linspace(-2, 2, 2 * shape[1], device=device).to(dtypes[1])
        bias = bias[::2] if strided else bias[: shape[1]]
    with leaves_alone(x):
        y = ops.channel_glu(x, bias, provider=provider)
    first, _ = x.chunk(2, 1)
    assert (y.shape, y.dtype, y.device) == (first.shape, x.dtype, x.device)
    assert strides_that_matter(y) == strides_that_matter(torch.empty_like(first))
    added = torch.zeros(shape[1], device=device).double() if bias is None else bias.double()
    value, gate = (x.double() + added.view(-1, 1, 1)).chunk(2, 1)
    spread, gate_spread = (x.double().abs() + added.abs().view(-1, 1, 1)).chunk(2, 1)
    truth, silu = value * F.silu(gate), F.silu(gate)
    error = FLOAT32_SLACK * (spread * silu.abs() + 1.1 * value.abs() * gate_spread + 4 * truth.abs())
    bound = error + half_unit(x.dtype) * (truth.abs() + error) + 2 * torch.finfo(x.dtype).smallest_normal
    assert_within(y, (truth, 1.01 * bound))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_the_error_is_at_most_that_of_the_torch_chain(case: str, layout: str, provider: str, device: str) -> None:
    for dtype in (torch.float32, *EXACT_HALF):
        x = _image(layout, (2, 96, 8, 10), dtype, device)
        bias = torch.randn(96, generator=torch.Generator().manual_seed(1)).to(device, dtype)
        y = ops.channel_glu(x, bias, round_each=CASES[case], provider=provider)
        truth, stock = _stock(x.double(), bias.double()), _stock(x, bias)
        assert relative_error(y, truth) <= 1.05 * relative_error(stock, truth) + 1e-6
        if CASES[case] and provider == "eager":
            assert torch.equal(y, stock)


def test_each_activation_is_that_of_glu(provider: str, device: str) -> None:
    x = _image("channels_last", (2, 12, 5, 3), torch.float32, device)
    for activation in ("gelu", "gelu_tanh", "silu", "quick_gelu"):
        y = ops.channel_glu(x, activation=activation, provider=provider)
        torch.testing.assert_close(y, ops.glu(*x.chunk(2, 1), activation), rtol=1e-6, atol=1e-6)


def test_opcheck_and_gradients(provider: str, device: str) -> None:
    x = _image("channels_last", (2, 6, 2, 3), torch.float32, device).detach().requires_grad_()
    bias = torch.ones(6, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.diffkern.channel_glu, (x, bias, "silu", False, provider))
    torch.library.opcheck(torch.ops.diffkern.channel_glu, (x, None, "gelu", True, provider))
    if provider == "eager":
        wide = x.detach().double().requires_grad_(), bias.detach().double().requires_grad_()
        assert torch.autograd.gradcheck(ops.channel_glu, wide)
        assert torch.autograd.gradgradcheck(lambda x: ops.channel_glu(x, activation="gelu"), wide[:1])
    half = x.detach().to(torch.bfloat16).requires_grad_()
    ops.channel_glu(half, bias, provider=provider).sum().backward()
    assert half.grad is not None and bias.grad is not None
    assert (half.grad.dtype, bias.grad.dtype) == (torch.bfloat16, torch.float32)


def test_zero_size_inputs(provider: str, device: str) -> None:
    for shape in ((0, 8, 2, 3), (2, 0, 2, 3), (2, 8, 0, 3)):
        y = ops.channel_glu(torch.empty(shape, device=device), provider=provider)
        assert y.shape == (shape[0], shape[1] // 2, *shape[2:])


def test_bad_arguments_are_named(device: str) -> None:
    x = torch.randn(2, 8, 3, device=device)
    with pytest.raises(TypeError, match=r"floating point operands, got torch\.int64"):
        ops.channel_glu(x.long())
    with pytest.raises(ValueError, match="unknown activation 'relu'"):
        ops.channel_glu(x, activation="relu")
    with pytest.raises(ValueError, match=r"must have shape \[B, 2C, ...\], got \(2, 7, 3\)"):
        ops.channel_glu(x[:, :7])
    with pytest.raises(ValueError, match=r"the bias has shape \(4,\), but the input has 8 channels"):
        ops.channel_glu(x, torch.ones(4, device=device))
    with pytest.raises(ValueError, match="the bias is on meta"):
        ops.channel_glu(x, torch.ones(8, device="meta"))
