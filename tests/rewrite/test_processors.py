"""Attention processors whose ``__call__`` is rewritten: object, class and routes stay, and any change is seen."""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import Attention, CogVideoXAttnProcessor2_0, JointAttnProcessor2_0
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxAttnProcessor
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from diffkern import inject_optimized_kernels, restore
from diffkern.rewrite import Rewriter, Rewritten, prove_ahead
from diffkern.rewrite.facts import Facts
from diffkern.rewrite.reference import to_float64
from diffkern.rewrite.variants import split_by_arguments

BATCH, TEXT, IMAGE, HEADS, HEAD_DIM = 2, 5, 12, 2, 16


#: Processors that join text and image, or rotate in place behind the text.
PROCESSORS: dict[str, Any] = {
    "sd3": JointAttnProcessor2_0,
    "qwen": QwenDoubleStreamAttnProcessor2_0,
    "hunyuan": HunyuanVideoAttnProcessor2_0,
    "cogvideox": CogVideoXAttnProcessor2_0,
}


class Louder(FluxAttnProcessor):
    """A subclass that computes something else."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return tuple([2 * part for part in super().__call__(*args, **kwargs)])


class TorchOps(TorchDispatchMode):
    """Remembers the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def narrowed(value: Any) -> Any:
    """A floating point tensor in bfloat16; tables as they are."""
    return value.bfloat16() if isinstance(value, Tensor) else value


def attention(dtype: torch.dtype = torch.bfloat16) -> FluxAttention:
    torch.manual_seed(0)
    module = FluxAttention(32, HEADS, HEAD_DIM, added_kv_proj_dim=32, context_pre_only=False, bias=True)
    for name, parameter in module.named_parameters():
        nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    return module.to(dtype).eval().requires_grad_(False)


