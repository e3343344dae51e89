"""The denoiser of LTX-Video in graphs of ``torch.compile``: rotary tables by axis, and the bits of the eager run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
from diffusers.models.transformers.transformer_ltx import LTXVideoRotaryPosEmbed
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from diffkern import inject_optimized_kernels, restore
from diffkern.bench.measure import relative_error
from diffkern.blocks.ltx_rope import TracedTables, axial_tables
from diffkern.ops import expand_axes
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

    def tables(self) -> list[list[tuple[int, ...]]]:
        """The shapes of the cosines that each op reads which rotates."""
        found = []
        for graph in self:
            for node in graph.graph.nodes:
                if "qk_norm_rope" in str(node.target) and len(node.args) > 6 and node.args[6]:
                    found.append([tuple(table.meta["example_value"].shape) for table in node.args[6]])
        return found


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


def test_blocks_read_tables_by_axis_and_one_graph_serves_all_steps() -> None:
    model, fast, graphs = compiled()
    for time in (1000.0, 700.0, 10.0):
        inputs = arguments(timestep=torch.full((2,), time))
        assert torch.equal(step(fast, inputs), step(model, inputs))
    assert len(graphs) == 1 and graphs.tables() == [[(3, 5), (4, 5), (5, 5)]] * 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("dynamic", [None, True])
def test_other_sizes_need_no_more_graphs_than_stock_has(dynamic: bool | None) -> None:
    calls = [arguments(grid, batch) for batch, grid in ((2, (2, 4, 4)), (2, (3, 3, 5)), (2, (1, 7, 3)), (1, (3, 3, 5)))]
    stock, expected = Graphs(), tiny_ltx(layers=1)
    slow = torch.compile(expected, backend=stock, fullgraph=True, dynamic=dynamic)
    for inputs in calls:
        step(slow, inputs)
    torch._dynamo.reset()
    model, fast, graphs = compiled(layers=1, dynamic=dynamic)
    for inputs in calls:
        assert torch.equal(step(fast, inputs), step(model, inputs))
        torch.testing.assert_close(step(model, inputs), step(expected, inputs), rtol=1e-4, atol=1e-5)
    assert len(graphs) == len(stock)
    assert {len(tables) for tables in graphs.tables()} == {3}


@pytest.mark.parametrize("dim", [48, 50, 52])
@pytest.mark.parametrize("scale", [None, SCALE])
def test_tables_by_axis_make_up_the_full_ones(dim: int, scale: tuple[float, float, float] | None) -> None:
    rope, x = LTXVideoRotaryPosEmbed(dim), torch.zeros(2, 1, 1)
    stock = rope(x, 3, 4, 5, scale)
    inject_optimized_kernels(rope)
    with torch.no_grad():
        tables = torch.compile(rope, backend="eager", fullgraph=True)(x, 3, 4, 5, scale)
    axes = tables.axes
    whole = expand_axes(axes.cos, axes.sin, grid=axes.grid, order=axes.order, front_pad=axes.front_pad)
    for own, again, expected in zip(tables, whole, stock, strict=True):
        assert torch.equal(own, expected)
        assert all(torch.equal(again, expected[i, :, j::2]) for i in (0, 1) for j in (0, 1))


@pytest.mark.exhaustive
def test_inductor_computes_each_small_table_once_and_no_full_one() -> None:
    from torch._inductor.utils import run_and_get_code

    model, fast, _ = compiled(layers=2, backend="inductor")
    inputs = arguments((3, 7, 11))
    result, (code,) = run_and_get_code(step, fast, inputs)
    torch.testing.assert_close(result, step(model, inputs), rtol=1e-4, atol=1e-4)
    allocated = [line for line in code.splitlines() if "= empty_strided" in line]
    assert not any(f"({batch}, 231, 32)" in line for line in allocated for batch in (1, 2))
    for length in (3, 7, 11):
        assert sum(f"(({length}, 5)," in line for line in allocated) == 2


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_the_bits_of_the_eager_run(numerics: str) -> None:
    model = tiny_ltx().to(torch.bfloat16)
    inputs = {
        name: value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in arguments((1, 5, 3), batch=1).items()
    }
    stock = step(model, inputs)
    inject_optimized_kernels(model, numerics=numerics)
    graphs = Graphs()
    result = step(torch.compile(model, backend=graphs, fullgraph=True), inputs)
    assert torch.equal(result, step(model, inputs))
    # Tables by axis are others than the stock ones, which exact has.
    assert graphs.tables() == [[(1, 5), (5, 5), (3, 5)]] * 2 if numerics == "fast" else torch.equal(result, stock)


# --- where the tables may be others, or somebody else hears of them ----------------------------------------


@pytest.mark.exhaustive
def test_coordinates_of_its_own_are_read_in_full() -> None:
    model, fast, graphs = compiled()
    inputs = arguments(video_coords=torch.rand(2, 3, 60))
    assert torch.equal(step(fast, inputs), step(model, inputs))
    assert graphs.tables() == [[(2, 60, 4, 8)]] * 3


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
    assert all(len(tables) == 1 for tables in graphs.tables())


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
    eager = step(model, arguments())  # norms that stand alone are the compiler's
    assert torch.equal(result, eager) if what == "block" else torch.allclose(result, eager, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result, stock, rtol=1e-4, atol=1e-5)
    small, full = [(3, 5), (4, 5), (5, 5)], [(2, 60, 4, 8)]
    assert graphs.tables() == [small, small if what == "block" else full]


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
    assert len(graphs) == 1 and len(graphs.tables()[0]) == 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", ["before a block", "around the tables"])
def test_tables_that_leave_a_graph(where: str) -> None:
    model, graphs = tiny_ltx(layers=3), Graphs()
    inject_optimized_kernels(model)
    expected = step(model, arguments())
    if where == "before a block":
        hook = torch.compiler.disable(lambda *call: None)
        model.transformer_blocks[1].register_forward_pre_hook(hook)
        fast: Any = torch.compile(model, backend=graphs)
    else:
        fast = model
        model.rope.compile(backend=graphs)
        model.transformer_blocks[1].compile(backend=graphs)
    for _ in range(2):
        torch.testing.assert_close(step(fast, arguments()), expected, rtol=1e-5, atol=1e-6)
    assert len(graphs) > 1


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


def test_a_pair_that_somebody_makes_of_the_tables_has_no_axes() -> None:
    pair = TracedTables((torch.zeros(1, 2, 6), torch.ones(1, 2, 6)))
    cos, sin = pair
    assert cos is pair[0] and sin is pair[1] and pair.axes is None and axial_tables(pair) is None
    assert type(pair)(table.clone() for table in pair).axes is None


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
        # A whole graph rounds its attention and its sums elsewhere; a block by itself is one op.
        assert relative_error(step(model, inputs), expected) <= (1e-2 if whole else 0.0)


@pytest.mark.skipif(TorchVersion(torch.__version__) >= "2.13", reason="Inductor writes out no more what nobody reads")
def test_inductor_knows_all_ops_of_a_graph_before_it_meets_them() -> None:
    """A new op behind many others is written out with all that it is computed from: without end, for a whole model."""
    from torch._inductor import lowering

    _, fast, graphs = compiled(layers=2)
    step(fast, arguments())
    nodes = [node.target for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    own = [op for op in nodes if isinstance(op, torch._ops.OpOverload) and "diffkern" in op.namespace]
    assert len(own) > 10 and all(op in lowering.lowerings for op in own)
