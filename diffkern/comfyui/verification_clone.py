"""A copy of a small module of ComfyUI, such as a norm, to try things on.

Its weights may be quantised, offloaded, or not loaded yet; the copy has random ones in their place.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from diffkern.comfyui.norms import norm_kind

#: Where torch keeps the hooks of a module.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def shell(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Returns a copy of a module with random parameters of ``dtype`` on ``device``, in place of its own.

    It has the classes and attributes of the module, no hooks, and nothing that ComfyUI put on it.
    """
    copy = type(module).__new__(type(module))
    # Low-VRAM streaming and object patches keep their state in attributes, which a new module has not.
    kept = {key: value for key, value in module.__dict__.items() if not is_state_of_comfy(key) and key != "forward"}
    copy.__dict__ |= kept | {hooks: OrderedDict() for hooks in _HOOKS} | {"training": False}
    generator = torch.Generator("cpu").manual_seed(len(module._parameters))
    around = 1.0 if norm_kind(copy) is not None else 0.0
    copy.__dict__["_parameters"] = {
        name: None if parameter is None else _random(parameter, around, generator, device, dtype)
        for name, parameter in module._parameters.items()
    }
    copy.__dict__["_buffers"] = {
        name: None if buffer is None else buffer.to(device) for name, buffer in module._buffers.items()
    }
    copy.__dict__["_modules"] = {
        name: None if child is None else shell(child, device, dtype) for name, child in module._modules.items()
    }
    return copy


def is_state_of_comfy(name: str) -> bool:
    """Whether an attribute of a module says how ComfyUI has loaded it, and not what it computes."""
    return name.startswith(("_v", "_prefetch", "comfy_", "prev_comfy_", "weight_", "bias_"))


def _random(
    parameter: Any, around: float, generator: torch.Generator, device: torch.device, dtype: torch.dtype
) -> nn.Parameter:
    values = torch.randn(tuple(parameter.shape), generator=generator, device="cpu") * 0.2 + around
    return nn.Parameter(values.to(device=device, dtype=dtype), requires_grad=False)