def arguments(dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    image, text = (torch.randn(BATCH, rows, 32, generator=generator).to(dtype) for rows in (IMAGE, TEXT))
    angles = torch.randn(TEXT + IMAGE, HEAD_DIM // 2, generator=generator).repeat_interleave(2, 1)
    return {"hidden_states": image, "encoder_hidden_states": text, "image_rotary_emb": (angles.cos(), angles.sin())}


def run(module: nn.Module, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        results = module(**kwargs)
    parts = results if isinstance(results, tuple) else (results,)
    return torch.cat([part.double().reshape(-1) for part in parts])


@pytest.fixture
def patched() -> Iterator[FluxAttention]:
    module = attention()
    inject_optimized_kernels(module)
    yield module
    restore(module)


def test_norms_and_rotation_of_two_streams_are_one_site_as_close_to_float64_as_stock() -> None:
    module, given = attention(), arguments()
    wide = {name: tuple(t.double() for t in v) if type(v) is tuple else v.double() for name, v in given.items()}
    stock, reference = run(module, **given), run(attention().double(), **wide)
    rewritten = Rewriter().rewrite(module)
    assert isinstance(rewritten, Rewritten)
    module.forward = rewritten.function.__get__(module)
    fused = run(module, **given)
    assert "query and key norm, two streams" in [site.plan.rule.name for site in rewritten.sites if site.fused_calls]
    assert (fused - reference).norm() <= 1.1 * (stock - reference).norm()


def test_exact_numerics_give_the_bits_of_stock_in_a_processor() -> None:
    module = attention()
    stock = run(module, **arguments())
    inject_optimized_kernels(module, numerics="exact")
    assert torch.equal(run(module, **arguments()), stock)


def test_a_site_that_exact_numerics_leave_as_it_is_written_has_a_reason() -> None:
    module, given = wan_attention()
    rewritten = Rewriter("exact").rewrite(module)
    assert isinstance(rewritten, Rewritten)
    module.forward = rewritten.function.__get__(module)
    run(module, hidden_states=given["hidden_states"])  # norms without a rotation: nothing is left beside them
    assert [reason for site in rewritten.sites for reason in site.reasons.values()] == [
        "no op keeps the bits of its norm"
    ]


def joint_attention(kind: str, rows: int = IMAGE) -> tuple[nn.Module, dict[str, Any]]:
    """An attention over image and text, and the arguments of a call, in float32."""
    torch.manual_seed(0)
    joint: dict[str, Any] = {"added_kv_proj_dim": 32, "context_pre_only": False, "qk_norm": "rms_norm"}
    made = Attention(
        query_dim=32, heads=HEADS, dim_head=HEAD_DIM, out_dim=32, bias=True, processor=PROCESSORS[kind](),
        **({"qk_norm": "layer_norm"} if kind == "cogvideox" else joint),
    )  # fmt: skip
    for name, parameter in made.named_parameters():
        nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    image, text = torch.randn(BATCH, rows, 32), torch.randn(BATCH, TEXT, 32)
    angles = [torch.randn(tokens, HEAD_DIM // 2) for tokens in (rows, TEXT)]
    given = {"hidden_states": image, "encoder_hidden_states": text}
    if kind == "qwen":
        given["image_rotary_emb"] = tuple([torch.polar(torch.ones_like(one), one) for one in angles])  # type: ignore
    elif kind != "sd3":
        repeated = angles[0].repeat_interleave(2, 1)
        given["image_rotary_emb"] = (repeated.cos(), repeated.sin())  # type: ignore[assignment]
    return made.eval().requires_grad_(False), given


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("kind", ["sd3", "qwen", "hunyuan", "cogvideox"])
def test_two_streams_are_normalised_rotated_and_joined_by_one_op(kind: str, numerics: str) -> None:
    module, given = joint_attention(kind, IMAGE if numerics == "fast" else 1024)  # many bits to be equal
    wide = {name: to_float64(value) for name, value in given.items()}
    reference = run(copy.deepcopy(module).double(), **wide)
    module, given = module.bfloat16(), {name: narrowed(value) for name, value in given.items()}
    stock = run(module, **given)
    rewritten = Rewriter(numerics).rewrite(module)
    assert isinstance(rewritten, Rewritten)
    module.forward = rewritten.function.__get__(module)
    fused = run(module, **given)
    fused_sites = {site.plan.rule.name for site in rewritten.sites if site.fused_calls}
    if numerics == "fast":
        assert (fused - reference).norm() <= 1.1 * (stock - reference).norm()
    else:
        assert torch.equal(fused, stock)
    of_values = {"concatenation of streams"} if numerics == "fast" or kind == "sd3" else set()
    of_values |= {"linear of a stream"} if numerics == "fast" else set()
    of_values = set() if kind == "cogvideox" else of_values
    assert fused_sites == {"query and key norm, two streams"} | of_values
    with TorchOps() as seen:
        module(**given)
    assert any("joint_qk_norm_rope" in name for name in seen.names)
    # Values: for exact numerics copied into the layout that stock has.
    assert seen.names.count("aten::cat") == (0 if numerics == "exact" and kind == "sd3" else 1)


class TwoStreams(nn.Module):
    """The end of a block over image and text, as HunyuanVideo has it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm2, self.norm2_context = nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, x: Tensor, text: Tensor, gate: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        x = x + x * gate
        text = text + text * gate
        y = self.norm2(x)
        z = self.norm2_context(text)
        return x, text, y * (1 + scale) + gate, z * (1 + scale) + gate


def test_norms_of_two_streams_are_not_taken_for_those_of_queries_and_keys() -> None:
    rewritten = Rewriter().rewrite(TwoStreams())
    assert isinstance(rewritten, Rewritten)
    assert [site.plan.rule.name for site in rewritten.sites] == ["residual, norm, modulation"] * 2


def test_an_argument_that_is_bound_again_is_asked_for_again() -> None:
    text = """
def call(self, module, x, text=None):
    if text is not None:
        x = torch.cat([x, text])
    text = None
    if text is not None:
        x = -x
    return x
"""
    tree = ast.parse(text).body[0]
    assert isinstance(tree, ast.FunctionDef)
    split_by_arguments(tree, Facts("module"))
    assert isinstance(tree.body[0], ast.If)
    namespace: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module([tree], []), "<test>", "exec"), namespace)
    one, other = torch.ones(1), torch.zeros(1)
    assert torch.equal(namespace["call"](None, None, one, other), torch.tensor([1.0, 0.0]))
    assert torch.equal(namespace["call"](None, None, one), one)


def test_a_call_without_tables_takes_the_branch_without_a_rotation() -> None:
    module, given = attention(torch.float32), arguments(torch.float32)
    given["image_rotary_emb"] = None
    stock = run(module, **given)
    inject_optimized_kernels(module)
    torch.testing.assert_close(run(module, **given), stock, rtol=1e-4, atol=1e-5)


def test_processor_object_and_class_stay(patched: FluxAttention) -> None:
    processor = patched.processor
    run(patched, **arguments())
    assert patched.processor is processor and type(processor) is FluxAttnProcessor
    assert "__call__" not in vars(processor)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_subclass_of_a_processor_runs_its_own_call(when: str) -> None:
    module, stock = attention(), attention()
    stock.set_processor(Louder())
    if when == "before":
        module.set_processor(Louder())
    inject_optimized_kernels(module)
    if when == "after":
        module.set_processor(Louder())
    assert torch.allclose(run(module, **arguments()), run(stock, **arguments()), rtol=2e-2, atol=2e-2)


def test_another_processor_of_the_class_is_rewritten_as_well(patched: FluxAttention) -> None:
    first = run(patched, **arguments())
    patched.set_processor(FluxAttnProcessor())
    assert torch.equal(run(patched, **arguments()), first)


def test_a_call_that_is_replaced_later_runs(patched: FluxAttention, monkeypatch: pytest.MonkeyPatch) -> None:
    def replaced(self: Any, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return hidden_states, hidden_states

    run(patched, **arguments())
    monkeypatch.setattr(FluxAttnProcessor, "__call__", replaced)
    x = arguments()["hidden_states"].double().reshape(-1)
    assert torch.equal(run(patched, **arguments()), torch.cat([x, x]))


def test_a_backend_that_is_set_later_serves_the_rewritten_call(patched: FluxAttention) -> None:
    run(patched, **arguments())
    patched.processor._attention_backend = "no such backend"
    with pytest.raises(Exception, match="no such backend"):
        run(patched, **arguments())


def test_a_hook_on_a_norm_of_queries_is_called(patched: FluxAttention) -> None:
    seen: list[Any] = []
    run(patched, **arguments())
    patched.norm_q.register_forward_hook(lambda *_: seen.append(1))
    run(patched, **arguments())
    assert seen == [1]


def test_arguments_that_the_processor_does_not_know_are_ignored_as_before(patched: FluxAttention) -> None:
    assert torch.equal(run(patched, **arguments()), run(patched, **arguments(), scale=2.0))


def test_the_signature_of_a_call_is_read_once_and_that_of_another_call_too(
    patched: FluxAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    read = inspect.Signature.from_callable
    monkeypatch.setattr(inspect, "signature", lambda method: asked.append(method) or read(method))
    for _ in range(3):
        run(patched, **arguments())
    assert len(asked) <= 1
    taken: list[float] = []

    def other(self: Any, attn: Any, hidden_states: Any, *args: Any, scale: float = 1.0) -> Any:
        taken.append(scale)
        return hidden_states, hidden_states

    monkeypatch.setattr(type(patched.processor), "__call__", other)
    run(patched, **arguments(), scale=2.0)
    other.__dict__["__signature__"] = inspect.Signature([inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)])
    run(patched, **arguments(), scale=2.0)
    assert taken == [2.0, 1.0], "what is written into a function holds at once"


def test_a_norm_over_all_heads_and_a_nested_rotation_are_one_site() -> None:
    module, given = wan_attention()
    stock = run(module, **given)
    rewritten = Rewriter().rewrite(module)
    assert isinstance(rewritten, Rewritten)
    module.forward = rewritten.function.__get__(module)
    torch.testing.assert_close(run(module, **given), stock, rtol=1e-5, atol=1e-5)
    (rotated,) = [site for site in rewritten.sites if site.fused_calls]
    (way,) = rotated.ways.values()
    assert way is not None and way.options["form"].across_heads


def test_an_attention_that_is_compiled_before_its_first_call_is_one_graph_with_its_op(patched: FluxAttention) -> None:
    torch._dynamo.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(patched, fullgraph=True, backend=backend)
    first = run(compiled, **arguments())
    (graph,) = graphs
    assert sum("joint_qk_norm_rope" in str(node.target) for node in graph.graph.nodes) == 1
    assert torch.equal(run(patched, **arguments()), first)


@pytest.mark.parametrize("kind", ["sd3", "qwen", "hunyuan", "wan"])
def test_attention_is_proven_for_the_operands_that_it_will_have(kind: str) -> None:
    module, given = wan_attention() if kind == "wan" else joint_attention(kind)
    rewriter = Rewriter()
    rewritten = rewriter.rewrite(module)
    assert isinstance(rewritten, Rewritten)
    for site in rewritten.sites:
        prove_ahead(site, module, torch.device("cpu"), torch.float32)
        site.on_new_signature = None  # what is met only now stays stock
    module.forward = rewritten.function.__get__(module)
    run(module, **given)
    sites = [site for site in rewritten.sites if site.plan.rule.name != "linear of a stream"]  # which needs no proof
    assert sum(site.fused_calls for site in sites) == (1 if kind == "wan" else 2)  # values as well


def wan_attention() -> tuple[nn.Module, dict[str, Any]]:
    """A self-attention with norms over all heads, and the arguments of a call, in float32."""
    torch.manual_seed(0)
    module = WanAttention(32, HEADS, HEAD_DIM, processor=WanAttnProcessor()).requires_grad_(False)
    angles = torch.randn(1, IMAGE, 1, HEAD_DIM // 2).repeat_interleave(2, -1)
    return module, {"hidden_states": torch.randn(BATCH, IMAGE, 32), "rotary_emb": (angles.cos(), angles.sin())}
