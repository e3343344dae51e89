"""The residual block of the autoencoder of LTX-Video."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_ltx import LTXVideoCausalConv3d, LTXVideoResnetBlock3d
from diffusers.models.normalization import RMSNorm
from torch import Tensor, nn
from typing_extensions import override

from diffkern.blocks.ltx_vae.parts import (
    AutoencoderRecipe,
    best_memory_format,
    convolve,
    is_weightless,
    padding_of,
    sample,
    stock_convolutions,
    unfit_call,
)
from diffkern.blocks.pieces import plain, untouched
from diffkern.ops import add_norm_silu_pad
from diffkern.verify.samples import Draws


class LTXResnetBlock(AutoencoderRecipe):
    """``LTXVideoResnetBlock3d``."""

    op = "ltx_vae_resnet"
    fingerprints = frozenset({"b5e082e37f834ffe"})
    covers = frozenset({"ltx_vae_conv"})

    @staticmethod
    @override
    def arguments(
        inputs: Tensor, temb: Tensor | None = None, generator: torch.Generator | None = None
    ) -> tuple[Any, ...]:
        return inputs, temb, generator

    @override
    def unfit(self, module: nn.Module, call: tuple[Any, ...]) -> str | None:
        block: Any = module
        x, temb, _ = call
        table = block.scale_shift_table
        reason = unfit_call(module, x, () if table is None else (temb,))
        if reason is not None:
            return reason
        if not (is_weightless(block.norm1) and is_weightless(block.norm2)):
            return "its norms are not the weightless RMS norms of diffusers, or one of them has a hook"
        if not untouched(block.nonlinearity, nn.SiLU):
            return "its activation is not torch's SiLU, or it has a hook"
        if not untouched(block.dropout, nn.Dropout) or (block.dropout.training and block.dropout.p > 0):
            return "its dropout is in force, or it has a hook"
        for name in ("scale_shift_table", "per_channel_scale1", "per_channel_scale2"):
            parameter = getattr(block, name)
            if parameter is not None and (not plain(parameter, x.device) or parameter.dtype != x.dtype):
                return f"its {name} is not a plain tensor like the hidden states"
        if table is None:
            return None
        if type(temb) is not Tensor or temb.shape != (x.shape[0], table.numel(), 1, 1, 1) or temb.dtype != x.dtype:
            return "its timestep embedding is not a plain tensor with one row for each sample"
        return None

    @override
    def stock_pieces(self, module: nn.Module, call: tuple[Any, ...]) -> tuple[str, ...]:
        return stock_convolutions(module, call[0], ("conv1", "conv2", "conv_shortcut"))

    @override
    def compute(self, module: nn.Module, call: tuple[Any, ...], provider: str | None, stock: tuple[str, ...]) -> Tensor:
        block: Any = module
        inputs, temb, generator = call
        memory_format = best_memory_format(inputs)
        shift_1 = scale_1 = shift_2 = scale_2 = None
        if block.scale_shift_table is not None:
            modulation = temb.reshape(inputs.shape[0], 4, -1) + block.scale_shift_table
            shift_1, scale_1, shift_2, scale_2 = modulation.unbind(1)

        def convolved(
            name: str, x: Tensor, bias: Tensor | None, noise: Tensor | None, scale: Tensor | None,
            shift: Tensor | None, eps: float,
        ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
            """Convolves the activated norm of the sum; also returns the bias that is still to be added."""
            conv = getattr(block, name)
            pad = (0, 0) if name in stock else padding_of(conv)
            x = add_norm_silu_pad(
                x, bias, noise, scale, shift, eps, pad=pad, memory_format=memory_format, provider=provider
            )
            return (conv(x), None) if name in stock else convolve(conv, x, conv.conv.weight, conv.conv.bias)

        h, bias = convolved("conv1", inputs, None, None, scale_1, shift_1, block.norm1.eps)
        noise = _noise(h, block.per_channel_scale1, generator, memory_format)
        h, bias = convolved("conv2", h, bias, noise, scale_2, shift_2, block.norm2.eps)
        noise = _noise(h, block.per_channel_scale2, generator, memory_format)

        residual = inputs
        if block.norm3 is not None:
            residual = block.norm3(residual.movedim(1, -1)).movedim(-1, 1)
        if block.conv_shortcut is not None:
            # Its kernel is of one frame: there is no padding to spare, and nothing but the bias to fuse.
            if "conv_shortcut" in stock:
                residual = block.conv_shortcut(residual)
            else:
                conv = block.conv_shortcut
                residual, shortcut_bias = convolve(conv, residual, conv.conv.weight, conv.conv.bias)
                bias = _sum(bias, shortcut_bias)
        if noise is not None:
            residual = residual + noise
        return add_norm_silu_pad(
            h, bias, residual, norm=None, activation=None, memory_format=memory_format, provider=provider
        )

    @override
    def sources(self) -> tuple[Callable[..., Any], ...]:
        return LTXVideoResnetBlock3d.forward, LTXVideoCausalConv3d.forward, RMSNorm.forward

    @override
    def sample_calls(self, module: nn.Module, tokens: int, draw: Draws) -> list[tuple[Any, ...]]:
        block: Any = module
        x = sample(block.conv1.in_channels, tokens, draw)
        temb = None
        if block.scale_shift_table is not None:
            size = block.scale_shift_table.numel()
            temb = draw(x.shape[0], size, 1, 1, 1, scale=0.5)
        # A generator of its own: the user's must not advance.
        return [(x, temb, torch.Generator(draw.device))]

    @override
    def make_plain(self, module: nn.Module) -> None:
        """Takes away the noise, which is another at every call."""
        for name in ("per_channel_scale1", "per_channel_scale2"):
            scale = module._parameters.get(name)
            if scale is not None:  # replaced, since the copy may share its data with the block
                module._parameters[name] = nn.Parameter(torch.zeros_like(scale), requires_grad=False)


def _noise(
    x: Tensor, per_channel_scale: Tensor | None, generator: torch.Generator | None, memory_format: torch.memory_format
) -> Tensor | None:
    """The noise that the stock forward adds to ``x``: the same numbers, in the same turn."""
    if per_channel_scale is None:
        return None
    spatial = torch.randn(x.shape[-2:], generator=generator, device=x.device, dtype=x.dtype)
    if memory_format is torch.channels_last_3d:
        noise = (spatial[..., None] * per_channel_scale.flatten()).movedim(-1, 0)
    else:
        noise = spatial * per_channel_scale
    return noise[None, :, None]


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum of two biases, in float32."""
    if a is None or b is None:
        return b if a is None else a
    return a.float() + b.float()


RECIPE = LTXResnetBlock()
