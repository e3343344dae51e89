"""packed_linear: one product where the weights lie together, and the same result where they do not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from diffkern import ops
from diffkern.ops.contract import table
from diffkern.providers.cublaslt.layers import together
from tests.ops.reference import relative_error

SIZES = (16, 8, 24)


def _operands(dtype: torch.dtype, device: str, *, packed: bool, rows: tuple[int, ...] = (2, 33)) -> tuple[Tensor, ...]:
    """An input, a weight and a bias, and the parts of both."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(*rows, 48), (sum(SIZES), 48), (sum(SIZES),)]
    x, weight, bias = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    weights, biases = weight.split(SIZES), bias.split(SIZES)
    if not packed:
        weights, biases = (tuple(part.clone() for part in parts) for parts in (weights, biases))
    return x, weight, bias, weights, biases  # type: ignore[return-value]


def test_every_row_of_the_contract_is_tested() -> None:
    cases = {row.case for row in table() if row.op == "packed_linear"}
    assert cases == {"weights, and biases, one after another in memory", "any other"}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_error_is_at_most_that_of_the_layers(dtype: torch.dtype, packed: bool, device: str) -> None:
    x, weight, bias, weights, biases = _operands(dtype, device, packed=packed)
    for own, whole in ((biases, bias), ((), None)):
        y = ops.packed_linear(x, weights, own)
        layers = [F.linear(x, one, own[index] if own else None) for index, one in enumerate(weights)]
        truth = F.linear(x.double(), weight.double(), None if whole is None else whole.double())
        assert (y.shape, y.dtype, y.is_contiguous()) == ((2, 33, sum(SIZES)), dtype, True)
        assert relative_error(y, truth) <= 1.05 * relative_error(torch.cat(layers, -1), truth) + 1e-6
        assert torch.equal(y, F.linear(x, weight, whole) if packed else torch.cat(layers, -1))


def test_any_leading_shape_and_any_strides(device: str) -> None:
    for rows in ((), (1,), (5,), (2, 3), (2, 1, 3), (0,), (2, 0)):
        for packed in (True, False):
            x, weight, bias, weights, biases = _operands(torch.float32, device, packed=packed, rows=rows)
            torch.testing.assert_close(ops.packed_linear(x, weights, biases), F.linear(x, weight, bias))
    x, weight, bias, weights, biases = _operands(torch.float32, device, packed=True)
    y = ops.packed_linear(x.transpose(0, 1), weights, biases)
    torch.testing.assert_close(y, F.linear(x.transpose(0, 1), weight, bias))
    columns = [part.t().contiguous().t() for part in weights]
    torch.testing.assert_close(ops.packed_linear(x, columns, biases), F.linear(x, weight, bias))


def test_together_is_what_one_tensor_holds_in_order(device: str) -> None:
    weight = torch.randn(24, 8, device=device)
    first, second, third = weight.split(8)
    whole = together([first, second, third])
    assert whole is not None and whole.data_ptr() == weight.data_ptr() and torch.equal(whole, weight)
    assert torch.equal(together([second, third]), weight[8:])  # type: ignore[arg-type]
    for parts in ([first, third], [second, first], [first, first], [first, second.clone()], [first.t(), second.t()]):
        assert together(parts) is None
    assert together([first, second.half()]) is None
    assert together([weight[:8, :4], weight[8:, :4]]) is None


def test_neighbours_of_other_allocations_are_not_together() -> None:
    memory = bytearray(2 * 4 * 4)
    first = torch.frombuffer(memory, dtype=torch.float32, count=4).view(1, 4)
    second = torch.frombuffer(memory, dtype=torch.float32, count=4, offset=16).view(1, 4)
    assert first.data_ptr() + 16 == second.data_ptr()
    assert together([first, second]) is None


def test_gradients_and_the_registered_op() -> None:
    x, _, _, weights, biases = _operands(torch.float32, "cpu", packed=True, rows=(3,))
    torch.library.opcheck(torch.ops.diffkern.packed_linear, (x, list(weights), list(biases), None))
    torch.library.opcheck(torch.ops.diffkern.packed_linear, (x, list(weights), [], None))
    wide = [tensor.double().requires_grad_() for tensor in (x, *weights, *biases)]
    assert torch.autograd.gradcheck(lambda x, *rest: ops.packed_linear(x, rest[:3], rest[3:]), wide)
    assert torch.autograd.gradcheck(lambda x, *rest: ops.packed_linear(x, rest), wide[:4])


def test_transforms_and_graphs_see_the_layers() -> None:
    x, weight, bias, weights, biases = _operands(torch.float32, "cpu", packed=True)
    expected = F.linear(x, weight, bias)
    by_sample = torch.func.vmap(lambda one: ops.packed_linear(one, weights, biases))(x)
    torch.testing.assert_close(by_sample, expected)
    _, tangent = torch.func.jvp(lambda given: ops.packed_linear(given, weights, biases), (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, F.linear(torch.ones_like(x), weight))
    compiled = torch.compile(lambda x: ops.packed_linear(x, weights, biases) * 2, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected * 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ops.packed_linear(x, weights, biases), F.linear(x, weight, bias))


def test_what_does_not_fit_together_is_refused() -> None:
    x, _, _, weights, biases = _operands(torch.float32, "cpu", packed=True)
    with pytest.raises(ValueError, match="one weight at least"):
        ops.packed_linear(x, [])
    with pytest.raises(ValueError, match="3 weights and 2 biases"):
        ops.packed_linear(x, weights, biases[:2])
    with pytest.raises(ValueError, match="do not fit together"):
        ops.packed_linear(x[..., :8], weights, biases)
    with pytest.raises(ValueError, match="and its weight 8 rows"):
        ops.packed_linear(x, weights, (biases[0], biases[0], biases[2]))
    with pytest.raises(TypeError, match="must be of the dtype of the input"):
        ops.packed_linear(x.half(), weights, biases)


@pytest.mark.parametrize("shape", [(2, 3, 16), (16,), (0, 16), (2, 0)])
@pytest.mark.parametrize("rows", [(0,), (0, 0), (0, 5), (5, 3)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_layers_without_rows_or_columns_are_those_of_torch(
    shape: tuple[int, ...], rows: tuple[int, ...], with_bias: bool, device: str
) -> None:
    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()

    results = []
    for layers in (ops.packed_linear, lambda x, w, b: torch.cat([F.linear(x, *o) for o in zip(w, b, strict=True)], -1)):
        x, weights = leaf(*shape), [leaf(count, shape[-1]) for count in rows]
        biases = [leaf(count) for count in rows] if with_bias else []
        given = biases or ([] if layers is ops.packed_linear else [None] * len(rows))
        y = layers(x, weights, given)
        y.square().sum().backward()
        results.append((y, *(leaf.grad for leaf in (x, *weights, *biases))))
    for ours, stock in zip(*results, strict=True):
        assert ours.shape == stock.shape
        torch.testing.assert_close(ours, stock)
