"""Every layout, shape and dtype mix against float64, for rms_norm and layer_norm on every provider."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from diffkern.ops import layer_norm, rms_norm
from tests.ops.checks import check_call
from tests.ops.layouts import LAYOUTS, make, make_parameter
from tests.ops.reference import INTERPRETED

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LENGTHS = (1, 2, 3, 5, 7, 8, 16, 31, 40, 46, 64, 65, 72, 96, 127, 128, 200, 256, 257, 520, 1000, 1152, 1536)
_PARAMETERS = ("none", "plain", "strided", "offset")
_EXAMPLES = 15 if INTERPRETED or torch.cuda.is_available() else 100

inputs = st.fixed_dictionaries(
    {
        "layout": st.sampled_from(sorted(LAYOUTS)),
        "batch": st.integers(1, 3),
        "rows": st.integers(1, 5 if INTERPRETED else 40),
        "length": st.sampled_from(_LENGTHS),
        "dtype": st.sampled_from(_DTYPES),
        "seed": st.integers(0, 2**16),
        "scale": st.sampled_from((1e-3, 1.0, 30.0)),
        "shift": st.sampled_from((0.0, 0.5)),
    }
)
parameters = st.tuples(st.sampled_from(_PARAMETERS), st.sampled_from(_DTYPES))
memory_formats = st.sampled_from((torch.contiguous_format, torch.preserve_format))
optional_dtypes = st.sampled_from((None, *_DTYPES))


@hypothesis.settings(max_examples=_EXAMPLES)
@hypothesis.given(
    spec=inputs,
    weight=parameters,
    bias=parameters,
    eps=st.sampled_from((1e-6, 1e-5, 1e-2)),
    weight_offset=st.sampled_from((0.0, 1.0)),
    round_dtype=optional_dtypes,
    out_dtype=optional_dtypes,
    clamp_eps=st.booleans(),
    memory_format=memory_formats,
)
def test_rms_norm_agrees_with_float64_for_any_layout_and_dtypes(
    provider: str, device: str, spec: dict[str, Any], weight: Any, bias: Any, eps: float, **options: Any
) -> None:
    x = make(device=device, **spec)
    w = make_parameter(weight[0], spec["length"], weight[1], device)
    b = make_parameter(bias[0], spec["length"], bias[1], device, seed=2)
    check_call("rms_norm", x, w, b, eps, provider=provider, **options)


@hypothesis.settings(max_examples=_EXAMPLES)
@hypothesis.given(
    spec=inputs,
    weight=parameters,
    bias=parameters,
    eps=st.sampled_from((1e-6, 1e-5, 1e-2)),
    out_dtype=optional_dtypes,
    memory_format=memory_formats,
)
def test_layer_norm_agrees_with_float64_for_any_layout_and_dtypes(
    provider: str, device: str, spec: dict[str, Any], weight: Any, bias: Any, eps: float, **options: Any
) -> None:
    x = make(device=device, **spec)
    w = make_parameter(weight[0], spec["length"], weight[1], device)
    b = make_parameter(bias[0], spec["length"], bias[1], device, seed=2)
    check_call("layer_norm", x, w, b, eps, provider=provider, **options)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_views_of_a_fused_qkv_buffer_are_read_in_place(op: str, provider: str, device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight = make_parameter("plain", 16, dtype, device)
        qkv = make("contiguous", 2, 7, 3 * 64, dtype, device)
        q = qkv.chunk(3, -1)[0].unflatten(-1, (4, 16))
        assert q.stride() == (1344, 192, 16, 1)
        for view in (q, q.transpose(1, 2), q[:, ::2], make("offset_by_one", 2, 7, 16, dtype, device)):
            y = check_call(op, view, weight, provider=provider)
            of_copy = check_call(op, view.contiguous(), weight, provider=provider)
            torch.testing.assert_close(y, of_copy, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_inner_strides_of_input_and_parameters_are_honoured(op: str, provider: str, device: str) -> None:
    for dtype in _DTYPES:
        x = make("transposed", 2, 7, 64, dtype, device)
        assert x.stride(-1) == 7
        weight = make_parameter("strided", 64, dtype, device)
        bias = make_parameter("strided", 64, dtype, device, seed=2)
        assert weight is not None
        assert weight.stride() == (2,)
        for memory_format in (torch.contiguous_format, torch.preserve_format):
            check_call(op, x, weight, bias, provider=provider, memory_format=memory_format)


@pytest.mark.parametrize("length", [40, 46, 72, 80, 96, 1152, 1536, 3584, 5120, 6144])
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_misaligned_bases_and_odd_row_lengths(op: str, length: int, provider: str, device: str) -> None:
    for dtype in _DTYPES:
        for rows in (1, 3) if INTERPRETED else (1, 257 if length < 100 else 7):
            for layout, kind in (("matrix", "offset"), ("offset_by_one", "plain")):
                x = make(layout, 1, rows, length, dtype, device)
                check_call(op, x, make_parameter(kind, length, dtype, device), provider=provider)


@pytest.mark.parametrize("length", [4097, 16384, 16385, 32768, 65536, 131072])
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_rows_longer_than_any_block(op: str, length: int, provider: str, device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        # Were the row cut short, the large tail would be missing from the mean.
        x = make("matrix", 1, 2, length, dtype, device)
        x[:, length - 7 :] *= 100
        check_call(op, x, make_parameter("plain", length, dtype, device), provider=provider)


@pytest.mark.parametrize("length", [1025, 4096])
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_many_channels_in_front_of_the_pixels(op: str, length: int, provider: str, device: str) -> None:
    x = make("channel_first", 1, 3, length, torch.float32, device)
    weight = make_parameter("plain", length, torch.float32, device)
    check_call(op, x, weight, provider=provider, memory_format=torch.preserve_format)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_a_row_offset_beyond_32_bits(op: str, provider: str, device: str) -> None:
    try:
        base = torch.empty(2**31 + 4096, dtype=torch.bfloat16, device=device)
    except RuntimeError as error:
        pytest.skip(f"4 GiB of address space are not to be had: {error}")
    # The stride itself fits into 32 bits, and so would be multiplied in them; the offset of the last row does not.
    x = base.as_strided((3, 512), (2**30, 1))
    x.copy_(make("matrix", 1, 3, 512, torch.bfloat16, device))
    weight = make_parameter("plain", 512, torch.bfloat16, device)
    y = {"rms_norm": rms_norm, "layer_norm": layer_norm}[op](x, weight, provider=provider)
    small = check_call(op, x.contiguous(), weight, eps={"rms_norm": 1e-6, "layer_norm": 1e-5}[op], provider=provider)
    torch.testing.assert_close(y, small, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(0, 7, 64), (2, 0, 64), (0, 64), (0,), (3, 0), (2, 5, 0)])
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_zero_size_inputs_forward_and_backward(op: str, shape: tuple[int, ...], provider: str, device: str) -> None:
    for dtype in _DTYPES:
        x = torch.empty(shape, dtype=dtype, device=device, requires_grad=True)
        weight = torch.ones(shape[-1], dtype=dtype, device=device, requires_grad=True)
        bias = torch.ones(shape[-1], dtype=dtype, device=device, requires_grad=True)
        y = {"rms_norm": rms_norm, "layer_norm": layer_norm}[op](x, weight, bias, provider=provider)
        assert (y.shape, y.dtype, y.device) == (x.shape, dtype, x.device)
        y.sum().backward()
        for tensor in (x, weight, bias):
            assert tensor.grad is not None
            assert torch.equal(tensor.grad, torch.zeros_like(tensor))


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_an_inner_dimension_is_normalised_like_the_last_one(op: str, provider: str, device: str) -> None:
    function = {"rms_norm": rms_norm, "layer_norm": layer_norm}[op]
    x = torch.randn(2, 24, 3, 5, 7, generator=torch.Generator().manual_seed(0)).to(device)
    weight = make_parameter("plain", 24, torch.float32, device)
    assert weight is not None
    expected = function(x.movedim(1, -1).contiguous(), weight, provider=provider).movedim(-1, 1)
    for dim, parameter in ((1, weight), (-4, weight.view(24, 1, 1, 1))):
        y = function(x, parameter, dim=dim, provider=provider)
        assert y.stride() == x.stride()
        torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    channels_last = x[:, :, 0].contiguous(memory_format=torch.channels_last)
    kept = function(channels_last, weight, dim=1, memory_format=torch.preserve_format, provider=provider)
    assert kept.stride() == channels_last.stride()
    torch.testing.assert_close(kept, expected[:, :, 0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_a_weight_of_several_dimensions_is_normalised_over_at_once(op: str, provider: str, device: str) -> None:
    function = {"rms_norm": rms_norm, "layer_norm": layer_norm}[op]
    x = make("contiguous", 2, 3, 40, torch.float32, device).unflatten(-1, (5, 8))
    weight = make_parameter("plain", 40, torch.float32, device)
    assert weight is not None
    y = function(x, weight.view(5, 8), provider=provider)
    flat = function(x.flatten(-2), weight, provider=provider)
    torch.testing.assert_close(y, flat.view(x.shape), rtol=0, atol=0)


@pytest.mark.parametrize("op", [rms_norm, layer_norm])
@pytest.mark.parametrize(
    ("make", "dim"),
    [
        (lambda: torch.randn(1, 65).expand(3, 65), 0),
        (lambda: torch.randn(1, 1, 1, 130).expand(33, 4, 1, 130), -3),
        (lambda: torch.randn(5, 1, 7).expand(5, 4, 7), 1),
        (lambda: torch.randn(6, 4, 5).permute(2, 0, 1)[::2], 1),
        (lambda: torch.randn(4, 33, 254)[..., ::2].transpose(0, 1), "last two"),
    ],
)
def test_preserved_strides_are_those_of_a_pointwise_op(
    op: Callable[..., Tensor], make: Callable[[], Tensor], dim: Any, provider: str, device: str
) -> None:
    x = make().to(device)
    weight = torch.rand(x.shape[-2:], device=device) if dim == "last two" else None
    dims = {} if dim == "last two" else {"dim": dim}
    y = op(x, weight, memory_format=torch.preserve_format, provider=provider, **dims)
    assert y.stride() == (x * 2).stride()
    torch.testing.assert_close(y, op(x.contiguous(), weight, provider=provider, **dims))
