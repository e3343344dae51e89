"""The causal convolution of the autoencoder of LTX-Video, where it stands alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diffusers.models.autoencoders.autoencoder_kl_ltx import LTXVideoCausalConv3d
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


RECIPE = LTXCausalConv()
