"""Fused forwards of known transformer blocks: what stands between their matrix products, in few passes."""

from diffkern.blocks import inner_table, recipe
from diffkern.blocks.inner import InnerRecipe
from diffkern.blocks.inner_table import inner_recipe_for
from diffkern.blocks.recipe import BlockRecipe, fingerprint, recipe_for

#: Names under which configurations and reports know all of them.
OPS = (*recipe.OPS, *inner_table.OPS)

__all__ = ["OPS", "BlockRecipe", "InnerRecipe", "fingerprint", "inner_recipe_for", "recipe_for"]
