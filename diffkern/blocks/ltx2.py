"""The transformer block of LTX-2: a video and an audio stream, each like LTX-Video's, which attend to each other.

The streams are walked as residuals with a branch that is still to be added: the next norm adds it, in one pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.models.transformers import transformer_ltx2 as stock_module
from diffusers.models.transformers.transformer_ltx2 import (
    LTX2Attention,
    LTX2AudioVideoAttnProcessor,
    LTX2AudioVideoRotaryPosEmbed,
    LTX2VideoTransformerBlock,
)
from torch import Tensor, nn
from typing_extensions import override

from diffkern.blocks.pieces import gelu_feed_forward, plain, unfit_input, untouched
from diffkern.blocks.recipe import BlockRecipe
from diffkern.blocks.rms_pieces import (
    Rotation,
    attend,
    attend_to_text,
    is_gelu,
    is_weightless,
    norms_are_plain,
    project_out,
)
from diffkern.blocks.steps import EXACT, FAST, FastSteps
from diffkern.blocks.text import TextAttention, text_attention
from diffkern.ops import norm_modulate
from diffkern.providers import KERNEL_DTYPES

Tables = tuple[Tensor, Tensor]
Operand = Tensor | None

_NORMS = ("norm1", "norm2", "norm3", "audio_norm1", "audio_norm2", "audio_norm3")
_CROSS_NORMS = ("audio_to_video_norm", "video_to_audio_norm")
_ATTENTIONS = ("attn1", "audio_attn1", "attn2", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")


class _Call(NamedTuple):
    """The arguments of the stock forward."""

    hidden_states: Tensor
    audio_hidden_states: Tensor
    encoder_hidden_states: Tensor
    audio_encoder_hidden_states: Tensor
    temb: Tensor
    temb_audio: Tensor
    temb_ca_scale_shift: Tensor
    temb_ca_audio_scale_shift: Tensor
    temb_ca_gate: Tensor
    temb_ca_audio_gate: Tensor
    temb_prompt: Operand = None
    temb_prompt_audio: Operand = None
    video_rotary_emb: Tables | None = None
    audio_rotary_emb: Tables | None = None
    ca_video_rotary_emb: Tables | None = None
    ca_audio_rotary_emb: Tables | None = None
    encoder_attention_mask: Operand = None
    audio_encoder_attention_mask: Operand = None
    self_attention_mask: Operand = None
    audio_self_attention_mask: Operand = None
    a2v_cross_attention_mask: Operand = None
    v2a_cross_attention_mask: Operand = None
    use_a2v_cross_attention: bool = True
    use_v2a_cross_attention: bool = True
    perturbation_mask: Operand = None
    all_perturbed: bool | None = None


@dataclass
class _Stream:
    """Hidden states, and a branch ``gate * y`` that is still to be added to them."""

    x: Tensor
    steps: FastSteps
    stock: tuple[str, ...]
    provider: str | None
    y: Operand = None
    gate: Operand = None

    def add(self, y: Tensor, gate: Operand) -> None:
        """Leaves a branch for later."""
        self.y, self.gate = y, gate

    def flush_pending(self) -> Tensor:
        """Adds the branch that is left, if any."""
        if self.y is not None:
            self.x = self.steps.gate_residual(self.x, self.y, self.gate, self.provider)
            self.y = self.gate = None
        return self.x

    def norm(self, name: str, norm: Any, scale: Operand = None, shift: Operand = None) -> Tensor:
        """The modulated norm of the hidden states with the branch."""
        if name in self.stock:
            y: Tensor = norm(self.flush_pending())
            return y if scale is None and shift is None else self.steps.modulate(y, scale, shift, self.provider)
        if self.y is None:
            return self.steps.norm_modulate(norm, self.x, scale, shift, self.provider)
        self.x, y = self.steps.gate_residual_norm_modulate(norm, self.x, self.y, self.gate, scale, shift, self.provider)
        self.y = self.gate = None
        return y


class LTX2Block(BlockRecipe):
    """``LTX2VideoTransformerBlock``. Returns the hidden states of the video and of the audio.

    Args:
        steps: The steps between the matrix products.
    """

    op = "ltx2_block"
    ops = ("norm_modulate", "qk_norm_rope", "gate_residual", "gate_residual_norm_modulate")
    fingerprints = frozenset({"8d19f9d577c550e5"})
    versions = "diffusers 0.42"
    calls_layers = True

    def __init__(self, steps: FastSteps = FAST) -> None:
        self._steps = steps

    @override
    def for_numerics(self, numerics: str) -> LTX2Block:
        return LTX2Block(EXACT if numerics == "exact" else FAST)

    @staticmethod
    @override
    def arguments(*args: Any, **kwargs: Any) -> _Call:
        return _Call(*args, **kwargs)

    @override
    def declines(self, module: nn.Module, call: tuple[Any, ...]) -> str | None:
        call = _Call(*call)
        x, audio = call.hidden_states, call.audio_hidden_states
        reason = unfit_input(x) or unfit_input(audio)
        if reason is not None:
            return reason
        for value in call:
            for part in value if type(value) is tuple else (value,):
                if not isinstance(part, (Tensor, bool, type(None))) or (
                    isinstance(part, Tensor) and (type(part) is not Tensor or part.device != x.device)
                ):
                    return "an argument is not a plain tensor on the device of the hidden states"
        modulations: list[Any] = [
            value for name, value in zip(call._fields, call, strict=True) if name.startswith("temb")
        ]
        if any(temb is not None and (temb.dtype != x.dtype or temb.ndim != 3) for temb in modulations):
            return "a modulation is not of the dtype and rank of the hidden states"
        tables = (call.video_rotary_emb, call.audio_rotary_emb, call.ca_video_rotary_emb, call.ca_audio_rotary_emb)
        for pair in tables:
            if pair is not None and (
                len(pair) != 2 or any(part.dtype not in KERNEL_DTYPES or part.ndim not in (3, 4) for part in pair)
            ):
                return "its rotary tables are not a pair of tables in a dtype that kernels read"
        for name, parameter in module._parameters.items():
            if parameter is not None and (not plain(parameter, x.device) or parameter.dtype != x.dtype):
                return f"its {name} is not a plain tensor like the hidden states"
        return None if audio.dtype == x.dtype else "video and audio are of different dtypes"

    @override
    def stock_pieces(self, module: nn.Module, call: tuple[Any, ...]) -> tuple[str, ...]:
        x, children = call[0], module._modules
        stock = [name for name in (*_NORMS, *_CROSS_NORMS) if not is_weightless(children[name])]
        for name in _ATTENTIONS:
            attention: Any = children[name]
            if not untouched(attention, LTX2Attention) or type(attention.processor) is not LTX2AudioVideoAttnProcessor:
                stock.append(name)
            elif not norms_are_plain(attention._modules, x.device):
                stock.append(f"{name}.norm_q and norm_k")
        stock += [name for name in ("ff", "audio_ff") if not is_gelu(children[name], x.device, x.dtype)]
        return tuple(stock)

    @override
    def compute(
        self, module: nn.Module, call: tuple[Any, ...], provider: str | None, stock: tuple[str, ...]
    ) -> tuple[Tensor, Tensor]:
        block: Any = module
        c, steps = _Call(*call), self._steps
        video = _Stream(c.hidden_states, steps, stock, provider)
        audio = _Stream(c.audio_hidden_states, steps, stock, provider)
        run = _Attentions(block, c, steps, stock, provider)

        # Self-attention.
        ada, text_ada = _modulation(block.scale_shift_table, c.temb)
        shift, scale, gate, *mlp = ada
        video.add(run.to_itself("attn1", video.norm("norm1", block.norm1, scale, shift), video=True), gate)
        audio_ada, audio_text_ada = _modulation(block.audio_scale_shift_table, c.temb_audio)
        shift, scale, gate, *audio_mlp = audio_ada
        y = audio.norm("audio_norm1", block.audio_norm1, scale, shift)
        audio.add(run.to_itself("audio_attn1", y, video=False), gate)

        # Attention to the text, whose states may be modulated too.
        text, audio_text = c.encoder_hidden_states, c.audio_encoder_hidden_states
        if block.cross_attn_adaln:
            text = _modulate_text(text, block.prompt_scale_shift_table, c.temb_prompt, steps, provider)
            audio_text = _modulate_text(
                audio_text, block.audio_prompt_scale_shift_table, c.temb_prompt_audio, steps, provider
            )
        text_shift, text_scale, text_gate = text_ada
        y = video.norm("norm2", block.norm2, text_scale, text_shift)
        video.add(run.to_text("attn2", y, text, c.encoder_attention_mask), text_gate)
        text_shift, text_scale, text_gate = audio_text_ada
        y = audio.norm("audio_norm2", block.audio_norm2, text_scale, text_shift)
        audio.add(run.to_text("audio_attn2", y, audio_text, c.audio_encoder_attention_mask), text_gate)

        # Attention of the streams to each other: both norms are of the states before either of them.
        if c.use_a2v_cross_attention or c.use_v2a_cross_attention:
            video_factors, a2v_gate = _cross_modulation(
                block.video_a2v_cross_attn_scale_shift_table, c.temb_ca_scale_shift, c.temb_ca_gate
            )
            audio_factors, v2a_gate = _cross_modulation(
                block.audio_a2v_cross_attn_scale_shift_table, c.temb_ca_audio_scale_shift, c.temb_ca_audio_gate
            )
            used = [i for i, use in enumerate((c.use_a2v_cross_attention, c.use_v2a_cross_attention)) if use]
            ys = {
                i: (
                    video.norm("audio_to_video_norm", block.audio_to_video_norm, *video_factors[2 * i : 2 * i + 2]),
                    audio.norm("video_to_audio_norm", block.video_to_audio_norm, *audio_factors[2 * i : 2 * i + 2]),
                )
                for i in used
            }
            if c.use_a2v_cross_attention:
                video.add(run.across("audio_to_video_attn", *ys[0], to_video=True), a2v_gate)
            if c.use_v2a_cross_attention:
                audio.add(run.across("video_to_audio_attn", *ys[1][::-1], to_video=False), v2a_gate)

        # Feed-forward.
        shift, scale, gate = mlp
        y = video.norm("norm3", block.norm3, scale, shift)
        video.add(_feed_forward("ff", block.ff, y, steps, stock), gate)
        shift, scale, gate = audio_mlp
        y = audio.norm("audio_norm3", block.audio_norm3, scale, shift)
        audio.add(_feed_forward("audio_ff", block.audio_ff, y, steps, stock), gate)
        return video.flush_pending(), audio.flush_pending()

    @override
    def sources(self) -> tuple[Callable[..., Any], ...]:
        return (
            LTX2VideoTransformerBlock.forward,
            LTX2VideoTransformerBlock.get_mod_params,
            LTX2Attention.forward,
            LTX2AudioVideoAttnProcessor.__call__,
            stock_module.apply_interleaved_rotary_emb,
            stock_module.apply_split_rotary_emb,
            FeedForward.forward,
            GELU.forward,
            GELU.gelu,
        )

    @override
    def samples(
        self, module: nn.Module, tokens: int, device: torch.device, dtype: torch.dtype
    ) -> list[tuple[Any, ...]]:
        block: Any = module
        generator = torch.Generator("cpu").manual_seed(20)

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=generator, device="cpu") * scale).to(device=device, dtype=dtype)

        def tables(attention: Any, length: int) -> Tables:
            embedding = LTX2AudioVideoRotaryPosEmbed(
                attention.inner_dim,
                modality="audio",
                rope_type=attention.rope_type,
                num_attention_heads=attention.heads,
            )
            positions = torch.arange(length, device=device, dtype=torch.float32)
            pair: Tables = embedding(positions.expand(2, 1, length), device)
            return pair

        dim, audio_dim = block.scale_shift_table.shape[-1], block.audio_scale_shift_table.shape[-1]
        length, sound, text = tokens | 1, max(5, tokens // 3) | 1, 7
        mask = torch.zeros(2, 1, text, device=device, dtype=dtype)
        mask[0, :, 4:] = -10000.0
        calls: list[tuple[Any, ...]] = []
        for per_token, text_mask in ((False, mask), (True, None)):
            n, m = (length, sound) if per_token else (1, 1)
            count, audio_count = block.scale_shift_table.shape[0], block.audio_scale_shift_table.shape[0]
            prompt: tuple[Operand, Operand] = (None, None)
            if block.cross_attn_adaln:
                prompt = random(2, 1, 2 * dim, scale=0.3), random(2, 1, 2 * audio_dim, scale=0.3)
            calls.append(
                _Call(
                    random(2, length, dim),
                    random(2, sound, audio_dim),
                    random(2, text, block.attn2.cross_attention_dim),
                    random(2, text, block.audio_attn2.cross_attention_dim),
                    random(2, n, count * dim, scale=0.5),
                    random(2, m, audio_count * audio_dim, scale=0.5),
                    random(2, n, 4 * dim, scale=0.5),
                    random(2, m, 4 * audio_dim, scale=0.5),
                    random(2, n, dim, scale=0.5),
                    random(2, m, audio_dim, scale=0.5),
                    *prompt,
                    tables(block.attn1, length),
                    tables(block.audio_attn1, sound),
                    tables(block.audio_to_video_attn, length),
                    tables(block.video_to_audio_attn, sound),
                    text_mask,
                    text_mask,
                )
            )
        return calls

    @override
    def make_plain(self, module: nn.Module) -> None:
        for name in _ATTENTIONS:
            attention: Any = module._modules[name]
            processor = attention.__dict__.get("processor") or attention._modules.get("processor")
            if type(attention) is LTX2Attention and type(processor) is LTX2AudioVideoAttnProcessor:
                processor = LTX2AudioVideoAttnProcessor()
                processor._attention_backend = AttentionBackendName.NATIVE
                attention._modules.pop("processor", None)
                attention.__dict__["processor"] = processor


@dataclass(frozen=True)
class _Attentions:
    """The attention modules of a block, fused or as they are."""

    block: Any
    call: _Call
    steps: FastSteps
    stock: tuple[str, ...]
    provider: str | None

    def to_itself(self, name: str, y: Tensor, *, video: bool) -> Tensor:
        """A stream to itself."""
        c = self.call
        tables = c.video_rotary_emb if video else c.audio_rotary_emb
        mask = c.self_attention_mask if video else c.audio_self_attention_mask
        if self._is_fused(name):
            return self._attend(name, y, y, tables, None, mask)
        extra: dict[str, Any] = {}
        if self.block.perturbed_attn:
            extra = {"perturbation_mask": c.perturbation_mask, "all_perturbed": c.all_perturbed}
        attention = getattr(self.block, name)
        result: Tensor = attention(
            hidden_states=y, encoder_hidden_states=None, query_rotary_emb=tables, attention_mask=mask, **extra
        )
        return result

    def to_text(self, name: str, y: Tensor, text: Tensor, mask: Operand) -> Tensor:
        """A stream to the text."""
        if self._is_fused(name):
            # Modulated text is another one at every step.
            may = not self.block.cross_attn_adaln and f"{name}.norm_q and norm_k" not in self.stock
            kept = text_attention(self.block, name, text) if may else None
            return self._attend(name, y, text, None, None, mask, kept)
        attention = getattr(self.block, name)
        result: Tensor = attention(y, encoder_hidden_states=text, query_rotary_emb=None, attention_mask=mask)
        return result

    def across(self, name: str, y: Tensor, context: Tensor, *, to_video: bool) -> Tensor:
        """A stream to the other one."""
        c = self.call
        tables = (c.ca_video_rotary_emb, c.ca_audio_rotary_emb)
        own, other = tables if to_video else tables[::-1]
        mask = c.a2v_cross_attention_mask if to_video else c.v2a_cross_attention_mask
        if self._is_fused(name):
            return self._attend(name, y, context, own, other, mask)
        attention = getattr(self.block, name)
        result: Tensor = attention(
            y, encoder_hidden_states=context, query_rotary_emb=own, key_rotary_emb=other, attention_mask=mask
        )
        return result

    def _is_fused(self, name: str) -> bool:
        return name not in self.stock and self.steps.fuses_norms

    def _attend(
        self, name: str, y: Tensor, context: Tensor, tables: Tables | None, key_tables: Tables | None, mask: Operand,
        kept: TextAttention | None = None,
    ) -> Tensor:  # fmt: skip
        attention: Any = getattr(self.block, name)
        stock_norms = f"{name}.norm_q and norm_k" in self.stock
        dispatch = stock_module.dispatch_attention_fn
        gates = attention.to_gate_logits
        logits = None if gates is None else gates(y)
        if kept is not None:
            result = attend_to_text(attention, y, context, mask, stock_norms, dispatch, self.provider, kept)
        else:
            rotation = _rotation(attention, tables, key_tables)
            result = attend(attention, y, context, rotation, mask, stock_norms, dispatch, self.provider)
        if logits is not None:
            # One gate for each head, 1 where the logit is 0.
            heads = result.unflatten(2, (attention.heads, -1))
            result = (heads * (2.0 * torch.sigmoid(logits)).unsqueeze(-1)).flatten(2, 3)
        return project_out(attention, result)


def _rotation(attention: Any, tables: Tables | None, key_tables: Tables | None) -> Rotation:
    if tables is None:
        return {}
    split = attention.rope_type == "split"
    (cos, sin), (cos_k, sin_k) = (
        (_by_head(part, attention.heads, split) for part in pair) for pair in (tables, key_tables or tables)
    )
    pairing = "half" if split else "interleaved"
    return {"cos": cos, "sin": sin, "cos_k": cos_k, "sin_k": sin_k, "pairing": pairing}


def _by_head(table: Tensor, heads: int, split: bool) -> Tensor:
    """Views ``[B, S, H * D]``, or split tables ``[B, H, S, D / 2]``, as ``[B, S, H, ...]``."""
    if split and table.ndim == 4:
        return table.transpose(1, 2)
    rows: Tensor = table.unflatten(-1, (heads, -1))
    return rows


def _modulation(table: Tensor, temb: Tensor) -> tuple[tuple[Tensor, ...], tuple[Operand, ...]]:
    """The six of attention and feed-forward, and the three of the attention to the text (None without)."""
    parts = _parts(table, temb)
    return parts[:6], parts[6:9] or (None, None, None)


def _cross_modulation(table: Tensor, temb: Tensor, temb_gate: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Scale and shift for the attention to the video, and for that to the audio; and the gate."""
    return _parts(table[:4], temb), _parts(table[4:], temb_gate)[0]


def _parts(table: Tensor, temb: Tensor) -> tuple[Tensor, ...]:
    modulation: Tensor = table + temb.reshape(*temb.shape[:2], table.shape[0], -1)
    return modulation.unbind(dim=2)


def _modulate_text(text: Tensor, table: Tensor, temb: Operand, steps: FastSteps, provider: str | None) -> Tensor:
    shift, scale = table[None, None].unbind(dim=2) if temb is None else _parts(table, temb)
    return norm_modulate(text, scale, shift, norm=None, rounding=steps.rounding, provider=provider)


def _feed_forward(name: str, feed_forward: Any, y: Tensor, steps: FastSteps, stock: tuple[str, ...]) -> Tensor:
    if name in stock or not steps.fuses_norms:
        return feed_forward(y)  # type: ignore[no-any-return]
    return gelu_feed_forward(feed_forward, y)


RECIPE = LTX2Block()
