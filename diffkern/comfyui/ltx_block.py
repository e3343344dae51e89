"""The transformer block of LTX-Video in ComfyUI; its attention has a recipe of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from comfy.ldm.lightricks import model as native
from torch import Tensor, nn
from typing_extensions import override

from diffkern.blocks.pieces import unfit_input
from diffkern.comfyui.recipe import MODULATION, ComfyRecipe, Samples, in_training, sample_options
from diffkern.comfyui.verification_clone import input_size
from diffkern.ops import norm_modulate

#: ε of the norms that are modulated; they have no module.
EPS = 1e-6


class LTXBlock(ComfyRecipe):
    """``BasicTransformerBlock``: modulated RMS norms and gated residuals around attention and feed-forward.

    The residual is written where it lies, as the stock block does: its callers go on with the tensor that they gave.
    Exactly, nothing is left to fuse: the norms are torch's or comfy-kitchen's.
    """

    op = "comfy_ltx_block"
    ops = ("norm_modulate",)
    families: ClassVar[frozenset[str]] = frozenset({MODULATION})
    exact_families: ClassVar[frozenset[str]] = frozenset()
    versions = "ComfyUI 0.33"
    fingerprints = frozenset({"a105965d2b24eb41"})
    words: ClassVar[frozenset[str]] = frozenset(
        {"context", "device", "dim", "dtype", "mask", "pe", "transformer_options"}
    )

    @staticmethod
    @override
    def arguments(
        x: Tensor,
        context: Tensor | None = None,
        attention_mask: Any = None,
        timestep: Tensor | None = None,
        pe: Any = None,
        transformer_options: dict[str, Any] | None = None,
        self_attention_mask: Any = None,
        prompt_timestep: Tensor | None = None,
    ) -> tuple[Any, ...]:
        options = transformer_options or {}
        return x, context, attention_mask, timestep, pe, options, self_attention_mask, prompt_timestep

    @override
    def declines(self, module: nn.Module, call: tuple[Any, ...]) -> str | None:
        x, timestep = call[0], call[3]
        if in_training():
            return "ComfyUI is training"
        reason = unfit_input(x)
        if reason is not None:
            return reason
        if type(timestep) is not Tensor or timestep.dtype != x.dtype or timestep.ndim != 3:
            return "its modulation is not a plain tensor of the dtype of the hidden states"
        return None

    @override
    def stock_pieces(self, module: nn.Module, call: tuple[Any, ...]) -> tuple[str, ...]:
        return ()

    @override
    def compute(self, module: nn.Module, call: tuple[Any, ...], provider: str | None, stock: tuple[str, ...]) -> Tensor:
        block: Any = module
        x, context, mask, timestep, pe, options, self_mask, prompt_timestep = call
        modulation = _modulation(block, x, timestep)
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = modulation[:6]

        y = norm_modulate(x, scale_msa, shift_msa, eps=EPS, provider=provider)
        x.addcmul_(block.attn1(y, pe=pe, mask=self_mask, transformer_options=options), gate_msa)

        if block.cross_attention_adaln:
            y = _modulated_cross_attention(block, x, context, mask, modulation[6:9], prompt_timestep, options)
        else:
            y = block.attn2(x, context=context, mask=mask, transformer_options=options)
        x.add_(y)
        y = norm_modulate(x, scale_mlp, shift_mlp, eps=EPS, provider=provider)
        result: Tensor = x.addcmul_(block.ff(y), gate_mlp)
        return result

    @override
    def sources(self) -> tuple[Callable[..., Any], ...]:
        return native.BasicTransformerBlock.forward, native.apply_cross_attention_adaln

    @override
    def samples(
        self, module: nn.Module, tokens: int, device: torch.device, dtype: torch.dtype
    ) -> list[tuple[Any, ...]]:
        block: Any = module
        random = Samples(device, dtype)
        count, size = block.scale_shift_table.shape
        attention = block.attn1
        pe = random.rotations(1, tokens, attention.heads, attention.dim_head // 2), False
        options = sample_options()
        prompt = random(2, 1, 2 * size, scale=0.5) if block.cross_attention_adaln else None
        text = random(2, 7, input_size(block.attn2.to_k))
        return [
            (random(2, tokens, size), text, None, random(2, rows, count * size, scale=0.5), pe, options, None, prompt)
            for rows in (1, tokens)
        ]


def _modulation(block: Any, x: Tensor, timestep: Tensor) -> tuple[Tensor, ...]:
    """Shifts, scales and gates: parts of one tensor ``[B, 1 or S, 6 or 9, D]``, which are read in place."""
    table = block.scale_shift_table
    parts = timestep.reshape(x.shape[0], timestep.shape[1], table.shape[0], -1)
    modulation: Tensor = table[None, None].to(device=x.device, dtype=x.dtype) + parts
    return modulation.unbind(dim=2)


def _modulated_cross_attention(
    block: Any, x: Tensor, context: Any, mask: Any, modulation: tuple[Tensor, ...], prompt_timestep: Any,
    options: dict[str, Any],
) -> Tensor:  # fmt: skip
    """The gated cross-attention of LTX-2.3, by ComfyUI's own function."""
    shift, scale, gate = modulation
    y: Tensor = native.apply_cross_attention_adaln(
        x, context, block.attn2, shift, scale, gate, block.prompt_scale_shift_table, prompt_timestep, mask, options
    )
    return y


RECIPE = LTXBlock()
