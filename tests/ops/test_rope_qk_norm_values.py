"""qk_norm_rope against float64 and against the chains of modules that it stands in for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from diffkern.ops import expand_axes, qk_norm_rope, rope
from tests.ops.checks import leaves_alone
from tests.ops.reference import EXACT_HALF, INTERPRETED, half_unit, relative_error
from tests.ops.rotation import angles, axis_tables, chain, norm_truth, random, truth

PAIRINGS = ("interleaved", "half")
NORMS = ("rms", "layer", None)
#: Triton's interpreter is slow: there, one dtype stands for all.
DTYPES = (torch.float32, *EXACT_HALF)[-1 if INTERPRETED else 0 :]
TOKENS = 4 if INTERPRETED else 65


def check(
    q: Tensor,
    k: Tensor,
    parameters: Sequence[Tensor | None] = (None,) * 4,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    provider: str,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    axes: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Calls qk_norm_rope and asserts its results, element by element, against float64.

    ``parameters`` are the weights and biases of q and of k. With ``axes``, its tables are given in place of the full
    ones that they expand to.
    """
    q_weight, k_weight, q_bias, k_bias = parameters
    given = (cos, sin)
    positions: dict[str, Any] = {}
    if axes is not None:
        positions = dict(axes)
        given = (positions.pop("cos"), positions.pop("sin"))
    inputs = [tensor for tensor in (q, k, *parameters, cos, sin, cos_k, sin_k) if tensor is not None]
    with leaves_alone(*inputs):
        results = qk_norm_rope(
            q, k, q_weight, k_weight, *given, 1e-6, q_bias=q_bias, k_bias=k_bias, cos_k=cos_k, sin_k=sin_k,
            provider=provider, **positions, **options,
        )  # fmt: skip
    for x, y, weight, bias, table in (
        (q, results[0], q_weight, q_bias, (cos, sin)),
        (k, results[1], k_weight, k_bias, (cos if cos_k is None else cos_k, sin if sin_k is None else sin_k)),
    ):
        assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
        assert y.stride() == torch.empty_like(x).stride()
        expected = expected_of(x, weight, bias, table, q, options)
        error = (y.double().view_as(expected) - expected).abs()
        # Two roundings at most, of values up to the largest of the row.
        unit = half_unit(x.dtype) * (1 + bool(options.get("round_norm")) + bool(options.get("round_dtype")))
        scale = expected.abs().amax(-1, keepdim=True) + (0 if weight is None else 1)
        assert (error <= (2 * unit + 2e-5) * (scale + 1)).all(), f"off by {error.max().item()}"
    return results


def expected_of(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    table: tuple[Tensor | None, ...],
    q: Tensor,
    options: dict[str, Any],
) -> Tensor:
    heads = options.get("across_heads")
    normed = norm_truth(x, weight, bias, options.get("norm", "rms"), 1e-6, options.get("weight_offset", 0.0))
    if heads:
        normed = normed.unflatten(-1, (-1, q.shape[-1] // heads))
    cos, sin = table
    if cos is None or sin is None:
        return normed
    rotary = options.get("rotary_dim") or normed.shape[-1]
    pairing = options.get("pairing", "interleaved")
    tokens = options.get("tokens")
    if tokens is None:
        return truth(normed, cos, sin, pairing, rotary)
    dim = options.get("seq_dim", 1)
    result = normed.clone()
    part = normed.narrow(dim, *tokens)
    result.narrow(dim, *tokens).copy_(truth(part, cos, sin, pairing, rotary))
    return result


def packed(
    tokens: int, heads: int, head_dim: int, dtype: torch.dtype, device: str, *, flat: bool = False, batch: int = 2
) -> tuple[Tensor, Tensor]:
    """q and k as chunks of one projection."""
    q, k, _ = random(batch, tokens, 3 * heads * head_dim, device=device, dtype=dtype).chunk(3, -1)
    return (q, k) if flat else (q.unflatten(-1, (heads, head_dim)), k.unflatten(-1, (heads, head_dim)))


def parameters_of(size: int, kind: str, dtype: torch.dtype, device: str) -> list[Tensor | None]:
    """Weights and biases of q and k around 1: none, weights alone, or both; weights of k in float32."""
    made = [1 + 0.3 * random(size, seed=seed, device=device) for seed in (1, 2, 3, 4)]
    kept = {"none": 0, "weights": 2, "both": 4}[kind]
    return [p.to(torch.float32 if i == 1 else dtype) if i < kept else None for i, p in enumerate(made)]


# --- the models' sites ----------------------------------------------------------------------------------


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_every_norm_and_pairing(pairing: str, norm: str | None, across: bool, provider: str, device: str) -> None:
    heads, head_dim = 3, 32
    for dtype in DTYPES:
        q, k = packed(5, heads, head_dim, dtype, device, flat=across)
        for kind in ("none", "weights", "both") if norm else ("none",):
            parameters = parameters_of(q.shape[-1], kind, dtype, device)
            options: dict[str, Any] = {"norm": norm, "pairing": pairing, "provider": provider}
            options["across_heads"] = heads if across else None
            check(q, k, parameters, **options)
            for table in (angles(5, 1, 32, device=device), angles(5, heads, 16, device=device)):
                check(q, k, parameters, *table, **options)
            if norm == "rms":
                check(q, k, parameters, *table, weight_offset=1.0, **options)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128, 256])
