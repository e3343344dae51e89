"""Attention under masks that hide the last keys: it reads the keys in front of them, without a mask."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffkern import KernelConfig, inject_optimized_kernels
from diffkern.cache.in_call import one_model_call
from diffkern.rewrite import Rewriter, Rewritten, masked
from diffkern.rewrite.masked import MaskedAttentionSite, _shown_keys
from tests.rewrite import test_masks
from tests.rewrite.test_processors import IMAGE, TEXT, joint_attention

TOKENS = IMAGE + TEXT


@pytest.fixture(autouse=True)
def _pays_for_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked, "LEAST_PAIRS", 1)


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, bool]]]:
    """The keys of each call of torch's attention, and whether it has a mask."""
    seen: list[tuple[int, bool]] = []
    real = F.scaled_dot_product_attention

    def watched(*given: Any, **options: Any) -> Tensor:
        key = options.get("key", given[1] if len(given) > 1 else None)
        seen.append((key.shape[-2], options.get("attn_mask") is not None))
        return real(*given, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    yield seen


def rewritten(module: nn.Module, numerics: str = "fast") -> MaskedAttentionSite:
    found = Rewriter(numerics).rewrite(module)
    assert isinstance(found, Rewritten)
    module.forward = found.function.__get__(module)  # type: ignore[method-assign]
    (site,) = [site for site in found.sites if isinstance(site, MaskedAttentionSite)]
    return site


def mask_of(*shown: int) -> Tensor:
    """A mask that shows so many of the first keys of each sample."""
    return (torch.arange(TOKENS) < torch.tensor(shown)[:, None])[:, None, None]


def run(module: nn.Module, given: dict[str, Any]) -> list[Tensor]:
    with torch.no_grad():
        found = module(**given)
    return [*found]


def full(*_: Any) -> Tensor:
    raise torch.OutOfMemoryError("no room")


def assert_same(some: list[Tensor], others: list[Tensor]) -> None:
    for one, other in zip(some, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shown", [TOKENS, TOKENS - 2, IMAGE])
def test_keys_that_a_mask_hides_at_the_end_are_not_read_and_the_others_without_a_mask(
    shown: int, attended: list[tuple[int, bool]]
) -> None:
    module, given = joint_attention("hunyuan")
    given["attention_mask"] = mask_of(shown, shown)
    stock = run(module, given)
    site = rewritten(module)
    for _ in range(2):
        assert_same(run(module, given), stock)
    assert site.fused_calls == 2
    assert attended[0] == (TOKENS, True) and attended[-1] == (shown, False)


@pytest.mark.parametrize(
    "mask",
    [
        mask_of(TOKENS - 2, TOKENS - 1),  # samples of other lengths
        mask_of(TOKENS, TOKENS) & (torch.arange(TOKENS) != 3),  # a hole
        torch.arange(TOKENS).ge(2).expand(2, 1, 1, TOKENS),  # the first ones
        torch.where(mask_of(IMAGE, IMAGE), 0.0, -1e9),  # added to the scores
        None,
    ],
    ids=["lengths", "hole", "front", "additive", "none"],
)
def test_any_other_mask_stays(mask: Tensor | None, attended: list[tuple[int, bool]]) -> None:
    module, given = joint_attention("hunyuan")
    given["attention_mask"] = mask
    stock = run(module, given)
    site = rewritten(module)
    assert_same(run(module, given), stock)
    assert site.fused_calls == 0 and attended[-1] == (TOKENS, mask is not None)


def test_a_mask_that_shows_nothing_stays() -> None:
    assert [_shown_keys(mask_of(n, n)) for n in (0, 1, TOKENS)] == [0, 1, TOKENS]
    assert [_shown_keys(mask_of(n, n)[:, 0, 0]) for n in (0, 4)] == [0, 4]
    pairs = mask_of(5, 5) & mask_of(5, 5).mT
    assert _shown_keys(pairs) == 5 and _shown_keys(pairs | mask_of(1, 1)) == 0
    for row, column, value in ((1, 3, False), (0, 4, False), (1, 6, True), (9, 2, True), (2, 4, False)):
        other = pairs.clone()
        other[1, 0, row, column] = value
        assert _shown_keys(other) == 0
    swapped = pairs.clone()
    swapped[0, 0, 2, [1, 7]] = torch.tensor([False, True])  # as many, and others
    assert _shown_keys(swapped) == 0


def test_exact_numerics_keep_the_mask(attended: list[tuple[int, bool]]) -> None:
    module, given = joint_attention("hunyuan")
    given["attention_mask"] = mask_of(IMAGE, IMAGE)
    stock = run(module, given)
    site = rewritten(module, "exact")
    assert all(map(torch.equal, run(module, given), stock))
    assert site.fused_calls == 0 and attended[-1] == (TOKENS, True)


def test_gradients_tokens_of_several_gpus_and_few_tokens_keep_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    module, given = joint_attention("hunyuan")
    given["attention_mask"] = mask_of(IMAGE, IMAGE)
    site = rewritten(module)
    module(**given)
    leaves = [torch.randn(2, TOKENS, 2, 16) for _ in range(3)]
    names = {**dict(zip(("query", "key", "value"), leaves, strict=True)), "attn_mask": given["attention_mask"]}
    with torch.no_grad():
        assert site._shown(module, tuple([names.get(role) for role in site.plan.roles])) == IMAGE
        shared = {**names, "parallel_config": SimpleNamespace()}
        assert site._shown(module, tuple([shared.get(role) for role in site.plan.roles])) == 0
        monkeypatch.setattr(masked, "LEAST_PAIRS", TOKENS**2 + 1)
        run(module, given)
    assert site.fused_calls == 0


def test_queries_that_are_hidden_themselves_see_nothing_as_in_stock(attended: list[tuple[int, bool]]) -> None:
    module, _, given = test_masks.attention()
    given["attention_mask"] = torch.tensor([[1, 1, 1, 0, 0]] * 2, dtype=torch.bool)
    stock = run(module, given)
    site = rewritten(module)
    attended.clear()
    for _ in range(2):
        assert_same(run(module, given), stock)
    shown = test_masks.IMAGE + 3
    assert site.fused_calls == 2 and attended[-1] == (shown, False)


def test_how_many_keys_are_shown_is_asked_once_in_a_call_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    module, given = joint_attention("hunyuan")
    given["attention_mask"] = mask_of(IMAGE, IMAGE)
    asked: list[Tensor] = []
    monkeypatch.setattr(masked, "_shown_keys", lambda mask: asked.append(mask) or _shown_keys(mask))
    site = rewritten(module)
    with one_model_call():
        for _ in range(3):
            run(module, given)
        assert len(asked) == 1
        given["attention_mask"][0, 0, 0, 0] = False  # which PyTorch counts
        run(module, given)
    assert len(asked) == 2 and site.fused_calls == 3


def test_views_of_one_mask_are_asked_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module, given = joint_attention("hunyuan")
    flat, asked = mask_of(IMAGE, IMAGE)[:, 0, 0].clone(), []
    monkeypatch.setattr(masked, "_shown_keys", lambda mask: asked.append(mask) or _shown_keys(mask))
    site = rewritten(module)
    with one_model_call(), torch.no_grad():
        for _ in range(5):
            given["attention_mask"] = flat[:, None, None]
            run(module, given)
        given["attention_mask"] = flat[:1, None, None]
        run(module, given)
    assert len(asked) == 2 and site.fused_calls == 6


def test_layers_that_make_masks_of_their_own_keep_them(monkeypatch: pytest.MonkeyPatch) -> None:
    module, given = joint_attention("hunyuan")
    asked: list[Tensor] = []
    monkeypatch.setattr(masked, "_shown_keys", lambda mask: asked.append(mask) or _shown_keys(mask))
    site = rewritten(module)
    for _ in range(12):
        given["attention_mask"] = mask_of(IMAGE, IMAGE)
        run(module, given)
    assert len(asked) == site.fused_calls == 9 and not site.shortens


def test_a_mask_for_each_call_of_the_model_is_looked_at_in_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    module, given = joint_attention("hunyuan")
    asked: list[Tensor] = []
    monkeypatch.setattr(masked, "_shown_keys", lambda mask: asked.append(mask) or _shown_keys(mask))
    site = rewritten(module)
    for _ in range(30):
        with one_model_call():
            given["attention_mask"] = mask_of(IMAGE, IMAGE)
            run(module, given)
    assert len(asked) == site.fused_calls == 30 and site.shortens


def test_a_call_whose_error_is_larger_than_stocks_keeps_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    module, given = joint_attention("hunyuan")
    given["attention_mask"] = mask_of(IMAGE, IMAGE)
    stock = run(module, given)
    site = rewritten(module)
    monkeypatch.setattr(masked, "_shown_keys", lambda mask: IMAGE - 1)  # one too few
    for _ in range(2):
        assert_same(run(module, given), stock)
    assert site.fused_calls == 0


class Layers(nn.Module):
    """So many times the same layer, each with a mask of its own."""

    def __init__(self, layer: nn.Module, count: int) -> None:
        super().__init__()
        self.layer, self.count = layer, count

    def forward(self, attention_mask: Tensor, **given: Any) -> Any:
        return [self.layer(attention_mask=attention_mask.clone(), **given) for _ in range(self.count)][-1]


@pytest.mark.parametrize(
    ("reason", "calls"),
    [
        ("without it the error is ", 2),
        ("fused it takes 2.0 us, as it is written 1.0 us: no gain", 2),
        ("each layer makes its own, and the host would wait in every one to look at it", 1),
        ("the comparison with float64 raised OutOfMemoryError", 2),
    ],
    ids=["wrong", "no gain", "own masks", "no memory"],
)
def test_the_report_says_once_why_a_mask_stays_and_strict_lets_it(
    reason: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, given = joint_attention("hunyuan")
    given["attention_mask"] = mask_of(IMAGE, IMAGE)
    stock = run(module, given)
    if "error" in reason:
        monkeypatch.setattr(masked, "_shown_keys", lambda mask: IMAGE - 1)  # one too few
    elif "gain" in reason:
        monkeypatch.setattr(masked, "reason_to_stay_stock", lambda *_: reason)
    elif "raised" in reason:
        monkeypatch.setattr(masked.accuracy, "reference", full)
    # Strict takes no times.
    strict, model = "gain" not in reason, Layers(module, 12 if calls == 1 else 1)
    report = inject_optimized_kernels(model, strict=strict, config=KernelConfig(measure=not strict))
    for _ in range(calls):
        given["attention_mask"] = given["attention_mask"].clone()
        assert_same(run(model, given), stock)
    (note,) = [note for note in report.notes if "mask" in note]
    assert note.startswith("attention of HunyuanVideoAttnProcessor2_0 (line ") and f"keeps its mask: {reason}" in note


def test_a_mask_that_goes_or_must_stay_is_no_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked, "reason_to_stay_stock", lambda *_: "")
    for numerics in ("fast", "exact"):
        module, given = joint_attention("hunyuan")
        report = inject_optimized_kernels(module, numerics=numerics, config=KernelConfig(measure=True))
        for mask in (mask_of(IMAGE, IMAGE), mask_of(TOKENS - 2, TOKENS - 1)):
            run(module, {**given, "attention_mask": mask})
        assert not [note for note in report.notes if "mask" in note]


class Attends(nn.Module):
    """Normalises and attends, by a processor."""

    def __init__(self, processor: Any) -> None:
        super().__init__()
        self.norm, self.to_v, self.processor = nn.LayerNorm(8), nn.Linear(8, 8), processor

    def forward(self, x: Tensor, mask: Tensor, flag: Any) -> Tensor:
        result: Tensor = self.processor(self, x, mask, flag)
        return result


class Causal:
    def __call__(self, attn: Any, x: Tensor, mask: Tensor, flag: Any) -> Tensor:
        q, k, v = x[:, None], x[:, None], attn.to_v(x)[:, None]
        joint = torch.cat([v, v], dim=2)[:, :, : v.shape[2]]
        return F.scaled_dot_product_attention(q, k, joint, attn_mask=mask, is_causal=flag)


class Scaled:
    def __call__(self, attn: Any, x: Tensor, mask: Tensor, flag: Any) -> Tensor:
        q, k, v = x[:, None], x[:, None], attn.to_v(x)[:, None]
        joint = torch.cat([v, v], dim=2)[:, :, : v.shape[2]]
        return F.scaled_dot_product_attention(q, k, joint, attn_mask=mask, scale=flag)


class Drops:
    def __call__(self, attn: Any, x: Tensor, mask: Tensor, flag: Any) -> Tensor:
        q, k, v = x[:, None], x[:, None], attn.to_v(x)[:, None]
        joint = torch.cat([v, v], dim=2)[:, :, : v.shape[2]]
        return F.scaled_dot_product_attention(q, k, joint, attn_mask=mask, dropout_p=0.5)


class Plain:
    def __call__(self, attn: Any, x: Tensor, mask: Tensor, flag: Any) -> Tensor:
        q, k, v = x[:, None], x[:, None], attn.to_v(x)[:, None]
        joint = torch.cat([v, v], dim=2)[:, :, : v.shape[2]]
        return F.scaled_dot_product_attention(q, k, joint, attn_mask=mask, dropout_p=0.0, is_causal=False)


def test_attention_that_may_be_causal_or_drops_weights_is_no_site() -> None:
    for processor, found in ((Plain(), True), (Causal(), False), (Drops(), False)):
        rewritten = Rewriter().rewrite(Attends(processor))
        assert isinstance(rewritten, Rewritten)
        assert any(isinstance(site, MaskedAttentionSite) for site in rewritten.sites) is found


def test_a_proof_that_finds_no_memory_leaves_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    module, given = joint_attention("hunyuan")
    given["attention_mask"] = mask_of(IMAGE, IMAGE)
    stock = run(module, given)
    site = rewritten(module)
    monkeypatch.setattr(masked.accuracy, "reference", full)
    for _ in range(2):
        assert_same(run(module, given), stock)
    assert site.fused_calls == 0


def test_on_meta_nothing_is_asked() -> None:
    module, x = Attends(Plain()), torch.randn(2, TOKENS, 8)
    rewritten(module)
    with torch.no_grad():
        assert module.to("meta")(x.to("meta"), mask_of(IMAGE, IMAGE).to("meta"), None).shape == (2, 1, TOKENS, 8)


def test_a_scale_stays(attended: list[tuple[int, bool]]) -> None:
    module, x, mask = Attends(Scaled()), torch.randn(2, TOKENS, 8), mask_of(IMAGE, IMAGE)
    with torch.no_grad():
        stock = [module(x, mask, scale) for scale in (0.5, None)]
        site = rewritten(module)
        for _ in range(2):
            assert_same([module(x, mask, scale) for scale in (0.5, None)], stock)
    assert site.fused_calls == 4 and attended[-1] == (IMAGE, False)


def test_a_trace_holds_the_mask_of_each_call() -> None:
    module, x = Attends(Plain()).requires_grad_(False), torch.randn(2, TOKENS, 8)
    rewritten(module)
    masks = mask_of(IMAGE, IMAGE), mask_of(3, 3)
    with torch.no_grad():
        module(x, masks[0], None)
        traced = torch.jit.trace(lambda x, mask: module(x, mask, None), (x, masks[0]))
        stock = Attends(Plain())
        stock.load_state_dict(module.state_dict())
        for mask in masks:
            torch.testing.assert_close(traced(x, mask), stock(x, mask, None), rtol=1e-5, atol=1e-5)


def test_compiled_it_is_what_is_written() -> None:
    module, given = joint_attention("hunyuan")
    given["attention_mask"] = mask_of(IMAGE, IMAGE)
    stock = run(module, given)
    site = rewritten(module)
    run(module, given)
    calls = site.fused_calls
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert_same(run(compiled, given), stock)  # type: ignore[arg-type]
    assert site.fused_calls == calls
