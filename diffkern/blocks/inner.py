"""Forwards that stay as they are but for one computation between their layers, which is fused."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from diffkern.blocks.pieces import unfit_surroundings
from diffkern.providers import KERNEL_DTYPES

#: Computes the inside of a forward from its inputs; the module is None where they say everything.
Inside = Callable[[nn.Module | None, tuple[Tensor, ...]], Any]


class InnerRecipe(ABC):
    """A computation inside the forward of a class: what it is, and the forward with something else in its place.

    Everything around it, the linear layers above all, is called as the stock forward calls it: adapters, quantised
    weights and hooks are no matter. One object serves all modules of a class, and keeps nothing of them.

    Attributes:
        op: The op of :mod:`diffkern.ops` that computes it, which is its name in reports too.
    """

    op: str

    def for_numerics(self, numerics: str) -> InnerRecipe:
        """Returns the recipe of a tier, see :meth:`diffkern.blocks.recipe.BlockRecipe.for_numerics`."""
        return self

    def concerns(self, module: nn.Module) -> bool:
        """Whether there is something to fuse in this module of the class; others pass without a word."""
        return True

    def lacks(self, module: nn.Module) -> str | None:
        """Says what a module has that no kernel computes, or None."""
        return None

    def sources(self, module: nn.Module) -> tuple[Callable[..., Any], ...]:
        """The forwards of children whose work the inside does."""
        return ()

    @abstractmethod
    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """Returns the call, the hidden states first; None for arguments that the stock forward does not know."""

    @abstractmethod
    def declines(self, module: nn.Module, call: tuple[Any, ...]) -> str | None:
        """Says why a call must run the stock forward, or None. Never looks at data."""

    @abstractmethod
    def forward(self, inside: Inside) -> Callable[..., Any]:
        """Returns the forward with ``inside`` in it; it takes the module and the arguments of the call."""

    @property
    def children(self) -> tuple[str, ...]:
        """Names of the children that the inside does the work of; those that are sites themselves."""
        return ()

    def part(self, module: nn.Module) -> nn.Module:
        """The module that the inside is given, which may be one of the module's children; of itself, it is itself."""
        return module

    @abstractmethod
    def stock(self, module: nn.Module | None, inputs: tuple[Tensor, ...]) -> Any:
        """Computes the inside as the stock forward does: a tensor, or a tuple of tensors."""

    def reference(self, module: nn.Module | None, inputs: tuple[Tensor, ...]) -> Any:
        """Computes the inside in float64, of which the inputs are."""
        return self.stock(module, inputs)

    @abstractmethod
    def fused(self, module: nn.Module | None, inputs: tuple[Tensor, ...], provider: str | None) -> Any:
        """Computes the inside with :mod:`diffkern.ops`. Differentiable."""

    @abstractmethod
    def samples(self, module: nn.Module, rows: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Random inputs of the inside, the first of ``dtype``, with about ``rows`` rows."""

    @abstractmethod
    def kind(self, module: nn.Module) -> Hashable:
        """What modules must have in common to compute the same inside."""

    def differentiable(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Those of the inputs that gradients may be wanted of."""
        return inputs


def unfit(x: Any) -> str | None:
    """Why hidden states are not for kernels, or None."""
    if type(x) is not Tensor:
        return f"the hidden states are a {type(x).__name__}, not a plain tensor"
    if x.dtype not in KERNEL_DTYPES:
        return f"the hidden states are {str(x.dtype).removeprefix('torch.')}; float32, float16 and bfloat16 are served"
    if x.layout is not torch.strided or x.is_nested or x.is_meta:
        return "the hidden states are not an ordinary dense tensor"
    # The first question is quick, and almost always enough: the name of a device takes long to form.
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type):
        return f"autocast is on for {x.device.type}, and the stock forward follows its rules"
    return unfit_surroundings()
