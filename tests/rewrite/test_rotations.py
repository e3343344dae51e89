"""Spellings of the rotation of queries and keys: without norms, both at once, by angles, of a part of each head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffkern import inject_optimized_kernels, restore
from diffkern.cache import in_call, rotary
from diffkern.rewrite import Rewriter, Rewritten, prove_ahead
from diffkern.rewrite.reference import CastsLifted, to_float64
from scripts.check_models.denoisers import DENOISERS
from scripts.check_models.rewritten import batch_of_two
from scripts.check_models.rewritten import run as run_model
from tests.rewrite.test_processors import TorchOps

TOKENS, TEXT, HEADS, HEAD_DIM = 70, 6, 2, 16


def _rotate_half(x: Tensor) -> Tensor:
    one, other = x.chunk(2, dim=-1)
    return torch.cat((-other, one), dim=-1)


def apply_rotary(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = table
    return (x.float() * cos + _rotate_half(x.float()) * sin).type_as(x)


def apply_rotary_and_more(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    return apply_rotary(x, tuple([part[TEXT:] for part in table])).square()  # type: ignore[arg-type]


def apply_rotary_of_all_or_each(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = table
    return apply_rotary(x, table if cos.ndim == 2 else (cos[:, None], sin[:, None]))


def apply_rotary_to_both(q: Tensor, k: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return apply_rotary(q, table), apply_rotary(k, table)


def apply_rotary_by_angles(x: Tensor, angles: Tensor) -> Tensor:
    columns = angles.shape[-1]
    angles = angles[:, None]
    turned = (x[..., :columns] * angles.cos() + _rotate_half(x[..., :columns]) * angles.sin()).to(x.dtype)
    return torch.cat((turned, x[..., columns:]), dim=-1)


def apply_rotary_complex(x: Tensor, table: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.to(torch.float64).unflatten(3, (-1, 2)))
    return torch.view_as_real(pairs * table).flatten(3, 4).type_as(x)


def apply_rotary_rows(x: Tensor, tables: Any, indices: Any) -> Tensor:
    parts = []
    for part, (cos, sin), index in zip(x.chunk(2, dim=-1), tables, indices, strict=True):
        parts.append(apply_rotary(part, (cos[index][:, None], sin[index][:, None])))
    return torch.cat(parts, dim=-1)


def apply_rotary_other_rows(x: Tensor, tables: Any, indices: Any) -> Tensor:
    return apply_rotary_rows(x, tables, indices[::-1])


class ByRows:
    """Has tables of two axes, and which rows of them each token has."""

    def __call__(self, attn: Any, x: Tensor, table: Any) -> Tensor:
        query = attn.to_q(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        key = attn.to_k(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        query = apply_rotary_rows(query, table[0], table[1])
        key = apply_rotary_rows(key, table[0], table[1])
        return torch.stack([query, key])


class ByOtherRows:
    """Takes the indices of one axis for the other."""

    def __call__(self, attn: Any, x: Tensor, table: Any) -> Tensor:
        query = attn.to_q(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        key = attn.to_k(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        query = apply_rotary_other_rows(query, table[0], table[1])
        key = apply_rotary_other_rows(key, table[0], table[1])
        return torch.stack([query, key])


class InPart:
    """Rotates the first elements of heads in float32, and puts the others behind them."""

    def __call__(self, attn: Any, x: Tensor, table: Any) -> Tensor:
        query = attn.to_q(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        key = attn.to_k(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        dtype, n = query.dtype, table[0].shape[-1]
        query = query.to(torch.float32)
        key = key.to(torch.float32)
        turned, rest = query[..., :n], query[..., n:]
        turned = apply_rotary(turned, table)
        query = torch.cat((turned, rest), dim=-1)
        turned, rest = key[..., :n], key[..., n:]
        turned = apply_rotary(turned, table)
        key = torch.cat((turned, rest), dim=-1)
        query = query.to(dtype)
        key = key.to(dtype)
        return torch.stack([query, key])


class InPartOfAnother:
    """Puts elements of the key behind those of the query."""

    def __call__(self, attn: Any, x: Tensor, table: Any) -> Tensor:
        query = attn.to_q(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        key = attn.to_k(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        n = table[0].shape[-1]
        query_turned, query_rest = query[..., :n], key[..., n:]
        key_turned, key_rest = key[..., :n], query[..., n:]
        query = torch.cat((apply_rotary(query_turned, table), query_rest), dim=-1)
        key = torch.cat((apply_rotary(key_turned, table), key_rest), dim=-1)
        return torch.stack([query, key])


class InPartViewed:
    """Views what a concatenation has made contiguous."""

    def __call__(self, attn: Any, x: Tensor, table: Any) -> Tensor:
        query = attn.to_q(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        key = attn.to_k(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        n = table[0].shape[-1]
        query = torch.cat((apply_rotary(query[..., :n], table), query[..., n:]), dim=-1)
        key = torch.cat((apply_rotary(key[..., :n], table), key[..., n:]), dim=-1)
        return torch.stack([query.view(-1, TOKENS, HEAD_DIM), key.view(-1, TOKENS, HEAD_DIM)])


class BehindText:
    """Changes the tokens behind the text in a way that is no rotation."""

    def __call__(self, attn: Any, x: Tensor, table: Any) -> Tensor:
        query = attn.to_q(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        key = attn.to_k(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        query = attn.norm_q(query)
        key = attn.norm_k(key)
        query[:, :, TEXT:] = apply_rotary_and_more(query[:, :, TEXT:], table)
        key[:, :, TEXT:] = apply_rotary_and_more(key[:, :, TEXT:], table)
        return torch.stack([query, key])


class Exchanged:
    """Exchanges queries and keys by slices of both."""

    def __call__(self, attn: Any, x: Tensor, table: Any) -> Tensor:
        query = attn.to_q(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        key = attn.to_k(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        query, key = key[..., :], query[..., :]
        query = apply_rotary(query, table)
        key = apply_rotary(key, table)
        return torch.stack([query, key])


class Alone:
    """Rotates queries and keys that no norm has seen, with heads before tokens."""

    def __call__(self, attn: Any, x: Tensor, table: Any) -> Tensor:
        query = attn.to_q(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        key = attn.to_k(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        query = apply_rotary(query, table)
        key = apply_rotary(key, table)
        return torch.stack([query, key])


class OfAllOrEach:
    """Has a table for all samples or one for each."""

    def __call__(self, attn: Any, x: Tensor, table: Any) -> Tensor:
        query = attn.to_q(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        key = attn.to_k(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        query = apply_rotary_of_all_or_each(query, table)
        key = apply_rotary_of_all_or_each(key, table)
        return torch.stack([query, key])


class AtOnce:
    """Has one call for both, if there is a table."""

    def __call__(self, attn: Any, x: Tensor, table: Any = None) -> Tensor:
        query = attn.to_q(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        key = attn.to_k(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        if table is not None:
            query, key = apply_rotary_to_both(query, key, table)
        return torch.stack([query, key])


class ByAngles:
    """Has angles, which may be fewer than a head has elements."""

    def __call__(self, attn: Any, x: Tensor, table: Any) -> Tensor:
        query = attn.norm_q(attn.to_q(x).unflatten(2, (HEADS, -1)))
        key = attn.norm_k(attn.to_k(x).unflatten(2, (HEADS, -1)))
        query = apply_rotary_by_angles(query, table)
        key = apply_rotary_by_angles(key, table)
        return torch.stack([query, key])


class AcrossHeads:
    """Normalises all heads together, and rotates with heads before tokens."""

    def __call__(self, attn: Any, x: Tensor, table: Any) -> Tensor:
        query = attn.norm_q(attn.to_q(x)).unflatten(2, (HEADS, -1)).transpose(1, 2)
        key = attn.norm_k(attn.to_k(x)).unflatten(2, (HEADS, -1)).transpose(1, 2)
        query = apply_rotary_complex(query, table)
        key = apply_rotary_complex(key, table)
        return torch.stack([query, key])


class QueryAlone:
    """Rotates queries alone, as attention to a text does, behind both norms."""

    def __call__(self, attn: Any, x: Tensor, table: Any) -> Tensor:
        query = attn.norm_q(attn.to_q(x).unflatten(2, (HEADS, -1)).transpose(1, 2))
        key = attn.norm_k(attn.to_k(x).unflatten(2, (HEADS, -1)).transpose(1, 2))
        query = apply_rotary(query, table)
        return torch.stack([query, key])


class QueryAloneFirst:
    """Rotates queries alone before the norm of the keys."""

    def __call__(self, attn: Any, x: Tensor, table: Any) -> Tensor:
        query = attn.to_q(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        key = attn.to_k(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        query = apply_rotary(attn.norm_q(query), table)
        key = attn.norm_k(key)
        return torch.stack([query, key])


class BehindJoinedText:
    """Joins a text of some tokens with all, and rotates what is behind a number of tokens in place."""

    def __call__(self, attn: Any, x: Tensor, table: Any) -> Tensor:
        pair, text, start = table[0], x[:, : table[1]], table[2]
        query = attn.norm_q(attn.to_q(x).unflatten(2, (HEADS, -1)).transpose(1, 2))
        key = attn.norm_k(attn.to_k(x).unflatten(2, (HEADS, -1)).transpose(1, 2))
        query_of_text = attn.norm_q(attn.to_q(text).unflatten(2, (HEADS, -1)).transpose(1, 2))
        key_of_text = attn.norm_k(attn.to_k(text).unflatten(2, (HEADS, -1)).transpose(1, 2))
        query = torch.cat([query_of_text, query], dim=2)
        key = torch.cat([key_of_text, key], dim=2)
        query[:, :, start:] = apply_rotary(query[:, :, start:], pair)
        key[:, :, start:] = apply_rotary(key[:, :, start:], pair)
        return torch.stack([query, key])


class QueryByKey:
    """Rotates queries by what the norm of the keys returns."""

    def __call__(self, attn: Any, x: Tensor, table: Any) -> Tensor:
        query = attn.to_q(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        key = attn.to_k(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        key = attn.norm_k(key)
        query = apply_rotary(attn.norm_q(query), (key, key))
        return torch.stack([query, key])


class Attention(nn.Module):
    """Two projections, two norms and a processor."""

    def __init__(self, processor: Any) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        normed = width if isinstance(processor, AcrossHeads) else HEAD_DIM
        self.to_q, self.to_k = nn.Linear(width, width), nn.Linear(width, width)
        self.norm_q, self.norm_k = nn.RMSNorm(normed, eps=1e-6), nn.RMSNorm(normed, eps=1e-6)
        self.head_dim, self.processor = HEAD_DIM, processor

    def forward(self, x: Tensor, table: Any = None) -> Tensor:
        result: Tensor = self.processor(self, x, table)
        return result


ANGLES = torch.linspace(0, 3, TOKENS * HEAD_DIM).view(TOKENS, HEAD_DIM)
PAIR = (ANGLES.cos(), ANGLES.sin())
COMPLEX = torch.polar(torch.ones(TOKENS, HEAD_DIM // 2, dtype=torch.float64), ANGLES[:, ::2].double())
PART = ANGLES[:7, :8]
ROWS = (
    ((PART.cos(), PART.sin()), (-PART.cos(), PART.sin())),
    tuple(torch.arange(TOKENS)[None] // n % 7 for n in (10, 1)),
)
CASES: dict[str, tuple[Any, Any, str]] = {
    "rows of axes": (ByRows, ROWS, "rotation of query and key"),
    "in part": (InPart, tuple(table[:, : HEAD_DIM // 2] for table in PAIR), "rotation of query and key"),
    "exchanged": (Exchanged, PAIR, "rotation of query and key"),
    "alone": (Alone, PAIR, "rotation of query and key"),
    "of all or each": (OfAllOrEach, PAIR, "rotation of query and key"),
    "at once": (AtOnce, PAIR, "rotation of query and key"),
    "by angles": (ByAngles, ANGLES, "query and key norm, rotation"),
    "by angles, a part": (ByAngles, ANGLES[:, : HEAD_DIM // 2], "query and key norm, rotation"),
    "query alone": (QueryAlone, PAIR, "query and key norm, rotation"),
    "query alone, first": (QueryAloneFirst, PAIR, "query and key norm, rotation"),
    "across heads": (AcrossHeads, COMPLEX, "query and key norm, rotation"),
}


def attention(kind: str, numerics: str = "fast") -> tuple[Attention, Rewritten]:
    torch.manual_seed(0)
    module = Attention(CASES[kind][0]()).bfloat16().requires_grad_(False)
    found = Rewriter(numerics).rewrite(module)
    assert isinstance(found, Rewritten)
    return module, found


def arguments(kind: str) -> tuple[Tensor, Any]:
    return torch.randn(2, TOKENS, HEADS * HEAD_DIM, generator=torch.Generator().manual_seed(1)).bfloat16(), CASES[kind][
        1
    ]


@pytest.mark.parametrize("kind", CASES)
def test_a_spelling_of_the_rotation_is_one_site_as_close_to_float64_as_stock(kind: str) -> None:
    module, found = attention(kind)
    given = arguments(kind)
    wide = Attention(module.processor).double().requires_grad_(False)
    wide.load_state_dict(module.state_dict())
    with torch.no_grad():
        stock = module(*given).double()
        with CastsLifted():
            reference = wide(*map(to_float64, given))
        module.forward = found.function.__get__(module)
        fused = module(*given).double()
    assert [(site.plan.rule.name, site.fused_calls) for site in found.sites] == [(CASES[kind][2], 1)], [
        site.reasons for site in found.sites
    ]
    assert (fused - reference).norm() <= 1.05 * (stock - reference).norm()
    with torch.no_grad(), TorchOps() as seen:
        module(*given)
    assert any("qk_norm_rope" in name for name in seen.names) and "aten::mul" not in seen.names
    found.guard.force_original()
    with torch.no_grad():
        assert torch.equal(module(*given).double(), stock)


@pytest.mark.parametrize("kind", CASES)
def test_exact_numerics_give_the_bits_of_a_spelling(kind: str) -> None:
    module, found = attention(kind, "exact")
    with torch.no_grad():
        stock = module(*arguments(kind))
        module.forward = found.function.__get__(module)
        assert torch.equal(module(*arguments(kind)), stock)


def test_a_call_without_tables_is_not_rotated() -> None:
    module, found = attention("at once")
    x, _ = arguments("at once")
    stock = module(x)
    module.forward = found.function.__get__(module)
    assert torch.equal(module(x), stock) and not any(site.fused_calls for site in found.sites)


@pytest.mark.parametrize(
    ("processor", "like"),
    [
        (ByOtherRows, "rows of axes"),
        (InPartOfAnother, "in part"),
        (InPartViewed, "in part"),
        (BehindText, "alone"),
        (QueryByKey, "alone"),
    ],
    ids=["indices of another axis", "a part of another", "viewed", "behind a text", "by the keys"],
)
def test_what_only_looks_like_a_rotation_stays_as_it_is_written(processor: Any, like: str) -> None:
    torch.manual_seed(0)
    module = Attention(processor()).bfloat16().requires_grad_(False)
    given = arguments(like)
    stock, found = module(*given), Rewriter("fast").rewrite(module)
    if isinstance(found, Rewritten):
        module.forward = found.function.__get__(module)
    assert torch.equal(module(*given), stock)
    assert not isinstance(found, Rewritten) or not any(site.fused_calls for site in found.sites)


@pytest.mark.parametrize("kind", ["alone", "at once"])
def test_a_rotation_without_norms_is_proven_ahead_for_heads_before_tokens(kind: str) -> None:
    """Tokens before heads are tried first, where a table would be read along the heads: that says nothing."""
    module, found = attention(kind)
    for site in found.sites:
        prove_ahead(site, module, torch.device("cpu"), torch.bfloat16)
        site.on_new_signature = None
        assert not site.reasons
    module.forward = found.function.__get__(module)
    module(*arguments(kind))
    assert [site.fused_calls for site in found.sites] == [1]


def test_tables_of_the_whole_head_and_of_a_part_have_a_proof_each() -> None:
    """A table as wide as half a head could be one of pairs: what a proof for whole heads chose must not read it so."""
    module, found = attention("by angles")
    x, angles = arguments("by angles")
    part = angles[:, : HEAD_DIM // 2].contiguous()
    stock = module(x, part)
    module.forward = found.function.__get__(module)
    module(x, angles)
    torch.testing.assert_close(module(x, part), stock, rtol=2e-2, atol=2e-2)
    assert [(site.fused_calls, len(site.ways)) for site in found.sites] == [(2, 2)]


def test_a_table_of_all_samples_and_tables_of_each_have_a_proof_each() -> None:
    """There are as many samples as heads: tables of samples would fit heads."""
    module, found = attention("of all or each")
    x, pair = arguments("of all or each")
    each = tuple(torch.stack([table, table.flip(0)]) for table in pair)
    stock = module(x, each)
    module.forward = found.function.__get__(module)
    module(x, pair)
    torch.testing.assert_close(module(x, each), stock, rtol=2e-2, atol=2e-2)
    assert [(site.fused_calls, len(site.ways)) for site in found.sites] == [(2, 2)]


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_what_begins_elsewhere_than_behind_a_joined_text_is_not_rotated_as_if_it_did(numerics: str) -> None:
    """That as many tokens as samples are no longer all of the text, no signature says, nor tables of one row."""
    torch.manual_seed(0)
    module = Attention(BehindJoinedText()).bfloat16().requires_grad_(False)
    x, row = arguments("alone")[0], tuple([table[-1:] for table in PAIR])
    both = [(row, 2, 2), (row, 3, 2)]
    stock, found = [module(x, table) for table in both], Rewriter(numerics).rewrite(module)
    assert isinstance(found, Rewritten)
    module.forward = found.function.__get__(module)  # type: ignore[method-assign]
    bound = 0.0 if numerics == "exact" else 2e-2
    for table, expected in zip(both, stock, strict=True):
        torch.testing.assert_close(module(x, table), expected, rtol=bound, atol=bound)
    rotated = found.sites[0]
    assert rotated.plan.rule.name == "query and key norm, two streams" and not rotated.reasons
    assert (rotated.fused_calls, rotated.original_calls, len(rotated.ways)) == (1, 1, 1)


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("name", ["hidream", "ernie_image"])
def test_tables_are_made_once_in_a_call_of_the_model(name: str, graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, made, compute = DENOISERS[name].build().requires_grad_(False), [], rotary._compute
    given = batch_of_two(DENOISERS[name], torch.float32)
    stock = run_model(model, given)
    monkeypatch.setattr(rotary, "_compute", lambda *args: made.append(args) or compute(*args))
    inject_optimized_kernels(model, cuda_graph=graph)
    run_model(model, given)
    made.clear()
    torch.testing.assert_close(run_model(model, given), stock, rtol=1e-4, atol=1e-5)
    assert len(made) == len({id(matrices) for matrices, _ in made}) > 0
    before = len(made)
    run_model(model, given)
    assert len(made) == 2 * before
    restore(model)
    assert "forward" not in model.__dict__


def test_tables_of_another_device_are_moved_once_in_a_call_and_again_in_a_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CogView4 and EasyAnimate make theirs on the CPU, and move them for each query and key."""
    table, device = torch.randn(4, 8), torch.device("meta")
    assert rotary.on_device(table, table.device) is table
    with in_call.one_model_call():
        moved = rotary.on_device(table, device)
        assert moved.device == device and rotary.on_device(table, device) is moved
        monkeypatch.setattr(in_call, "_is_capturing", lambda device: device.type == "meta")
        assert rotary.on_device(table, device) is not moved


def test_a_capture_makes_its_own_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay makes the tables that the capture made; with those of an earlier run it would not see new matrices."""
    matrices = torch.randn(4, 8, 2, 2)
    with in_call.one_model_call():
        outside = rotary.rotary_tables(matrices, "half")
        assert rotary.rotary_tables(matrices, "half") is outside
        monkeypatch.setattr(in_call, "_is_capturing", lambda device: True)
        inside = rotary.rotary_tables(matrices, "half")
        assert inside is not outside and rotary.rotary_tables(matrices, "half") is inside
