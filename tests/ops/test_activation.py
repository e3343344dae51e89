"""Activations and gated units against float64, in every layout, on every provider."""

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
from tests.ops.layouts import LAYOUTS, make
from tests.ops.reference import EXACT_HALF, INTERPRETED, half_unit, relative_error

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_EXAMPLES = 15 if INTERPRETED or torch.cuda.is_available() else 60

#: The public call of each function, and the same in plain torch, at any precision.
CALLS: dict[str, Callable[..., Tensor]] = {
    "gelu": lambda x, **options: ops.gelu(x, **options),
    "gelu_tanh": lambda x, **options: ops.gelu(x, "tanh", **options),
    "silu": ops.silu,
    "quick_gelu": ops.quick_gelu,
}
TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def _check_unary(function: str, x: Tensor, provider: str) -> None:
    with leaves_alone(x):
        y = CALLS[function](x, provider=provider)
    assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
    assert strides_that_matter(y) == strides_that_matter(torch.empty_like(x))
    truth = TORCH[function](x.double())
    # Float32 arithmetic loses some of the small values left of zero, relative to x; then one rounding.
    bound = 1e-6 * x.double().abs() + half_unit(x.dtype) * truth.abs() + torch.finfo(x.dtype).smallest_normal
    reference.assert_within(y, (truth, 1.01 * bound))


def _check_glu(value: Tensor, gate: Tensor, function: str, round_activation: bool, provider: str) -> None:
    with leaves_alone(value, gate):
        y = ops.glu(value, gate, function, round_activation=round_activation, provider=provider)
    dtype = torch.promote_types(value.dtype, gate.dtype)
    assert (y.shape, y.dtype, y.device) == (value.shape, dtype, value.device)
    assert strides_that_matter(y) == strides_that_matter(torch.empty_like(value))
    activated = TORCH[function](gate.double())
    error = 1e-6 * gate.double().abs()
    if round_activation:
        error = error + half_unit(gate.dtype) * activated.abs() + torch.finfo(gate.dtype).smallest_normal
    truth, error = value.double() * activated, value.double().abs() * error
    bound = error + half_unit(dtype) * (truth.abs() + error) + 2 * torch.finfo(dtype).smallest_normal
    reference.assert_within(y, (truth, 1.01 * bound))


# --- values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", CALLS)
def test_each_form_is_its_own_to_the_sixth_decimal(function: str, provider: str, device: str) -> None:
    x = torch.linspace(-4, 4, 4001, device=device)
    y = CALLS[function](x, provider=provider)
    torch.testing.assert_close(y.double(), TORCH[function](x.double()), rtol=0, atol=1e-6)
    for other in CALLS:
        apart = (TORCH[other](x.double()) - y.double()).abs().max().item()
        assert apart > 4e-4 or other == function, f"{other} cannot be told from {function}"


def test_the_forms_of_the_stock_modules(provider: str, device: str) -> None:
    x = torch.linspace(-4, 4, 1000, device=device)
    modules: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
        (torch.nn.GELU(), lambda x: ops.gelu(x, provider=provider)),
        (torch.nn.GELU("tanh"), lambda x: ops.gelu(x, "tanh", provider=provider)),
        (torch.nn.SiLU(), lambda x: ops.silu(x, provider=provider)),
        (lambda x: x * torch.sigmoid(1.702 * x), lambda x: ops.quick_gelu(x, provider=provider)),
        (
            lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x.pow(3)))),
            lambda x: ops.gelu(x, "tanh", provider=provider),
        ),
    ]
    for stock, ours in modules:
        # torch's own erf on the CPU is off by a little more than 1e-6 here and there.
        torch.testing.assert_close(ours(x).double(), stock(x.double()), rtol=0, atol=2e-6)


@pytest.mark.parametrize("function", CALLS)
def test_large_values_neither_overflow_nor_lose_their_sign(function: str, provider: str, device: str) -> None:
    for dtype in _DTYPES:
        # Up to half of the largest value: at that itself, torch's own GELU doubles before it halves.
        x = torch.tensor([10.5, 12.0, 88.0, 104.0, 1e3, 6e4, torch.finfo(dtype).max / 2], dtype=torch.float64)
        x = x.clamp(max=torch.finfo(dtype).max / 2).to(device, dtype)
        y = CALLS[function](x, provider=provider)
        torch.testing.assert_close(y.double(), TORCH[function](x.double()), rtol=2 * half_unit(dtype), atol=0)
        negative = CALLS[function](-x, provider=provider)
        torch.testing.assert_close(negative.double(), TORCH[function](-x.double()), rtol=0.01, atol=1e-7)


@pytest.mark.parametrize("function", CALLS)
def test_a_nan_stays_where_it_is(function: str, provider: str, device: str) -> None:
    x = torch.linspace(-3, 3, 100, device=device)
    x[[0, 17, 99]] = torch.nan
    y = CALLS[function](x, provider=provider)
    assert torch.equal(y.isnan(), x.isnan())
    z = ops.glu(torch.ones_like(x), x, function, provider=provider)
    assert torch.equal(z.isnan(), x.isnan())


