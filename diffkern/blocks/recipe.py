"""What a block recipe is, and which classes have one."""

from __future__ import annotations

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

#: Full name of a block's class -> its name as an op, and the module with its recipe, ``RECIPE`` unless it is named.
#: That may import diffusers, which a user of such a block has imported already.
_RECIPES = {
    "diffusers.models.transformers.transformer_ltx.LTXVideoTransformerBlock": ("ltx_block", "diffkern.blocks.ltx"),
    "diffusers.models.transformers.transformer_ltx.LTXVideoRotaryPosEmbed": (
        "ltx_rope",
        "diffkern.blocks.ltx_rope",
    ),
    "diffusers.models.embeddings.PixArtAlphaTextProjection": ("caption", "diffkern.blocks.text"),
    "diffusers.models.autoencoders.autoencoder_kl_ltx.LTXVideoResnetBlock3d": (
        "ltx_vae_resnet",
        "diffkern.blocks.ltx_vae.resnet",
    ),
    "diffusers.models.autoencoders.autoencoder_kl_ltx.LTXVideoUpsampler3d": (
        "ltx_vae_up",
        "diffkern.blocks.ltx_vae.upsampler",
    ),
    "diffusers.models.autoencoders.autoencoder_kl_ltx.LTXVideoCausalConv3d": (
        "ltx_vae_conv",
        "diffkern.blocks.ltx_vae.conv",
    ),
    **{
        f"diffusers.models.autoencoders.autoencoder_kl_{name}": (op, f"diffkern.blocks.wan_vae:{recipe}")
        for name, op, recipe in (
            ("wan.WanCausalConv3d", "causal_conv", "WAN"),
            ("wan.WanUpsample", "upsample", "WAN_UP"),
            ("qwenimage.QwenImageCausalConv3d", "causal_conv", "QWEN"),
            ("qwenimage.QwenImageUpsample", "upsample", "QWEN_UP"),
            ("qwenimage21.QwenImage21Upsample", "upsample", "QWEN_21_UP"),
        )
    },
}

#: Names under which configurations and reports know the blocks.
OPS = tuple(dict.fromkeys(op for op, _ in _RECIPES.values()))


class BlockRecipe(ABC):
    """How the block of one class is computed fused, and when it may be, in ``fast`` and ``fp8``.

    What is fused here has other bits, or is kept between calls: in ``exact`` the rules read the class.

    A recipe reads the block at every call, so that one object serves all blocks of a class. What it remembers of a
    block stands in :mod:`diffkern.cache.memory`.
    A *piece* is a child, or what stands around it, that the fused forward computes itself as long as no
    hook watches and nothing replaces the child; else the child is called as the stock forward calls it.

    Attributes:
        op: Name of the whole in reports and configurations.
        ops: The ops of :mod:`diffkern.ops` between which providers can be chosen; none where none of them is called.
        served_by: What reports name as the provider where there are no such ops.
        fingerprints: Of the stock sources that the recipe was written against, see :func:`fingerprint`.
        versions: The versions of the library that these sources are from.
        covers: Other recipes, by their ops, whose modules are no sites of their own inside such a block.
        is_one_op: Whether the block is one op in the graph of ``torch.compile`` where that compiles it by itself. Its
            result must be like its first operand.
        lays_out: Whether it decides by itself how its weights and activations lie in memory.
        is_timed: Whether calls on a CPU run stock where they take no less time so.
        allowance: Error against float64 that is granted beyond what the contract grants, for products in fp8.
    """

    op: str
    ops: tuple[str, ...]
    served_by: str = "cache"
    fingerprints: frozenset[str]
    versions: str
    covers: frozenset[str] = frozenset()
    is_one_op: bool = False
    lays_out: bool = True
    is_timed: bool = False
    allowance: float = 0.0

    def in_fp8(self) -> BlockRecipe:
        """Returns the recipe with products in fp8: this one, unless it has any."""
        return self

    @staticmethod
    @abstractmethod
    def arguments(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Returns the arguments of a call in the order of the stock signature, which this one repeats.

        Raises:
            TypeError: the call has other arguments.
        """

    @abstractmethod
    def declines(self, module: nn.Module, call: tuple[Any, ...]) -> str | None:
        """Says why a call must run the stock forward altogether, or None. Never looks at data."""

    def allowed_in_strict(self, module: nn.Module, call: tuple[Any, ...]) -> bool:
        """Whether a call is declined since it would gain nothing, so that a strict injection lets it be."""
        return False

    def stock_pieces(self, module: nn.Module, call: tuple[Any, ...]) -> tuple[str, ...]:
        """Names the pieces that must go through their child; those a call that is not declined can have."""
        return ()

    @abstractmethod
    def compute(self, module: nn.Module, call: tuple[Any, ...], provider: str | None, stock: tuple[str, ...]) -> Any:
        """Computes the block's forward. ``stock`` comes from :meth:`stock_pieces`. Differentiable."""

    def operands(self, call: tuple[Any, ...]) -> list[Tensor | None]:
        """Returns all tensors of a call; only of a recipe with :attr:`is_one_op`."""
        return []

    def call_of(self, operands: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """Returns the call with these tensors: the way back from :meth:`operands`."""
        return ()

    @abstractmethod
    def sources(self) -> tuple[Callable[..., Any], ...]:
        """The stock functions whose work :meth:`compute` does, the forward of the block first."""

    @abstractmethod
    def samples(
        self, module: nn.Module, tokens: int, device: torch.device, dtype: torch.dtype
    ) -> list[tuple[Any, ...]]:
        """Random arguments of every kind that the block is called with, of about ``tokens`` tokens each."""

    def make_plain(self, module: nn.Module) -> None:
        """Makes a private copy of a block computable anywhere: stock processors, torch's own attention."""
        return


@cache
def recipe_for(class_name: str) -> BlockRecipe | None:
    """Returns the recipe of a class by its full name, or None if it has none."""
    if class_name not in _RECIPES:
        return None
    module, _, name = _RECIPES[class_name][1].partition(":")
    recipe: BlockRecipe = getattr(import_module(module), name or "RECIPE")
    return recipe


@cache
def fingerprint(functions: tuple[Callable[..., Any], ...]) -> str | None:
    """Returns a hash of the sources of ``functions``, indentation and blank lines aside; None without a source."""
    try:
        sources = [inspect.getsource(function) for function in functions]
    except (OSError, TypeError):
        return None
    lines = [line.strip() for source in sources for line in source.splitlines()]
    return hashlib.sha256("\n".join(filter(None, lines)).encode()).hexdigest()[:16]
