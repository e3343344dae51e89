"""The transformer block of LTX-Video: RMS norms, queries and keys normalised over all heads, tanh GELU.

Stock, the block reads and writes its hidden states some 250 times between the matrix products and the attention
(in units of one byte per element, for bfloat16); fused about 34 times.

With products in fp8, self-attention and feed-forward read rows of fp8. The attention to the text stays as it
is: its queries are made of the residual stream itself, whose outliers one scale per row does not hold, and its keys and
values of a few hundred tokens, where nothing can be gained.

The last sum of a block and the first norm of the next one are one pass as well: see :mod:`diffkern.blocks.ltx_chain`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.models.transformers import transformer_ltx as stock_module
from diffusers.models.transformers.transformer_ltx import (
    LTXAttention,
    LTXVideoAttnProcessor,
    LTXVideoRotaryPosEmbed,
    LTXVideoTransformerBlock,
)
from torch import Tensor, nn
from typing_extensions import override

from diffkern.blocks import fp8
from diffkern.blocks.fp8 import RowwiseFp8, fits, parts_of_feed_forward, quantize_rowwise, weights_of
from diffkern.blocks.ltx_attention import Tables, attend, is_gelu, is_weightless, norms_are_plain
from diffkern.blocks.ltx_chain import (
    modulation_of,
    next_block,
    pop_prefetched_norm,
    remember_last,
    store_prefetched_norm,
)
from diffkern.blocks.ltx_rope import TracedTables
from diffkern.blocks.pieces import are_silent, gelu_feed_forward, plain, unfit, untouched
from diffkern.blocks.recipe import BlockRecipe
from diffkern.cache import version
from diffkern.ops import (
    gate_residual,
    gate_residual_norm_modulate,
    gate_residual_norm_modulate_fp8,
    norm_modulate,
    norm_modulate_fp8,
)
from diffkern.providers import KERNEL_DTYPES
from diffkern.verify.contract import FP8_ALLOWANCE
from diffkern.verify.samples import Draws

#: How reports name what could be computed in fp8 and is not.
_ATTN1, _FF = "attn1 in fp8", "ff in fp8"


class LTXBlock(BlockRecipe):
    """``LTXVideoTransformerBlock``.

    Args:
        in_fp8: Whether matrix products are computed in fp8.
    """

    op = "ltx_block"
    kernel_ops = ("norm_modulate", "qk_norm_rope", "gate_residual", "gate_residual_norm_modulate")
    fingerprints = frozenset({"c846e58e0ac2885e"})
    versions = "diffusers 0.42"
    is_one_op = True

    def __init__(self, in_fp8: bool = False) -> None:
        self._in_fp8 = in_fp8
        self.allowance = FP8_ALLOWANCE if in_fp8 else 0.0

    @override
    def in_fp8(self) -> LTXBlock:
        return LTXBlock(in_fp8=True)

    @staticmethod
    @override
    def arguments(
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: Tables | None = None,
        encoder_attention_mask: Tensor | None = None,
    ) -> tuple[Any, ...]:
        return hidden_states, encoder_hidden_states, temb, image_rotary_emb, encoder_attention_mask

    @override
    def unfit(self, module: nn.Module, call: tuple[Any, ...]) -> str | None:
        x, text, temb, tables, mask = call
        reason = unfit(x)
        if reason is not None:
            return reason
        if x.ndim != 3:
            return "the hidden states are not of the shape [batch, tokens, channels]"
        if type(text) is not Tensor or type(temb) is not Tensor or (mask is not None and type(mask) is not Tensor):
            return "an argument is not a plain tensor"
        dtype, device = x.dtype, x.device
        table = module._parameters.get("scale_shift_table")
        if not plain(table, device) or table.dtype != dtype:  # type: ignore[union-attr]
            return "its scale_shift_table is not a plain tensor like the hidden states"
        if temb.dtype != dtype or temb.ndim != 3:
            return "its modulation is not of the dtype and rank of the hidden states"
        if tables is None:
            return None
        if type(tables) not in (tuple, TracedTables) or len(tables) != 2:
            return "its rotary tables are not a pair"
        for part in tables:
            if type(part) is not Tensor or part.dtype not in KERNEL_DTYPES or part.device != device:
                return "its rotary tables are not plain tensors on the device of the hidden states"
            if part.shape != x.shape and part.shape != (1, *x.shape[1:]):
                return "its rotary tables have not one row for each token"
        return None

    @override
    def stock_pieces(self, module: nn.Module, call: tuple[Any, ...]) -> tuple[str, ...]:
        x = call[0]
        device = x.device
        children: Any = module._modules
        stock: tuple[str, ...] = ()
        for name in ("norm1", "norm2"):
            if not is_weightless(children[name]):
                stock += (name,)
        for name in ("attn1", "attn2"):
            attention = children[name]
            if not untouched(attention, LTXAttention) or type(attention.processor) is not LTXVideoAttnProcessor:
                stock += (name,)
            elif not norms_are_plain(attention._modules, device):
                stock += (f"{name}.norm_q and norm_k",)
        if not is_gelu(children["ff"], device, x.dtype):
            stock += ("ff",)
        if self._in_fp8:
            # Rounding to fp8 has no gradient, and tensor cores make bfloat16 of such products.
            wide = torch.is_grad_enabled() or (x.is_cuda and x.dtype != torch.bfloat16)
            stock += (_ATTN1, _FF) if wide else _wide_pieces(children, device, x.dtype, stock)
        return stock

    @override
    def operands(self, call: tuple[Any, ...]) -> list[Tensor | None]:
        x, text, temb, tables, mask = call
        cos, sin = (None, None) if tables is None else tables
        return [x, text, temb, cos, sin, mask]

    @override
    def call_of(self, operands: Sequence[Tensor | None]) -> tuple[Any, ...]:
        x, text, temb, cos, sin, mask = operands
        return x, text, temb, None if cos is None else (cos, sin), mask

    @override
    def compute(self, module: nn.Module, call: tuple[Any, ...], provider: str | None, stock: tuple[str, ...]) -> Tensor:
        block: Any = module
        x, text, temb, tables, mask = call
        if type(tables) is TracedTables and ("attn1" in stock or not untouched(block, LTXVideoTransformerBlock)):
            tables.axes = None  # who listens here may write into the tables, and a graph cannot tell
        chained = not torch.compiler.is_compiling() and not torch.is_grad_enabled() and version(x) is not None

        weights = weights_of(block, x.device) if self._in_fp8 and not torch.compiler.is_compiling() else None
        attn1 = weights if weights is not None and "attn1" not in stock and _ATTN1 not in stock else None
        ff = weights if weights is not None and "ff" not in stock and _FF not in stock else None
        if weights is not None and attn1 is None:
            weights.drop("to_")
        if weights is not None and ff is None:
            weights.drop("ff.")

        prefetched = pop_prefetched_norm(block, x, temb, attn1 is not None) if chained else None
        y: Any = None if prefetched is None else prefetched.y
        modulation = modulation_of(block, temb, x.size(0)) if prefetched is None else prefetched.modulation
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = modulation
        if "norm1" in stock:
            y = norm_modulate(block.norm1(x), scale_msa, shift_msa, norm=None, provider=provider)
        elif y is None:
            y = _normed(x, scale_msa, shift_msa, block.norm1.eps, attn1 is not None, provider)

        if "attn1" in stock:
            y = block.attn1(hidden_states=y, encoder_hidden_states=None, image_rotary_emb=tables)
        else:
            stock_norms = "attn1.norm_q and norm_k" in stock
            y = attend(block.attn1, y, y, tables, None, stock_norms, provider, attn1)
        x = gate_residual(x, y, gate_msa, provider=provider)

        if "attn2" in stock:
            y = block.attn2(x, encoder_hidden_states=text, image_rotary_emb=None, attention_mask=mask)
        else:
            stock_norms = "attn2.norm_q and norm_k" in stock
            text_of = None if torch.compiler.is_compiling() else block
            y = attend(block.attn2, x, text, None, mask, stock_norms, provider, text_of=text_of)

        if "norm2" in stock:
            x = gate_residual(x, y, provider=provider)
            y = norm_modulate(block.norm2(x), scale_mlp, shift_mlp, norm=None, provider=provider)
        else:
            x, y = _summed_and_normed(x, y, None, scale_mlp, shift_mlp, block.norm2.eps, ff is not None, provider)

        if ff is not None:
            layers, _ = parts_of_feed_forward(block.ff)
            y = fp8.gelu_feed_forward(ff.run, layers, "gelu_tanh", quantize_rowwise(y, provider), provider)
        else:
            y = block.ff(y) if "ff" in stock else gelu_feed_forward(block.ff, y)
        following = next_block(block, x) if chained else None
        if following is None:
            x = gate_residual(x, y, gate_mlp, provider=provider)
        else:
            modulation = modulation_of(following, temb, x.size(0))
            shift, scale, *_ = modulation
            # The next block is one like this: if it differs, it computes its norm itself.
            x, y = _summed_and_normed(x, y, gate_mlp, scale, shift, following.norm1.eps, attn1 is not None, provider)
            store_prefetched_norm(following, x, temb, modulation, y)
        if chained:
            remember_last(block, x)
        return x

    @override
    def sources(self) -> tuple[Callable[..., Any], ...]:
        return (
            LTXVideoTransformerBlock.forward,
            LTXAttention.forward,
            LTXVideoAttnProcessor.__call__,
            stock_module.apply_rotary_emb,
            FeedForward.forward,
            GELU.forward,
            GELU.gelu,
        )

    @override
    def sample_calls(self, module: nn.Module, tokens: int, draw: Draws) -> list[tuple[Any, ...]]:
        block: Any = module
        frames, height = 3, 3
        width = tokens // (frames * height) | 1
        length, dim, text = frames * height * width, block.scale_shift_table.shape[-1], 7
        rotary = LTXVideoRotaryPosEmbed(dim)
        tables = rotary(draw(2, length, dim), frames, height, width, (0.3, 32.0, 32.0))
        mask = torch.zeros(2, 1, text, device=draw.device, dtype=draw.dtype)
        mask[0, :, 4:] = -10000.0
        context = block.attn2.cross_attention_dim
        return [
            (draw(2, length, dim), draw(2, text, context), draw(2, 1, 6 * dim, scale=0.5), tables, mask),
            (draw(2, length, dim), draw(2, text, context), draw(2, length, 6 * dim, scale=0.5), tables, None),
        ]

    @override
    def make_plain(self, module: nn.Module) -> None:
        for name in ("attn1", "attn2"):
            attention: Any = module._modules[name]
            if type(attention) is LTXAttention:
                processor = LTXVideoAttnProcessor()
                processor._attention_backend = AttentionBackendName.NATIVE
                attention._modules.pop("processor", None)
                attention.__dict__["processor"] = processor


def _normed(x: Tensor, scale: Tensor, shift: Tensor, eps: float, in_fp8: bool, provider: str | None) -> Any:
    """The modulated norm of ``x``, for products in fp8 as their rows."""
    if in_fp8:
        return RowwiseFp8(*norm_modulate_fp8(x, scale, shift, eps=eps, provider=provider))
    return norm_modulate(x, scale, shift, eps=eps, provider=provider)


def _summed_and_normed(
    residual: Tensor, x: Tensor, gate: Tensor | None, scale: Tensor, shift: Tensor, eps: float, in_fp8: bool,
    provider: str | None,
) -> tuple[Tensor, Any]:  # fmt: skip
    """The new residual, and its modulated norm, for products in fp8 as their rows."""
    if in_fp8:
        new, *rows = gate_residual_norm_modulate_fp8(residual, x, gate, scale, shift, eps=eps, provider=provider)
        return new, RowwiseFp8(*rows)
    return gate_residual_norm_modulate(residual, x, gate, scale, shift, eps=eps, provider=provider)


def _wide_pieces(children: Any, device: torch.device, dtype: torch.dtype, stock: tuple[str, ...]) -> tuple[str, ...]:
    """Those pieces that could be computed in fp8 but for their layers."""
    pieces: tuple[str, ...] = ()
    if "attn1" not in stock:
        projections = children["attn1"]._modules
        layers = [projections[name] for name in ("to_q", "to_k", "to_v")]
        out = list(projections["to_out"]._modules.values())
        if not (all(fits(layer, device, dtype) for layer in (*layers, out[0])) and are_silent(out[1:])):
            pieces += (_ATTN1,)
    if "ff" not in stock:
        layers, others = parts_of_feed_forward(children["ff"])
        if not (len(layers) == 2 and all(fits(layer, device, dtype) for layer in layers) and are_silent(others)):
            pieces += (_FF,)
    return pieces


RECIPE = LTXBlock()
