"""What the recipes for ComfyUI's own modules share, beyond what every block recipe has."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from diffkern.blocks import BlockRecipe

#: Norms with modulation, and gated residuals.
MODULATION = "modulation"
#: Norms of queries and keys, and the rotary embedding.
QK_NORM_ROPE = "qk_norm_rope"

#: What can be switched on and off.
FAMILIES = (MODULATION, QK_NORM_ROPE)


@dataclass(frozen=True)
class ComfyRecipe(BlockRecipe):
    """How a module of ComfyUI is computed fused.

    Its forward reads options that other nodes set; a call with an option that the fused forward does not serve runs
    stock. Linear layers, attention and feed-forwards are called as modules and functions of ComfyUI, so that
    adapters, quantised weights, low-VRAM streaming and attention overrides stay in force.

    Attributes:
        chosen: The families to compute fused; what belongs to others runs as in the stock forward.
        exact: Whether only such steps are fused that round where the stock forward rounds.
        families: The families that this recipe has steps of.
        exact_families: Those with steps that can be fused without changing a bit.
        words: The strings in the stock sources that could be names of options.
    """

    chosen: frozenset[str] = frozenset(FAMILIES)
    exact: bool = False

    families: ClassVar[frozenset[str]]
    exact_families: ClassVar[frozenset[str]] = frozenset(FAMILIES)
    words: ClassVar[frozenset[str]]

    def for_numerics(self, numerics: str) -> ComfyRecipe:
        """Returns the recipe for ``"fast"`` or ``"exact"``."""
        return replace(self, exact=numerics == "exact")

    def of(self, families: frozenset[str]) -> Iterator[ComfyRecipe]:
        """Yields the recipe for those of ``families`` that it has, and then for each of them alone."""
        chosen = self.families & families & (self.exact_families if self.exact else self.families)
        if chosen:
            yield replace(self, chosen=chosen)
        if len(chosen) > 1:
            yield from (replace(self, chosen=frozenset({family})) for family in sorted(chosen))

    def primary_input(self, call: tuple[Any, ...]) -> Tensor:
        """Returns the input whose device and dtype decide whether a call is proven."""
        x: Tensor = call[0]
        return x

    @override
    def make_plain(self, module: nn.Module) -> None:
        """Nothing: the samples come with plain attention."""


def unknown_options(recipe: ComfyRecipe) -> list[str]:
    """Returns the words in the stock sources, as they are here, that the recipe was not written against.

    A proof on random input sees what the stock forward computes, but not what it would compute if a user set an
    option that this version of ComfyUI has and the recipe does not know.
    """
    found = {word for function in recipe.sources() for word in _strings(function)}
    return sorted(found - recipe.words)


def _strings(function: Callable[..., Any]) -> Iterator[str]:
    code = getattr(function, "__code__", None)
    pending = [code] if isinstance(code, CodeType) else []
    while pending:
        for constant in pending.pop().co_consts:
            if isinstance(constant, CodeType):
                pending.append(constant)
            # Tuples hold the names of keyword arguments, among others.
            items = constant if isinstance(constant, (tuple, frozenset)) else (constant,)
            yield from (item for item in items if isinstance(item, str) and item.isidentifier())


@contextmanager
def plain_arithmetic() -> Iterator[None]:
    """Makes ComfyUI compute in plain torch ops, which take float64 as well, as it does while it trains."""
    management = _management()
    if management is None:
        yield
        return
    before = management.in_training
    management.in_training = True
    try:
        yield
    finally:
        management.in_training = before


def in_training() -> bool:
    """Whether ComfyUI is training, which needs gradients of what it computes."""
    management = _management()
    return management is not None and management.in_training


def _management() -> Any:
    """ComfyUI's module with that switch; None where no ComfyUI is running."""
    return sys.modules.get("comfy.model_management")


def plain_attention(_: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    """Stands in for whatever attention ComfyUI uses, in proofs: torch's own, in any dtype."""
    from comfy.ldm.modules.attention import attention_pytorch

    y: Tensor = attention_pytorch(*args, **kwargs)
    return y


def sample_options() -> dict[str, Any]:
    """Returns the options of sample calls."""
    return {"optimized_attention_override": plain_attention}


class Samples:
    """Random tensors for sample calls, of a device and dtype, the same at every start."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._generator = torch.Generator("cpu").manual_seed(20)
        self._device, self._dtype = device, dtype

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Draws from a normal distribution of deviation ``scale``."""
        values = torch.randn(shape, generator=self._generator, device="cpu") * scale
        return values.to(device=self._device, dtype=self._dtype)

    def rotations(self, *shape: int) -> Tensor:
        """Draws rotation matrices ``[..., 2, 2]``."""
        angles = torch.randn(shape, generator=self._generator, device="cpu") * 3
        cos, sin = angles.cos(), angles.sin()
        matrices: Tensor = torch.stack((cos, -sin, sin, cos), dim=-1).unflatten(-1, (2, 2))
        return matrices.to(device=self._device, dtype=self._dtype)
