"""Heads of keys and values that are repeated for queries: where each is there once, nothing is copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_cosmos import CosmosAttnProcessor2_0
from torch import Tensor, nn

from diffkern.rewrite.identity import RepeatedSite, _once
from diffkern.rewrite.rewriter import Rewriter, Rewritten
from tests.rewrite.test_rooms import launches

RULE = "repetition, once"
TOKENS, HEADS, HEAD_DIM = 6, 2, 16


def attention(processor: Any, kv_heads: int = HEADS) -> Attention:
    torch.manual_seed(0)
    module = Attention(
        32, heads=HEADS, kv_heads=kv_heads, dim_head=HEAD_DIM, qk_norm="rms_norm", processor=processor, out_bias=False
    )
    return module.eval().requires_grad_(False)


def given(**more: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    angles = torch.randn(TOKENS, HEAD_DIM // 2, generator=generator).repeat(1, 2)
    states = torch.randn(2, TOKENS, 32, generator=generator)
    return {"hidden_states": states, "image_rotary_emb": (angles.cos(), angles.sin()), **more}


def installed(module: nn.Module, numerics: str = "fast") -> list[RepeatedSite]:
    found = Rewriter(numerics).rewrite(module)
    assert isinstance(found, Rewritten)
    module.forward = found.function.__get__(module)  # type: ignore[method-assign]
    sites = [site for site in found.sites if isinstance(site, RepeatedSite)]
    assert [site.plan.rule.name for site in sites] == [RULE] * len(sites)
    return sites


def run(module: nn.Module, arguments: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return module(**arguments)  # type: ignore[no-any-return]


def repetitions(module: nn.Module, arguments: dict[str, Any]) -> int:
    return launches(module, arguments).count("aten::repeat_interleave")


@pytest.mark.parametrize("arguments", [given(), given(image_rotary_emb=None)], ids=["rotated", "not rotated"])
def test_attention_of_cosmos_copies_no_keys_and_values(arguments: dict[str, Any]) -> None:
    stock, module = attention(CosmosAttnProcessor2_0()), attention(CosmosAttnProcessor2_0())
    assert len(installed(module)) == 2
    for _ in range(2):
        torch.testing.assert_close(run(module, arguments), run(stock, arguments), rtol=1e-5, atol=1e-5)
    assert repetitions(module, arguments) == 0
    assert repetitions(stock, arguments) == 2


def test_exact_numerics_keep_the_layout_of_stock() -> None:
    stock, module = attention(CosmosAttnProcessor2_0()), attention(CosmosAttnProcessor2_0())
    installed(module, "exact")
    assert torch.equal(run(module, given()), run(stock, given()))
    assert repetitions(module, given()) == 2


def test_only_what_is_repeated_once_along_a_dimension_that_it_has_is_itself() -> None:
    x = torch.randn(2, 3, 4)
    assert _once(x, 1, 2) is x and _once(x, 1, -3) is x
    parameter = nn.Parameter(x)
    for one, n, dim in (
        (x, 2, 2),
        (x, 0, 2),
        (x, True, 2),
        (x, torch.tensor(1), 2),
        (x, 1, 3),
        (x, 1, -4),
        (parameter, 1, 2),
        (x.clone().requires_grad_(), 1, 2),
        (None, 1, 2),
    ):
        assert _once(one, n, dim) is None


class OnlyReads:
    def __call__(self, attn: Any, hidden_states: Tensor, **_: Any) -> Any:
        query, key = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
        more = key.repeat_interleave(query.size(2) // key.size(2), dim=2)
        return attn.to_out[0](query * more)


class WritesIt:
    def __call__(self, attn: Any, hidden_states: Tensor, **_: Any) -> Any:
        query, key = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
        more = key.repeat_interleave(query.size(2) // key.size(2), dim=2)
        more *= 2
        return attn.to_out[0](query * more + key)


class WritesIntoAViewOfIt:
    def __call__(self, attn: Any, hidden_states: Tensor, **_: Any) -> Any:
        query, key = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
        more = key.repeat_interleave(query.size(2) // key.size(2), dim=2)
        more.transpose(1, 2).mul_(2)
        return attn.to_out[0](query * more + key)


class WritesWhatItRepeats:
    def __call__(self, attn: Any, hidden_states: Tensor, **_: Any) -> Any:
        query, key = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
        more = key.repeat_interleave(query.size(2) // key.size(2), dim=2)
        key[:, 0] = 3
        return attn.to_out[0](query * more + key)


class ReturnsIt:
    def __call__(self, attn: Any, hidden_states: Tensor, **_: Any) -> Any:
        query, key = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
        more = hidden_states.repeat_interleave(query.size(2) // key.size(2), dim=2)
        return more.transpose(1, 2), query * key


class KeepsIt:
    def __call__(self, attn: Any, hidden_states: Tensor, **_: Any) -> Any:
        query, key = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
        attn.last = more = hidden_states.repeat_interleave(query.size(2) // key.size(2), dim=2)
        return attn.to_out[0](query * key * more)


class ViewsIt:
    def __call__(self, attn: Any, hidden_states: Tensor, **_: Any) -> Any:
        query, key = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
        turned = key.transpose(1, 2)
        more = turned.repeat_interleave(query.size(2) // key.size(2), dim=1)
        return attn.to_out[0](query.sum() * more.view(2, -1, 32))


class AsksFirst:
    def __call__(self, attn: Any, hidden_states: Tensor, **_: Any) -> Any:
        query, key = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
        groups = query.size(2) // key.size(2)
        if groups > 1:
            key = key.repeat_interleave(groups, dim=2)
        return attn.to_out[0](query * key)


class RepeatsAlone:
    def __call__(self, attn: Any, hidden_states: Tensor, **_: Any) -> Any:
        more = hidden_states.repeat_interleave(hidden_states.size(1) // hidden_states.size(1), dim=2)
        return attn.to_out[0](more)


def simple(processor: Any) -> Attention:
    torch.manual_seed(0)
    module = Attention(32, heads=1, dim_head=32, qk_norm="rms_norm", processor=processor)
    return module.eval().requires_grad_(False)


OWN = [WritesIt, WritesIntoAViewOfIt, WritesWhatItRepeats, ReturnsIt, KeepsIt, ViewsIt, AsksFirst]


@pytest.mark.parametrize("cls", OWN)
def test_what_is_written_returned_kept_or_viewed_is_a_tensor_of_its_own(cls: type) -> None:
    stock, module = simple(cls()), simple(cls())
    assert installed(module) == []
    states = given()["hidden_states"]
    with torch.no_grad():
        for one, other in zip(module(states.clone()), stock(states.clone()), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_what_is_only_read_may_be_what_is_repeated() -> None:
    stock, module = simple(OnlyReads()), simple(OnlyReads())
    (site,) = installed(module)
    arguments = {"hidden_states": given()["hidden_states"]}
    torch.testing.assert_close(run(module, arguments), run(stock, arguments), rtol=1e-5, atol=1e-5)
    assert repetitions(module, arguments) == 0 and site.fused_calls == 2


def test_a_repetition_that_a_backward_reads_stays() -> None:
    found = []
    for module in (simple(OnlyReads()), rewritten := simple(OnlyReads())):
        if module is rewritten:
            installed(module)
        states = given()["hidden_states"].requires_grad_()
        (module(states) ** 2).sum().backward()
        found.append(states.grad)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_a_function_whose_only_find_is_a_repetition_stays_as_it_is() -> None:
    assert isinstance(Rewriter().rewrite(simple(RepeatsAlone())), str)
