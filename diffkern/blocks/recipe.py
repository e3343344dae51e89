"""What a block recipe is, and which classes have one."""

from __future__ import annotations

import hashlib
import inspect
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self, override

from diffkern.matching import full_name
from diffkern.providers import KERNEL_DTYPES
from diffkern.verify.contract import FEW_TOKENS, TOKENS
from diffkern.verify.fusion import Fusion
from diffkern.verify.gain import reason_to_stay_stock
from diffkern.verify.samples import Draws, clone_tree, doubled, in_float64

#: Full name of a block's class -> its name as an op, and the module of this package and the name there of its recipe.
#: The module may import diffusers, which a user of such a block has imported already.
_RECIPES = {
    "diffusers.models.transformers.transformer_ltx.LTXVideoRotaryPosEmbed": ("ltx_rope", "ltx_rope:RECIPE"),
    "diffusers.models.embeddings.PixArtAlphaTextProjection": ("caption", "text:RECIPE"),
    **{
        f"diffusers.models.autoencoders.autoencoder_kl_{name}": (op, recipe)
        for name, op, recipe in (
            ("ltx.LTXVideoResnetBlock3d", "ltx_vae_resnet", "ltx_vae:RESNET"),
            ("ltx.LTXVideoUpsampler3d", "ltx_vae_up", "ltx_vae:UPSAMPLER"),
            ("ltx.LTXVideoCausalConv3d", "ltx_vae_conv", "ltx_vae:CONVOLUTION"),
            ("wan.WanCausalConv3d", "causal_conv", "wan_vae:WAN"),
            ("wan.WanUpsample", "upsample", "wan_vae:WAN_UP"),
            ("qwenimage.QwenImageCausalConv3d", "causal_conv", "wan_vae:QWEN"),
            ("qwenimage.QwenImageUpsample", "upsample", "wan_vae:QWEN_UP"),
            ("qwenimage21.QwenImage21Upsample", "upsample", "wan_vae:QWEN_21_UP"),
        )
    },
}

#: Names under which configurations and reports know the blocks.
OPS = tuple(dict.fromkeys(op for op, _ in _RECIPES.values()))


