"""Patched models under torch.compile, autocast and torch.export."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from diffusers.models.transformers.sana_transformer import GLUMBConv
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoIndividualTokenRefinerBlock
from torch import nn

from diffkern import inject_optimized_kernels, restore
from diffkern.rewrite import RULES
from tests.injection.models import ltx_inputs, run, tiny_ltx
from tests.rewrite.modules import SIZE, block


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def count_graphs(model: nn.Module, *inputs: dict[str, object]) -> int:
    """Compiles the model's blocks as diffusers does and counts the graphs that its calls need."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    model.compile_repeated_blocks(backend=backend, fullgraph=True)
    with torch.no_grad():
        for arguments in inputs:
            model(**arguments)
    return len(graphs)


def test_no_more_graphs_than_the_stock_model() -> None:
    inputs = ltx_inputs(), ltx_inputs(frames=3), ltx_inputs(frames=5)
    with torch._dynamo.config.patch(error_on_recompile=False, recompile_limit=8):
        expected = count_graphs(tiny_ltx(layers=12), *inputs)
        torch._dynamo.reset()
        model = tiny_ltx(layers=12)
        inject_optimized_kernels(model)
        assert count_graphs(model, *inputs) == expected


def test_compiled_and_injected_gives_the_same_and_uses_the_ops() -> None:
    stock = run(tiny_ltx())
    model = tiny_ltx()
    inject_optimized_kernels(model)
    targets: set[str] = set()

    def backend(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> object:
        targets.update(str(node.target) for node in graph.graph.nodes if "diffkern" in str(node.target))
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        result = compiled(**ltx_inputs())[0]
    torch.testing.assert_close(result, stock, rtol=1e-4, atol=1e-5)
    # The op of whoever computes it, and not the one that asks at every call who does.
    names = {target.split(".")[1].removesuffix("_plain") for target in targets if not target.startswith("diffkern.")}
    names |= {target.split(".")[1].rpartition("_by_")[0] for target in targets if target.startswith("diffkern.")}
    names = {name.removesuffix("_plain") for name in names}
    assert {"norm_modulate", "qk_norm_rope", "gate_residual_norm_modulate"} <= names


@pytest.mark.parametrize("kind", ["left to the compiler", "kept between calls"])
def test_a_graph_of_parts_that_no_proof_would_change_is_not_said_to_lack_one(kind: str) -> None:
    if kind == "kept between calls":
        refiner = HunyuanVideoIndividualTokenRefinerBlock(num_attention_heads=2, attention_head_dim=16)
        layer: nn.Module = refiner.requires_grad_(False).eval()
        inputs = torch.randn(1, 5, 32), torch.randn(1, 32)
    else:
        layer = block("x, y, gate", "return x + gate * y")
        inputs = torch.randn(1, 5, SIZE), torch.randn(1, 5, SIZE), torch.randn(1, 1, SIZE)  # type: ignore[assignment]
    report = inject_optimized_kernels(layer)
    if kind == "left to the compiler":
        layer.bfloat16()
        inputs = tuple([x.bfloat16() for x in inputs])  # type: ignore[assignment]
    with torch.no_grad():
        torch.compile(layer, backend="eager", fullgraph=True)(*inputs)
    assert report.patched and not [note for note in report.notes if "not being proven yet" in note]


def test_a_proof_on_one_device_is_none_on_another() -> None:
    report = inject_optimized_kernels(tiny_ltx(1))
    site = next(site for site in report.patched if site.class_name.endswith(".LTXVideoTransformerBlock"))
    lacks = site._state.fusion.lacks_proof
    assert not lacks(torch.device("cpu"), torch.float32)
    assert lacks(torch.device("cuda", 0), torch.float32) and lacks(torch.device("cpu"), torch.float64)


@pytest.mark.parametrize("norm", [nn.LayerNorm(32), nn.RMSNorm(32, eps=1e-6)], ids=["layer_norm", "rms_norm"])
def test_a_norm_over_rows_is_left_to_the_compiler_unless_a_provider_is_named(norm: nn.Module) -> None:
    x, ops = torch.randn(4, 32), {}
    stock = norm(x)
    for providers in (None, {"layer_norm": "eager", "rms_norm": "eager"}):
        targets: list[str] = []

        def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor], seen: list[str] = targets) -> object:
            seen += [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
            return graph.forward

        torch._dynamo.reset()
        report = inject_optimized_kernels(norm, config=providers)
        result = torch.compile(norm, backend=backend, fullgraph=True)(x)
        torch.testing.assert_close(result, stock, rtol=1e-5, atol=1e-6)
        ops[providers is None] = [target for target in targets if "diffkern" in target]
        assert not report.notes and restore(norm) == 1
        if providers is None:
            assert torch.equal(result, stock)
    assert not ops[True] and ops[False]


def test_rules_that_are_left_to_the_compiler_are_those_that_it_fuses_with_what_stands_around() -> None:
    left = {rule.name for rule in RULES if rule.is_left_to_compiler}
    behind = {f"convolution, {what}" for what in ("SiLU", "gated linear unit", "residual")}
    assert left == {"gated residual", "linear attention", *behind}


def test_what_stands_behind_a_convolution_is_left_to_the_compiler_unless_a_provider_is_named() -> None:
    torch.manual_seed(0)
    block = GLUMBConv(8, 8, 2.5, None, False).requires_grad_(False).eval()
    x, ops = torch.randn(2, 8, 6, 6), {}
    stock = block(x)
    for providers in (None, {"*": "eager"}):
        targets: list[str] = []

        def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor], seen: list[str] = targets) -> object:
            seen += [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
            return graph.forward

        torch._dynamo.reset()
        inject_optimized_kernels(block, config=providers)
        block(x)  # proven
        result = torch.compile(block, backend=backend, fullgraph=True)(x)
        torch.testing.assert_close(result, stock, rtol=1e-5, atol=1e-6)
        ops[providers is None] = [target for target in targets if "diffkern" in target]
        assert restore(block) == 1
        if providers is None:
            assert torch.equal(result, stock)
    assert not ops[True] and len(ops[False]) == 2


def in_bfloat16(arguments: dict[str, object]) -> dict[str, object]:
    return {
        name: value.bfloat16() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }


def test_a_block_cast_after_the_injection_is_traced_as_stock_and_said_so() -> None:
    model = tiny_ltx(layers=3)
    report = inject_optimized_kernels(model)
    model.to(torch.bfloat16)
    arguments = in_bfloat16(ltx_inputs())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="traced LTXVideoTransformerBlock in bfloat16 on cpu as stock") as warned:
            compiled(**arguments)
        (note,) = [note for note in report.notes if "traced LTXVideoTransformerBlock" in note]
        assert "run one call first" in note and note in str(report).replace("\n", " ")
        assert len([one for one in warned if "Block in bfloat16 on cpu as stock" in str(one.message)]) == 1
        model(**arguments)
    assert [report.calls()[f"transformer_blocks.{i}"]["fused"] for i in range(3)] == [4, 4, 4]
    torch._dynamo.reset()
    report.notes.clear()
    with torch.no_grad():
        torch.compile(model, backend="eager", fullgraph=True)(**arguments)
    assert not [note for note in report.notes if "traced" in note]


