"""add_norm_silu_pad against float64 and against the stock chain, in every order of the memory."""

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
_FORMATS = (torch.contiguous_format, torch.channels_last_3d)
_EXAMPLES = 10 if INTERPRETED or torch.cuda.is_available() else 40


def video(layout: str, shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    """A video ``[B, C, T, H, W]`` inside a buffer of NaN."""
    batch, channels, frames, height, width = shape
    buffers: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
        "contiguous": (shape, lambda t: t),
        "channels_last": ((batch, frames, height, width, channels), lambda t: t.movedim(-1, 1)),
        "later frames": ((batch, frames + 1, height, width, channels), lambda t: t[:, 1:].movedim(-1, 1)),
        "rows of a wider one": ((batch, channels, frames, height, width + 1), lambda t: t[..., :width]),
        "turned": ((batch, channels, frames, width, height), lambda t: t.mT),
    }
    size, view = buffers[layout]
    x = view(torch.full(size, torch.nan, dtype=dtype, device=device))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.copy_(values + 0.3)


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _float64(
    x: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 1e-8,
    *,
    norm: str | None = "rms",
    activation: str | None = "silu",
    pad: tuple[int, int] = (0, 0),
) -> tuple[Tensor, Tensor]:
    """The result in float64, from the formula alone, and the largest admissible error of each element."""
    y, error = x.double(), FLOAT32_SLACK * x.double().abs()
    if bias is not None:
        y, error = y + bias.double().view(-1, 1, 1, 1), error + FLOAT32_SLACK * bias.double().abs().view(-1, 1, 1, 1)
    if residual is not None:
        y, error = y + residual.double(), error + FLOAT32_SLACK * residual.double().abs()
    if norm is not None:
        rate = (y.pow(2).mean(1, keepdim=True) + eps).rsqrt()
        y, error = y * rate, error * rate + 2 * FLOAT32_SLACK * (y * rate).abs()
    if scale is not None:
        factor = 1 + scale.double()[..., None, None, None]
        y, error = y * factor, (error + FLOAT32_SLACK * y.abs()) * factor.abs()
    if shift is not None:
        offset = shift.double()[..., None, None, None]
        y, error = y + offset, error + FLOAT32_SLACK * (y.abs() + offset.abs())
    if activation is not None:
        y, error = F.silu(y), 1.1 * error + FLOAT32_SLACK * F.silu(y).abs()
    error = error + half_unit(x.dtype) * (y.abs() + error) + torch.finfo(x.dtype).smallest_normal
    frames = torch.arange(-pad[0], x.shape[2] + pad[1], device=x.device).clamp(0, x.shape[2] - 1)
    return y[:, :, frames], error[:, :, frames]


def _check(
    x: Tensor, *operands: Tensor | None, provider: str, memory_format: torch.memory_format = _FORMATS[0], **options: Any
) -> Tensor:
    with leaves_alone(x):
        y = ops.add_norm_silu_pad(x, *operands, provider=provider, memory_format=memory_format, **options)
    expected = _float64(x, *operands, **options)
    assert (y.shape, y.dtype, y.device) == (expected[0].shape, x.dtype, x.device)
    assert strides_that_matter(y) == strides_that_matter(torch.empty_like(y, memory_format=memory_format))
    assert_within(y, expected)
    return y


