"""The self- and cross-attention of Wan in ComfyUI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from comfy.ldm.wan import model as native
from torch import Tensor, nn
from typing_extensions import override

from diffkern.blocks.pieces import unfit_input
from diffkern.comfyui.qk import norm_and_rotate, norms_fuse
from diffkern.comfyui.recipe import QK_NORM_ROPE, ComfyRecipe, Samples, in_training, sample_options
from diffkern.comfyui.rope import Tables, rotary_tables, unfit_matrices
from diffkern.comfyui.stand_in import input_size


class WanAttention(ComfyRecipe):
    """What the kinds of attention share: queries and keys normalised over all heads together."""

    ops = ("qk_norm_rope",)
    families: ClassVar[frozenset[str]] = frozenset({QK_NORM_ROPE})
    versions = "ComfyUI 0.33"

    @override
    def stock_pieces(self, module: nn.Module, call: tuple[Any, ...]) -> tuple[str, ...]:
        attention: Any = module
        return () if norms_fuse(attention.norm_q, attention.norm_k) else ("norm_q and norm_k",)

    def _queries_and_keys(
        self, attention: Any, x: Tensor, context: Tensor, tables: Tables | None, fuse_norms: bool, provider: str | None
    ) -> tuple[Tensor, Tensor]:
        return norm_and_rotate(
            attention.q(x), attention.k(context), attention.norm_q, attention.norm_k, tables, tables,
            fuse_norms=fuse_norms and not self.exact, across_heads=attention.num_heads, pairing="interleaved",
            provider=provider,
        )  # fmt: skip


class WanSelfAttention(WanAttention):
    """``WanSelfAttention``: rotated."""

    op = "comfy_wan_self_attention"
    fingerprints = frozenset({"7780af161c36b847"})
    words: ClassVar[frozenset[str]] = frozenset(
        {"attn1_patch", "heads", "k", "patches", "q", "transformer_options", "x"}
    )

    @staticmethod
    @override
    def arguments(x: Tensor, freqs: Tensor, transformer_options: dict[str, Any] | None = None) -> tuple[Any, ...]:
        return x, freqs, transformer_options or {}

    @override
    def declines(self, module: nn.Module, call: tuple[Any, ...]) -> str | None:
        x, freqs, options = call
        if in_training():
            return "ComfyUI is training"
        reason = unfit_input(x)
        if reason is not None:
            return reason
        if "attn1_patch" in options.get("patches", {}):
            return "another node patches its attention"
        attention: Any = module
        return unfit_matrices(freqs, x.device, x.shape[0], x.shape[1], attention.num_heads)

    @override
    def compute(self, module: nn.Module, call: tuple[Any, ...], provider: str | None, stock: tuple[str, ...]) -> Tensor:
        attention: Any = module
        x, freqs, options = call
        tables = rotary_tables(freqs, "interleaved")
        q, k = self._queries_and_keys(attention, x, x, tables, not stock, provider)
        y = native.optimized_attention(q, k, attention.v(x), heads=attention.num_heads, transformer_options=options)
        return attention.o(y)  # type: ignore[no-any-return]

    @override
    def sources(self) -> tuple[Callable[..., Any], ...]:
        return native.WanSelfAttention.forward, native.apply_rope1

    @override
    def samples(
        self, module: nn.Module, tokens: int, device: torch.device, dtype: torch.dtype
    ) -> list[tuple[Any, ...]]:
        attention: Any = module
        freqs = Samples(device, torch.float32).rotations(1, tokens, 1, attention.head_dim // 2)
        return [(Samples(device, dtype)(2, tokens, attention.dim), freqs, sample_options())]


class WanTextAttention(WanAttention):
    """``WanT2VCrossAttention``: not rotated, so without the norms nothing is left to fuse exactly."""

    op = "comfy_wan_text_attention"
    exact_families: ClassVar[frozenset[str]] = frozenset()
    fingerprints = frozenset({"7bb1fba222c7a7ca"})
    words: ClassVar[frozenset[str]] = frozenset({"heads", "transformer_options"})

    @staticmethod
    @override
    def arguments(
        x: Tensor, context: Tensor, transformer_options: dict[str, Any] | None = None, **others: Any
    ) -> tuple[Any, ...]:
        # The stock forward takes, and ignores, whatever other keyword its caller has: the number of image tokens.
        if others.keys() - {"context_img_len"}:
            raise TypeError(f"unknown arguments: {', '.join(others)}")
        return x, context, transformer_options or {}

    @override
    def declines(self, module: nn.Module, call: tuple[Any, ...]) -> str | None:
        return _refusal(*call[:2])

    @override
    def compute(self, module: nn.Module, call: tuple[Any, ...], provider: str | None, stock: tuple[str, ...]) -> Tensor:
        attention: Any = module
        x, context, options = call
        q, k = self._queries_and_keys(attention, x, context, None, not stock, provider)
        y = native.optimized_attention(
            q, k, attention.v(context), heads=attention.num_heads, transformer_options=options
        )
        return attention.o(y)  # type: ignore[no-any-return]

    @override
    def sources(self) -> tuple[Callable[..., Any], ...]:
        return (native.WanT2VCrossAttention.forward,)

    @override
    def samples(
        self, module: nn.Module, tokens: int, device: torch.device, dtype: torch.dtype
    ) -> list[tuple[Any, ...]]:
        attention: Any = module
        random = Samples(device, dtype)
        context = random(2, tokens // 2, input_size(attention.k))
        return [(random(2, tokens, attention.dim), context, sample_options())]


class WanImageAttention(WanAttention):
    """``WanI2VCrossAttention``: the first tokens of the context are of an image, and have keys of their own."""

    op = "comfy_wan_image_attention"
    exact_families: ClassVar[frozenset[str]] = frozenset()
    fingerprints = frozenset({"aa5380b8583992a2"})
    words: ClassVar[frozenset[str]] = frozenset({"heads", "low_precision_attention", "transformer_options"})

    @staticmethod
    @override
    def arguments(
        x: Tensor, context: Tensor, context_img_len: int, transformer_options: dict[str, Any] | None = None
    ) -> tuple[Any, ...]:
        return x, context, context_img_len, transformer_options or {}

    @override
    def declines(self, module: nn.Module, call: tuple[Any, ...]) -> str | None:
        return _refusal(*call[:2])

    @override
    def compute(self, module: nn.Module, call: tuple[Any, ...], provider: str | None, stock: tuple[str, ...]) -> Tensor:
        attention: Any = module
        x, context, image_tokens, options = call
        image, text = context[:, :image_tokens], context[:, image_tokens:]
        q, k = self._queries_and_keys(attention, x, text, None, not stock, provider)
        k_image, v_image = attention.norm_k_img(attention.k_img(image)), attention.v_img(image)
        heads = attention.num_heads
        seen = native.optimized_attention(
            q, k_image, v_image, heads=heads, transformer_options=options, low_precision_attention=False
        )
        read = native.optimized_attention(q, k, attention.v(text), heads=heads, transformer_options=options)
        return attention.o(read + seen)  # type: ignore[no-any-return]

    @override
    def sources(self) -> tuple[Callable[..., Any], ...]:
        return (native.WanI2VCrossAttention.forward,)

    @override
    def samples(
        self, module: nn.Module, tokens: int, device: torch.device, dtype: torch.dtype
    ) -> list[tuple[Any, ...]]:
        x, context, options = TEXT.samples(module, tokens, device, dtype)[0]
        return [(x, context, tokens // 4, options)]


def _refusal(x: Any, context: Any) -> str | None:
    if in_training():
        return "ComfyUI is training"
    return unfit_input(x) or unfit_input(context)


SELF, TEXT, IMAGE = WanSelfAttention(), WanTextAttention(), WanImageAttention()
