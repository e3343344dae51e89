"""Which classes have something fused inside of their forwards."""

from __future__ import annotations

from torch import nn

from diffkern.blocks import language
from diffkern.blocks.inner import InnerRecipe

#: Names under which configurations and reports know what is fused inside of forwards.
OPS = language.OPS


def inner_recipe_for(cls: type[nn.Module]) -> InnerRecipe | None:
    """Returns what is fused inside the forward of a class of transformers, or None."""
    forward = getattr(cls, "forward", None)  # scripted modules have none
    if forward is None:
        return None
    return language.inside_of(cls.__module__, forward)