@hypothesis.settings(max_examples=_EXAMPLES)
@hypothesis.given(
    layout=st.sampled_from(("contiguous", "channels_last", "later frames", "rows of a wider one", "turned")),
    shape=st.tuples(*(st.integers(1, most) for most in (2, 40, 4, 9, 9))),
    dtypes=st.tuples(*[st.sampled_from(_DTYPES)] * 5),
    given=st.tuples(*[st.booleans()] * 4),
    residual=st.sampled_from(("contiguous", "channels_last", "of one frame")),
    norm=st.sampled_from(("rms", None)),
    activation=st.sampled_from(("silu", None)),
    pad=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    memory_format=st.sampled_from(_FORMATS),
    seed=st.integers(0, 2**16),
)
def test_any_layout_shape_and_dtypes_agree_with_float64(
    provider: str,
    device: str,
    layout: str,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    given: tuple[bool, ...],
    residual: str,
    norm: str | None,
    activation: str | None,
    pad: tuple[int, int],
    memory_format: torch.memory_format,
    seed: int,
) -> None:
    batch, channels, _, height, width = shape
    if residual == "of one frame":
        added = _random((1, channels, 1, height, width), dtypes[2], device, 2)
    else:
        added = video(residual, shape, dtypes[2], device, 2)
    operands = (
        _random((channels,), dtypes[1], device, 1),
        added,
        _random((batch, channels), dtypes[3], device, 3),
        _random((batch, 2 * channels), dtypes[4], device, 4)[:, ::2],
    )
    x = video(layout, shape, dtypes[0], device, seed)
    chosen = (operand if wanted else None for operand, wanted in zip(operands, given, strict=True))
    options = {"norm": norm, "activation": activation, "pad": pad, "memory_format": memory_format}
    _check(x, *chosen, provider=provider, **options)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("channels", [48, 128, 256, 512, 1024, 1032])
