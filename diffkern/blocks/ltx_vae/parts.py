"""What the recipes of the autoencoder share: guards, the causal convolution, and the order of the memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl_ltx import LTXVideoCausalConv3d
from diffusers.models.normalization import RMSNorm
from torch import Tensor, nn

from diffkern.blocks.pieces import plain, unfit, untouched
from diffkern.blocks.recipe import BlockRecipe
from diffkern.providers.dispatch_modes import transforms_active
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
    if reason is not None:
        return reason
    if x.ndim != 5 or not x.numel():
        return "the hidden states have not the shape [B, C, T, H, W], or nothing in them"
    if not torch.compiler.is_compiling() and transforms_active():
        return "a transform of torch.func looks into it"
    if torch.is_grad_enabled() and any(
        isinstance(tensor, Tensor) and tensor.requires_grad for tensor in (x, *others, *module.parameters())
    ):
        return "gradients are wanted: run it under torch.no_grad() to have it fused"
    return None


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
    weight, bias = conv._parameters["weight"], conv._parameters["bias"]
    return (
        plain(weight, x.device)
        and weight.dtype == x.dtype
        and (bias is None or (plain(bias, x.device) and bias.dtype == x.dtype))
    )


def stock_convolutions(module: nn.Module, x: Tensor, names: tuple[str, ...]) -> tuple[str, ...]:
    """Names the convolutions among the children ``names`` that must be called; a child may be None."""
    children = ((name, getattr(module, name)) for name in names)
    return tuple(name for name, child in children if child is not None and not is_plain_conv(child, x))


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
