"""group_norm_silu against float64 and against torch's own group norm, in every layout, on every provider."""

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

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_EXAMPLES = 10 if INTERPRETED or torch.cuda.is_available() else 60


def _float64(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, add: Tensor | None = None, *, silu: bool,
    each: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result in float64, from the formula alone, and the largest admissible error of each element."""
    wide = x.double() if add is None else x.double() + add.double().view(*add.shape[:2], *(1,) * (x.ndim - 2))
    wide = wide.transpose(1, 2).flatten(0, 1) if each else wide
    grouped = wide.reshape(wide.shape[0], groups, -1)
    centred = grouped - grouped.mean(-1, keepdim=True)
    rate = (centred.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    shape = (1, -1, *(1,) * (wide.ndim - 2))
    one, zero = torch.ones(1, device=x.device).double(), torch.zeros(1, device=x.device).double()
    factor = (one if weight is None else weight.double()).view(shape)
    offset = (zero if bias is None else bias.double()).view(shape)
    normed = (centred * rate).view(wide.shape)
    y = normed * factor + offset
    # The mean is off by a rounding of the largest element; the division by the deviation magnifies that.
    cancellation = (grouped.abs().amax(-1, keepdim=True) * rate).expand_as(grouped).reshape(wide.shape)
    error = FLOAT32_SLACK * ((normed.abs() + cancellation) * factor.abs() + offset.abs())
    if silu:
        y, error = F.silu(y), 1.1 * error + FLOAT32_SLACK * y.abs()
    error = error + half_unit(x.dtype) * (y.abs() + error) + torch.finfo(x.dtype).smallest_normal
    if each:
        frames = (x.shape[0], x.shape[2], x.shape[1], *x.shape[3:])
        y, error = (tensor.view(frames).transpose(1, 2) for tensor in (y, error))
    return y, error


def _check(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, add: Tensor | None = None, *,
    provider: str, memory_format: torch.memory_format | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    with leaves_alone(x):
        y = ops.group_norm_silu(
            x, groups, weight, bias, add=add, memory_format=memory_format, provider=provider, **options
        )
    assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
    if memory_format is not None:
        assert strides_that_matter(y) == strides_that_matter(torch.empty_like(x, memory_format=memory_format))
    silu, each = options.get("activation", "silu") is not None, options.get("frames") == "each"
    truth, bound = _float64(x, groups, weight, bias, add, silu=silu, each=each)
    if provider == "eager" and _torch_is_inaccurate(x):
        bound = 10 * bound
    reference.assert_within(y, (truth, bound))
    return y


def _torch_is_inaccurate(x: Tensor) -> bool:
    """Whether torch's own group norm sums up many elements in a row, as it does on the CPU with channels last."""
    return x.device.type == "cpu" and x.stride(1) == 1 and x.shape[1] > 1


# --- layouts -------------------------------------------------------------------------------------------

_Layout = tuple[Callable[[tuple[int, ...]], tuple[int, ...]], Callable[[Tensor], Tensor]]


def _channels_last(ndim: int) -> torch.memory_format:
    return torch.channels_last if ndim == 4 else torch.channels_last_3d


#: The shape of a buffer, and the view of it under test.
LAYOUTS: dict[str, _Layout] = {
    "contiguous": (lambda s: s, lambda t: t),
    "channels_last": (lambda s: (s[0], *s[2:], s[1]), lambda t: t.movedim(-1, 1)),
    "chunk_of_channels": (lambda s: (s[0], 3 * s[1], *s[2:]), lambda t: t.chunk(3, 1)[1]),
    "chunk_of_channels_last": (lambda s: (s[0], *s[2:], 2 * s[1]), lambda t: t.chunk(2, -1)[1].movedim(-1, 1)),
    "batch_inside": (lambda s: (s[1], s[0], *s[2:]), lambda t: t.transpose(0, 1)),
    "every_second_row": (lambda s: (*s[:2], 2 * s[2], *s[3:]), lambda t: t[:, :, ::2]),
    "every_second_column": (lambda s: (*s[:-1], 2 * s[-1]), lambda t: t[..., ::2]),
    "positions_transposed": (lambda s: (*s[:2], *s[:1:-1]), lambda t: t.permute(0, 1, *range(t.ndim - 1, 1, -1))),
    "expanded": (lambda s: (1, *s[1:]), lambda t: t.expand(2, *t.shape[1:])),
}


def make_image(
    layout: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    *,
    seed: int = 0,
    scale: float = 1.0,
    shift: float = 0.0,
) -> Tensor:
    """``scale * randn + shift`` as a view of the named layout; all else in its buffer is NaN."""
    buffer_shape, view = LAYOUTS[layout]
    buffer = torch.full(buffer_shape(shape), torch.nan, dtype=dtype, device=device)
    x = view(buffer)
    target = buffer if layout == "expanded" else x
    values = torch.randn(target.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    target.copy_((scale * values + shift).to(dtype))
    return x


def make_add(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    """What is added to each channel of a sample, as half of a wider buffer that is NaN elsewhere."""
    buffer = torch.full((shape[0], 2 * shape[1]), torch.nan, dtype=dtype, device=device)
    view = buffer[:, ::2] if seed % 2 else buffer[:, : shape[1]]
    view.copy_(3 * torch.randn(view.shape, generator=torch.Generator().manual_seed(seed)))
    return view.view(*view.shape, *(1,) * (len(shape) - 2))


@hypothesis.settings(max_examples=_EXAMPLES)
@hypothesis.given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    batch=st.integers(1, 2),
    groups=st.sampled_from((1, 2, 3, 8)),
    of_group=st.sampled_from((1, 2, 5, 8, 12)),
    size=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    dtype=st.sampled_from(_DTYPES),
    shift=st.sampled_from((0.0, 3.0)),
    weight=st.tuples(st.sampled_from(("none", "plain", "strided", "offset")), st.sampled_from(_DTYPES)),
    bias=st.tuples(st.sampled_from(("none", "plain", "strided")), st.sampled_from(_DTYPES)),
    add=st.sampled_from((None, *_DTYPES)),
    activation=st.sampled_from(("silu", None)),
    memory_format=st.sampled_from((None, torch.preserve_format, torch.contiguous_format)),
    each=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_layout_shape_and_dtypes_agree_with_float64(
    provider: str,
    device: str,
    layout: str,
    batch: int,
    groups: int,
    of_group: int,
    size: list[int],
    dtype: torch.dtype,
    shift: float,
    weight: Any,
    bias: Any,
    add: torch.dtype | None,
    activation: str | None,
    memory_format: torch.memory_format | None,
    each: bool,
    seed: int,
) -> None:
    shape = (batch, groups * of_group, *size)
    x = make_image(layout, shape, dtype, device, seed=seed, shift=shift)
    hypothesis.assume(x.numel() != groups)
    w = make_parameter(weight[0], shape[1], weight[1], device)
    b = make_parameter(bias[0], shape[1], bias[1], device, seed=2)
    frames = "each" if each and x.ndim == 5 else "joint"
    a = None if add is None else make_add(shape, add, device, seed)
    _check(x, groups, w, b, a, provider=provider, activation=activation, frames=frames, memory_format=memory_format)


#: Shapes that take other ways through the kernels: (shape, groups).
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "unet": ((2, 320, 16, 16), 32),
    "odd positions": ((1, 64, 17, 13), 8),
    "a channel per group": ((1, 16, 12, 12), 16),
    "one group": ((1, 24, 20, 20), 1),
    "groups that are no power of two": ((1, 48, 8, 8), 6),
    "several parts of a group": ((1, 6, 160, 128), 2),
    "the most parts of a group": ((1, 4, 520, 512), 1),
    "many channels": ((1, 1280, 4, 4), 32),
    "wider than a block": ((1, 2304, 3, 3), 1),
    "no positions": ((3, 64), 8),
    "a sequence": ((2, 32, 77), 4),
    "video": ((1, 16, 3, 12, 10), 4),
    "more samples than multiprocessors": ((140, 16, 8, 8), 4),
}


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_way_through_the_kernels(name: str, layout: str, provider: str, device: str) -> None:
    shape, groups = SHAPES[name]
    for dtype in (torch.float32, torch.bfloat16):
        x = make_image(layout, shape, dtype, device, shift=1.0)
        weight = make_parameter("plain", shape[1], dtype, device)
        bias = make_parameter("offset", shape[1], dtype, device, seed=2)
        _check(x, groups, weight, bias, provider=provider, memory_format=torch.preserve_format)
        add = make_add(shape, dtype, device, seed=1)
        _check(x, groups, weight, bias, add, provider=provider, memory_format=torch.preserve_format)


def test_values_are_those_of_the_contiguous_reference(provider: str, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(4, 32, 24, 24, generator=generator).to(device)
    video = torch.randn(2, 32, 5, 8, 6, generator=generator).to(device)
    for x, last in ((image, torch.channels_last), (video, torch.channels_last_3d)):
        stock = F.silu(F.group_norm(x, 8))
        for view in (x, x.contiguous(memory_format=last)):
            y = ops.group_norm_silu(view, 8, provider=provider)
            torch.testing.assert_close(y, stock, rtol=1e-5, atol=1e-5)
            assert strides_that_matter(y) == strides_that_matter(F.group_norm(view, 8))
            preserved = ops.group_norm_silu(view, 8, memory_format=torch.preserve_format, provider=provider)
            assert preserved.stride() == view.stride()
            dense = ops.group_norm_silu(view, 8, memory_format=torch.contiguous_format, provider=provider)
            assert dense.is_contiguous()
            torch.testing.assert_close(dense, y, rtol=1e-6, atol=1e-6)


def test_the_layout_is_that_of_eager_for_odd_views_too(provider: str, device: str) -> None:
    for layout in LAYOUTS:
        for shape in ((2, 6, 4, 5), (2, 6, 1, 1), (2, 1, 4, 5), (2, 6, 3, 4, 5), (1, 6, 1, 4, 5), (2, 6, 7)):
            if shape[1] == 1 and layout == "expanded":
                continue
            x = make_image(layout, shape, torch.float32, device)
            stock = F.group_norm(x, 1)
            y = ops.group_norm_silu(x, 1, activation=None, provider=provider)
            assert strides_that_matter(y) == strides_that_matter(stock), (layout, shape)


def test_frames_folded_into_the_batch(provider: str, device: str) -> None:
    for layout in ("contiguous", "channels_last", "every_second_row"):
        x = make_image(layout, (2, 8, 3, 5, 4), torch.float32, device)
        folded = x.transpose(1, 2).flatten(0, 1)
        stock = F.group_norm(folded, 4).unflatten(0, (2, 3)).transpose(1, 2)
        for memory_format in (None, torch.preserve_format):
            y = _check(x, 4, provider=provider, activation=None, frames="each", memory_format=memory_format)
            torch.testing.assert_close(y, stock, rtol=1e-5, atol=1e-5)
        # The same view handed in as the stock modules make it.
        torch.testing.assert_close(
            _check(folded, 4, provider=provider, activation=None), F.group_norm(folded, 4), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("shape", [(0, 8, 4, 4), (2, 8, 0, 4), (2, 8, 3, 0, 4)])
def test_zero_size_inputs_forward_and_backward(shape: tuple[int, ...], provider: str, device: str) -> None:
    for dtype in _DTYPES:
        x = torch.empty(shape, dtype=dtype, device=device, requires_grad=True)
        weight = torch.ones(8, dtype=dtype, device=device, requires_grad=True)
        bias = torch.ones(8, dtype=dtype, device=device, requires_grad=True)
        for frames in ("joint", "each") if len(shape) == 5 else ("joint",):
            y = ops.group_norm_silu(x, 4, weight, bias, frames=frames, provider=provider)
            assert (y.shape, y.dtype, y.device) == (x.shape, dtype, x.device)
            grads = torch.autograd.grad(y.sum(), (x, weight, bias))
            assert [grad.shape for grad in grads] == [x.shape, (8,), (8,)]
            assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


# --- the contract --------------------------------------------------------------------------------------

# case: (activation, frames)
CASES = {
    "silu": ("silu", "joint"),
    "no activation": (None, "joint"),
    "frames each": ("silu", "each"),
    "add": ("silu", "joint"),
}


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("case", CASES)
def test_the_error_is_at_most_that_of_the_torch_chain(case: str, layout: str, provider: str, device: str) -> None:
    activation, frames = CASES[case]
    for dtype in (torch.float32, *EXACT_HALF):
        x = make_image(layout, (4, 64, 4, 12, 10), dtype, device, shift=0.5)
        weight = make_parameter("plain", 64, dtype, device)
        bias = make_parameter("plain", 64, dtype, device, seed=2)
        add = make_add(tuple(x.shape), dtype, device) if case == "add" else None
        y = ops.group_norm_silu(x, 16, weight, bias, add=add, activation=activation, frames=frames, provider=provider)
        added = x if add is None else x + add
        folded = added.transpose(1, 2).flatten(0, 1) if frames == "each" else added
        stock = F.group_norm(folded, 16, weight, bias)
        stock = stock if activation is None else F.silu(stock)
        stock = stock.unflatten(0, (4, 4)).transpose(1, 2) if frames == "each" else stock
        truth, _ = _float64(x, 16, weight, bias, add, silu=activation is not None, each=frames == "each")
        assert relative_error(y, truth) <= 1.05 * relative_error(stock, truth) + 1e-6


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_a_mean_far_from_zero_costs_no_accuracy(layout: str, provider: str, device: str) -> None:
    for mean in (1e3, 1e5):
        x = make_image(layout, (1, 8, 32, 32), torch.float32, device, shift=mean)
        y = ops.group_norm_silu(x, 2, activation=None, provider=provider)
        truth, _ = _float64(x, 2, None, None, silu=False, each=False)
        assert relative_error(y, truth) < 1e-6


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_a_mean_far_from_zero_costs_no_accuracy_where_each_channel_has_its_own(
    layout: str, provider: str, device: str
) -> None:
    if provider == "eager":
        pytest.skip("it rounds the sum to float32, as stock does")
    x = make_image(layout, (2, 8, 32, 32), torch.float32, device, shift=1e4)
    add = make_add((2, 8, 32, 32), torch.float32, device)
    y = ops.group_norm_silu(x, 2, activation=None, add=add, provider=provider)
    truth, _ = _float64(x, 2, None, None, add, silu=False, each=False)
    assert relative_error(y, truth) < 1e-6


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_an_outlier_in_the_first_place_costs_no_accuracy(layout: str, provider: str, device: str) -> None:
    x = make_image(layout, (1, 8, 32, 32), torch.float32, device)
    x[0, 0, 0, 0] = 1e4
    _check(x, 2, provider=provider, activation=None, memory_format=torch.preserve_format)


def test_a_group_of_two_to_the_24_elements(provider: str, device: str) -> None:
    if INTERPRETED:
        pytest.skip("the interpreter would take an hour")
    x = torch.randn(1, 2, 2**23, generator=torch.Generator().manual_seed(0)).add_(1).to(device)
    y = ops.group_norm_silu(x, 1, activation=None, provider=provider)
    truth, _ = _float64(x, 1, None, None, silu=False, each=False)
    digit = 10 if (provider, device) == ("eager", "cuda") else 1  # that torch's own sums lose on a GPU
    assert relative_error(y, truth) < 2e-7 * digit
    assert abs(y.double().mean().item()) < 1e-7 * digit


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_an_image_larger_than_the_shared_memory_of_a_gpu(layout: str, provider: str, device: str) -> None:
    shape = (2, 8, 2048 if device == "cuda" else 16, 1024)
    x = make_image(layout, shape, torch.bfloat16, device, shift=1.0)
    add = make_add(shape, torch.float32, device, seed=1)
    _check(x, 2, None, None, add, provider=provider, memory_format=torch.preserve_format)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_results_do_not_depend_on_the_batch_nor_on_the_run(layout: str, provider: str, device: str) -> None:
    if provider == "eager":
        pytest.skip("torch makes no such promise")
    x = make_image(layout, (3, 32, 40, 41), torch.float32, device)
    call = lambda x: ops.group_norm_silu(x, 8, memory_format=torch.preserve_format, provider=provider)  # noqa: E731
    y = call(x)
    assert torch.equal(call(x), y)
    for sample in range(3):
        assert torch.equal(call(x[sample : sample + 1]), y[sample : sample + 1])


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_nan_and_inf_spoil_their_own_group_alone(layout: str, provider: str, device: str) -> None:
    for value in (torch.nan, torch.inf):
        x = make_image(layout, (2, 8, 6, 6), torch.float32, device)
        x[1, 5, 2, 2] = value
        y = ops.group_norm_silu(x, 4, provider=provider)
        spoiled = torch.zeros_like(y, dtype=torch.bool)
        spoiled[1, 4:6] = True
        assert torch.equal(y.isnan(), spoiled)


def test_large_half_values_do_not_overflow(provider: str, device: str) -> None:
    x = make_image("contiguous", (1, 8, 16, 16), torch.float16, device, scale=10000.0)
    _check(x, 2, provider=provider)


# --- as a torch op -------------------------------------------------------------------------------------


def test_opcheck(provider: str, device: str) -> None:
    for layout in ("contiguous", "channels_last", "every_second_column"):
        x = make_image(layout, (2, 8, 3, 4, 5), torch.float32, device).detach().requires_grad_()
        weight = make_parameter("strided", 8, torch.float16, device)
        add = torch.randn(2, 8, device=device)
        for options in ({}, {"per_frame": True, "preserve_strides": True}, {"silu": False, "eps": 1e-3, "add": add}):
            torch.library.opcheck(torch.ops.diffkern.group_norm_silu, (x, 4, weight), {"provider": provider, **options})


@pytest.mark.parametrize("options", [{}, {"activation": None}, {"frames": "each"}], ids=str)
def test_gradients_are_those_of_the_formula(options: dict[str, Any], device: str) -> None:
    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)

    leaves = leaf(2, 4, 2, 2, 3), leaf(4), leaf(4)
    call = lambda x, *parameters: ops.group_norm_silu(x, 2, *parameters, **options)  # noqa: E731
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradcheck(call, leaves[:1])
    added = lambda x, add: ops.group_norm_silu(x, 2, add=add, **options)  # noqa: E731
    assert torch.autograd.gradcheck(added, (leaves[0], leaf(2, 4, 1, 1, 1)))
    assert torch.autograd.gradgradcheck(call, leaves)


def test_gradients_of_half_operands_are_close_and_of_their_dtype(provider: str, device: str) -> None:
    x = make_image("channels_last", (2, 16, 8, 8), torch.bfloat16, device).detach().requires_grad_()
    weight = torch.randn(16, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    y = ops.group_norm_silu(x, 4, weight, provider=provider)
    grads = torch.autograd.grad(y, (x, weight), torch.ones_like(y))
    wide = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = torch.autograd.grad(F.silu(F.group_norm(wide[0], 4, wide[1])).sum(), wide)
    for grad, leaf, truth, bound in zip(grads, (x, weight), expected, (8e-3, 1e-5), strict=True):
        assert grad.dtype == leaf.dtype
        assert relative_error(grad, truth) <= bound


def test_compile_without_a_graph_break(provider: str, device: str) -> None:
    torch.compiler.reset()
    x = torch.randn(2, 8, 4, 4, device=device).to(memory_format=torch.channels_last)
    call = lambda x: ops.group_norm_silu(x * 2, 4, provider=provider) + 1  # noqa: E731
    y = torch.compile(call, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(y, call(x), rtol=0, atol=0)
    assert y.stride() == call(x).stride()


# --- errors --------------------------------------------------------------------------------------------


def test_bad_arguments_are_named(device: str) -> None:
    x = torch.randn(2, 6, 4, 4, device=device)
    with pytest.raises(ValueError, match="6 channels do not fall into 4 groups"):
        ops.group_norm_silu(x, 4)
    with pytest.raises(ValueError, match="6 channels do not fall into 0 groups"):
        ops.group_norm_silu(x, 0)
    with pytest.raises(ValueError, match=r"weight has shape \(4,\), but the input has 6 channels"):
        ops.group_norm_silu(x, 2, torch.ones(4, device=device))
    with pytest.raises(ValueError, match="bias is on meta"):
        ops.group_norm_silu(x, 2, None, torch.ones(6, device="meta"))
    with pytest.raises(ValueError, match=r"add of shape \(2, 6, 4, 4\) does not broadcast to one value per sample"):
        ops.group_norm_silu(x, 2, add=x)
    with pytest.raises(ValueError, match="has one element, and no variance"):
        ops.group_norm_silu(x[:1, :, :1, :1], 6)
    with pytest.raises(ValueError, match="unknown activation 'relu'"):
        ops.group_norm_silu(x, 2, activation="relu")
    with pytest.raises(ValueError, match=r"needs an input of shape \[B, C, T, H, W\]"):
        ops.group_norm_silu(x, 2, frames="each")
    with pytest.raises(ValueError, match="unknown frames 'all'"):
        ops.group_norm_silu(x, 2, frames="all")
    with pytest.raises(ValueError, match=r"shape \[B, C, ...\], got \(6,\)"):
        ops.group_norm_silu(x[0, :, 0, 0], 2)
    with pytest.raises(TypeError, match=r"floating point input, got torch\.int64"):
        ops.group_norm_silu(x.long(), 2)


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("frames", ["joint", "each"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last_3d])
def test_a_small_deviation_far_from_zero_is_kept(
    activation: str | None, frames: str, memory_format: torch.memory_format, provider: str, device: str
) -> None:
    x = torch.randn(2, 32, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 1e-3 - 20
    x = x.contiguous(memory_format=memory_format).to(device)
    y = ops.group_norm_silu(x, 4, eps=1e-6, activation=activation, frames=frames, provider=provider)
    groups = x.double().unflatten(1, (4, 8))
    dims = (2, 4, 5) if frames == "each" else (2, 3, 4, 5)
    centred = groups - groups.mean(dims, keepdim=True)
    truth = (centred / (centred.square().mean(dims, keepdim=True) + 1e-6).sqrt()).flatten(1, 2)
    truth = truth * torch.sigmoid(truth) if activation else truth
    assert (y.double() - truth).norm() / truth.norm() < 2e-3  # the mean is known to an ulp of 20
