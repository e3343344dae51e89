"""Fused forwards of known transformer blocks: what stands between their matrix products, in few passes."""

from diffkern.blocks.recipe import OPS, BlockRecipe, fingerprint, recipe_for

__all__ = ["OPS", "BlockRecipe", "fingerprint", "recipe_for"]