def test_every_head_dim_alone_and_across_heads(head_dim: int, pairing: str, provider: str, device: str) -> None:
    for dtype in DTYPES:
        table = angles(3, 1, head_dim, device=device)
        for heads in (None, 6):
            q, k = packed(3, 6, head_dim, dtype, device, flat=heads is not None)
            parameters = parameters_of(q.shape[-1], "weights", dtype, device)
            check(q, k, parameters, *table, across_heads=heads, pairing=pairing, provider=provider)


@pytest.mark.parametrize("shape", [(32, 64), (40, 128)])
def test_the_widths_of_ltx_and_wan(shape: tuple[int, int], provider: str, device: str) -> None:
    heads, head_dim = shape
    for dtype in DTYPES:
        q, k = packed(6, heads, head_dim, dtype, device, flat=True, batch=1 if INTERPRETED else 2)
        parameters = parameters_of(q.shape[-1], "weights", dtype, device)
        widths = {64: (341, 341, 341), 128: (22, 21, 21)}[head_dim]
        layout: dict[str, Any] = {"grid": (1, 2, 3)}
        if head_dim == 64:
            layout |= {"order": "alternating", "front_pad": 1}
        cos, sin = axis_tables((1, 2, 3), widths, device)
        full = [table.view(6, -1, head_dim // 2) for table in expand_axes(cos, sin, **layout)]
        axes = {"cos": cos, "sin": sin, **layout}
        one = check(q, k, parameters, *full, axes=axes, across_heads=heads, provider=provider)
        other = check(q, k, parameters, *full, across_heads=heads, provider=provider)
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b)


def test_only_some_tokens_are_rotated_and_all_are_normalised(provider: str, device: str) -> None:
    for dtype in DTYPES:
        for tokens in ((0, 5), (4, 5), (2, 3), (8, 1)):
            table = angles(tokens[1], 1, 32, device=device)
            q, k = packed(9, 3, 32, dtype, device)
            check(q, k, *_weights(q, dtype, device), *table, tokens=tokens, norm="layer", provider=provider)
            flat_q, flat_k = packed(9, 3, 32, dtype, device, flat=True)
            options = {"tokens": tokens, "across_heads": 3, "provider": provider}
            check(flat_q, flat_k, *_weights(flat_q, dtype, device), *table, **options)
            q, k = q.transpose(1, 2), k.transpose(1, 2)
            cos, sin = (t.transpose(0, 1) for t in table)
            check(q, k, *_weights(q, dtype, device), cos, sin, tokens=tokens, seq_dim=2, provider=provider)


def _weights(x: Tensor, dtype: torch.dtype, device: str) -> tuple[list[Tensor | None]]:
    return (parameters_of(x.shape[-1], "weights", dtype, device),)


def test_q_and_k_may_differ_in_heads_tokens_and_tables(provider: str, device: str) -> None:
    for dtype in DTYPES:
        q, k = packed(7, 4, 32, dtype, device)
        table = angles(7, 1, 32, device=device)
        check(q, k[:, :, :1], *_weights(q, dtype, device), *table, provider=provider)
        cos_k, sin_k = angles(5, 4, 16, seed=3, device=device)
        check(q, k[:, 1:6], *_weights(q, dtype, device), *table, cos_k=cos_k, sin_k=sin_k, provider=provider)
        q, k = packed(7, 4, 32, dtype, device, flat=True)
        options = {"across_heads": 4, "provider": provider}
        check(q, k[:, 1:6], *_weights(q, dtype, device), *table, cos_k=cos_k, sin_k=sin_k, **options)
        fewer = parameters_of(64, "weights", dtype, device)
        check(q, k[..., :64], [_weights(q, dtype, device)[0][0], fewer[1], None, None], *table, **options)


def test_part_of_each_head_may_be_rotated(provider: str, device: str) -> None:
    for dtype in DTYPES:
        for rotary in (16, 30, 32):
            for pairing in PAIRINGS:
                table = angles(5, 1, rotary, device=device)
                options = {"rotary_dim": rotary, "pairing": pairing, "provider": provider}
                for heads in (None, 3):
                    q, k = packed(5, 3, 64, dtype, device, flat=heads is not None)
                    check(q, k, *_weights(q, dtype, device), *table, across_heads=heads, **options)


def test_without_a_norm_it_is_rope_bit_for_bit(provider: str, device: str) -> None:
    for dtype in DTYPES:
        q, k = packed(TOKENS, 8, 128, dtype, device)
        cos, sin = angles(TOKENS, 1, 128, device=device)
        for pairing in PAIRINGS:
            for arithmetic in ("float32", "float64", "input"):
                options: dict[str, Any] = {"pairing": pairing, "arithmetic": arithmetic}
                for x, y in zip(
                    (q, k),
                    qk_norm_rope(q, k, None, None, cos, sin, norm=None, provider=provider, **options),
                    strict=True,
                ):
                    assert torch.equal(y, rope(x, cos, sin, provider=provider, **options))
                    assert torch.equal(y, chain(x, cos, sin, **options))
        complex_table = torch.complex(cos[..., :64], sin[..., :64])
        y, _ = qk_norm_rope(q, k, None, None, complex_table, norm=None, provider=provider)
        assert torch.equal(y, rope(q, complex_table, provider=provider))


@pytest.mark.parametrize("across", [False, True])
def test_the_rounding_of_the_norm_is_the_callers(across: bool, provider: str, device: str) -> None:
    for dtype in EXACT_HALF:
        q, k = packed(TOKENS, 4, 64, dtype, device, flat=across)
        weight = 1 + 0.3 * random(q.shape[-1], device=device, dtype=dtype)
        cos, sin = angles(TOKENS, 1, 64, device=device)
        scale = torch.rsqrt(q.float().square().mean(-1, keepdim=True) + 1e-6)
        rounded = {
            "torch": (q.float() * scale * weight.float()).to(dtype),
            "diffusers": (q.float() * scale).to(dtype) * weight,
        }
        for name, normed in rounded.items():
            by_head = normed.unflatten(-1, (4, 64)) if across else normed
            options: dict[str, Any] = {"across_heads": 4 if across else None, "provider": provider}
            options["round_dtype"] = dtype if name == "diffusers" else None
            for arithmetic in ("float32", "input"):
                y, _ = qk_norm_rope(q, k, weight, None, cos, sin, round_norm=True, arithmetic=arithmetic, **options)
                expected = chain(by_head, cos, sin, arithmetic=arithmetic).view_as(y)
                # Another order of summation may move a value that lies next to a rounding boundary, and few do.
                assert (y != expected).float().mean() < 5e-3


SITES = {
    "ltx": ("rms", 32, 64, "interleaved", True),
    "flux": ("rms", 24, 128, "interleaved", False),
    "wan": ("rms", 12, 128, "interleaved", True),
    "ltx2": ("rms", 8, 128, "half", True),
    "cogvideox": ("layer", 30, 64, "interleaved", False),
}


@pytest.mark.parametrize("site", SITES)
def test_the_error_is_at_most_that_of_the_chain_of_modules(site: str, provider: str, device: str) -> None:
    norm, heads, head_dim, pairing, across = SITES[site]
    for dtype in DTYPES:
        q, k = packed(TOKENS, heads, head_dim, dtype, device, flat=across)
        size = q.shape[-1]
        weight = (1 + 0.3 * random(size, device=device)).to(dtype)
        bias = random(size, seed=5, device=device, dtype=dtype) if norm == "layer" else None
        cos, sin = angles(TOKENS, 1, head_dim, device=device)
        stock = F.rms_norm(q, (size,), weight, 1e-6) if norm == "rms" else F.layer_norm(q, (size,), weight, bias, 1e-6)
        exact = norm_truth(q, weight, bias, norm, 1e-6)
        if across:
            stock, exact = stock.unflatten(-1, (heads, -1)), exact.unflatten(-1, (heads, -1))
        expected = truth(exact, cos, sin, pairing, head_dim)
        ours, _ = qk_norm_rope(
            q, k, weight, None, cos, sin, 1e-6, norm=norm, q_bias=bias, pairing=pairing,
            across_heads=heads if across else None, provider=provider,
        )  # fmt: skip
        limit = 1.05 * relative_error(chain(stock, cos, sin, pairing), expected) + 1e-6
        assert relative_error(ours.view_as(expected), expected) <= limit


@pytest.mark.parametrize("head_dim", [64, 72, 256])
def test_layer_norms_of_heads_far_from_zero_or_with_one_element_far_from_the_others(
    head_dim: int, provider: str, device: str
) -> None:
    for dtype in DTYPES:
        q, k = packed(TOKENS, 5, head_dim, dtype, device)
        q, k = q + 100, k * torch.where(torch.arange(head_dim, device=device) == 0, 1000, 1).to(dtype)
        for x, ours in zip((q, k), qk_norm_rope(q, k, norm="layer", eps=1e-6, provider=provider), strict=True):
            expected = norm_truth(x, None, None, "layer", 1e-6)
            limit = 1.05 * relative_error(F.layer_norm(x, (head_dim,), eps=1e-6), expected) + 1e-6
            assert relative_error(ours, expected) <= limit


@hypothesis.settings(max_examples=8 if INTERPRETED else 80)
@hypothesis.given(data=st.data())
def test_any_combination_of_options(data: st.DataObject, provider: str, device: str) -> None:
    draw = data.draw
    dtype = draw(st.sampled_from(DTYPES))
    heads, head_dim = draw(st.integers(1, 5)), draw(st.sampled_from([2, 8, 12, 16, 40, 64]))
    tokens, flat = draw(st.integers(1, 6)), draw(st.booleans())
    q, k = packed(tokens, heads, head_dim, dtype, device, flat=flat)
    options: dict[str, Any] = {
        "norm": draw(st.sampled_from(NORMS)),
        "pairing": draw(st.sampled_from(PAIRINGS)),
        "across_heads": heads if flat else None,
        "round_norm": draw(st.booleans()),
        "arithmetic": draw(st.sampled_from(["float32", "float64"])),
        "provider": provider,
    }
    if draw(st.booleans()):
        start = draw(st.integers(0, tokens - 1))
        options["tokens"] = (start, draw(st.integers(1, tokens - start)))
    count = options["tokens"][1] if "tokens" in options else tokens
    kind = draw(st.sampled_from(["none", "weights", "both"])) if options["norm"] else "none"
    table = angles(
        count, draw(st.sampled_from([1, heads])), draw(st.sampled_from([head_dim, head_dim // 2])), device=device
    )
    check(q, k, parameters_of(q.shape[-1], kind, dtype, device), *table, **options)


# --- errors ---------------------------------------------------------------------------------------------


def test_bad_arguments_are_named(device: str) -> None:
    q, k = packed(5, 3, 32, torch.float32, device)
    cos, sin = angles(5, 1, 32, device=device)
    with pytest.raises(ValueError, match="unknown norm 'group'"):
        qk_norm_rope(q, k, norm="group")
    with pytest.raises(ValueError, match="they must be alike"):
        qk_norm_rope(q, k.half())
    with pytest.raises(ValueError, match=r"the weight of k has shape \(31,\), but 32 elements"):
        qk_norm_rope(q, k, None, cos[0, 0, :31])
    with pytest.raises(ValueError, match="the q_bias is on meta"):
        qk_norm_rope(q, k, q_bias=torch.ones(32, device="meta"))
    with pytest.raises(ValueError, match="not those of 5 equal heads"):
        qk_norm_rope(q.flatten(2), k.flatten(2), None, None, cos, sin, across_heads=5)
    with pytest.raises(ValueError, match=r"cos of shape .* does not broadcast"):
        qk_norm_rope(q, k, None, None, cos[:4], sin)
    with pytest.raises(ValueError, match="does not broadcast"):
        qk_norm_rope(q, k[:, :4], None, None, cos, sin)
    with pytest.raises(ValueError, match="but no cos"):
        qk_norm_rope(q, k, sin=sin)
    with pytest.raises(TypeError, match="with sin=None the table must be complex"):
        qk_norm_rope(q, k, None, None, cos)
    with pytest.raises(ValueError, match="one table per axis"):
        qk_norm_rope(q, k, None, None, cos, sin, grid=(5,))
    with pytest.raises(ValueError, match="give the grid or the coordinates"):
        qk_norm_rope(q, k, None, None, [cos], [sin])


@pytest.mark.parametrize("norm", ["layer", None])
def test_an_offset_of_weights_without_an_rms_norm_is_refused(norm: str | None) -> None:
    q = torch.randn(1, 2, 2, 8)
    with pytest.raises(ValueError, match="weight_offset belongs to the weights of an RMS norm"):
        qk_norm_rope(q, q, norm=norm, weight_offset=1.0)