# --- the contract --------------------------------------------------------------------------------------

# (op, case): whether our op rounds the activation
CASES = {
    ("activation", "gelu, gelu_tanh, silu, quick_gelu"): False,
    ("glu", "plain"): False,
    ("glu", "round_activation"): True,
}


@pytest.mark.parametrize("function", CALLS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_the_error_is_at_most_that_of_the_torch_chain(
    case: tuple[str, str], function: str, provider: str, device: str
) -> None:
    op, rounds = case[0], CASES[case]
    for dtype in (torch.float32, *EXACT_HALF):
        x = make("matrix", 1, 64, 2048, dtype, device, scale=2.0)
        value, gate = x.chunk(2, -1)
        if op == "activation":
            y, stock, truth = CALLS[function](x, provider=provider), TORCH[function](x), TORCH[function](x.double())
        else:
            y = ops.glu(value, gate, function, round_activation=rounds, provider=provider)
            stock = value * TORCH[function](gate)
            truth = value.double() * TORCH[function](gate.double())
        assert relative_error(y, truth) <= 1.05 * relative_error(stock, truth) + 1e-6


# --- layouts -------------------------------------------------------------------------------------------

inputs = st.fixed_dictionaries(
    {
        "layout": st.sampled_from(sorted(LAYOUTS)),
        "batch": st.integers(1, 3),
        "rows": st.integers(1, 5 if INTERPRETED else 20),
        "length": st.sampled_from((1, 2, 3, 7, 8, 16, 40, 65, 127, 256, 520)),
        "dtype": st.sampled_from(_DTYPES),
        "seed": st.integers(0, 2**16),
        "scale": st.sampled_from((1e-3, 1.0, 10.0)),
    }
)


@hypothesis.settings(max_examples=_EXAMPLES)
@hypothesis.given(spec=inputs, function=st.sampled_from(sorted(CALLS)))
def test_an_activation_agrees_with_float64_for_any_layout(
    provider: str, device: str, spec: dict[str, Any], function: str
) -> None:
    _check_unary(function, make(device=device, **spec), provider)


@hypothesis.settings(max_examples=_EXAMPLES)
@hypothesis.given(
    spec=inputs,
    gate_layout=st.sampled_from(sorted(LAYOUTS)),
    gate_dtype=st.sampled_from(_DTYPES),
    function=st.sampled_from(sorted(CALLS)),
    round_activation=st.booleans(),
)
def test_a_gated_unit_agrees_with_float64_for_any_layouts(
    provider: str,
    device: str,
    spec: dict[str, Any],
    gate_layout: str,
    gate_dtype: torch.dtype,
    function: str,
    round_activation: bool,
) -> None:
    value = make(device=device, **spec)
    gate = make(device=device, **{**spec, "layout": gate_layout, "dtype": gate_dtype, "seed": spec["seed"] + 1})
    if gate.shape != value.shape:
        gate = make(device=device, **{**spec, "dtype": gate_dtype, "seed": spec["seed"] + 1})
    _check_glu(value, gate, function, round_activation, provider)


@pytest.mark.parametrize("length", [2, 16, 80, 130, 5120])
def test_halves_of_a_packed_projection_are_read_in_place(length: int, provider: str, device: str) -> None:
    for dtype in _DTYPES:
        x = make("contiguous", 2, 5, length, dtype, device)
        first, second = x.chunk(2, -1)
        assert not first.is_contiguous()
        for function, call in (("gelu", ops.geglu), ("silu", ops.swiglu)):
            _check_glu(first, second, function, False, provider)
            assert torch.equal(call(x, provider=provider), ops.glu(first, second, function, provider=provider))
            assert torch.equal(
                call(x, gate_first=True, provider=provider), ops.glu(second, first, function, provider=provider)
            )


def test_the_halves_may_be_channels_of_an_image(provider: str, device: str) -> None:
    x = make("contiguous", 2, 16, 30, torch.float32, device).view(2, 16, 5, 6)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        image = x.contiguous(memory_format=memory_format)
        first, second = image.chunk(2, 1)
        y = ops.swiglu(image, dim=1, provider=provider)
        assert strides_that_matter(y) == strides_that_matter(first * F.silu(second))
        torch.testing.assert_close(y, first * F.silu(second), rtol=1e-6, atol=1e-6)


def test_the_forms_of_the_stock_feed_forwards(provider: str, device: str) -> None:
    x = make("contiguous", 2, 7, 64, torch.float32, device)
    first, second = x.chunk(2, -1)
    for ours, stock in (
        (ops.geglu(x, provider=provider), first * F.gelu(second)),
        (ops.swiglu(x, provider=provider), first * F.silu(second)),
        (ops.swiglu(x, gate_first=True, provider=provider), F.silu(first) * second),
        (ops.geglu(x, "tanh", provider=provider), first * F.gelu(second, approximate="tanh")),
    ):
        torch.testing.assert_close(ours, stock, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("function", CALLS)
def test_more_elements_than_a_block_and_an_odd_end(function: str, provider: str, device: str) -> None:
    for dtype in _DTYPES:
        for count in (8191, 8192, 8200, 20011):
            _check_unary(function, make("vector", 1, 1, count, dtype, device), provider)


@pytest.mark.parametrize("shape", [(0,), (0, 7, 64), (2, 0, 64), (2, 5, 0)])
def test_zero_size_inputs_forward_and_backward(shape: tuple[int, ...], provider: str, device: str) -> None:
    for dtype in _DTYPES:
        for call in (*CALLS.values(), ops.geglu, ops.swiglu):
            x = torch.empty(shape, dtype=dtype, device=device, requires_grad=True)
            y = call(x, provider=provider)
            halved = call in (ops.geglu, ops.swiglu)
            expected = (*shape[:-1], shape[-1] // 2) if halved else shape
            assert (y.shape, y.dtype, y.device) == (expected, dtype, x.device)
            y.sum().backward()
            assert x.grad is not None
            assert x.grad.shape == x.shape


def test_a_scalar_is_an_input_like_any_other(provider: str, device: str) -> None:
    x = torch.tensor(0.5, device=device)
    torch.testing.assert_close(ops.gelu(x, provider=provider), F.gelu(x), rtol=1e-6, atol=0)
    torch.testing.assert_close(ops.glu(x, x, provider=provider), x * F.gelu(x), rtol=1e-6, atol=0)


# --- as torch ops --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["matrix", "transposed", "qkv_chunk"])
def test_opcheck(layout: str, provider: str, device: str) -> None:
    x = make(layout, 2, 3, 8, torch.float32, device).detach().requires_grad_()
    half = make(layout, 2, 3, 8, torch.bfloat16, device)
    torch.library.opcheck(torch.ops.diffkern.activation, (x, "gelu_tanh", provider))
    torch.library.opcheck(torch.ops.diffkern.glu, (x, half, "silu"), {"provider": provider})


@pytest.mark.parametrize("function", CALLS)
def test_gradients_are_those_of_the_formula(function: str, device: str) -> None:
    x = torch.randn(4, 6, dtype=torch.float64, device=device, requires_grad=True)
    call = CALLS[function]
    assert torch.autograd.gradcheck(call, (x,))
    assert torch.autograd.gradgradcheck(call, (x,))
    assert torch.autograd.gradcheck(lambda x: ops.glu(*x.chunk(2, -1), function), (x,))
    assert torch.autograd.gradgradcheck(lambda x: ops.glu(*x.chunk(2, -1), function), (x,))


def test_gradients_have_the_dtype_of_their_operand(provider: str, device: str) -> None:
    value = make("matrix", 1, 9, 40, torch.bfloat16, device).requires_grad_()
    gate = make("matrix", 1, 9, 40, torch.float32, device, seed=1).requires_grad_()
    y = ops.glu(value, gate, "gelu", provider=provider)
    upstream = torch.ones_like(y)
    grads = torch.autograd.grad(y, (value, gate), upstream)
    wide = value.detach().double().requires_grad_(), gate.detach().double().requires_grad_()
    expected = torch.autograd.grad(wide[0] * F.gelu(wide[1]), wide, upstream.double())
    for grad, leaf, truth, bound in zip(grads, (value, gate), expected, (4e-3, 1e-6), strict=True):
        assert grad.dtype == leaf.dtype
        assert relative_error(grad, truth) <= bound


def test_compile_without_a_graph_break(provider: str, device: str) -> None:
    torch.compiler.reset()
    x = make("contiguous", 2, 5, 16, torch.float32, device)

    def block(x: Tensor) -> Tensor:
        return ops.swiglu(ops.gelu(x, "tanh", provider=provider) + 1, gate_first=True, provider=provider)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), block(x), rtol=0, atol=0)


# --- errors --------------------------------------------------------------------------------------------


def test_bad_arguments_are_named(device: str) -> None:
    x = torch.randn(2, 8, device=device)
    with pytest.raises(ValueError, match="unknown approximation 'erf' of GELU: choose 'none' or 'tanh'"):
        ops.gelu(x, "erf")
    with pytest.raises(TypeError, match=r"floating point input, got torch\.int64"):
        ops.silu(torch.ones(2, dtype=torch.int64, device=device))
    with pytest.raises(TypeError, match=r"floating point operands, got torch\.float32 and torch\.int64"):
        ops.glu(x, x.long())
    with pytest.raises(ValueError, match=r"unknown activation 'relu': choose one of gelu, gelu_tanh, silu, quick_gelu"):
        ops.glu(x, x, "relu")
    with pytest.raises(ValueError, match=r"the value has shape \(2, 8\), the gate \(2, 1\)"):
        ops.glu(x, x[:, :1])
    with pytest.raises(ValueError, match="the gate is on meta"):
        ops.glu(x, x.to("meta"))
    with pytest.raises(ValueError, match="dimension -1 has the odd size 7"):
        ops.geglu(x[:, :7])
    with pytest.raises(ValueError, match="dim 2 is out of range"):
        ops.swiglu(x, dim=2)
    with pytest.raises(ValueError, match="unknown provider 'cuda'"):
        ops.gelu(x, provider="cuda")
