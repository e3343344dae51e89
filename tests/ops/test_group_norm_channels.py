"""channel_rms_norm_silu against float64 and against the stock norms over channels, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from diffkern import ops
from tests.ops import reference
from tests.ops.checks import leaves_alone, strides_that_matter
from tests.ops.layouts import make_parameter
from tests.ops.reference import EXACT_HALF, FLOAT32_SLACK, INTERPRETED, half_unit, relative_error
from tests.ops.test_group_norm import LAYOUTS, make_image

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_EXAMPLES = 10 if INTERPRETED or torch.cuda.is_available() else 60


def _float64(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 1e-6,
    *,
    eps_mode: str = "add",
    activation: str | None = "silu",
    round_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The result in float64, from the formula alone, and the largest admissible error of each element."""
    wide = x.double()
    column = (-1, *(1,) * (x.ndim - 2))
    if eps_mode == "clamp":
        y = wide / wide.pow(2).sum(1, keepdim=True).sqrt().clamp(min=eps) * x.shape[1] ** 0.5
    else:
        y = wide / (wide.pow(2).mean(1, keepdim=True) + eps).sqrt()
    error = FLOAT32_SLACK * y.abs()
    if round_dtype is not None:
        error = error + half_unit(round_dtype) * y.abs() + torch.finfo(round_dtype).smallest_normal
    if weight is not None:
        factor = weight.double().view(column)
        y, error = y * factor, error * factor.abs()
    if bias is not None:
        if round_dtype is not None:
            error = error + half_unit(x.dtype) * (y.abs() + error) + torch.finfo(x.dtype).smallest_normal
        y = y + bias.double().view(column)
        error = error + FLOAT32_SLACK * (y.abs() + bias.double().view(column).abs())
    if scale is not None:
        y, error = y * (1 + scale.double()), (error + FLOAT32_SLACK * y.abs()) * (1 + scale.double()).abs()
    if shift is not None:
        error = error + FLOAT32_SLACK * (y.abs() + shift.double().abs())
        y = y + shift.double()
    if activation is not None:
        y, error = F.silu(y), 1.1 * error + FLOAT32_SLACK * y.abs()
    return y, error + half_unit(x.dtype) * (y.abs() + error) + torch.finfo(x.dtype).smallest_normal


def _check(x: Tensor, *parameters: Tensor | None, provider: str, **options: Any) -> Tensor:
    with leaves_alone(x):
        y = ops.channel_rms_norm_silu(x, *parameters, provider=provider, **options)
    assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
    assert strides_that_matter(y) == strides_that_matter(torch.empty_like(x))
    reference.assert_within(y, _float64(x, *parameters, **options))
    return y


def _modulation(kind: str, x: Tensor, dtype: torch.dtype, seed: int) -> Tensor | None:
    """``"none"``; of shape ``[B, C, 1, ...]``, a part of a larger tensor if ``"chunk"``; or what broadcasts to it."""
    if kind == "none":
        return None
    ones = (1,) * (x.ndim - 2)
    shape = {
        "sample": (x.shape[0], x.shape[1], *ones),
        "channel": (x.shape[1], *ones),
        "all": (1, 1, *ones),
        "chunk": (x.shape[0], 4 * x.shape[1], *ones),
    }[kind]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(x.device, dtype)
    return values.chunk(4, 1)[2] if kind == "chunk" else values


# --- layouts -------------------------------------------------------------------------------------------

_KINDS = ("none", "sample", "channel", "all", "chunk")


@hypothesis.settings(max_examples=_EXAMPLES)
@hypothesis.given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    batch=st.integers(1, 2),
    channels=st.sampled_from((1, 2, 5, 8, 24, 40)),
    size=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    dtype=st.sampled_from(_DTYPES),
    weight=st.tuples(st.sampled_from(("none", "plain", "strided", "offset")), st.sampled_from(_DTYPES)),
    bias=st.tuples(st.sampled_from(("none", "plain")), st.sampled_from(_DTYPES)),
    scale=st.tuples(st.sampled_from(_KINDS), st.sampled_from(_DTYPES)),
    shift=st.tuples(st.sampled_from(_KINDS), st.sampled_from(_DTYPES)),
    options=st.sampled_from(({}, {"activation": None}, {"eps": 1e-12, "eps_mode": "clamp"}, {"round_dtype": "x"})),
    seed=st.integers(0, 2**16),
)
def test_any_layout_shape_and_dtypes_agree_with_float64(
    provider: str,
    device: str,
    layout: str,
    batch: int,
    channels: int,
    size: list[int],
    dtype: torch.dtype,
    weight: Any,
    bias: Any,
    scale: Any,
    shift: Any,
    options: dict[str, Any],
    seed: int,
) -> None:
    x = make_image(layout, (batch, channels, *size), dtype, device, seed=seed)
    parameters = (
        make_parameter(weight[0], channels, weight[1], device),
        make_parameter(bias[0], channels, bias[1], device, seed=2),
        _modulation(*scale[:1], x, scale[1], 3),
        _modulation(*shift[:1], x, shift[1], 4),
    )
    options = {name: dtype if value == "x" else value for name, value in options.items()}
    _check(x, *parameters, provider=provider, **options)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("channels", [8, 64, 96, 128, 192, 384, 512, 1024, 1032, 2048])