class BlockRecipe(Fusion):
    """How the block of one class is computed fused, and when it may be, in ``fast`` and ``fp8``.

    What is fused here has other bits, or is kept between calls: in ``exact`` the rules read the class. A call is the
    tuple of its arguments. The proof compares the fused forward with the stock one, and both with the stock forward of
    a copy in float64, so that nothing but the stock forward itself says what the block computes.

    A recipe reads the block at every call, so that one object serves all blocks of a class. What it remembers of a
    block stands in :mod:`diffkern.cache.memory`.
    A *piece* is a child, or what stands around it, that the fused forward computes itself as long as no
    hook watches and nothing replaces the child; else the child is called as the stock forward calls it.
    """

    served_by = "cache"
    #: Of the stock sources that the recipe was written against, see :func:`fingerprint`.
    fingerprints: ClassVar[frozenset[str]]
    versions: ClassVar[str]  # the versions of the library that these sources are from
    is_timed_on_cpu: ClassVar[bool] = False  # whether calls on a CPU run stock where they take no less time so
    is_block = True
    lays_out = True
    matched_sources: tuple[Callable[..., Any], ...] = ()  # what sources() returned when a block was matched

    def matched(self, replayed: bool | None) -> Self:
        """Returns the recipe for a block that has just been matched; ``replayed`` is that of :class:`Fusion`."""
        recipe = copy(self)
        recipe.matched_sources = self.sources()
        recipe.replayed = replayed if self.is_timed_on_cpu else None
        return recipe

    # --- what each recipe says --------------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def arguments(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Returns the arguments of a call in the order of the stock signature, which this one repeats.

        Raises:
            TypeError: the call has other arguments.
        """

    @abstractmethod
    def unfit(self, module: nn.Module, call: tuple[Any, ...]) -> str | None:
        """Says why a call must run the stock forward altogether, or None. Never looks at data."""

    @abstractmethod
    def sources(self) -> tuple[Callable[..., Any], ...]:
        """The stock functions whose work :meth:`compute` does, the forward of the block first."""

    @abstractmethod
    def sample_calls(self, module: nn.Module, tokens: int, draw: Draws) -> list[tuple[Any, ...]]:
        """Random arguments of every kind that the block is called with, of about ``tokens`` tokens each."""

    def make_plain(self, module: nn.Module) -> None:
        """Makes a private copy of a block computable anywhere: stock processors, torch's own attention."""

    # --- what follows from it ---------------------------------------------------------------------------

    @override
    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        try:
            return self.arguments(*args, **kwargs)
        except TypeError:
            return None

    @override
    def primary_input(self, call: tuple[Any, ...]) -> Tensor:
        x: Tensor = call[0]
        return x

    @override
    def declines(self, module: nn.Module, call: tuple[Any, ...] | None) -> str | None:
        if call is None:
            return "it is called with other arguments than the recipe knows"
        if self.sources() != self.matched_sources:
            return "what its class computes was replaced after the injection"
        return self.unfit(module, call)

    @override
    def weigh(self, module: nn.Module, call: tuple[Any, ...], patched: Callable[..., Any]) -> str | None:
        x = self.primary_input(call)
        if x.is_cuda:
            return ""  # where what is kept is checked once in each step, whatever is called how often
        key = "call of a block", self.op, str(x.dtype), x.shape[-1], x.numel().bit_length()
        both = lambda: patched(module, *call), lambda: self.stock(module, call)
        return reason_to_stay_stock(both, x.device, bool(self.replayed), *key)

    @override
    def kind(self, module: nn.Module) -> Hashable:
        children = tuple((full_name(type(child)), settings(child)) for child in module.modules())
        parameters = tuple((name, p.shape, p.dtype) for name, p in module.named_parameters())
        return self.op, children, parameters

    @override
    def likely_dtypes(self, module: nn.Module, whole: torch.dtype) -> tuple[torch.dtype, ...]:
        """Its own: a block casts nothing. Those of a quantised or layerwise cast one are the model's."""
        own = next((p.dtype for p in module.parameters() if p.dtype in KERNEL_DTYPES), whole)
        return (own,)

    @override
    def clone_for_verification(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
        dtype = dtype if dtype in KERNEL_DTYPES else torch.float32
        twin = clone_tree(
            module, device, lambda tensor: tensor.dtype if tensor.dtype in KERNEL_DTYPES else dtype, dtype
        )
        self.make_plain(twin)
        return twin

    @override
    def samples(
        self, module: nn.Module, device: torch.device, dtype: torch.dtype, exact: bool
    ) -> Sequence[tuple[Any, ...]]:
        return self.sample_calls(module, TOKENS, Draws(device, dtype))

    @override
    def short_samples(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> Sequence[tuple[Any, ...]]:
        return self.sample_calls(module, FEW_TOKENS, Draws(device, dtype))[:1]

    @override
    def stock(self, module: nn.Module, call: tuple[Any, ...]) -> Any:
        return type(module).forward(module, *call)

    @override
    def reference(self, module: nn.Module, call: tuple[Any, ...]) -> Any:
        return self.stock(self._in_float64(module, call), doubled(call))

    def _in_float64(self, module: nn.Module, call: tuple[Any, ...]) -> nn.Module:
        twin = in_float64(module, self.primary_input(call).device)
        self.make_plain(twin)
        return twin


def settings(module: nn.Module) -> tuple[tuple[str, Hashable], ...]:
    """The plain attributes of a module itself, which may decide what it computes: strides, say, or a mode."""
    return tuple((name, value) for name, value in vars(module).items() if _is_plain(value))


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


@cache
def recipe_for(class_name: str) -> BlockRecipe | None:
    """Returns the recipe of a class by its full name, or None if it has none."""
    if class_name not in _RECIPES:
        return None
    module, _, name = _RECIPES[class_name][1].partition(":")
    recipe: BlockRecipe = getattr(import_module(f"diffkern.blocks.{module}"), name)
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
