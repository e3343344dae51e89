"""The guard lets through exactly what the fused forward computes like stock, and both compile."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from diffusers.models.normalization import FP32LayerNorm, RMSNorm
from diffusers.models.unets.unet_stable_cascade import SDCascadeLayerNorm
from torch import Tensor, nn

from diffkern.matching import NormSemantics, apply, declines, match


def semantics_of(module: nn.Module) -> NormSemantics:
    matched = match(module)
    assert matched is not None and matched.semantics is not None
    return matched.semantics


class TensorSubclass(Tensor):
    pass


class ParameterSubclass(nn.Parameter):
    pass


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (None, "the input is a NoneType, not a plain tensor"),
        ([1.0], "the input is a list, not a plain tensor"),
        (torch.zeros(2, 8).as_subclass(TensorSubclass), "the input is a TensorSubclass, not a plain tensor"),
        (
            torch.zeros(2, 8, dtype=torch.float64),
            "the input is float64; float32, float16 and bfloat16 are served",
        ),
        (
            torch.zeros(2, 8, dtype=torch.int32),
            "the input is int32; float32, float16 and bfloat16 are served",
        ),
        (torch.zeros(2, 8).to_sparse(), "the input is not an ordinary dense tensor"),
        (torch.zeros(2, 8, device="meta"), "the input has no data (meta device)"),
        (torch.zeros(2, 9), "its weight has shape (8,), the input calls for (9,)"),
        (torch.zeros(()), "an input of 0 dimensions has no dimension -1"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_inputs_that_run_stock(x: Any, reason: str) -> None:
    module = RMSNorm(8, 1e-6)
    assert declines(semantics_of(module), module, x) == reason


def test_nested_input_runs_stock() -> None:
    module = nn.LayerNorm(8)
    nested = torch.nested.nested_tensor([torch.zeros(2, 8), torch.zeros(3, 8)])
    assert "the input is" in str(declines(semantics_of(module), module, nested))


def _set(**parameters: Any) -> nn.Module:
    module = RMSNorm(8, 1e-6, bias=True)
    for name, value in parameters.items():
        if name == "eps":
            module.eps = value
        else:
            module._parameters[name] = value
    return module


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (
            _set(weight=ParameterSubclass(torch.ones(8))),
            "its weight is a ParameterSubclass, not a plain tensor",
        ),
        (_set(weight=nn.Parameter(torch.ones(8, device="meta"))), "its weight is on meta, the input on cpu"),
        (_set(bias=nn.Parameter(torch.ones(8, device="meta"))), "its bias is on meta, the input on cpu"),
        (_set(weight=nn.Parameter(torch.ones(8).double())), "its weight is stored as float64"),
        (_set(weight=nn.Parameter(torch.ones(1))), "its weight has shape (1,), the input calls for (8,)"),
        (
            _set(weight=nn.Parameter(torch.ones(3, 8))),
            "its weight has shape (3, 8), the input calls for (8,)",
        ),
        (_set(bias=nn.Parameter(torch.ones(8).bfloat16())), "its bias has another dtype than its weight"),
        (_set(weight=None), "its bias has another dtype than its weight"),
        (_set(eps=torch.tensor(1e-6)), "its eps is tensor(1.0000e-06), not a number"),
        (_set(eps="small"), "its eps is 'small', not a number"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_parameters_that_run_stock(module: nn.Module, reason: str) -> None:
    assert str(declines(semantics_of(module), module, torch.zeros(3, 8))).startswith(reason)


def test_an_attribute_that_went_missing_runs_stock() -> None:
    module = nn.LayerNorm(8)
    semantics = semantics_of(module)
    del module.eps
    assert declines(semantics, module, torch.zeros(2, 8)) == "its eps is 'missing', not a number"


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.LayerNorm(8), (2, 9)),
        (nn.LayerNorm((3, 8)), (8,)),
        (nn.LayerNorm((3, 8)), (2, 4, 8)),
        (FP32LayerNorm(8, elementwise_affine=False), (2, 9)),
        (SDCascadeLayerNorm(8), (2, 8, 4)),
        (SDCascadeLayerNorm(8), (2, 4, 4, 8)),
    ],
)
def test_shapes_that_stock_raises_for_are_declined(module: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape)
    with pytest.raises(RuntimeError):
        module(x)
    assert "does not" in str(declines(semantics_of(module), module, x))


def test_autocast_of_the_inputs_device_runs_stock() -> None:
    module = nn.LayerNorm(8)
    x = torch.zeros(2, 8)
    semantics = semantics_of(module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert declines(semantics, module, x) == "autocast is on for cpu, and the stock forward follows its rules"
        with torch.autocast("cpu", enabled=False):
            assert declines(semantics, module, x) is None
    assert declines(semantics, module, x) is None


def test_parameters_may_be_plain_tensors() -> None:
    module = nn.LayerNorm(8)
    semantics = semantics_of(module)
    del module.weight
    module.weight = torch.full((8,), 2.0)
    x = torch.randn(4, 8)
    assert declines(semantics, module, x) is None
    torch.testing.assert_close(apply(semantics, module, x), module(x))


def test_apply_reads_parameters_at_every_call() -> None:
    module = nn.RMSNorm(8, eps=1e-6)
    semantics = semantics_of(module)
    x = torch.randn(4, 8)
    before = apply(semantics, module, x)
    module.weight = nn.Parameter(torch.full((8,), 3.0))
    torch.testing.assert_close(apply(semantics, module, x), 3 * before)
    module.to(torch.bfloat16)
    assert apply(semantics, module, x.bfloat16()).dtype == torch.bfloat16


def test_gradients_are_those_of_stock() -> None:
    module = SDCascadeLayerNorm(8)
    module.weight.data = torch.randn(8)
    x = torch.randn(2, 8, 3, 4, requires_grad=True)
    target = torch.randn(2, 8, 3, 4)
    ours = torch.autograd.grad((apply(semantics_of(module), module, x) * target).sum(), (x, *module.parameters()))
    stock = torch.autograd.grad((module(x) * target).sum(), (x, *module.parameters()))
    for mine, theirs in zip(ours, stock, strict=True):
        torch.testing.assert_close(mine, theirs)


class Guarded(nn.Module):
    """Two norms of one class and one of another, each fused where the guard allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(8, eps=1e-6), nn.RMSNorm(8, eps=1e-6), RMSNorm(8, 1e-6)])
        self.semantics = [semantics_of(norm) for norm in self.norms]

    def forward(self, x: Tensor) -> Tensor:
        for semantics, norm in zip(self.semantics, self.norms, strict=True):
            fits = declines(semantics, norm, x) is None
            x = 1.5 * (apply(semantics, norm, x) if fits else norm(x))
        return x


def test_guard_and_forward_compile_without_graph_breaks() -> None:
    torch._dynamo.reset()
    model = Guarded()
    for number, parameter in enumerate(model.parameters()):
        parameter.data += number
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=keep)
    x = torch.randn(4, 8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        compiled(torch.randn(4, 8))
    assert len(graphs) == 1
    ops = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("diffkern" in op and ".rms_norm" in op for op in ops) == 3


def test_semantics_are_plain_data() -> None:
    semantics = semantics_of(nn.LayerNorm(8))
    assert pickle.loads(pickle.dumps(semantics)) == semantics
    assert len({semantics, semantics_of(nn.LayerNorm(16))}) == 1
