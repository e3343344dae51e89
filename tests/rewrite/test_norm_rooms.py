"""Modulated norms of two streams that are concatenated: the longer one leaves room for the other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import CogVideoXAttnProcessor2_0
from diffusers.models.normalization import AdaLayerNormZero
from torch import Tensor, nn

from diffkern import inject_optimized_kernels, use_provider
from diffkern.injection import InjectionReport
from diffkern.rewrite import rooms
from diffkern.rewrite.rewriter import Rewriter, Rewritten
from diffkern.rewrite.rooms import HalvesSite, NormSite
from tests.rewrite.test_modulating_children import block, drawn
from tests.rewrite.test_rooms import launches

TEXT, IMAGE = 3, 6


@pytest.fixture(autouse=True)
def _pays_for_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "LEAST_BYTES", 1)
    monkeypatch.setenv("DIFFKERN_MEASURE", "0")
    rooms._made.clear()


class Around(nn.Module):
    """A model of one block of CogVideoX."""

    def __init__(self) -> None:
        super().__init__()
        self.block = block("cogvideox")[0]

    def forward(self, **given: Any) -> Any:
        return self.block(**given)


def made(numerics: str = "fast", **options: Any) -> tuple[Around, nn.Module, InjectionReport]:
    """A patched model, its block and the report."""
    model = Around()
    report = inject_optimized_kernels(model, numerics=numerics, **options)
    return model, model.block, report


def given(batch: int = 2, text: int = TEXT, image: int = IMAGE) -> dict[str, Any]:
    return {
        "hidden_states": drawn(batch, image, 32, seed=1),
        "encoder_hidden_states": drawn(batch, text, 32, seed=2),
        "temb": drawn(batch, 16, seed=3),
    }


@torch.no_grad()
def assert_as_stock(model: nn.Module, arguments: dict[str, Any], stock: nn.Module | None = None) -> None:
    expected = (Around() if stock is None else stock)(**arguments)
    for one, other in zip(model(**arguments), expected, strict=True):
        assert one.is_contiguous() and one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def seen_by_attention(model: nn.Module, arguments: dict[str, Any], grad: bool = False) -> list[bool]:
    """Whether the image that attention is given is contiguous, in two calls."""
    seen: list[bool] = []
    attn: Any = model.block.attn1  # type: ignore[union-attr]
    forward = attn.forward

    def watched(hidden_states: Tensor, **rest: Any) -> Any:
        seen.append(hidden_states.is_contiguous())
        return forward(hidden_states=hidden_states, **rest)

    with torch.set_grad_enabled(grad), pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(attn), "__call__", lambda _, **rest: watched(**rest))
        model(**arguments)
        model(**arguments)
    return seen


@pytest.mark.parametrize("batch", [1, 2])
def test_neither_attention_nor_feed_forward_of_cogvideox_concatenates_its_streams(batch: int) -> None:
    model, _, _ = made()
    arguments = given(batch)
    for _ in range(4):
        assert_as_stock(model, arguments)
    assert "aten::cat" not in launches(model, arguments) and not rooms._made
    stock = launches(Around(), arguments)
    assert stock.count("aten::cat") == 2


def test_texts_and_images_of_other_lengths_get_other_room() -> None:
    model, _, _ = made()
    calls = [given(), given(text=5), given(text=9), given(1), given(1, 9), given(image=2)]
    for number in (0, 0, 0, 1, 1, 0, 2, 2, 2, 0, 0, 3, 3, 4, 4, 5, 5, 5, 0, 0, 0):
        assert_as_stock(model, calls[number])
    assert "aten::cat" not in launches(model, calls[0])


class Flat(CogVideoXAttnProcessor2_0):
    """Reads the tokens of all samples as one sequence of rows, as a view."""

    def __call__(self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, **rest: Any) -> Any:
        rows = hidden_states.view(-1, hidden_states.shape[-1])
        return super().__call__(attn, (2 * rows).view_as(hidden_states), encoder_hidden_states, **rest)


def test_another_processor_is_given_what_stock_gives_it() -> None:
    model, inner, _ = made()
    for _ in range(3):
        assert_as_stock(model, given())
    stock = Around()
    for one in (inner, stock.block):
        one.attn1.set_processor(Flat())  # type: ignore[union-attr, operator]
    for _ in range(3):
        assert_as_stock(model, given(), stock)


def test_a_hook_of_attention_is_given_what_stock_gives_it_and_may_write_into_it() -> None:
    model, inner, _ = made()
    for _ in range(3):
        assert_as_stock(model, given())
    stock = Around()

    def hook(_: nn.Module, __: Any, words: dict[str, Any]) -> None:
        words["hidden_states"].view(-1, 32).mul_(2)

    for one in (inner, stock.block):
        one.attn1.register_forward_pre_hook(hook, with_kwargs=True)  # type: ignore[union-attr, operator]
    for _ in range(3):
        assert_as_stock(model, given(), stock)


def test_a_hook_of_the_feed_forward_may_write_into_what_it_is_given() -> None:
    model, inner, _ = made()
    for _ in range(3):
        assert_as_stock(model, given())
    stock = Around()

    def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        args[0].mul_(2)

    for one in (inner, stock.block):
        one.ff.register_forward_pre_hook(hook)  # type: ignore[union-attr, operator]
    for _ in range(3):
        assert_as_stock(model, given(), stock)


def test_a_result_that_is_kept_is_written_by_no_later_call() -> None:
    model, inner, _ = made()
    kept: list[tuple[Tensor, Tensor]] = []

    def hook(_: nn.Module, __: Any, results: tuple[Tensor, ...]) -> None:
        kept.extend([(y, y.clone()) for y in results])

    inner.norm1.register_forward_hook(hook)  # type: ignore[union-attr, operator]
    for seed in range(4):
        arguments = given()
        arguments["encoder_hidden_states"] = drawn(2, TEXT, 32, seed=10 + seed)
        assert_as_stock(model, arguments)
    assert len(kept) == 16 and all(torch.equal(y, then) for y, then in kept)


def test_exact_numerics_keep_the_bits_and_the_layout_of_stock() -> None:
    model, _, _ = made("exact")
    for _ in range(3):
        with torch.no_grad():
            for one, other in zip(model(**given()), Around()(**given()), strict=True):
                assert torch.equal(one, other)
    assert seen_by_attention(model, given()) == [True, True]
    assert seen_by_attention(made()[0], given()) == [True, False]


def test_gradients_and_compiled_calls_have_no_room() -> None:
    model, _, _ = made()
    for _ in range(3):
        assert_as_stock(model, given())
    assert seen_by_attention(model, given(), grad=True) == [True, True]
    grads = []
    for one in (model, Around()):
        arguments = given()
        arguments["hidden_states"].requires_grad_()
        sum(part.square().sum() for part in one(**arguments)).backward()
        grads.append(arguments["hidden_states"].grad)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_as_stock(compiled, given())


def test_samples_of_vmap_are_concatenated() -> None:
    model, stock = OfOneClass().eval(), OfOneClass().eval()
    inject_optimized_kernels(model)
    text, emb = drawn(1, 3, 32, seed=2), drawn(1, 32, seed=3)
    for _ in range(3):
        with torch.no_grad():
            found, expected = (
                torch.func.vmap(lambda x, one=one: one(x, text, emb))(drawn(2, 1, 6, 32)) for one in (model, stock)
            )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        model(drawn(1, 6, 32), text, emb)


def test_another_provider_has_no_room_and_is_concatenated() -> None:
    model, _, _ = made()
    for _ in range(3):
        assert_as_stock(model, given())
    with use_provider("eager"):
        assert_as_stock(model, given())
        assert launches(model, given()).count("aten::cat") == 2
    assert_as_stock(model, given())


def test_few_bytes_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "LEAST_BYTES", 2 * IMAGE * 32 * 4 + 1)
    model, _, _ = made()
    for _ in range(3):
        assert_as_stock(model, given())
    assert launches(model, given()).count("aten::cat") == 2 and not rooms._made


def test_a_copy_of_a_model_has_room_of_its_own() -> None:
    model, _, _ = made()
    for _ in range(3):
        assert_as_stock(model, given())
    other = copy.deepcopy(model)
    for _ in range(3):
        assert_as_stock(other, given())
        assert_as_stock(model, given())


class OfOneClass(nn.Module):
    """Two modules of one kind, which share their sites, norm the streams."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm1, self.norm1_context, self.proj = AdaLayerNormZero(32), AdaLayerNormZero(32), nn.Linear(32, 32)

    def forward(self, x: Tensor, text: Tensor, emb: Tensor) -> tuple[Tensor, Tensor]:
        image, gate, _, _, _ = self.norm1(x, emb=emb)
        words, _, _, _, _ = self.norm1_context(text, emb=emb)
        both = torch.cat([words, image], dim=1)
        y = self.proj(both)
        return x + gate.unsqueeze(1) * y[:, text.shape[1] :], y[:, : text.shape[1]]