def test_every_number_of_channels_of_the_autoencoders(channels: int, layout: str, provider: str, device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = video(layout, (1, channels, 2, 3, 4), dtype, device)
        bias = _random((channels,), dtype, device, 1)
        for memory_format in _FORMATS:
            _check(x, bias, x, provider=provider, pad=(2, 0), memory_format=memory_format)


@pytest.mark.parametrize("channels", [2056, 5000, 13440])
def test_without_a_norm_channels_may_be_of_any_number(channels: int, provider: str, device: str) -> None:
    """Kernels that hold all channels of a position for its norm take slices of them, as of Sana's feed-forwards."""
    for dtype in (torch.float32, torch.bfloat16):
        x = video("channels_last", (2, channels, 2, 3, 5), dtype, device)
        bias, residual = _random((channels,), dtype, device, 1), video("channels_last", x.shape, dtype, device, 2)
        scale = _random((2, channels), dtype, device, 3)
        for operands in ((bias,), (bias, residual), (None, residual, scale, scale)):
            _check(x, *operands, norm=None, pad=(1, 0), memory_format=_FORMATS[1], provider=provider)


def test_zero_size_inputs(provider: str, device: str) -> None:
    for shape in ((0, 8, 2, 3, 4), (2, 8, 0, 3, 4), (2, 8, 3, 0, 4)):
        x = torch.empty(shape, device=device, requires_grad=True)
        y = ops.add_norm_silu_pad(x, provider=provider)
        assert (y.shape, y.device) == (x.shape, x.device)
        assert torch.autograd.grad(y.sum(), x)[0].shape == shape


# --- the contract --------------------------------------------------------------------------------------


def _normalised(x: Tensor) -> Tensor:
    rows = x.movedim(1, -1)
    return (rows * torch.rsqrt(rows.float().pow(2).mean(-1, keepdim=True) + 1e-8)).to(x.dtype).movedim(-1, 1)


def _column(w: Tensor) -> Tensor:
    return w.view(-1, 1, 1, 1)


# case: (the chain of LTX-Video's residual block, the operands from a weight, the options)
CASES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Any], dict[str, Any]]] = {
    "norm": (lambda x, w: F.silu(_normalised(x)), lambda x, w: (), {}),
    "bias, scale and shift": (
        lambda x, w: F.silu(_normalised(x + _column(w)) * (1 + _column(w)) + _column(w)),
        lambda x, w: (w, None, w.expand(x.shape[:2]), w.expand(x.shape[:2])),
        {},
    ),
    "bias and residual alone": (
        lambda x, w: x + _column(w) + x.flip(3),
        lambda x, w: (w, x.flip(3)),
        {"norm": None, "activation": None},
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_the_error_is_at_most_that_of_the_torch_chain(case: str, layout: str, provider: str, device: str) -> None:
    chain, operands, options = CASES[case]
    for dtype in (torch.float32, *EXACT_HALF):
        x = video(layout, (2, 96, 3, 8, 10), dtype, device)
        w = _random((96,), dtype, device, 1)
        y = ops.add_norm_silu_pad(x, *operands(x, w), provider=provider, **options)
        truth, _ = _float64(x, *operands(x, w), **options)
        assert relative_error(y, truth) <= 1.05 * relative_error(chain(x, w), truth) + 1e-6


def test_results_do_not_depend_on_the_batch(provider: str, device: str) -> None:
    if provider == "eager":
        pytest.skip("torch makes no such promise")
    for layout in ("contiguous", "channels_last"):
        x = video(layout, (3, 24, 2, 5, 7), torch.float32, device)
        y = ops.add_norm_silu_pad(x, pad=(1, 1), provider=provider)
        for sample in range(3):
            one = ops.add_norm_silu_pad(x[sample : sample + 1], pad=(1, 1), provider=provider)
            assert torch.equal(one, y[sample : sample + 1])


# --- as a torch op -------------------------------------------------------------------------------------


def test_opcheck(provider: str, device: str) -> None:
    x = video("channels_last", (2, 8, 3, 2, 4), torch.float32, device).detach().requires_grad_()
    residual = torch.randn(2, 8, 3, 2, 4, device=device, requires_grad=True)
    scale = torch.randn(2, 8, device=device, requires_grad=True)
    for operands in ((scale[0].detach(), residual, scale, scale), (None, None, None, scale)):
        for channels_last in (False, True):
            arguments = (x, *operands, 1e-8, True, True, 1, 2, channels_last, provider)
            torch.library.opcheck(torch.ops.diffkern.add_norm_silu_pad, arguments)


@pytest.mark.parametrize("options", [{}, {"norm": None}, {"activation": None, "pad": (2, 1)}], ids=str)
def test_gradients_are_those_of_the_formula(options: dict[str, Any], device: str, provider: str) -> None:
    if provider != "eager":
        pytest.skip("float64 is the eager provider's")

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)

    leaves = leaf(2, 3, 2, 1, 3), leaf(3), leaf(1, 3, 1, 1, 3), leaf(2, 3), leaf(2, 3)
    call = lambda *tensors: ops.add_norm_silu_pad(*tensors, **options)  # noqa: E731
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradcheck(lambda x, s: call(x, None, None, s, s), (leaves[0], leaves[3]))
    assert torch.autograd.gradgradcheck(call, leaves)


def test_compile_without_a_graph_break(provider: str, device: str) -> None:
    torch.compiler.reset()
    x = torch.randn(2, 8, 3, 2, 4, device=device)
    call = lambda x: ops.add_norm_silu_pad(x, pad=(1, 0), memory_format=_FORMATS[1], provider=provider) * 2  # noqa: E731
    y = torch.compile(call, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(y, call(x), rtol=0, atol=0)


def test_bad_arguments_are_named(device: str, provider: str) -> None:
    x = torch.randn(2, 6, 3, 2, 4, device=device)
    for name, tensor, pattern in (
        ("bias", torch.ones(4, device=device), r"the bias has shape \(4,\), and must have \(6,\)"),
        ("scale", torch.ones(1, 6, device=device), r"the scale has shape \(1, 6\), and must have \(2, 6\)"),
        ("shift", torch.ones(2, 6, device="meta"), "the shift is on meta"),
        ("norm", "layer", "unknown norm 'layer'"),
        ("activation", "gelu", "unknown activation 'gelu'"),
        ("pad", (-1, 0), r"3 frames cannot be padded by \(-1, 0\)"),
        ("memory_format", torch.channels_last, "unknown memory format"),
    ):
        with pytest.raises(ValueError, match=pattern):
            ops.add_norm_silu_pad(x, provider=provider, **{name: tensor})
    with pytest.raises(ValueError, match=r"must have shape \[B, C, T, H, W\]"):
        ops.add_norm_silu_pad(x[0], provider=provider)
    with pytest.raises(TypeError, match="floating point input"):
        ops.add_norm_silu_pad(x.long(), provider=provider)
