"""The causal convolutions and the upsampling of the autoencoders of Wan and Qwen-Image, without needless copies.

Stock pads in space and time with a copy of the activations, and convolves that without padding. Here the convolution
pads in space by itself. A single frame with nothing before it, as every image and the first frame of a video are, meets
zeros in all taps of the kernel but the last in time: its convolution is one of images, with a third of the products.

Stock repeats pixels in float32, between two casts of which neither changes any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from diffkern.blocks.pieces import has_plain_parameters, unfit, unfit_for_inference
from diffkern.blocks.recipe import BlockRecipe
from diffkern.verify.samples import Draws


class LayerRecipe(BlockRecipe):
    """A single layer of torch, with a forward around it that copies more than it must.

    Args:
        class_name: Its full name.
    """

    served_by = "torch"
    lays_out = False
    versions = "diffusers 0.42"

    def __init__(self, class_name: str) -> None:
        self._module, _, self._class = class_name.rpartition(".")

    @override
    def unfit(self, module: nn.Module, call: tuple[Any, ...]) -> str | None:
        x: Tensor = call[0]
        reason = unfit(x)
        if reason is None and not x.numel():
            reason = "there is nothing in the hidden states"
        return reason or unfit_for_inference(module, call)

    @override
    def sources(self) -> tuple[Callable[..., Any], ...]:
        return (getattr(import_module(self._module), self._class).forward,)


class CausalConvolution(LayerRecipe):
    """A subclass of ``nn.Conv3d`` that pads by hand, with what a cache holds of the frames before."""

    op = "causal_conv"
    fingerprints = frozenset({"77e25d25fe8bee1b"})

    @staticmethod
    @override
    def arguments(x: Tensor, cache_x: Tensor | None = None) -> tuple[Any, ...]:
        return x, cache_x

    @override
    def unfit(self, module: nn.Module, call: tuple[Any, ...]) -> str | None:
        conv: Any = module
        x, cache = call
        reason = super().unfit(module, call)
        if reason is not None:
            return reason
        if x.ndim != 5:
            return "the hidden states have not the shape [B, C, T, H, W]"
        if cache is not None and (type(cache) is not Tensor or (cache.device, cache.dtype) != (x.device, x.dtype)):
            return "the frames in its cache are not plain tensors like the hidden states"
        if not has_plain_parameters(conv, x.device, x.dtype) or "_conv_forward" in conv.__dict__:
            return "its weights are not plain tensors like the hidden states, or its convolution was replaced"
        if conv.padding_mode != "zeros" or any(conv.padding):
            return "its convolution pads by itself, too"
        return None

    @override
    def compute(self, module: nn.Module, call: tuple[Any, ...], provider: str | None, stock: tuple[str, ...]) -> Tensor:
        conv: Any = module
        x, cache = call
        width, _, height, _, front, _ = conv._padding
        if cache is not None and front > 0:
            x, front = torch.cat([cache, x], dim=2), front - cache.shape[2]
        weight, bias, groups = conv.weight, conv.bias, conv.groups
        if x.shape[2] == 1 and front == conv.dilation[0] * (conv.kernel_size[0] - 1) > 0:
            frame, image = x[:, :, 0], weight[:, :, -1]
            if x.stride(2) < x.shape[3] * x.stride(3) and weight.is_contiguous():
                frame = frame.contiguous()  # in channels last as an image, but not as the video that stock convolves
            return F.conv2d(frame, image, bias, conv.stride[1:], (height, width), conv.dilation[1:], groups).unsqueeze(
                2
            )
        if front:  # frames of zeros, or, where the cache holds more than are needed, fewer frames
            x = F.pad(x, (0, 0, 0, 0, front, 0))
        return F.conv3d(x, weight, bias, conv.stride, (0, height, width), conv.dilation, groups)

    @override
    def sample_calls(self, module: nn.Module, tokens: int, draw: Draws) -> list[tuple[Any, ...]]:
        conv: Any = module

        def video(frames: int) -> Tensor:
            return draw(2, conv.in_channels, frames, 5, max(conv.kernel_size[2] + 1, tokens // 30))

        front = conv._padding[4]
        fewest = max(conv.kernel_size[0] - front, 1)
        cached = [(video(2), video(2)), (video(2), video(1))] if front else []
        return [(video(fewest + 2), None), (video(fewest), None), *cached]


class Upsampling(LayerRecipe):
    """A subclass of ``nn.Upsample`` that casts an image to float32, and back: torch computes in that by itself."""

    op = "upsample"
    fingerprints = frozenset({"6736ccc67cb58c50"})

    @staticmethod
    @override
    def arguments(x: Tensor) -> tuple[Any, ...]:
        return (x,)

    @override
    def compute(self, module: nn.Module, call: tuple[Any, ...], provider: str | None, stock: tuple[str, ...]) -> Tensor:
        return nn.Upsample.forward(module, call[0])  # type: ignore[arg-type]

    @override
    def sample_calls(self, module: nn.Module, tokens: int, draw: Draws) -> list[tuple[Any, ...]]:
        return [(draw(2, 8, 5, max(tokens // 10, 4)),)]


_PACKAGE = "diffusers.models.autoencoders"
WAN = CausalConvolution(f"{_PACKAGE}.autoencoder_kl_wan.WanCausalConv3d")
QWEN = CausalConvolution(f"{_PACKAGE}.autoencoder_kl_qwenimage.QwenImageCausalConv3d")
WAN_UP = Upsampling(f"{_PACKAGE}.autoencoder_kl_wan.WanUpsample")
QWEN_UP = Upsampling(f"{_PACKAGE}.autoencoder_kl_qwenimage.QwenImageUpsample")
QWEN_21_UP = Upsampling(f"{_PACKAGE}.autoencoder_kl_qwenimage21.QwenImage21Upsample")