@pytest.mark.parametrize("batch", [1, 2])
def test_streams_that_one_site_norms_are_joined_at_every_call(batch: int) -> None:
    model, stock = OfOneClass().eval(), OfOneClass().eval()
    inject_optimized_kernels(model)
    arguments = {"x": drawn(batch, 6, 32), "text": drawn(batch, 3, 32, seed=2), "emb": drawn(batch, 32, seed=3)}
    for _ in range(6):
        with torch.no_grad():
            pairs = zip(model(**arguments), stock(**arguments), strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert ["aten::cat" in launches(model, arguments) for _ in range(3)] == [False] * 3


class Twice(nn.Module):
    """Two norms, concatenated, of which one is read again; or written into, or kept."""

    kept: Any = None

    def __init__(self, use: Callable[..., Tensor]) -> None:
        super().__init__()
        self.norm, self.proj, self.use = nn.LayerNorm(32), nn.Linear(32, 32), use

    def forward(self, x: Tensor, text: Tensor, scale: Tensor) -> Tensor:
        image = self.norm(x) * (1 + scale)
        words = self.norm(text) * (1 + scale)
        both = torch.cat([words, image], dim=1)
        return self.proj(both) + self.use(image).sum()


def test_a_norm_that_something_else_reads_is_copied() -> None:
    torch.manual_seed(0)
    module = Twice(lambda image: image.view(-1, 32)).eval()
    found = Rewriter().rewrite(module)
    assert isinstance(found, Rewritten)
    assert [site for site in found.sites if isinstance(site, NormSite)]
    assert not [site for site in found.sites if isinstance(site, HalvesSite)]
    module.forward = found.function.__get__(module)  # type: ignore[method-assign]
    x, text, scale = drawn(2, 6, 32), drawn(2, 3, 32), drawn(2, 1, 32)
    with torch.no_grad():
        for _ in range(3):
            module(x, text, scale)


class Heads(nn.Module):
    """Norms of queries and keys of each head, of two streams, concatenated: as in AuraFlow of ComfyUI."""

    def __init__(self) -> None:
        super().__init__()
        self.q1, self.k1, self.q2, self.k2 = [nn.LayerNorm(16, elementwise_affine=False) for _ in range(4)]
        self.proj = nn.Linear(32, 32)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        q, k = self.proj(x).view(2, 6, 2, 16), self.proj(x).view(2, 6, 2, 16)
        tq, tk = self.proj(text).view(2, 3, 2, 16), self.proj(text).view(2, 3, 2, 16)
        q, k = self.q1(q), self.k1(k)
        tq, tk = self.q2(tq), self.k2(tk)
        q, k = torch.cat([tq, q], dim=1), torch.cat([tk, k], dim=1)
        return self.proj(q.flatten(2)) + self.proj(k.flatten(2))


def test_norms_of_heads_leave_no_room_and_their_concatenation_is_no_site() -> None:
    found = Rewriter().rewrite(Heads().eval())
    assert isinstance(found, Rewritten)
    assert [site.plan.rule.name for site in found.sites] == ["query and key norm"] * 2
