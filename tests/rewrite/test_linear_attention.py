"""The linear attention of Sana and SANA-Video as one op."""

from __future__ import annotations

import ast
import copy
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from diffusers.models.attention_processor import Attention, SanaLinearAttnProcessor2_0
from diffusers.models.transformers.transformer_sana_video import SanaLinearAttnProcessor3_0
from torch import Tensor, nn

from diffkern import inject_optimized_kernels, restore
from diffkern.rewrite.flow import Flow
from diffkern.verify.measures import relative_error

EVERYWHERE = {"*": "eager"}
HEADS, SIZE, TOKENS = 3, 8, 80


def _attention(processor: object) -> nn.Module:
    torch.manual_seed(0)
    return Attention(HEADS * SIZE, heads=HEADS, dim_head=SIZE, processor=processor).requires_grad_(False).eval()


def _inputs(dtype: torch.dtype, rotates: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, TOKENS, HEADS * SIZE, generator=generator).to(dtype)
    if not rotates:
        return {"hidden_states": x}
    angles = torch.rand(1, TOKENS, 1, SIZE // 2, generator=generator).repeat_interleave(2, -1)
    return {"hidden_states": x, "rotary_emb": (angles.cos(), angles.sin())}


PROCESSORS: dict[str, Callable[[], object]] = {"sana": SanaLinearAttnProcessor2_0, "video": SanaLinearAttnProcessor3_0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_of_sana_is_one_op_between_its_projections(name: str, dtype: torch.dtype) -> None:
    attention = _attention(PROCESSORS[name]()).to(dtype)
    inputs = _inputs(dtype, name == "video")
    exact = copy.deepcopy(attention).double()
    wide = _inputs(torch.float64, name == "video")
    wide["hidden_states"] = inputs["hidden_states"].double()
    own = Tensor.float
    stock = attention(**inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", lambda x: x if x.dtype == torch.float64 else own(x))
        reference = exact(**wide)
    report = inject_optimized_kernels(attention, config=EVERYWHERE)
    fused = attention(**inputs)
    text = report.source("")
    assert "matmul" not in text and "F.pad" not in text and "/" not in text
    counts = report.calls()[""]
    assert counts["fused"] > 0 and counts["stock"] == 0, counts
    assert fused.dtype == stock.dtype
    assert relative_error(fused, reference) <= 1.05 * relative_error(stock, reference) + 1e-6


def test_its_projections_are_still_called_as_modules() -> None:
    attention, inputs = _attention(SanaLinearAttnProcessor2_0()), _inputs(torch.float32, False)
    inject_optimized_kernels(attention, config=EVERYWHERE)
    before = attention(**inputs)
    attention.to_v.register_forward_hook(lambda module, args, output: 2 * output)  # type: ignore[union-attr]
    bias = attention.to_out[0].bias  # type: ignore[index, union-attr]
    torch.testing.assert_close(attention(**inputs), 2 * before - bias, rtol=1e-4, atol=1e-5)


def test_it_is_left_to_the_compiler_unless_a_provider_is_named() -> None:
    attention, inputs = _attention(SanaLinearAttnProcessor2_0()), _inputs(torch.float32, False)
    stock, found = attention(**inputs), {}
    for providers in (None, EVERYWHERE):
        targets: list[str] = []

        def backend(graph: torch.fx.GraphModule, _: list[Tensor], seen: list[str] = targets) -> object:
            seen += [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
            return graph.forward

        torch._dynamo.reset()
        inject_optimized_kernels(attention, config=providers)
        attention(**inputs)
        result = torch.compile(attention, backend=backend, fullgraph=True)(**inputs)
        torch.testing.assert_close(result, stock, rtol=1e-4, atol=1e-5)
        found[providers is None] = [target for target in targets if "linear_attention" in target]
        restore(attention)
    assert not found[True] and found[False]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("F.relu(query)", "torch.exp(query)"),
        ("unflatten(1, (attn.heads, -1)).transpose(2, 3)", "unflatten(1, (-1, attn.heads)).transpose(2, 3)"),
        ("value=1.0)", "value=2.0)"),
        ("[:, :, -1:]", "[:, :, :1]"),
        ("(hidden_states[:, :, -1:] + 1e-15)", "(torch.matmul(scores, query + 1)[:, :, -1:] + 1e-15)"),
        (
            "hidden_states = attn.to_out[0](hidden_states)",
            "hidden_states = attn.to_out[0](hidden_states) + scores.mean()",
        ),
    ],
)
def test_what_is_written_otherwise_is_computed_as_it_is_written(old: str, new: str, tmp_path: Path) -> None:
    text = inspect.getsource(SanaLinearAttnProcessor2_0)
    assert old in text
    head = "from __future__ import annotations\nimport torch\nimport torch.nn.functional as F\n\n"
    path = tmp_path / "other_processor.py"
    path.write_text(head + text.replace(old, new, 1))
    spec = importlib.util.spec_from_file_location("other_processor", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # Heads of as many elements as there are heads.
    attention = Attention(9, heads=3, dim_head=3, processor=module.SanaLinearAttnProcessor2_0()).requires_grad_(False)
    inputs = {"hidden_states": torch.randn(2, TOKENS, 9, generator=torch.Generator().manual_seed(2))}
    stock = attention(**inputs)
    inject_optimized_kernels(attention, config=EVERYWHERE)
    torch.testing.assert_close(attention(**inputs), stock, rtol=1e-4, atol=1e-5)


def test_a_parameter_of_a_nested_function_is_no_variable_of_the_outer_one_but_its_default_is() -> None:
    (tree,) = ast.parse(
        "def f(x, y):\n"
        "    a = x + y\n"
        "    b = a * 2\n"
        "    c = b * 3\n"
        "    def g(a, b=b):\n"
        "        return a + b + c\n"
        "    return g(a) + a + b + c\n"
    ).body
    assert isinstance(tree, ast.FunctionDef)
    flow = Flow(tree)
    last = tree.body[-1]
    captured = {}
    for node in ast.walk(last):
        if isinstance(node, ast.Name) and flow.definitions[node]:
            captured[node.id] = flow.single(node) is None
    assert (captured["a"], captured["b"], captured["c"]) == (False, True, True)
