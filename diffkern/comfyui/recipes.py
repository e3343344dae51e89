"""Which modules of ComfyUI have a recipe, and whether it fits the ComfyUI that is here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from torch import nn

from diffkern.blocks import fingerprint
from diffkern.comfyui.recipe import ComfyRecipe, unknown_options
from diffkern.matching import full_name

#: Full name of a class -> the module with its recipe, and its name there. That may import ComfyUI.
_RECIPES = {
    "comfy.ldm.lightricks.model.CrossAttention": (f"{__package__}.ltx_attention", "RECIPE"),
    "comfy.ldm.lightricks.model.BasicTransformerBlock": (f"{__package__}.ltx_block", "RECIPE"),
    "comfy.ldm.lightricks.av_model.BasicAVTransformerBlock": (f"{__package__}.ltx_av_block", "RECIPE"),
    "comfy.ldm.flux.layers.DoubleStreamBlock": (f"{__package__}.flux", "DOUBLE"),
    "comfy.ldm.flux.layers.SingleStreamBlock": (f"{__package__}.flux", "SINGLE"),
}


@dataclass(frozen=True)
class Found:
    """The recipe of a class, and how sure it is that it fits.

    Attributes:
        recipe: The recipe, or None if the class may not be computed by it.
        how: ``"recipe"`` if the stock sources are those that it was written against, ``"probe"`` if only a proof
            can say whether they still mean the same, None without a recipe.
        reason: Why there is no recipe.
    """

    recipe: ComfyRecipe | None
    how: str | None
    reason: str = ""


def find_recipe(module: nn.Module) -> Found | None:
    """Looks up the exact class of a module; None if it has no recipe at all."""
    return _find(full_name(type(module)))


def known_recipes() -> dict[str, Found]:
    """Returns what there is for every class with a recipe, by its full name."""
    return {name: found for name in _RECIPES if (found := _find(name)) is not None}


def _find(class_name: str) -> Found | None:
    if class_name not in _RECIPES:
        return None
    module, name = _RECIPES[class_name]
    try:
        recipe: ComfyRecipe = getattr(import_module(module), name)
        sources = recipe.sources()
    except (ImportError, AttributeError) as error:
        return Found(None, None, f"this ComfyUI lacks what its recipe was written against: {error}")
    return _judge(recipe, sources)


@cache
def _judge(recipe: ComfyRecipe, sources: tuple[Callable[..., Any], ...]) -> Found:
    """Compares the sources with the recipe: again, if another node has put functions of its own in their place."""
    if fingerprint(sources) in recipe.fingerprints:
        return Found(recipe, "recipe")
    strange = unknown_options(recipe)
    if strange:
        names = ", ".join(map(repr, strange))
        return Found(None, None, f"its forward is not that of {recipe.versions}, and knows {names}: update diffkern")
    return Found(recipe, "probe")
