"""Which modules of a pipeline are looked at: its components by name, or the model itself."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

#: Denoisers, VAEs, text and image encoders, ControlNets and their like, with any numbered suffix.
_DEFAULT = re.compile(
    r"(transformer|unet|prior|prior_prior|decoder|decoder_pipe|denoiser|dit|vae|audio_vae|vqvae|vqgan|movq|vocoder"
    r"|text_encoder|image_encoder|prior_text_encoder|prior_image_encoder|controlnet|adapter|connectors?|motion_adapter"
    r"|latent_upsampler|language_model|vision_encoder|text_model|video_processor_model)(_\d+)?"
)

#: The components that are called once per step.
_DENOISER = re.compile(r"(transformer|unet|prior|prior_prior|decoder|denoiser|dit|controlnet)(_\d+)?")


def is_denoiser(name: str) -> bool:
    """Whether a component of that name is called once per denoising step; a model on its own, too."""
    return not name or _DENOISER.fullmatch(name) is not None


def select_components(target: Any, names: Iterable[str] | None) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Splits a pipeline or model into the modules to work on, by component name, and those left out, with the reasons.

    A single module has the empty name. Of a pipeline, None as names takes the default ones.

    Raises:
        TypeError: ``target`` is neither a pipeline nor a module, or ``names`` are no names.
        ValueError: a name is no component that holds a module, or there is no name.
    """
    wanted = None if names is None else _as_names(names)
    if isinstance(target, nn.Module):
        if wanted is not None:
            raise ValueError(
                f"components={wanted} makes sense for a pipeline, but this is a single {type(target).__name__}: "
                "leave components out, or choose modules with config"
            )
        return {"": target}, {}
    modules = all_components(target)
    if wanted is not None:
        if not wanted:
            raise ValueError(
                f"components=[] names nothing to work on: name some of {', '.join(sorted(modules)) or 'its models'}, "
                "or pass None for the default ones"
            )
        for name in wanted:
            if name not in modules:
                close = difflib.get_close_matches(name, modules, n=1)
                hint = f": did you mean {close[0]!r}?" if close else ""
                raise ValueError(f"the pipeline has no model {name!r} (it has {', '.join(sorted(modules))}){hint}")
    else:
        wanted = [name for name in modules if _DEFAULT.fullmatch(name)]
    left_out = {
        name: "not asked for" if names is not None else f"not touched by default: pass components=[{name!r}, ...]"
        for name in modules
        if name not in wanted
    }
    return {name: modules[name] for name in wanted}, left_out


def all_components(target: Any) -> dict[str, nn.Module]:
    """Every module of a pipeline by component name; a single module has the empty name.

    Raises:
        TypeError: ``target`` is neither a pipeline nor a module.
    """
    if isinstance(target, nn.Module):
        return {"": target}
    components = getattr(target, "components", None)
    if not isinstance(components, Mapping):
        raise TypeError(
            f"expected a diffusers pipeline or a torch.nn.Module, got {type(target).__name__}: "
            "pass the pipeline itself, or one of its models such as pipe.transformer"
        )
    return {name: part for name, part in components.items() if isinstance(part, nn.Module)}


def likely_device(models: Iterable[nn.Module]) -> torch.device:
    """Where models will probably run: weights on the CPU or on meta may be offloaded, or not moved yet."""
    weights = (tensor for model in models for tensor in model.parameters() if not tensor.is_meta)
    home = next((tensor.device for tensor in weights), torch.device("cpu"))
    accelerator = torch.accelerator.current_accelerator(check_available=True) if home.type == "cpu" else None
    return accelerator or home


def _as_names(names: Any) -> list[str]:
    listed = [names] if isinstance(names, str) else list(names) if isinstance(names, Iterable) else [None]
    if not all(isinstance(name, str) for name in listed):
        raise TypeError(
            f"components={names!r}: expected the names of components, such as ['transformer', 'vae'], or None for the "
            "default ones"
        )
    return list(dict.fromkeys(listed))
