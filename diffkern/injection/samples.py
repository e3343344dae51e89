"""Inputs and stand-ins for proofs: what a module can be tried on without touching the module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from diffkern.matching import NormSemantics

#: Size of the normalised dimension where the module does not say it.
_UNKNOWN_SIZE = 128

#: Instance attributes that belong to a patch or to hooks.
_NOT_COPIED = ("forward", "_diffkern", "_old_forward", "_hf_hook", "_diffusers_hook")


def sample_shape(semantics: NormSemantics, module: nn.Module, rows: int) -> torch.Size:
    """Returns a shape that the module's forward takes, with at least ``rows`` normalised vectors."""
    dim = getattr(module, semantics.dim) if isinstance(semantics.dim, str) else semantics.dim
    if isinstance(dim, bool):
        dim = 1 if dim else -1
    if isinstance(dim, tuple) and semantics.layout != "channels_last":
        return torch.Size((rows, *dim))
    weight = None if semantics.weight is None else module._parameters.get(semantics.weight)
    if dim == -1:
        return torch.Size((rows, weight.shape[-1] if weight is not None else _declared_size(module)))
    channels = dim[0] if isinstance(dim, tuple) else weight.numel() if weight is not None else _UNKNOWN_SIZE
    spatial = 2 if isinstance(dim, tuple) else weight.ndim - 1 if weight is not None else 3
    return torch.Size((2, channels, *(2,) * (spatial - 1), -(-rows // 2**spatial)))


def random_input(shape: torch.Size, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Draws rows of different scales around a mean that is not zero; torch's global generators stay as they are."""
    # On the CPU by name: a user's torch.set_default_device is not meant for this.
    generator = torch.Generator("cpu").manual_seed(20)
    x = torch.randn(shape, generator=generator, device="cpu") + 0.3
    scale = torch.empty(shape[0], *(1,) * (len(shape) - 1), device="cpu").uniform_(-3, 3, generator=generator).exp2()
    return (x * scale).to(device=device, dtype=dtype)


def stand_in(module: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
    """Returns a copy of a leaf module on ``device`` that shares nothing a run could change, and no hooks.

    A deep copy would drag hooks and their offload maps along. Weights on the meta device have no values;
    random ones take their place.
    """
    copy = type(module).__new__(type(module))
    state: dict[str, Any] = {key: value for key, value in module.__dict__.items() if key not in _NOT_COPIED}
    for group in ("_parameters", "_buffers"):
        state[group] = {
            name: None if tensor is None else _place(tensor, device, dtype) for name, tensor in state[group].items()
        }
    state["_parameters"] = {
        name: None if tensor is None else nn.Parameter(tensor, requires_grad=False)
        for name, tensor in state["_parameters"].items()
    }
    copy.__dict__.update(state)
    return copy


def _declared_size(module: nn.Module) -> int:
    """The size that a weightless norm was built for; Mochi builds its own for size 0 and means any."""
    size = getattr(module, "dim", None)
    if isinstance(size, (tuple, torch.Size)):
        size = size[-1] if size else None
    return size if isinstance(size, int) and size > 0 else _UNKNOWN_SIZE


def _place(tensor: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_meta:
        generator = torch.Generator("cpu").manual_seed(0)
        random = torch.randn(tensor.shape, generator=generator, device="cpu") + 1
        tensor = random.to(tensor.dtype) if tensor.is_floating_point() else torch.zeros_like(tensor, device="cpu")
    return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
