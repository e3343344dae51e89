"""The upsampler of the autoencoder of LTX-Video."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_ltx import LTXVideoCausalConv3d, LTXVideoUpsampler3d
from torch import Tensor, nn
from typing_extensions import override

from diffkern.blocks.ltx_vae.parts import (
    AutoencoderRecipe,
    best_memory_format,
    convolve,
    is_plain_conv,
    padding_of,
    sample,
    unfit_call,
)
from diffkern.ops import add_norm_silu_pad
from diffkern.verify.samples import Draws


class LTXUpsampler(AutoencoderRecipe):
    """``LTXVideoUpsampler3d``: a convolution whose channels become the frames and pixels between the old ones."""

    op = "ltx_vae_up"
    fingerprints = frozenset({"5cad8a82b2238388"})
    covers = frozenset({"ltx_vae_conv"})

    @staticmethod
    @override
    def arguments(hidden_states: Tensor) -> tuple[Any, ...]:
        return (hidden_states,)

    @override
    def unfit(self, module: nn.Module, call: tuple[Any, ...]) -> str | None:
        reason = unfit_call(module, call[0])
        if reason is None and not is_plain_conv(module._modules["conv"], call[0]):
            return "its convolution is not a plain one with weights like the hidden states, or it has a hook"
        return reason

    @override
    def compute(self, module: nn.Module, call: tuple[Any, ...], provider: str | None, stock: tuple[str, ...]) -> Tensor:
        upsampler: Any = module
        x: Tensor = call[0]
        conv, stride = upsampler.conv, tuple(upsampler.stride)
        memory_format = best_memory_format(x)
        y = add_norm_silu_pad(
            x, norm=None, activation=None, pad=padding_of(conv), memory_format=memory_format, provider=provider
        )

        # With the channels of one frame or pixel together, what follows copies whole rows of channels.
        weight = torch.empty_like(conv.conv.weight, memory_format=memory_format)
        weight.unflatten(0, (*stride, -1)).copy_(conv.conv.weight.unflatten(0, (-1, *stride)).movedim(0, 3))
        bias = conv.conv.bias
        if bias is not None:
            bias = bias.unflatten(0, (-1, *stride)).movedim(0, 3).flatten()
        y, bias = convolve(conv, y, weight, bias)

        batch, _, frames, height, width = y.shape
        channels = y.shape[1] // (stride[0] * stride[1] * stride[2])
        size = frames * stride[0], height * stride[1], width * stride[2]
        out = torch.empty((batch, channels, *size), dtype=y.dtype, device=y.device, memory_format=memory_format)
        # [B, C, T, st, H, sh, W, sw]
        target = out.unflatten(4, (-1, stride[2])).unflatten(3, (-1, stride[1])).unflatten(2, (-1, stride[0]))
        source = y.unflatten(1, (*stride, channels)).permute(0, 4, 5, 1, 6, 2, 7, 3)
        if bias is None:
            target.copy_(source)
        else:
            bias = bias.view(stride[0], 1, stride[1], 1, stride[2], channels).movedim(-1, 0)[:, None]
            torch.add(source, bias, out=target)
        if upsampler.residual:
            folded = x.unflatten(1, (-1, *stride)).permute(0, 1, 5, 2, 6, 3, 7, 4)
            target.unflatten(1, (-1, folded.shape[1])).add_(folded[:, None])
        return out[:, :, stride[0] - 1 :]

    @override
    def sources(self) -> tuple[Callable[..., Any], ...]:
        return LTXVideoUpsampler3d.forward, LTXVideoCausalConv3d.forward

    @override
    def sample_calls(self, module: nn.Module, tokens: int, draw: Draws) -> list[tuple[Any, ...]]:
        upsampler: Any = module
        return [(sample(upsampler.conv.in_channels, tokens, draw),)]


RECIPE = LTXUpsampler()
