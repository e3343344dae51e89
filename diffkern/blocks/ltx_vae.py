"""The autoencoder of LTX-Video: its residual blocks, its upsamplers, and the convolutions around them.

Stock, a residual block walks over its hidden states some 40 times besides the two convolutions (in units of one read
or write of them): the norm over channels with float32 copies, SiLU, the frames that pad each convolution, by a copy of
everything, the biases, and the sum. Fused it is 7 times: what a convolution reads is written in one pass, with the
bias of the convolution before and the padding frames.

On CUDA in half precision the hidden states are in channels-last order from the first convolution on, which is what
tensor cores read; in the other order cuDNN brings them into it and back at each convolution. Weights stay as they are:
each is brought into that order when it is used, which is one read of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl_ltx import (
    LTXVideoCausalConv3d,
    LTXVideoResnetBlock3d,
    LTXVideoUpsampler3d,
)
from diffusers.models.normalization import RMSNorm
from torch import Tensor, nn
from typing_extensions import override

from diffkern.blocks.pieces import has_plain_parameters, plain, unfit, unfit_for_inference, untouched
from diffkern.blocks.recipe import BlockRecipe
from diffkern.ops import add_norm_silu_pad
from diffkern.verify.samples import Draws


class AutoencoderRecipe(BlockRecipe):
    """What the recipes of the autoencoder have in common.

    A convolution in another memory order adds up in another order.
    """

    kernel_ops = ("add_norm_silu_pad",)
    versions = "diffusers 0.42"


# --- guards --------------------------------------------------------------------------------------------


def unfit_call(module: nn.Module, x: Any, others: tuple[Any, ...] = ()) -> str | None:
    """Why a call cannot run fused whatever the children of ``module`` are, or None."""
    reason = unfit(x)
    if reason is None and (x.ndim != 5 or not x.numel()):
        reason = "the hidden states have not the shape [B, C, T, H, W], or nothing in them"
    return reason or unfit_for_inference(module, (x, *others))


def is_weightless(norm: Any) -> bool:
    """Whether a norm is the RMS norm without weight that the autoencoder has, and no hook watches it."""
    return untouched(norm, RMSNorm) and norm.weight is None and norm.bias is None and type(norm.eps) is float


def is_plain_conv(causal: Any, x: Tensor, *, inside: bool = False) -> bool:
    """Whether a causal convolution can be computed around, or from the inside, from its weights."""
    if not inside and not untouched(causal, LTXVideoCausalConv3d):
        return False
    conv = causal._modules["conv"]
    if not untouched(conv, nn.Conv3d) or conv.padding_mode != "zeros" or conv.padding[0] != 0:
        return False
    if "_conv_forward" in conv.__dict__:  # by which images are made that can be tiled
        return False
    return has_plain_parameters(conv, x.device, x.dtype)


# --- parts ---------------------------------------------------------------------------------------------


def best_memory_format(x: Tensor) -> torch.memory_format:
    """The order in which the convolutions of this device are fastest."""
    fast = x.is_cuda and torch.version.hip is None and x.dtype in (torch.float16, torch.bfloat16)
    return torch.channels_last_3d if fast else torch.contiguous_format


def padding_of(causal: Any) -> tuple[int, int]:
    """How many frames a convolution repeats in front and behind."""
    size = causal.kernel_size[0]
    return (size - 1, 0) if causal.is_causal else ((size - 1) // 2, (size - 1) // 2)


def convolve(causal: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The convolution of what has its padding frames already, and the bias if it is still to be added.

    On a GPU torch adds it in a pass of its own, which whatever follows can do in passing. On the CPU it is in the
    convolution, before that rounds.
    """
    conv = causal.conv
    geometry = conv.stride, conv.padding, conv.dilation, conv.groups
    if x.is_cuda:
        return F.conv3d(x, weight, None, *geometry), bias
    return F.conv3d(x, weight, bias, *geometry), None


def sample(channels: int, tokens: int, draw: Draws) -> Tensor:
    """Random hidden states of about ``tokens`` positions."""
    return draw(2, channels, 3, 5, max(4, tokens // 30))


# --- recipes -------------------------------------------------------------------------------------------


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
        children = ((name, getattr(module, name)) for name in ("conv1", "conv2", "conv_shortcut"))
        return tuple(name for name, child in children if child is not None and not is_plain_conv(child, call[0]))

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


class LTXCausalConv(AutoencoderRecipe):
    """``LTXVideoCausalConv3d``, where it stands alone: the first and last ones, and those that downsample."""

    op = "ltx_vae_conv"
    fingerprints = frozenset({"82e4432f7bc6f958"})

    @staticmethod
    @override
    def arguments(hidden_states: Tensor) -> tuple[Any, ...]:
        return (hidden_states,)

    @override
    def unfit(self, module: nn.Module, call: tuple[Any, ...]) -> str | None:
        reason = unfit_call(module, call[0])
        if reason is None and not is_plain_conv(module, call[0], inside=True):
            return "its convolution is not a plain one with weights like the hidden states, or it has a hook"
        return reason

    @override
    def compute(self, module: nn.Module, call: tuple[Any, ...], provider: str | None, stock: tuple[str, ...]) -> Tensor:
        conv: Any = module
        x: Tensor = call[0]
        y = add_norm_silu_pad(
            x, norm=None, activation=None, pad=padding_of(conv), memory_format=best_memory_format(x), provider=provider
        )
        y, bias = convolve(conv, y, conv.conv.weight, conv.conv.bias)
        return y if bias is None else y.add_(bias.view(-1, 1, 1, 1))

    @override
    def sources(self) -> tuple[Callable[..., Any], ...]:
        return (LTXVideoCausalConv3d.forward,)

    @override
    def sample_calls(self, module: nn.Module, tokens: int, draw: Draws) -> list[tuple[Any, ...]]:
        conv: Any = module
        return [(sample(conv.in_channels, tokens, draw),)]


RESNET, UPSAMPLER, CONVOLUTION = LTXResnetBlock(), LTXUpsampler(), LTXCausalConv()
