"""rope against the rotary embeddings of diffusers themselves, family by family.

Where a model has its formula inside an attention processor, the processor is run and what it hands to the attention
is compared. The formulas that models share word for word are tested once: ``apply_rotary_emb`` with complex numbers
stands for Lumina, QwenImage, Z-Image, NucleusMoE and BriaFibo2; Wan's for VACE, Animate, SkyReels, ChronoEdit,
AnyFlow and SanaVideo. Kandinsky 5 and 6 round to bfloat16 whatever the model is in: they are rope in a bfloat16 model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from diffkern.ops import expand_axes, rope, rope_3d
from tests.ops.reference import EXACT_HALF
from tests.ops.rotation import angles, chain, random

pytest.importorskip("diffusers", reason="compares with the models of diffusers")

DTYPES = (torch.float32, *EXACT_HALF)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def assert_same(ours: Tensor, stock: Tensor, fused: bool = False) -> None:
    """Bit-equal, unless the stock code computes a product and a sum in one op, which may round only once."""
    assert ours.dtype == stock.dtype
    if fused:
        torch.testing.assert_close(ours, stock, rtol=2 * torch.finfo(stock.dtype).eps, atol=1e-6)
    else:
        assert torch.equal(ours, stock)


@every_dtype
def test_family_a_flux_hunyuan_cogvideox(dtype: torch.dtype, provider: str, device: str) -> None:
    from diffusers.models.embeddings import apply_rotary_emb, get_1d_rotary_pos_embed

    cos, sin = (t.to(device) for t in get_1d_rotary_pos_embed(64, 24, use_real=True, freqs_dtype=torch.float64))
    x = random(2, 24, 3, 64, device=device, dtype=dtype)
    stock = apply_rotary_emb(x, (cos, sin), sequence_dim=1)
    assert_same(rope(x, cos[:, None], sin[:, None], provider=provider), stock)
    x = x.transpose(1, 2)
    stock = apply_rotary_emb(x, (cos, sin), sequence_dim=2)
    assert_same(rope(x, cos, sin, provider=provider), stock)


@every_dtype
def test_family_a_cogvideox_rotates_the_video_in_place_behind_the_text(
    dtype: torch.dtype, provider: str, device: str
) -> None:
    from diffusers.models.embeddings import apply_rotary_emb, get_3d_rotary_pos_embed

    cos, sin = get_3d_rotary_pos_embed(64, ((0, 0), (4, 6)), (4, 6), 3)
    x = random(2, 3, 7 + 72, 64, device=device, dtype=dtype)
    stock = x.clone()
    stock[:, :, 7:] = apply_rotary_emb(stock[:, :, 7:], (cos, sin))
    table = cos.to(device), sin.to(device)
    assert_same(rope(x, *table, tokens=(7, 72), seq_dim=2, provider=provider), stock)
    axes = [_axis_rows(t.to(device).view(3, 4, 6, 64)[..., ::2], (8, 12, 12)) for t in (cos, sin)]
    ours = rope_3d(x, *axes, grid=(3, 4, 6), tokens=(7, 72), seq_dim=2, provider=provider)
    assert_same(ours, stock)


def _axis_rows(table: Tensor, widths: tuple[int, ...]) -> list[Tensor]:
    """The tables of the axes out of the compact table of a grid, ``[T, H, W, pairs]``, blocked."""
    t, h, w = table.split(widths, -1)
    return [t[:, 0, 0], h[0, :, 0], w[0, 0]]


@every_dtype
def test_family_b_ltx_flat_over_all_heads(dtype: torch.dtype, provider: str, device: str) -> None:
    from diffusers.models.transformers.transformer_ltx import LTXVideoRotaryPosEmbed, apply_rotary_emb
    from diffusers.models.transformers.transformer_ltx2 import apply_interleaved_rotary_emb

    dim, heads, grid = 128, 4, (2, 3, 4)
    x = random(2, 24, dim, device=device, dtype=dtype)
    cos, sin = LTXVideoRotaryPosEmbed(dim)(x, *grid, (0.4, 32.0, 32.0))
    stock = apply_rotary_emb(x, (cos, sin))
    assert_same(rope(x, cos, sin, provider=provider), stock)
    assert_same(rope(x, cos, sin, provider=provider), apply_interleaved_rotary_emb(x, (cos, sin)))
    # 128 is no multiple of 6: one pair of padding, and then the axes take turns.
    axes = []
    for table in (cos, sin):
        columns = table[0, :, ::2].view(*grid, dim // 2)[..., 1:].unflatten(-1, (-1, 3))
        axes.append([columns[:, 0, 0, :, 0], columns[0, :, 0, :, 1], columns[0, 0, :, :, 2]])
    layout: dict[str, Any] = {"grid": grid, "order": "alternating", "front_pad": 1}
    full = expand_axes(*axes, **layout)
    assert torch.equal(full[0].repeat_interleave(2, -1), cos[0])
    assert_same(rope_3d(x, *axes, **layout, provider=provider), stock)
    split = rope_3d(x.unflatten(-1, (heads, -1)), *axes, **layout, provider=provider)
    assert_same(split.flatten(-2), stock)


@every_dtype
def test_family_b_ltx2_halves_of_each_head(dtype: torch.dtype, provider: str, device: str) -> None:
    from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoRotaryPosEmbed, apply_split_rotary_emb

    dim, heads, grid = 128, 4, (2, 3, 4)
    embed = LTX2AudioVideoRotaryPosEmbed(dim, rope_type="split", num_attention_heads=heads, double_precision=False)
    coords = embed.prepare_video_coords(2, *grid, device=torch.device(device))
    cos, sin = embed(coords)
    x = random(2, 24, dim, device=device, dtype=dtype)
    stock = apply_split_rotary_emb(x, (cos, sin))
    by_head = x.unflatten(-1, (heads, -1))
    ours = rope(by_head, cos.transpose(1, 2), sin.transpose(1, 2), pairing="half", provider=provider)
    assert_same(ours.flatten(-2), stock, fused=True)  # addcmul
    flat = [table.transpose(1, 2).flatten(-2)[0].view(*grid, dim // 2) for table in (cos, sin)]
    axes = []
    for table in flat:
        columns = table[..., 1:].unflatten(-1, (-1, 3))
        axes.append([columns[:, 0, 0, :, 0], columns[0, :, 0, :, 1], columns[0, 0, :, :, 2]])
    ours = rope_3d(
        by_head, *axes, grid=grid, order="alternating", front_pad=1, pairing="half", provider=provider
    )  # fmt: skip
    assert_same(ours.flatten(-2), stock, fused=True)  # addcmul


class _Attended(Exception):
    """Raised in place of the attention, with what it was called with."""


def _attended(monkeypatch: pytest.MonkeyPatch, module: Any, call: Callable[[], Any], name: str) -> tuple[Tensor, ...]:
    def stop(*args: Any, **kwargs: Any) -> None:
        raise _Attended(*args)

    monkeypatch.setattr(module, name, stop)
    with pytest.raises(_Attended) as caught:
        call()
    return caught.value.args


def _recorded(module: torch.nn.Module) -> list[Tensor]:
    outputs: list[Tensor] = []
    module.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    return outputs


@every_dtype
def test_family_c_wan(dtype: torch.dtype, provider: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.models.transformers import transformer_wan as wan

    embed = wan.WanRotaryPosEmbed(32, (1, 2, 2), 16).to(device)
    attention = wan.WanAttention(96, 3, 32, processor=wan.WanAttnProcessor()).to(device, dtype)
    normed = _recorded(attention.norm_q)
    x = random(2, 24, 96, device=device, dtype=dtype)
    for table_dtype in (torch.float32, dtype):
        embed.to(table_dtype)  # a model cast as a whole has half tables, and rotates in its dtype
        cos, sin = embed(torch.empty(2, 4, 2, 6, 8, device=device))
        query = _attended(monkeypatch, wan, lambda: attention(x, None, None, (cos, sin)), "dispatch_attention_fn")[0]
        arithmetic = "float32" if table_dtype == torch.float32 else "input"
        by_head = normed[-1].unflatten(-1, (3, 32))
        options = {"arithmetic": arithmetic, "provider": provider}
        assert_same(rope(by_head, cos[..., 0::2], sin[..., 1::2], **options), query)
        axes = [_axis_rows(t.view(2, 3, 4, 32)[..., ::2], (6, 5, 5)) for t in (cos, sin)]
        assert_same(rope_3d(by_head, *axes, grid=(2, 3, 4), **options), query)


@every_dtype
def test_family_c_helios(dtype: torch.dtype, provider: str, device: str) -> None:
    from diffusers.models.transformers.transformer_helios import apply_rotary_emb_transposed

    x = random(2, 7, 3, 32, device=device, dtype=dtype)
    table = torch.cat(angles(2, 7, 32, device=device), -1)
    cos, sin = table.unsqueeze(-2).chunk(2, -1)
    ours = rope(x, cos[..., 0::2], sin[..., 1::2], provider=provider)
    assert_same(ours, apply_rotary_emb_transposed(x, table))


@every_dtype
def test_family_d_cosmos_cogview_omnigen(dtype: torch.dtype, provider: str, device: str) -> None:
    from diffusers.models.attention_processor import StableAudioAttnProcessor2_0
    from diffusers.models.embeddings import apply_rotary_emb, get_1d_rotary_pos_embed

    cos, sin = get_1d_rotary_pos_embed(32, 24, use_real=True, repeat_interleave_real=False)
    x = random(2, 3, 24, 32, device=device, dtype=dtype)
    stock = apply_rotary_emb(x, (cos, sin), use_real_unbind_dim=-2)
    table = cos.to(device), sin.to(device)
    assert_same(rope(x, *table, pairing="half", provider=provider), stock)
    x = random(2, 3, 24, 80, device=device, dtype=dtype)
    stock = StableAudioAttnProcessor2_0().apply_partial_rotary_emb(x, (cos, sin))
    assert_same(rope(x, *table, pairing="half", rotary_dim=32, provider=provider), stock)


@every_dtype
def test_family_e_in_the_dtype_of_the_model(dtype: torch.dtype, provider: str, device: str) -> None:
    from diffusers.models.transformers import transformer_ideogram4 as ideogram
    from diffusers.models.transformers.transformer_minimax_h3 import _apply_rotary_emb

    x = random(2, 7, 3, 64, device=device, dtype=dtype)
    options: dict[str, Any] = {"pairing": "half", "arithmetic": "input", "provider": provider}
    cos, sin = angles(7, 48, device=device)
    ours = rope(x, cos[:, None], sin[:, None], rotary_dim=48, **options)
    assert_same(ours, _apply_rotary_emb(x, cos, sin))
    cos, sin = angles(2, 7, 1, 64, device=device, dtype=dtype)
    stock = (x * cos) + (ideogram._rotate_half(x) * sin)
    assert_same(rope(x, cos, sin, **options), stock)


@every_dtype
def test_family_e_in_float32_on_tables_of_the_model(dtype: torch.dtype, provider: str, device: str) -> None:
    from diffusers.models.transformers.transformer_longcat_audio_dit import _apply_rotary_emb
    from diffusers.models.transformers.transformer_stable_audio3 import _apply_rotary_partial

    x = random(2, 7, 3, 64, device=device, dtype=dtype)
    cos, sin = angles(7, 64, device=device, dtype=dtype)
    ours = rope(x, cos[:, None], sin[:, None], pairing="half", provider=provider)
    assert_same(ours, _apply_rotary_emb(x, (cos, sin)))
    freqs = random(7, 32, device=device)
    ours = rope(
        x, freqs[:, None].cos(), freqs[:, None].sin(), pairing="half", rotary_dim=32, provider=provider
    )  # fmt: skip
    assert_same(ours, _apply_rotary_partial(x, freqs))


@every_dtype
def test_family_e_ernie_is_no_rotation(
    dtype: torch.dtype, provider: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers.models.transformers import transformer_ernie_image as ernie

    attention = ernie.ErnieImageAttention(96, heads=3, dim_head=32, qk_norm="rms_norm", eps=1e-6).to(device, dtype)
    normed = _recorded(attention.norm_q)
    x = random(2, 7, 96, device=device, dtype=dtype)
    freqs = ernie.ErnieImageEmbedND3(24, 256, (8, 8, 8))(random(2, 7, 3, device=device).abs() * 9)
    query = _attended(
        monkeypatch, ernie, lambda: attention(x, image_rotary_emb=freqs), "dispatch_attention_fn"
    )[0]  # fmt: skip
    ours = rope(
        normed[0], freqs.cos(), freqs.sin(), pairing="half", arithmetic="input", rotary_dim=24, provider=provider
    )  # fmt: skip
    assert_same(ours, query)
    assert (ours[..., :24].float().norm(dim=-1) / normed[0][..., :24].float().norm(dim=-1) - 1).abs().max() > 0.1


@every_dtype
def test_family_f_complex(dtype: torch.dtype, provider: str, device: str) -> None:
    from diffusers.models.embeddings import apply_rotary_emb
    from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen

    x = random(2, 8, 3, 64, device=device, dtype=dtype)
    freqs = torch.polar(torch.ones(2, 8, 32), 3 * random(2, 8, 32)).to(device)
    ours = rope(x, freqs.unsqueeze(2), provider=provider)
    assert_same(ours, apply_rotary_emb(x, freqs, use_real=False), fused=device != "cpu")
    ours = rope(x, freqs[0].unsqueeze(1), provider=provider)
    assert_same(ours, apply_rotary_emb_qwen(x, freqs[0], use_real=False), fused=device != "cpu")


@every_dtype
def test_family_f_lumina2_in_complex128(dtype: torch.dtype, provider: str, device: str) -> None:
    from diffusers.models.embeddings import apply_rotary_emb, get_1d_rotary_pos_embed

    freqs = get_1d_rotary_pos_embed(64, 8, freqs_dtype=torch.float64).expand(2, -1, -1).to(device)
    assert freqs.dtype == torch.complex128
    x = random(2, 8, 3, 64, device=device, dtype=dtype)
    stock = apply_rotary_emb(x, freqs, use_real=False)
    ours = rope(x, freqs.unsqueeze(2), arithmetic="float64", provider=provider)
    assert_same(ours, stock, fused=device != "cpu")


@every_dtype
def test_family_g_matrices(dtype: torch.dtype, provider: str, device: str) -> None:
    from diffusers.models.transformers.transformer_hidream_image import apply_rope
    from diffusers.models.transformers.transformer_prx import apply_rope as apply_rope_prx

    x = random(2, 7, 3, 64, device=device, dtype=dtype)
    cos, sin = angles(2, 7, 1, 32, device=device)
    matrices = torch.stack((cos, -sin, sin, cos), -1).unflatten(-1, (2, 2))
    ours = rope(x, matrices[..., 0, 0], matrices[..., 1, 0], provider=provider)
    assert_same(ours, apply_rope(x, x, matrices)[0])
    assert_same(ours, apply_rope_prx(x, matrices))
    # A table for half of a head: HiDream rotates the first half and leaves the second.
    first, second = x.chunk(2, -1)
    stock = torch.cat((apply_rope(first, first, matrices[..., :16, :, :])[0], second), -1)
    ours = rope(x, matrices[..., :16, 0, 0], matrices[..., :16, 1, 0], rotary_dim=32, provider=provider)
    assert_same(ours, stock)


@pytest.mark.skipif(torch.bfloat16 not in EXACT_HALF, reason="the interpreter truncates to bfloat16")
def test_family_g_kandinsky_in_bfloat16(provider: str, device: str) -> None:
    from diffusers.models.transformers.transformer_kandinsky6 import apply_rotary

    x = random(2, 7, 3, 64, device=device, dtype=torch.bfloat16)
    cos, sin = angles(2, 7, 1, 32, device=device)
    matrices = torch.stack((cos, -sin, sin, cos), -1).unflatten(-1, (2, 2))
    ours = rope(x, cos, sin, provider=provider)
    assert_same(ours, apply_rotary(x, matrices).to(torch.bfloat16))


@every_dtype
def test_family_h_mochi_has_learned_angles_per_head(
    dtype: torch.dtype, provider: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers.models import attention_processor as processors
    from diffusers.models.transformers.transformer_mochi import MochiRoPE

    attention = processors.MochiAttention(96, 48, processors.MochiAttnProcessor2_0(), heads=3, dim_head=32)
    attention = attention.to(device, dtype)
    normed = _recorded(attention.norm_q)
    cos, sin = MochiRoPE()(random(3, 3, 16, device=device), 2, 3, 4, torch.device(device), torch.float32)
    video, text = (random(1, n, c, device=device, dtype=dtype) for n, c in ((24, 96), (5, 48)))
    mask = torch.ones(1, 5, dtype=torch.bool, device=device)
    query = _attended(
        monkeypatch, processors.F, lambda: attention(video, text, mask, image_rotary_emb=(cos, sin)), "scaled_dot_product_attention"
    )[0]  # fmt: skip
    ours = rope(normed[0], cos, sin, provider=provider)
    assert_same(ours.transpose(1, 2), query[:, :, :24])


@every_dtype
def test_family_i_allegro_has_three_thirds_in_halves(dtype: torch.dtype, provider: str, device: str) -> None:
    from diffusers.models.embeddings import apply_rotary_emb_allegro

    x = random(2, 3, 24, 48, device=device, dtype=dtype)
    grid = (2, 3, 4)
    axes = [angles(size, 16, seed=size, device=device) for size in grid]
    positions = torch.cartesian_prod(*(torch.arange(size, device=device) for size in grid)).unbind(-1)
    stock = apply_rotary_emb_allegro(x, axes, [position[None] for position in positions])
    tables = [
        torch.stack([axis[which][position] for axis, position in zip(axes, positions, strict=True)], 1)
        for which in (0, 1)
    ]
    ours = rope(x.unflatten(-1, (3, 16)), *tables, pairing="half", provider=provider)
    assert_same(ours.flatten(-2), stock)


def test_the_chain_of_these_tests_is_the_formula_of_the_models(device: str) -> None:
    from diffusers.models.embeddings import apply_rotary_emb

    x = random(2, 3, 8, 32, device=device, dtype=torch.bfloat16)
    cos, sin = angles(8, 32, device=device)
    for pairing, dim in (("interleaved", -1), ("half", -2)):
        stock = apply_rotary_emb(x, (cos, sin), use_real_unbind_dim=dim)
        assert torch.equal(chain(x, cos, sin, pairing), stock)
