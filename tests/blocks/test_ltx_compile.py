"""The denoiser of LTX-Video in graphs of ``torch.compile``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from diffkern import inject_optimized_kernels, restore
from diffkern.bench.measure import relative_error
from tests.injection.models import ltx_inputs, tiny_ltx

SCALE = (0.3, 32.0, 32.0)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


class Graphs(list[torch.fx.GraphModule]):
    """A backend of ``torch.compile`` that runs graphs as they are, and keeps them."""

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Any:
        self.append(graph)
        return graph.forward

    def ops(self, name: str) -> int:
        """How many calls of an op there are."""
        return sum(name in str(node.target) for graph in self for node in graph.graph.nodes)


def arguments(grid: tuple[int, int, int] = (3, 4, 5), batch: int = 2, **options: Any) -> dict[str, Any]:
    frames, height, width = grid
    x = torch.randn(batch, frames * height * width, 8, generator=torch.Generator().manual_seed(0))
    sizes = {"num_frames": frames, "height": height, "width": width}
    return {**ltx_inputs(batch=batch), "hidden_states": x, **sizes, "rope_interpolation_scale": SCALE, **options}


def step(model: Any, inputs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(**inputs)[0]
    return result


def compiled(layers: int = 3, **options: Any) -> tuple[Any, Any, Graphs]:
    """An injected model, the same compiled, and its graphs."""
    model, graphs = tiny_ltx(layers=layers), Graphs()
    inject_optimized_kernels(model)
    return model, torch.compile(model, **{"backend": graphs, "fullgraph": True, **options}), graphs


def test_one_graph_serves_all_steps() -> None:
    model, fast, graphs = compiled()
    for time in (1000.0, 700.0, 10.0):
        inputs = arguments(timestep=torch.full((2,), time))
        torch.testing.assert_close(step(fast, inputs), step(model, inputs), rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1 and graphs.ops("qk_norm_rope") == 6


@pytest.mark.exhaustive
@pytest.mark.parametrize("dynamic", [None, True])
def test_other_sizes_need_no_more_graphs_than_stock_has(dynamic: bool | None) -> None:
    calls = [arguments(grid, batch) for batch, grid in ((2, (2, 4, 4)), (2, (3, 3, 5)), (2, (1, 7, 3)), (1, (3, 3, 5)))]
    stock, expected = Graphs(), tiny_ltx(layers=1)
    slow = torch.compile(expected, backend=stock, fullgraph=True, dynamic=dynamic)
    for inputs in calls:
        step(slow, inputs)
    torch._dynamo.reset()
    _, fast, graphs = compiled(layers=1, dynamic=dynamic)
    for inputs in calls:
        torch.testing.assert_close(step(fast, inputs), step(expected, inputs), rtol=1e-4, atol=1e-5)
    assert len(graphs) == len(stock)


def test_exact_has_the_bits_of_stock() -> None:
    model = tiny_ltx().to(torch.bfloat16)
    inputs = {
        name: value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in arguments((1, 5, 3), batch=1).items()
    }
    stock = step(model, inputs)
    inject_optimized_kernels(model, numerics="exact")
    assert torch.equal(step(torch.compile(model, backend=Graphs(), fullgraph=True), inputs), stock)


# --- where the tables may be others, or somebody else hears of them ----------------------------------------


def _double(module: nn.Module, args: Any, result: tuple[Tensor, Tensor]) -> None:
    result[0].mul_(2)


def _reverse(module: nn.Module, args: Any, result: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return tuple(table.flip(1) for table in result)


def _replaced(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return torch.rand(2, 60, 32, generator=torch.Generator().manual_seed(0)), torch.zeros(2, 60, 32)


@pytest.mark.parametrize("who", ["writes", "returns others", "replaces the forward"])
def test_who_hears_of_the_tables_has_its_effect(who: str) -> None:
    watched, model, graphs = tiny_ltx(), tiny_ltx(), Graphs()
    inject_optimized_kernels(model)
    for each in (watched, model):
        if who == "replaces the forward":
            tables = _replaced()
            each.rope.forward = lambda *args, tables=tables: tables
        else:
            each.rope.register_forward_hook(_double if who == "writes" else _reverse)
    inputs = arguments()
    expected = step(watched, inputs)
    assert not torch.allclose(expected, step(tiny_ltx(), inputs), rtol=1e-2, atol=1e-2), "the effect would not show"
    result = step(torch.compile(model, backend=graphs, fullgraph=True), inputs)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("what", ["block", pytest.param("attention", marks=pytest.mark.exhaustive)])
def test_stock_code_takes_the_same_tables(what: str) -> None:
    model, graphs = tiny_ltx(layers=3), Graphs()
    stock = step(model, arguments())
    inject_optimized_kernels(model)
    if what == "block":
        restore(model.transformer_blocks[1])
    else:
        model.transformer_blocks[1].attn1.register_forward_hook(lambda *call: None)
    result = step(torch.compile(model, backend=graphs, fullgraph=True), arguments())
    torch.testing.assert_close(result, step(model, arguments()), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result, stock, rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1


def _double_tables(module: nn.Module, args: Any, kwargs: dict[str, Any], *result: Any) -> None:
    kwargs["image_rotary_emb"][0].mul_(2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", ["transformer_blocks.1", "transformer_blocks.1.attn1"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_a_hook_writes_into_the_tables_reaches_the_blocks_after_it(path: str, when: str) -> None:
    watched, model, graphs = tiny_ltx(layers=3), tiny_ltx(layers=3), Graphs()
    inject_optimized_kernels(model)
    for each in (watched, model):
        module = each.get_submodule(path)
        hear = module.register_forward_pre_hook if when == "before" else module.register_forward_hook
        hear(_double_tables, with_kwargs=True)
    expected = step(watched, arguments())
    assert not torch.allclose(expected, step(tiny_ltx(layers=3), arguments()), rtol=1e-2, atol=1e-2)
    result = step(torch.compile(model, backend=graphs, fullgraph=True), arguments())
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1


@pytest.mark.exhaustive
def test_training_in_a_graph_has_the_gradients_of_the_eager_run() -> None:
    gradients = []
    for compile_it in (False, True):
        model: Any = tiny_ltx().requires_grad_(True).train()
        inject_optimized_kernels(model)
        fast = torch.compile(model, backend="aot_eager", fullgraph=True) if compile_it else model
        fast(**arguments())[0].square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for expected, actual in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("whole", [True, False])
def test_a_model_on_a_gpu_is_compiled_without_a_break(whole: bool) -> None:
    model = tiny_ltx(layers=3).to("cuda", torch.bfloat16)
    inputs = {
        name: value.to("cuda", torch.bfloat16 if value.is_floating_point() else None)
        if isinstance(value, Tensor)
        else value
        for name, value in arguments().items()
    }
    inject_optimized_kernels(model)
    expected = [step(model, inputs) for _ in range(3)][-1]
    if whole:
        model.compile(fullgraph=True)
    else:
        model.compile_repeated_blocks(fullgraph=True)
    for _ in range(3):
        assert relative_error(step(model, inputs), expected) <= 1e-2  # a graph rounds elsewhere


@pytest.mark.skipif(TorchVersion(torch.__version__) >= "2.13", reason="Inductor writes out no more what nobody reads")
def test_inductor_knows_all_ops_of_a_graph_before_it_meets_them() -> None:
    """A new op behind many others is written out with all that it is computed from: without end, for a whole model."""
    from torch._inductor import lowering

    _, fast, graphs = compiled(layers=2)
    step(fast, arguments())
    nodes = [node.target for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    own = [op for op in nodes if isinstance(op, torch._ops.OpOverload) and "diffkern" in op.namespace]
    assert len(own) > 10 and all(op in lowering.lowerings for op in own)