def test_a_patch_after_a_compiled_call_is_picked_up_and_restore_too() -> None:
    model = tiny_ltx(layers=1)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        stock = compiled(**ltx_inputs())[0]
        report = inject_optimized_kernels(model)
        torch.testing.assert_close(compiled(**ltx_inputs())[0], stock, rtol=1e-4, atol=1e-5)
        report.restore()
        assert torch.equal(compiled(**ltx_inputs())[0], stock)


def test_training_under_compile_gives_the_stock_gradients() -> None:
    gradients = []
    for inject in (False, True):
        torch._dynamo.reset()
        layer = nn.Sequential(nn.Linear(32, 32), nn.RMSNorm(32, eps=1e-6), nn.LayerNorm(32))
        torch.manual_seed(0)
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
        if inject:
            inject_optimized_kernels(layer)
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x).square().sum().backward()
        gradients.append([parameter.grad for parameter in layer.parameters()])
    for expected, actual in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_keeps_the_output_dtype(dtype: torch.dtype) -> None:
    for layer in (nn.LayerNorm(32), nn.RMSNorm(32)):
        x = torch.randn(4, 32).to(dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            stock = layer(x)
            inject_optimized_kernels(layer)
            patched = layer(x)
        assert patched.dtype == stock.dtype and torch.equal(patched, stock)
        assert restore(layer) == 1


def test_train_and_eval_and_grad_in_eval() -> None:
    stock = nn.RMSNorm(32, eps=1e-6)
    patched = nn.RMSNorm(32, eps=1e-6)
    report = inject_optimized_kernels(patched)
    x = torch.randn(4, 32)
    for mode in (True, False):
        results = []
        for layer in (stock, patched):
            layer.train(mode)
            layer.zero_grad()
            leaf = x.clone().requires_grad_()
            (layer(leaf) * x).sum().backward()
            results.append((leaf.grad, layer.weight.grad))
        for expected, actual in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected)
    assert report.calls()[""]["fused"] == 2