def test_every_number_of_channels_of_the_autoencoders(channels: int, layout: str, provider: str, device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for size in ((4, 6),) if INTERPRETED else ((3, 8), (7, 5), (2, 9, 8)):
            x = make_image(layout, (2, channels, *size), dtype, device)
            weight = make_parameter("plain", channels, dtype, device)
            scale, shift = (_modulation("chunk", x, dtype, seed) for seed in (1, 2))
            _check(x, weight, None, scale, shift, provider=provider)
            _check(x, weight, provider=provider, eps=1e-12, eps_mode="clamp", round_dtype=dtype, activation=None)


@pytest.mark.parametrize("shape", [(0, 8, 4, 4), (2, 8, 0, 4), (2, 8, 3, 0, 4)])
def test_zero_size_inputs_forward_and_backward(shape: tuple[int, ...], provider: str, device: str) -> None:
    x = torch.empty(shape, device=device, requires_grad=True)
    weight = torch.ones(8, device=device, requires_grad=True)
    y = ops.channel_rms_norm_silu(x, weight, provider=provider)
    assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
    grad_x, grad_weight = torch.autograd.grad(y.sum(), (x, weight))
    assert grad_x.shape == x.shape
    assert torch.equal(grad_weight, torch.zeros_like(weight))


# --- the contract --------------------------------------------------------------------------------------


def _wan(x: Tensor, weight: Tensor) -> Tensor:
    normed = F.normalize(x.float(), dim=1).to(x.dtype)
    return F.silu(normed * x.shape[1] ** 0.5 * weight.view(-1, 1, 1))


def _pixel_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.silu(x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + 1e-8) * weight.view(-1, 1, 1))


def _ltx(x: Tensor, weight: Tensor) -> Tensor:
    rows = x.movedim(1, -1)
    variance = rows.to(torch.float32).pow(2).mean(-1, keepdim=True)
    normed = (rows * torch.rsqrt(variance + 1e-8)).to(x.dtype).movedim(-1, 1)
    modulation = weight.view(1, -1, 1, 1)
    return F.silu(normed * (1 + modulation) + modulation)


# case: (chain, parameters from the weight, options; "x" is the dtype of the input)
CASES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], list[Tensor | None]], dict[str, Any]]] = {
    "add": (_pixel_norm, lambda w: [w], {"eps": 1e-8}),
    "clamp, round_dtype": (_wan, lambda w: [w], {"eps": 1e-12, "eps_mode": "clamp", "round_dtype": "x"}),
    "scale and shift": (_ltx, lambda w: [None, None, w.view(1, -1, 1, 1), w.view(-1, 1, 1)], {"eps": 1e-8}),
}


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("case", CASES)
def test_the_error_is_at_most_that_of_the_torch_chain(case: str, layout: str, provider: str, device: str) -> None:
    chain, parameters, options = CASES[case]
    for dtype in (torch.float32, *EXACT_HALF):
        x = make_image(layout, (2, 96, 16, 20), dtype, device)
        weight = make_parameter("plain", 96, dtype, device)
        assert weight is not None
        ours = {name: dtype if value == "x" else value for name, value in options.items()}
        y = ops.channel_rms_norm_silu(x, *parameters(weight), provider=provider, **ours)
        ours.pop("round_dtype", None)
        truth, _ = _float64(x, *parameters(weight), **ours)
        assert relative_error(y, truth) <= 1.05 * relative_error(chain(x, weight), truth) + 1e-6


