"""The attention of LTX-Video and LTX-2 in ComfyUI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from comfy.ldm.lightricks import model as native
from torch import Tensor, nn
from typing_extensions import override

from diffkern.blocks.pieces import unfit_input
from diffkern.cache.rotary import rotary_tables, unfit_matrices
from diffkern.comfyui.qk import norm_and_rotate, norms_fuse
from diffkern.comfyui.recipe import QK_NORM_ROPE, ComfyRecipe, Samples, in_training, sample_options
from diffkern.comfyui.verification_clone import input_size


class LTXAttention(ComfyRecipe):
    """``CrossAttention``: queries and keys normalised over all heads together, and rotated."""

    op = "comfy_ltx_attention"
    ops = ("qk_norm_rope",)
    families: ClassVar[frozenset[str]] = frozenset({QK_NORM_ROPE})
    versions = "ComfyUI 0.33"
    fingerprints = frozenset({"d31cd96f0b629f92"})
    words: ClassVar[frozenset[str]] = frozenset({"attn_precision", "mask", "stg_skip_self_attn", "transformer_options"})

    @staticmethod
    @override
    def arguments(
        x: Tensor,
        context: Tensor | None = None,
        mask: Any = None,
        pe: Any = None,
        k_pe: Any = None,
        transformer_options: dict[str, Any] | None = None,
    ) -> tuple[Any, ...]:
        return x, context, mask, pe, k_pe, transformer_options or {}

    @override
    def declines(self, module: nn.Module, call: tuple[Any, ...]) -> str | None:
        x, context, _, pe, k_pe, options = call
        if in_training():
            return "ComfyUI is training"
        reason = unfit_input(x)
        if reason is not None:
            return reason
        if context is None and options.get("stg_skip_self_attn", False):
            return "spatio-temporal guidance skips this attention"
        if pe is None:
            return None if k_pe is None else "its keys have a rotary embedding and its queries have none"
        keys = x if context is None else context
        heads = pe[0].shape[2]
        reason = unfit_matrices(pe[0], x.device, x.shape[0], x.shape[1], heads)
        if reason is None and k_pe is not None:
            reason = unfit_matrices(k_pe[0], x.device, x.shape[0], keys.shape[1], heads)
            if k_pe[1] != pe[1]:
                reason = "queries and keys have rotary embeddings of different layouts"
        elif keys.shape[1] != x.shape[1]:
            reason = "queries and keys of different lengths share a rotary embedding"
        return reason

    @override
    def stock_pieces(self, module: nn.Module, call: tuple[Any, ...]) -> tuple[str, ...]:
        attention: Any = module
        return () if norms_fuse(attention.q_norm, attention.k_norm) else ("q_norm and k_norm",)

    @override
    def compute(self, module: nn.Module, call: tuple[Any, ...], provider: str | None, stock: tuple[str, ...]) -> Tensor:
        attention: Any = module
        x, context, mask, pe, k_pe, options = call
        source = x if context is None else context
        q, k, v = attention.to_q(x), attention.to_k(source), attention.to_v(source)
        heads, pairing, q_tables, k_tables = attention.heads, "interleaved", None, None
        if pe is not None:
            heads, pairing = pe[0].shape[2], "half" if pe[1] else "interleaved"
            q_tables = rotary_tables(pe[0], pairing)
            k_tables = q_tables if k_pe is None else rotary_tables(k_pe[0], pairing)
        q, k = norm_and_rotate(
            q, k, attention.q_norm, attention.k_norm, q_tables, k_tables,
            fuse_norms=not stock and not self.exact, across_heads=heads, pairing=pairing, provider=provider,
        )  # fmt: skip
        y = _attend(attention, q, k, v, mask, options)
        if attention.to_gate_logits is not None:
            gates = 2.0 * torch.sigmoid(attention.to_gate_logits(x))
            y = (y.unflatten(-1, (attention.heads, attention.dim_head)) * gates.unsqueeze(-1)).flatten(-2)
        return attention.to_out(y)  # type: ignore[no-any-return]

    @override
    def sources(self) -> tuple[Callable[..., Any], ...]:
        return native.CrossAttention.forward, native.apply_rotary_emb_qk, native.apply_rotary_emb

    @override
    def samples(
        self, module: nn.Module, tokens: int, device: torch.device, dtype: torch.dtype
    ) -> list[tuple[Any, ...]]:
        attention: Any = module
        random = Samples(device, dtype)
        size, others = input_size(attention.to_q), tokens // 2
        x, context = random(2, tokens, size), random(2, others, input_size(attention.to_k))
        pairs = attention.dim_head // 2
        pe, k_pe = (random.rotations(1, length, attention.heads, pairs) for length in (tokens, others))
        options = sample_options()
        calls: list[tuple[Any, ...]] = [(x, context, None, None, None, options)]
        calls += [(x, context, None, (pe, split), (k_pe, split), options) for split in (False, True)]
        if input_size(attention.to_k) == size:
            calls.append((x, None, None, (pe, False), None, options))
        return calls


def _attend(attention: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]) -> Tensor:
    """ComfyUI's own attention; looked up in its module, where other nodes put theirs."""
    precision = attention.attn_precision
    if isinstance(mask, native.GuideAttentionMask):
        y = native._attention_with_guide_mask(q, k, v, attention.heads, mask, precision, options)
    else:
        attend = native.comfy.ldm.modules.attention.optimized_attention
        y = attend(q, k, v, attention.heads, mask=mask, attn_precision=precision, transformer_options=options)
    return y  # type: ignore[no-any-return]


RECIPE = LTXAttention()
