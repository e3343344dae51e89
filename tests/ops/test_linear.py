"""linear_gelu: the epilogue where there is one, the chain of two ops elsewhere."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from diffkern import ops
from diffkern.ops.linear import concatenate, linear_gelu
from tests.ops.reference import relative_error

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# case of the contract: (approximate, with bias)
CASES = {"tanh, bias, on CUDA": [("tanh", True)], "any other": [("tanh", False), ("none", True), ("none", False)]}


def _operands(dtype: torch.dtype, device: str, *, rows: tuple[int, ...] = (2, 33), bias: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(*rows, 48), (96, 48), (96,)][: 3 if bias else 2]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


@pytest.mark.parametrize("case", CASES)
def test_the_error_is_at_most_that_of_the_torch_chain(case: str, device: str) -> None:
    for approximate, with_bias in CASES[case]:
        for dtype in _DTYPES:
            operands = _operands(dtype, device, bias=with_bias)
            y = ops.linear_gelu(*operands, approximate=approximate)
            stock = F.gelu(F.linear(*operands), approximate=approximate)
            truth = F.gelu(F.linear(*(operand.double() for operand in operands)), approximate=approximate)
            assert (y.shape, y.dtype, y.is_contiguous()) == (stock.shape, dtype, True)
            assert relative_error(y, truth) <= 1.05 * relative_error(stock, truth) + 1e-6
            if case == "any other":
                assert torch.equal(y, stock)


def test_the_epilogue_is_the_tanh_form_and_only_that(device: str) -> None:
    weight, bias = torch.eye(64, device=device), torch.zeros(64, device=device)
    x = torch.linspace(-4, 4, 64 * 64, device=device).view(64, 64)
    for approximate in ("tanh", "none"):
        y = ops.linear_gelu(x, weight, bias, approximate=approximate)
        torch.testing.assert_close(y.double(), F.gelu(x.double(), approximate=approximate), rtol=0, atol=1e-6)


def test_any_leading_shape_and_any_strides(device: str) -> None:
    for rows in ((), (1,), (5,), (2, 3), (2, 1, 3), (0,), (2, 0)):
        x, weight, bias = _operands(torch.float32, device, rows=rows)
        expected = F.gelu(F.linear(x, weight, bias), approximate="tanh")
        torch.testing.assert_close(ops.linear_gelu(x, weight, bias), expected, rtol=1e-5, atol=1e-5)
    x, weight, bias = _operands(torch.float32, device)
    y = ops.linear_gelu(x.transpose(0, 1), weight.t().contiguous().t(), bias.repeat(2)[::2])
    expected = F.gelu(F.linear(x.transpose(0, 1), weight, bias.repeat(2)[::2]), approximate="tanh")
    assert y.is_contiguous()
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


def test_opcheck_and_gradients(device: str) -> None:
    operands = [operand.requires_grad_() for operand in _operands(torch.float32, device, rows=(2, 3))]
    torch.library.opcheck(torch.ops.diffkern.linear_gelu, tuple(operands))
    torch.library.opcheck(torch.ops.diffkern.linear_gelu, tuple(operands[:2]), {"function": "gelu"})
    wide = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 4), (5, 4), (5,))]
    for approximate in ("tanh", "none"):
        assert torch.autograd.gradcheck(lambda *t, a=approximate: ops.linear_gelu(*t, approximate=a), wide)
    assert torch.autograd.gradcheck(ops.linear_gelu, wide[:2])


def test_only_what_needs_a_gradient_gets_one(device: str) -> None:
    x, weight, bias = _operands(torch.float32, device)
    weight.requires_grad_()
    ops.linear_gelu(x, weight, bias).sum().backward()
    assert weight.grad is not None
    assert x.grad is None
    assert bias.grad is None


def test_autocast_casts_as_linear_does(device: str) -> None:
    x, weight, bias = _operands(torch.float32, device)
    with torch.autocast(device, torch.bfloat16):
        y = ops.linear_gelu(x, weight, bias, approximate="none")
        stock = F.gelu(F.linear(x, weight, bias))
    assert torch.equal(y, stock)
    assert y.dtype == torch.bfloat16


def test_compile_without_a_graph_break(device: str) -> None:
    torch.compiler.reset()
    x, weight, bias = _operands(torch.float32, device)
    compiled = torch.compile(lambda x: ops.linear_gelu(x, weight, bias) * 2, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), ops.linear_gelu(x, weight, bias) * 2, rtol=0, atol=0)


def test_errors_are_those_of_linear(device: str) -> None:
    x, weight, bias = _operands(torch.float32, device)
    with pytest.raises(ValueError, match="unknown approximation"):
        ops.linear_gelu(x, weight, bias, approximate="fast")
    for bad in ((x[..., :40], weight, bias), (x, weight, bias[:5]), (x, weight.half(), bias)):
        with pytest.raises(RuntimeError) as stock:
            F.linear(*bad)
        with pytest.raises(RuntimeError) as ours:
            ops.linear_gelu(*bad)
        assert str(ours.value) == str(stock.value)


@pytest.mark.parametrize("shape", [(3, 0), (0,), (2, 0, 8), (4, 8)])
@pytest.mark.parametrize("columns", [0, 5])
def test_a_layer_without_rows_or_columns_has_the_gradients_of_torch(
    shape: tuple[int, ...], columns: int, device: str
) -> None:
    results = []
    for layer in (ops.linear_gelu, lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh")):
        leaves = [
            torch.ones(size, device=device, requires_grad=True) for size in (shape, (columns, shape[-1]), (columns,))
        ]
        y = layer(*leaves)
        y.square().sum().backward()
        results.append((y, *(leaf.grad for leaf in leaves)))
    for ours, stock in zip(*results, strict=True):
        assert ours.shape == stock.shape
        torch.testing.assert_close(ours, stock)


@torch.no_grad()
def test_what_is_concatenated_in_front_lies_in_the_room_that_was_left(device: str) -> None:
    x, weight, bias = (torch.randn(*shape, device=device).bfloat16() for shape in ((2, 6, 32), (64, 32), (64,)))
    front = torch.randn(2, 6, 16, device=device).bfloat16()
    expected = torch.cat([front, linear_gelu(x, weight, bias)], -1)
    for dim in (-1, 2):
        y = linear_gelu(x, weight, bias, room=16)
        assert torch.equal(y, expected[..., 16:])
        both = concatenate(front, y, dim)
        assert both.is_contiguous() and torch.equal(both, expected)
        assert both.data_ptr() + 16 * both.element_size() == y.data_ptr()
        assert concatenate(front, y, dim).data_ptr() != both.data_ptr(), "the room is taken"


@torch.no_grad()
def test_what_does_not_fit_into_the_room_is_concatenated_as_torch_does(device: str) -> None:
    x, weight, front = (torch.randn(*shape, device=device) for shape in ((2, 6, 32), (64, 32), (2, 6, 16)))
    for other, dim in ((front[..., :8], -1), (front.double(), 2), (torch.randn(2, 3, 64, device=device), 1)):
        y = linear_gelu(x, weight, room=16)
        assert torch.equal(concatenate(other, y, dim), torch.cat([other, y], dim))
    with torch.enable_grad():
        y = linear_gelu(x, weight.requires_grad_(), room=16)
        assert y.is_contiguous() and concatenate(front, y, -1).requires_grad