def test_the_clamped_eps_bounds_the_length_and_is_not_added(provider: str, device: str) -> None:
    for value in (1e-4, 0.0, 1e-14):
        x = torch.full((1, 8, 2, 2), value, device=device)
        y = ops.channel_rms_norm_silu(x, eps=1e-12, eps_mode="clamp", activation=None, provider=provider)
        torch.testing.assert_close(y, F.normalize(x, dim=1, eps=1e-12) * 8**0.5, rtol=1e-6, atol=0)


def test_results_do_not_depend_on_the_batch(provider: str, device: str) -> None:
    if provider == "eager":
        pytest.skip("torch makes no such promise")
    for layout in ("contiguous", "channels_last"):
        x = make_image(layout, (3, 24, 9, 7), torch.float32, device)
        y = ops.channel_rms_norm_silu(x, provider=provider)
        for sample in range(3):
            one = ops.channel_rms_norm_silu(x[sample : sample + 1], provider=provider)
            assert torch.equal(one, y[sample : sample + 1])


def test_nan_spoils_its_own_position_alone(provider: str, device: str) -> None:
    for mode in ("add", "clamp"):
        x = make_image("contiguous", (1, 8, 4, 4), torch.float32, device)
        x[0, 3, 1, 2] = torch.nan
        y = ops.channel_rms_norm_silu(x, eps_mode=mode, provider=provider)
        spoiled = torch.zeros_like(y, dtype=torch.bool)
        spoiled[:, :, 1, 2] = True
        assert torch.equal(y.isnan(), spoiled)


# --- as a torch op -------------------------------------------------------------------------------------


def test_opcheck(provider: str, device: str) -> None:
    for layout in ("contiguous", "channels_last", "every_second_column"):
        x = make_image(layout, (2, 8, 3, 4), torch.float32, device).detach().requires_grad_()
        weight = make_parameter("strided", 8, torch.float16, device)
        scale = torch.randn(2, 8, device=device, requires_grad=True)
        for options in ({"scale": scale, "shift": scale.detach()}, {"clamp_eps": True, "silu": False}):
            torch.library.opcheck(
                torch.ops.diffkern.channel_rms_norm_silu, (x, weight), {"provider": provider, **options}
            )


@pytest.mark.parametrize("options", [{}, {"activation": None}, {"eps_mode": "clamp"}], ids=str)
def test_gradients_are_those_of_the_formula(options: dict[str, Any], device: str) -> None:
    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)

    leaves = leaf(2, 4, 2, 3), leaf(4, 1, 1), leaf(4), leaf(2, 4, 1, 1), leaf(4, 1, 1)
    call = lambda *tensors: ops.channel_rms_norm_silu(*tensors, **options)  # noqa: E731
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradcheck(call, leaves[:1])
    assert torch.autograd.gradgradcheck(call, leaves)


def test_compile_without_a_graph_break(provider: str, device: str) -> None:
    torch.compiler.reset()
    x = torch.randn(2, 8, 4, 4, device=device).to(memory_format=torch.channels_last)
    scale = torch.randn(2, 8, 1, 1, device=device)
    call = lambda x: ops.channel_rms_norm_silu(x, None, None, scale, scale, provider=provider) + x  # noqa: E731
    y = torch.compile(call, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(y, call(x), rtol=0, atol=0)


# --- errors --------------------------------------------------------------------------------------------


def test_bad_arguments_are_named(device: str) -> None:
    x = torch.randn(2, 6, 4, 4, device=device)
    with pytest.raises(ValueError, match=r"weight has shape \(4,\), but the input has 6 channels"):
        ops.channel_rms_norm_silu(x, torch.ones(4, 1, 1, device=device))
    for shape in ((2, 5, 1, 1), (3, 6, 1, 1), (2, 6, 4, 4), (2, 6), (1, 2, 6, 1, 1)):
        with pytest.raises(ValueError, match=r"the scale of shape .* does not broadcast to one value per sample"):
            ops.channel_rms_norm_silu(x, scale=torch.ones(shape, device=device))
    with pytest.raises(ValueError, match="shift is on meta"):
        ops.channel_rms_norm_silu(x, shift=torch.ones(6, 1, 1, device="meta"))
    with pytest.raises(ValueError, match="unknown eps_mode 'max'"):
        ops.channel_rms_norm_silu(x, eps_mode="max")
    with pytest.raises(ValueError, match="unknown activation 'gelu'"):
        ops.channel_rms_norm_silu(x, activation="gelu")
    with pytest.raises(TypeError, match="floating point input"):
        ops.channel_rms_norm_silu(x.long())
