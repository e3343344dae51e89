"""Attention processors whose ``__call__`` is rewritten: object, class and routes stay, and any change is seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxAttnProcessor
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from torch import Tensor, nn

from diffkern import inject_optimized_kernels, restore
from diffkern.rewrite import Rewriter, Rewritten

BATCH, TEXT, IMAGE, HEADS, HEAD_DIM = 2, 5, 12, 2, 16


class Louder(FluxAttnProcessor):
    """A subclass that computes something else."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return tuple([2 * part for part in super().__call__(*args, **kwargs)])


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
        return torch.cat([part.double().reshape(-1) for part in module(**kwargs)])


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
    assert [site.plan.rule.name for site in rewritten.sites if site.fused_calls] == ["query and key norm, rotation"]
    assert (fused - reference).norm() <= 1.1 * (stock - reference).norm()


def test_exact_numerics_give_the_bits_of_stock_in_a_processor() -> None:
    module = attention()
    stock = run(module, **arguments())
    inject_optimized_kernels(module, numerics="exact")
    assert torch.equal(run(module, **arguments()), stock)


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


def test_a_norm_over_all_heads_and_a_nested_rotation_are_one_site() -> None:
    torch.manual_seed(0)
    module = WanAttention(32, HEADS, HEAD_DIM, processor=WanAttnProcessor()).requires_grad_(False)
    angles = torch.randn(1, IMAGE, 1, HEAD_DIM // 2).repeat_interleave(2, -1)
    given = (torch.randn(BATCH, IMAGE, 32), None, None, (angles.cos(), angles.sin()))
    stock = module(*given)
    rewritten = Rewriter().rewrite(module)
    assert isinstance(rewritten, Rewritten)
    torch.testing.assert_close(rewritten.function(module, *given), stock, rtol=1e-5, atol=1e-5)
    (rotated,) = [site for site in rewritten.sites if site.fused_calls]
    (way,) = rotated.ways.values()
    assert way is not None and way.options["form"].across_heads


def test_a_compiled_attention_is_one_graph_with_its_op(patched: FluxAttention) -> None:
    first = run(patched, **arguments())  # proves the site
    torch._dynamo.reset()
    explained = torch._dynamo.explain(patched)(**arguments())
    assert explained.graph_break_count == 0
    assert any("qk_norm_rope" in str(node.target) for graph in explained.graphs for node in graph.graph.nodes)
    compiled = torch.compile(patched, fullgraph=True, backend="eager")
    with torch.no_grad():
        parts = compiled(**arguments())
    assert torch.equal(torch.cat([part.double().reshape(-1) for part in parts]), first)
