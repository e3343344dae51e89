"""Heads of two streams that are joined without a norm: in the order in which they lie in memory, in one launch each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from diffkern import inject_optimized_kernels, restore
from diffkern.rewrite import Rewriter, Rewritten, prove_ahead
from diffkern.rewrite.layout import concatenate

TEXT, IMAGE, HEADS, HEAD_DIM = 5, 12, 2, 16
RULE = "concatenation of streams"


class Launches(TorchDispatchMode):
    """Remembers along which dimension tensors are concatenated, whether they are contiguous, and what is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.cats: list[tuple[int, bool]] = []
        self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.cat.default:
            self.cats.append((args[1], all(x.is_contiguous() for x in args[0])))
        self.copies += func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default)
        return func(*args, **(kwargs or {}))


class Viewed(JointAttnProcessor2_0):
    """Asks the joined values for heads before tokens in memory."""

    def __call__(self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, **_: Any) -> Any:
        value = attn.to_v(hidden_states).unflatten(2, (attn.heads, -1)).transpose(1, 2)
        text = attn.add_v_proj(encoder_hidden_states).unflatten(2, (attn.heads, -1)).transpose(1, 2)
        value = torch.cat([text, value], dim=2)
        return value.view(-1, value.shape[2], value.shape[3])


def attention(
    device: str = "cpu", heads: int = HEADS, head_dim: int = HEAD_DIM, qk_norm: str | None = None
) -> Attention:
    """The attention of SD3-medium, which normalises neither queries nor keys; with norms that of SD3.5."""
    torch.manual_seed(0)
    width = heads * head_dim
    made = Attention(
        query_dim=width, heads=heads, dim_head=head_dim, out_dim=width, bias=True, added_kv_proj_dim=width,
        context_pre_only=False, processor=JointAttnProcessor2_0(), qk_norm=qk_norm,
    )  # fmt: skip
    return made.to(device, torch.bfloat16).eval().requires_grad_(False)


def arguments(device: str = "cpu", width: int = HEADS * HEAD_DIM, rows: int = IMAGE) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(2, count, width, generator=generator) for count in (rows, TEXT)]
    image, text = [x.to(device, torch.bfloat16) for x in drawn]
    return {"hidden_states": image, "encoder_hidden_states": text}


def run(module: nn.Module, given: dict[str, Tensor]) -> list[Tensor]:
    with torch.no_grad():
        results = module(**given)
    return list(results) if isinstance(results, tuple) else [results]


def rewritten(module: nn.Module, numerics: str = "fast") -> Rewritten:
    found = Rewriter(numerics).rewrite(module)
    assert isinstance(found, Rewritten)
    module.forward = found.function.__get__(module)
    return found


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_queries_keys_and_values_without_norms_are_joined_by_one_site_each(numerics: str) -> None:
    module, given = attention(), arguments()
    with torch.no_grad(), Launches() as of_stock:
        module(**given)
    assert of_stock.cats == [(2, False)] * 3 and of_stock.copies == 1  # the heads of the result, side by side
    stock = run(module, given)
    found = rewritten(module, numerics)
    if numerics == "exact":
        assert all(map(torch.equal, run(module, given), stock))
    else:  # the layer of the text adds its bias before it rounds
        torch.testing.assert_close(run(module, given), stock, rtol=2e-2, atol=2e-3)
    assert [site.fused_calls for site in found.sites if site.plan.rule.name == RULE] == [1] * 3
    with torch.no_grad(), Launches() as seen:
        module(**given)
    # Tokens before heads, as projections give them: whole rows. Exact numerics want the layout of stock, in two copies.
    assert seen.cats == ([(1, True)] * 3 if numerics == "fast" else [])
    assert seen.copies == (0 if numerics == "fast" else 6 + of_stock.copies)
    found.guard.force_original()
    assert all(map(torch.equal, run(module, given), stock))


@pytest.mark.parametrize("qk_norm", [None, "rms_norm"])
def test_attention_gets_the_queries_with_tokens_before_heads_in_memory(
    qk_norm: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention gives its result in the order of its queries; then no copy puts the heads side by side."""
    module, given, seen = attention(qk_norm=qk_norm), arguments(), []
    rewritten(module)
    run(module, given)
    attend = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *x, **rest: seen.append([y.stride() for y in x]) or attend(*x, **rest)
    )
    run(module, given)
    width = HEADS * HEAD_DIM
    assert seen == [[((TEXT + IMAGE) * width, HEAD_DIM, width, 1)] * 3]


def test_a_result_that_is_viewed_with_heads_before_tokens_stays_as_it_is_written() -> None:
    module, given = attention(), arguments()
    module.set_processor(Viewed())
    stock = run(module, given)
    found = Rewriter().rewrite(module)
    assert isinstance(found, Rewritten) and RULE not in {site.plan.rule.name for site in found.sites}
    assert {why for *_, why in found.plan.refused} == {
        "what reads it takes views that need heads before tokens in memory"
    }
    inject_optimized_kernels(module)
    assert all(map(torch.equal, run(module, given), stock))
    restore(module)


def test_joined_heads_are_proven_ahead_and_compiled_into_one_graph() -> None:
    module, given = attention(), arguments()
    stock = run(module, given)
    found = rewritten(module)
    for site in found.sites:
        prove_ahead(site, module, torch.device("cpu"), torch.bfloat16)
        site.on_new_signature = None
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if "cat" in str(node.target)])
        return graph

    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        assert all(map(torch.equal, compiled(**given), stock))
    assert len(graphs) == 1 and len(graphs[0]) == 3
    assert all(site.ways for site in found.sites if site.plan.rule.name == RULE)


@pytest.mark.parametrize("layout", ["heads behind tokens", "tokens behind heads", "one is repeated"])
def test_streams_are_concatenated_in_the_order_in_which_they_lie_in_memory(layout: str) -> None:
    behind = layout.startswith("tokens")
    streams = [torch.randn(2, count, 3, 4) for count in (3, 6, 2)]
    if layout == "one is repeated":
        streams[1] = streams[1][:1].expand(2, -1, -1, -1)
    if behind:
        streams = [x.transpose(1, 2) for x in streams]
    for dim in (2, -2) if behind else (1, -3):
        y = concatenate(streams, dim, True)
        assert torch.equal(y, torch.cat(streams, dim))
        assert (y.transpose(1, 2) if behind else y).is_contiguous()
        assert concatenate(streams, dim, False).is_contiguous()
        assert torch.equal(concatenate(streams, dim, False), y)


def test_a_small_stream_in_another_order_is_copied_first() -> None:
    """Mochi picks the valid tokens of a text, which then lie in an order of their own."""
    image, text = torch.randn(2, 60, 3, 4).transpose(1, 2), torch.randn(2, 3, 5, 4)
    with Launches() as seen:
        y = concatenate([image, text], 2, True)
    assert seen.cats == [(1, True)] and seen.copies == 1
    assert torch.equal(y, torch.cat([image, text], 2)) and y.transpose(1, 2).is_contiguous()


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_on_a_gpu_nothing_is_copied_behind_attention(numerics: str) -> None:
    module, given = attention("cuda", 4, 64), arguments("cuda", 256, 512)
    stock = run(module, given)
    rewritten(module, numerics)
    results = run(module, given)
    if numerics == "exact":
        assert all(map(torch.equal, results, stock))
        return
    for one, other in zip(results, stock, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
    with torch.no_grad(), Launches() as seen:
        module(**given)
    assert seen.cats == [(1, True)] * 3 and seen.copies == 0
