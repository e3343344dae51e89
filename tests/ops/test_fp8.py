"""Rows of fp8: a rounding away from float64, whatever a row holds; and their products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from diffkern.ops import (
    activation_fp8,
    gate_residual_norm_modulate,
    gate_residual_norm_modulate_and_fp8,
    gate_residual_norm_modulate_fp8,
    glu,
    glu_and_fp8,
    linear_fp8,
    norm_modulate,
    norm_modulate_and_fp8,
    norm_modulate_fp8,
)
from diffkern.ops.contract import table
from diffkern.providers import get_provider
from diffkern.providers.eager.fp8 import LONGEST_SHORT_SUM, fp8_unavailable_reason
from tests.ops.reference import INTERPRETED, poisoned_allocations, relative_error

#: Half a unit of three binary digits after the point.
ROUNDING = 2**-4
#: The smallest step of e4m3, among its subnormal numbers.
STEP = 2**-9

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


@pytest.fixture(autouse=True)
def _served(request: pytest.FixtureRequest) -> None:
    compiled = "provider" in request.fixturenames and request.getfixturevalue("provider") == "compiled"
    if compiled and (request.getfixturevalue("device") == "cpu" or torch.version.hip is not None):
        pytest.skip("rows of fp8 are compiled for NVIDIA's GPUs alone")


def random(*shape: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)


def check_rows(values: Tensor, scales: Tensor, truth: Tensor) -> None:
    """Asserts that rows stand for ``truth``, which is float64."""
    assert values.dtype == torch.float8_e4m3fn and values.shape == truth.shape and values.is_contiguous()
    assert scales.dtype == torch.float32 and scales.shape == (*truth.shape[:-1], 1)
    peaks = truth.abs().amax(-1, keepdim=True).clamp_min(1e-12)
    torch.testing.assert_close(scales.double(), peaks / 448, rtol=1e-5, atol=0)
    if INTERPRETED:  # whose e4m3 is wrong: of 127.9 it makes 64
        return
    wanted = truth / scales.double()
    assert ((values.double() - wanted).abs() <= wanted.abs() * ROUNDING * 1.001 + STEP).all()


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def layer(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-6)


@pytest.mark.sanitize
@DTYPES
@pytest.mark.parametrize("size", [1, 30, 128, 2048, 20000])
def test_modulated_norms(size: int, dtype: torch.dtype, provider: str, device: str) -> None:
    x, branch = (random(2, 5, size, device=device, dtype=dtype, seed=seed) for seed in (1, 2))
    scale, shift, gate = (random(2, 1, size, device=device, dtype=dtype, seed=seed) for seed in (3, 4, 5))
    weight, bias = (random(size, device=device, dtype=dtype, seed=seed) for seed in (6, 7))

    def modulated(y: Tensor) -> Tensor:
        return y * (1 + scale.double()) + shift.double()

    with poisoned_allocations():
        rows = norm_modulate_fp8(x, scale, shift, provider=provider)
        others = norm_modulate_fp8(x, scale, shift, weight, bias, norm="layer", provider=provider)
        new, *of_sum = gate_residual_norm_modulate_fp8(x, branch, gate, scale, shift, provider=provider)
    check_rows(*rows, modulated(rms(x.double())))
    check_rows(*others, modulated(layer(x.double()) * weight.double() + bias.double()))
    torch.testing.assert_close(new, (x.float() + gate.float() * branch.float()).to(dtype))
    check_rows(*of_sum, modulated(rms(new.double())))


FORMULAS: dict[str, Any] = {
    "identity": lambda x: x,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


@DTYPES
@pytest.mark.parametrize("function", ["identity", "gelu", "gelu_tanh", "silu", "quick_gelu"])
def test_activations(function: str, dtype: torch.dtype, provider: str, device: str) -> None:
    for x in (
        random(3, 7, 48, device=device, dtype=dtype),
        random(9, 20, device=device, dtype=dtype).t(),
        random(4, 60, device=device, dtype=dtype)[:, 3:40],
        random(2, 20001, device=device, dtype=dtype),
        *(random(2, size, device=device, dtype=dtype) for size in (8960, 15360, 24576)),
    ):
        with poisoned_allocations():
            rows = activation_fp8(x, function, provider=provider)
        check_rows(*rows, FORMULAS[function](x.double()))


@DTYPES
@pytest.mark.parametrize(
    ("function", "lowest"), [("gelu", -0.7518), ("gelu_tanh", -0.7525), ("silu", -1.2785), ("quick_gelu", -0.7512)]
)
def test_rows_whose_peak_is_that_of_a_negative_number(
    function: str, lowest: float, dtype: torch.dtype, provider: str, device: str
) -> None:
    """Activations fall before they rise: the largest element of a row has its peak only where it is large enough."""
    x = -2 * random(9, 64, device=device).abs().clamp_max(1)
    x[:, 5], x[:, 7] = lowest, torch.linspace(0, 0.4, 9, device=device)
    x[0].clamp_(-2, -1)
    x = x.to(dtype)
    check_rows(*activation_fp8(x, function, provider=provider), FORMULAS[function](x.double()))


@pytest.mark.sanitize
@DTYPES
@pytest.mark.parametrize("size", [30, 1536])
def test_a_result_and_its_rows_in_one_pass_are_those_of_two(
    size: int, dtype: torch.dtype, provider: str, device: str
) -> None:
    if "norm_modulate_and_fp8" not in get_provider(provider).support:
        pytest.skip(f"{provider} writes no rows of fp8 beside a result")
    x, branch = (random(2, 5, size, device=device, dtype=dtype, seed=seed) for seed in (1, 2))
    scale, shift, gate = (random(2, 1, size, device=device, dtype=dtype, seed=seed) for seed in (3, 4, 5))
    wide = shift.float()
    for options in (
        {"scale_offset": 0.0},
        {"norm": "layer", "rounding": "each"},
        {"norm": None, "out_dtype": torch.float32},
    ):
        for given in ((x, scale, shift), (x, scale, wide)):
            with poisoned_allocations():
                y, *rows = norm_modulate_and_fp8(*given, **options, provider=provider)  # type: ignore[arg-type]
                new, z, *others = gate_residual_norm_modulate_and_fp8(
                    given[0], branch, gate, *given[1:], **options, provider=provider  # type: ignore[arg-type]
                )  # fmt: skip
            plain = gate_residual_norm_modulate(given[0], branch, gate, *given[1:], **options, provider=provider)  # type: ignore[arg-type]
            assert torch.equal(new, plain[0])
            for one, other in ((y, norm_modulate(*given, **options, provider=provider)), (z, plain[1])):  # type: ignore[arg-type]
                if provider == "eager" or (provider == "compiled" and dtype is torch.bfloat16):
                    assert torch.equal(one, other)
                else:  # whose sums may have another order
                    eps = torch.finfo(one.dtype).eps
                    torch.testing.assert_close(one, other, rtol=4 * eps, atol=4 * eps)
            for result, (values, scales) in ((y, rows), (z, others)):
                wanted = activation_fp8(result, provider=provider)
                assert torch.equal(values.view(torch.uint8), wanted[0].view(torch.uint8))
                assert torch.equal(scales, wanted[1])


@pytest.mark.sanitize
@DTYPES
@pytest.mark.parametrize("function", ["gelu", "gelu_tanh", "silu", "quick_gelu"])
def test_a_gated_unit_and_its_rows_in_one_pass_are_those_of_two(
    function: str, dtype: torch.dtype, provider: str, device: str
) -> None:
    packed = random(2, 9, 128, device=device, dtype=dtype, seed=1)
    zero = torch.zeros(2, 64, device=device, dtype=dtype)
    for value, gate in (
        packed.chunk(2, -1),
        (packed[:, 2:7, 3:40], packed[:, 2:7, 80:117]),
        (packed.transpose(0, 1)[..., :64], packed.transpose(0, 1)[..., 64:]),
        (packed[0], packed[1].float()),
        (zero, packed[0, :2, :64]),
        *(random(2, 3, size, device=device, dtype=dtype, seed=2) for size in (30, 4096, 8192, 20480, 36000)),
    ):
        for rounds in (False, True):
            with poisoned_allocations():
                y, *rows = glu_and_fp8(value, gate, function, round_activation=rounds, provider=provider)
            plain = glu(value, gate, function, round_activation=rounds, provider=provider)
            assert torch.equal(y, plain) and y.dtype is plain.dtype and y.stride() == plain.stride()
            wanted = activation_fp8(plain, provider=provider)
            assert torch.equal(rows[0].view(torch.uint8), wanted[0].view(torch.uint8))
            assert torch.equal(rows[1], wanted[1])


@DTYPES
def test_rows_of_what_lies_in_front_and_an_activation(dtype: torch.dtype, provider: str, device: str) -> None:
    whole = random(2, 9, 96, device=device, dtype=dtype, seed=1)
    for front, x in (
        (random(2, 9, 32, device=device, dtype=dtype), whole[..., :64]),
        (whole[:, 2:7, 3:20], whole[:, 2:7, 40:]),
        (whole.transpose(0, 1)[1:, :, :16], whole.transpose(0, 1)[1:, :, 16:]),
        (random(2, 8, device=device, dtype=dtype), random(2, 15000, device=device, dtype=dtype, seed=2)),
    ):
        with poisoned_allocations():
            rows = activation_fp8(x, "gelu_tanh", front=front, provider=provider)
        activated = torch.nn.functional.gelu(x.double(), approximate="tanh")
        check_rows(*rows, torch.cat([front.double(), activated], -1))


def test_what_lies_in_front_must_have_the_same_rows(device: str) -> None:
    x = random(2, 9, 32, device=device)
    with pytest.raises(TypeError, match=r"front is torch\.float16"):
        activation_fp8(x, front=x.half())
    with pytest.raises(ValueError, match="other rows"):
        activation_fp8(x, front=x[:, 1:])


def test_tensors_that_differ_in_nothing_but_dtype_address_or_eps(provider: str, device: str) -> None:
    """A launch is taken for the last one only if the kernel is the same."""
    memory = random(2 * 5 * 64 + 8, device=device)
    for dtype, offset, eps in (
        *((torch.bfloat16, offset, 1e-6) for offset in (0, 1, 8, 0)),
        *((dtype, 0, eps) for dtype in (torch.float32, torch.float16, torch.bfloat16) for eps in (1.0, 1)),
    ):
        x = memory.to(dtype)[offset : offset + 2 * 5 * 64].view(2, 5, 64)
        check_rows(*activation_fp8(x, provider=provider), x.double())
        normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps)
        check_rows(*norm_modulate_fp8(x, eps=eps, provider=provider), normed)
        new, *rows = gate_residual_norm_modulate_fp8(x, x, eps=eps, provider=provider)
        assert torch.equal(new, x + x)
        normed = new.double() * torch.rsqrt(new.double().square().mean(-1, keepdim=True) + eps)
        check_rows(*rows, normed)


@pytest.mark.sanitize
def test_rows_of_zeros_of_nan_and_of_nothing(provider: str, device: str) -> None:
    x = random(4, 32, device=device)
    x[0], x[1, 3], x[2] = 0, torch.nan, x[2] * 1e-30
    values, scales = activation_fp8(x, provider=provider)
    assert (values[0].float() == 0).all() and (values[2].float() == 0).all() and torch.isfinite(scales[0]).all()
    assert INTERPRETED or not torch.isfinite(values[1].float() * scales[1]).all()
    check_rows(values[3:], scales[3:], x[3:].double())
    for shape in ((0, 32), (3, 0, 32)):
        empty = torch.empty(shape, device=device)
        assert activation_fp8(empty, provider=provider)[0].shape == shape
        assert norm_modulate_fp8(empty, provider=provider)[1].shape == (*shape[:-1], 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products(dtype: torch.dtype, device: str) -> None:
    x, weight = random(2, 24, 64, device=device, seed=1), random(48, 64, device=device, seed=2)
    bias = random(48, device=device, dtype=dtype, seed=3)
    rows, of_weight = activation_fp8(x, provider="eager"), activation_fp8(weight, provider="eager")
    truth = (rows[0].double() * rows[1].double()) @ (of_weight[0].double() * of_weight[1].double()).t()
    every_third = torch.full((48 * 3,), float("nan"), device=device, dtype=dtype)[::3].copy_(bias)
    for b in (bias, every_third, None):
        y = linear_fp8(*rows, *of_weight, b, out_dtype=dtype)
        assert y.shape == (2, 24, 48) and y.dtype == dtype
        assert relative_error(y, truth if b is None else truth + b.double()) <= 1e-2
    # What rounding to fp8 costs: 3.7 % of a product of random numbers.
    assert relative_error(y, x.double() @ weight.double().t()) <= 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("width", [512, 2048, 4096, 8192])
@pytest.mark.parametrize("signs", ["both", "one"])
def test_long_sums_of_tensor_cores_stay_within_the_bound(width: int, signs: str, device: str) -> None:
    """Where all terms have one sign the sum grows steadily, and each addition to it is rounded the same way."""
    if fp8_unavailable_reason(torch.device(device)) is not None:
        pytest.skip("this GPU has no fp8 numbers")
    x, weight = random(512, width, device=device, seed=1), random(256, width, device=device, seed=2)
    if signs == "one":
        x, weight = x.abs(), weight.abs()
    rows, of_weight = activation_fp8(x, provider="eager"), activation_fp8(weight, provider="eager")
    wide = [values.double() * scales.double() for values, scales in (rows, of_weight)]
    truth, magnitudes = wide[0] @ wide[1].t(), wide[0].abs() @ wide[1].abs().t()
    error = (linear_fp8(*rows, *of_weight).double() - truth).norm()
    assert error <= max(2e-5 * width if width <= LONGEST_SHORT_SUM else 0, 3e-3) * magnitudes.norm()
    assert signs == "one" or error <= 3e-3 * truth.norm()


def test_products_of_a_single_row_and_of_none(device: str) -> None:
    weight = activation_fp8(random(48, 64, device=device, seed=2), provider="eager")
    x = random(64, device=device, seed=1)
    rows = activation_fp8(x, provider="eager")
    y = linear_fp8(*rows, *weight)
    assert y.shape == (48,)
    assert torch.equal(y, linear_fp8(rows[0][None], rows[1][None], *weight)[0])
    for shape in ((0, 64), (2, 0, 64)):
        empty = activation_fp8(torch.empty(shape, device=device), provider="eager")
        assert linear_fp8(*empty, *weight).shape == (*shape[:-1], 48)


@pytest.mark.parametrize("shape", [(3, 24, 64), (16,)])
def test_operands_may_begin_anywhere_in_memory(shape: tuple[int, ...], device: str) -> None:
    weight = activation_fp8(random(48, shape[-1], device=device, seed=2), provider="eager")
    bias = random(48, device=device, dtype=torch.bfloat16, seed=3)
    operands = [*activation_fp8(random(*shape, device=device, seed=1), provider="eager"), *weight, bias]
    expected = linear_fp8(*operands)
    for index, operand in enumerate(operands):
        storage = torch.empty(operand.numel() + 3, device=device, dtype=operand.dtype)
        moved = storage[3:].view(operand.shape).copy_(operand)
        assert torch.equal(linear_fp8(*operands[:index], moved, *operands[index + 1 :]), expected)


def test_mistakes_are_answered(device: str) -> None:
    rows = activation_fp8(random(4, 32, device=device), provider="eager")
    with pytest.raises(TypeError, match=r"x must be torch\.float8_e4m3fn with float32 scales"):
        linear_fp8(rows[0].float(), rows[1], *rows)
    with pytest.raises(ValueError, match=r"weight of shape \(4, 32\) needs scales of shape \(4, 1\), got \(1, 4\)"):
        linear_fp8(*rows, rows[0], rows[1].t())
    with pytest.raises(ValueError, match="do not fit together"):
        linear_fp8(*rows, *activation_fp8(random(4, 16, device=device), provider="eager"))
    with pytest.raises(ValueError, match="the bias has shape"):
        linear_fp8(*rows, *rows, torch.zeros(5, device=device))
    with pytest.raises(ValueError, match="choose one of identity, gelu"):
        activation_fp8(rows[1], "relu")
    for shape in ((), (4, 0)):
        empty = torch.empty(shape, device=device)
        for op in (activation_fp8, norm_modulate_fp8, lambda x: gate_residual_norm_modulate_fp8(x, x)):
            with pytest.raises(ValueError, match="needs elements to find its scale from"):
                op(empty)
    no_rows = linear_fp8(rows[0][:0], rows[1][:0], *rows)
    assert no_rows.shape == (0, 4) and no_rows.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="norm is 'group'"):
        norm_modulate_fp8(rows[1], norm="group")  # type: ignore[arg-type]


def test_there_is_no_gradient_and_nobody_gets_a_wrong_one(device: str) -> None:
    x = random(4, 32, device=device).requires_grad_()
    _, scales = activation_fp8(x)
    with pytest.raises(RuntimeError, match="rounding to fp8 has no gradient"):
        scales.sum().backward()


def test_a_graph_holds_them(device: str) -> None:
    def step(x: Tensor, weight: Tensor) -> Tensor:
        return linear_fp8(*norm_modulate_fp8(x), *activation_fp8(weight), out_dtype=torch.float32)

    x, weight = random(4, 32, device=device), random(16, 32, device=device)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight), step(x, weight))


def test_every_row_of_the_contract_is_tested() -> None:
    norms = ("norm_modulate", "gate_residual_norm_modulate")
    ops = {
        "activation_fp8",
        "glu_and_fp8",
        "linear_fp8",
        *[f"{norm}{end}" for norm in norms for end in ("_fp8", "_and_fp8")],
    }
    assert {row.op for row in table() if row.op.endswith("_fp8")} == ops


def test_operands_that_do_not_fit_are_refused() -> None:
    x = random(4, 64, device="cpu")
    with pytest.raises(ValueError, match=r"128,.*64 elements are normalised together"):
        norm_modulate_fp8(x, weight=torch.ones(128))
    with pytest.raises(ValueError, match="64 elements are normalised together"):
        gate_residual_norm_modulate_fp8(x, x, bias=torch.tensor(1.0))
    with pytest.raises(ValueError, match="a weight belongs to a norm, and norm is None"):
        norm_modulate_fp8(x, weight=torch.ones(64), norm=None)
    with pytest.raises(ValueError, match="on meta"):
        norm_modulate_fp8(x, torch.ones(64, device="meta"))
    with pytest.raises(ValueError, match="needs elements"):
        gate_residual_norm_modulate_fp8(x[:, :0], x[:, :1])


def test_eps_may_be_left_to_the_machine() -> None:
    x = random(4, 64, device="cpu")
    eps = torch.finfo(torch.float32).eps
    for one, other in zip(norm_modulate_fp8(x, eps=None), norm_modulate_fp8(x, eps=eps), strict=True):
        assert torch.equal(one.float(), other.float())


def test_a_product_has_sums_in_float32_also_under_autocast() -> None:
    x, weight = random(8, 64, device="cpu"), random(16, 64, device="cpu", seed=2)
    rows, of_weight = activation_fp8(x), activation_fp8(weight)
    y = linear_fp8(*rows, *of_weight, out_dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(linear_fp8(*rows, *of_weight, out_dtype=torch.float32), y)


def test_transforms_get_no_gradient_either() -> None:
    x = random(4, 64, device="cpu")
    with pytest.raises(RuntimeError, match="no gradient"):
        torch.func.grad(lambda x: activation_fp8(x)[0].float().sum())(x)
    with pytest.raises(RuntimeError, match="no gradient"):
        torch.func.jvp(lambda x: norm_modulate_fp8(x)[1], (x,), (x,))
    assert torch.equal(torch.func.vmap(lambda x: activation_fp8(x)[1])(x[None])[0], activation_fp8(x)[1])
