"""The transformer block of Wan in ComfyUI; its attention has recipes of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from comfy.ldm.wan import model as native
from torch import Tensor, nn
from typing_extensions import override

from diffkern.blocks.pieces import unfit_input
from diffkern.comfyui.norms import norm_kind, readable
from diffkern.comfyui.recipe import MODULATION, ComfyRecipe, Samples, in_training, sample_options
from diffkern.comfyui.stand_in import input_size
from diffkern.ops import gate_residual, gate_residual_norm_modulate, norm_modulate

_NORMS = ("norm1", "norm2", "norm3")


class WanBlock(ComfyRecipe):
    """``WanAttentionBlock``: layer norms, of which the one before the cross-attention has weights and no modulation.

    The stock block is a chain of norms and fused multiply-adds of torch: exactly, nothing is left to fuse.
    """

    op = "comfy_wan_block"
    ops = ("norm_modulate", "gate_residual", "gate_residual_norm_modulate")
    families: ClassVar[frozenset[str]] = frozenset({MODULATION})
    exact_families: ClassVar[frozenset[str]] = frozenset()
    versions = "ComfyUI 0.33"
    fingerprints = frozenset({"874d14f80b9c57b5"})
    words: ClassVar[frozenset[str]] = frozenset(
        {"attn2_patch", "context_img_len", "device", "dim", "dtype", "patches", "transformer_options", "x"}
    )

    @staticmethod
    @override
    def arguments(
        x: Tensor,
        e: Tensor,
        freqs: Any,
        context: Tensor,
        context_img_len: int | None = 257,
        transformer_options: dict[str, Any] | None = None,
    ) -> tuple[Any, ...]:
        return x, e, freqs, context, context_img_len, transformer_options or {}

    @override
    def declines(self, module: nn.Module, call: tuple[Any, ...]) -> str | None:
        x, e, options = call[0], call[1], call[5]
        if in_training():
            return "ComfyUI is training"
        reason = unfit_input(x)
        if reason is not None:
            return reason
        if "attn2_patch" in options.get("patches", {}):
            return "another node patches its cross-attention"
        if type(e) is not Tensor or e.dtype != x.dtype or e.ndim not in (3, 4):
            return "its modulation is not a plain tensor of the dtype of the hidden states"
        return None

    @override
    def stock_pieces(self, module: nn.Module, call: tuple[Any, ...]) -> tuple[str, ...]:
        # Without cross_attn_norm, norm3 is no norm.
        return tuple(name for name in _NORMS if norm_kind(module._modules[name]) != "layer")

    @override
    def compute(self, module: nn.Module, call: tuple[Any, ...], provider: str | None, stock: tuple[str, ...]) -> Tensor:
        block: Any = module
        x, e, freqs, context, image_tokens, options = call
        shift1, scale1, gate1, shift2, scale2, gate2 = (_by_token(part, x) for part in _modulation(block, x, e))

        if "norm1" in stock:
            y = torch.addcmul(shift1, block.norm1(x), 1 + scale1)
        else:
            y = norm_modulate(x, scale1, shift1, eps=block.norm1.eps, norm="layer", provider=provider)
        y = block.self_attn(y, freqs, transformer_options=options)

        parameters = None if "norm3" in stock else readable(block.norm3, x)
        if parameters is None:
            x = gate_residual(x, y, gate1, provider=provider)
            y = block.norm3(x)
        else:
            x, y = gate_residual_norm_modulate(
                x, y, gate1, None, None, *parameters, block.norm3.eps, norm="layer", provider=provider
            )
        y = block.cross_attn(y, context, context_img_len=image_tokens, transformer_options=options)

        if "norm2" in stock:
            x = gate_residual(x, y, provider=provider)
            y = torch.addcmul(shift2, block.norm2(x), 1 + scale2)
        else:
            x, y = gate_residual_norm_modulate(
                x, y, None, scale2, shift2, eps=block.norm2.eps, norm="layer", provider=provider
            )
        return gate_residual(x, block.ffn(y), gate2, provider=provider)

    @override
    def sources(self) -> tuple[Callable[..., Any], ...]:
        return native.WanAttentionBlock.forward, native.repeat_e

    @override
    def samples(
        self, module: nn.Module, tokens: int, device: torch.device, dtype: torch.dtype
    ) -> list[tuple[Any, ...]]:
        block: Any = module
        random, size, frames = Samples(device, dtype), block.dim, 3
        length = frames * -(-tokens // frames)
        freqs = Samples(device, torch.float32).rotations(1, length, 1, block.self_attn.head_dim // 2)
        context = random(2, 11, input_size(block.cross_attn.k))
        return [
            (random(2, length, size), random(2, *rows, 6, size, scale=0.5), freqs, context, 4, sample_options())
            for rows in ((), (frames,))
        ]


def _modulation(block: Any, x: Tensor, e: Tensor) -> tuple[Tensor, ...]:
    """Shifts, scales and gates ``[B, 1, D]``, or ``[B, F, D]`` where the frames have timesteps of their own."""
    table = native.comfy.model_management.cast_to(block.modulation, dtype=x.dtype, device=x.device)
    modulation: Tensor = table + e if e.ndim == 3 else table.unsqueeze(0) + e
    return modulation.chunk(6, dim=1) if e.ndim == 3 else modulation.unbind(2)


def _by_token(part: Tensor, x: Tensor) -> Tensor:
    """Something that broadcasts over the tokens of ``x``."""
    if part.shape[1] in (1, x.shape[1]):
        return part
    repeated: Tensor = native.repeat_e(part, x)
    return repeated


RECIPE = WanBlock()
