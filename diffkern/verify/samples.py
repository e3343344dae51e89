"""Inputs and stand-ins for proofs: what a module can be tried on without touching the module."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from diffkern.matching import NormSemantics
from diffkern.matching.forward import dim_of
from diffkern.providers import KERNEL_DTYPES

#: Size of the normalised dimension where the module does not say it.
_UNKNOWN_SIZE = 128

#: Instance attributes that belong to a patch or to hooks.
_NOT_COPIED = ("forward", "_diffkern", "_old_forward", "_hf_hook", "_diffusers_hook", "_compiled_call_impl")

#: Where torch keeps the hooks of a module.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

#: What an 8-bit float weight of a layerwise cast layer is cast from at every call.
_CAST = (torch.float8_e4m3fn, torch.float8_e5m2)


def sample_shape(semantics: NormSemantics, module: nn.Module, rows: int) -> torch.Size:
    """Returns a shape that the module's forward takes, with at least ``rows`` normalised vectors."""
    dim = dim_of(semantics, module)
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


class Draws:
    """Random tensors of a device and dtype, the same at every start; torch's global generators stay as they are."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 20) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator("cpu").manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Draws from a normal distribution of deviation ``scale``."""
        values = torch.randn(shape, generator=self._generator, device="cpu") * scale
        return values.to(device=self.device, dtype=self.dtype)


def in_float64(module: nn.Module, device: torch.device) -> nn.Module:
    """Returns a copy of a module as :func:`clone_tree` makes it, in float64."""
    return clone_tree(module, device, lambda tensor: torch.float64, torch.float64)


def doubled(call: Any) -> Any:
    """Returns a call, in any containers, with every floating point tensor in float64."""
    return pytree.tree_map(
        lambda x: x.detach().double() if isinstance(x, Tensor) and x.is_floating_point() else x, call
    )


def clone_leaf(module: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
    """Returns a copy of a leaf module on ``device`` that shares nothing a run could change, and no hooks.

    A deep copy would drag hooks and their offload maps along. Weights on the meta device have no values;
    random ones take their place.
    """
    return _copy(module, lambda tensor: _place(tensor, device, dtype))


def clone_tree(
    module: nn.Module,
    device: torch.device,
    dtype_of: Callable[[Tensor], torch.dtype],
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Returns a copy of a block on ``device``, child by child, as :func:`clone_leaf` does for a leaf.

    A linear layer that is not torch's own, with adapters or quantised weights, is replaced by a random one of
    its size: recipes call such layers as they are, so nothing depends on what they compute. ``dtype`` is theirs, which
    their own weights need not have: that of the calls.
    """
    if not is_ordinary(module):
        linear: Any = module
        biased = getattr(linear, "bias", None) is not None
        module = nn.Linear(linear.in_features, linear.out_features, biased, device="meta", dtype=dtype)
    copy = _copy(module, lambda tensor: _place(tensor, device, dtype_of(tensor)))
    copy.__dict__ |= {"training": False, "_modules": {}}
    for name, child in module._modules.items():
        copy._modules[name] = None if child is None else clone_tree(child, device, dtype_of, dtype)
    return copy


def bare(module: nn.Module) -> nn.Module:
    """Returns a copy without hooks or patches, which shares tensors and children."""
    copy = type(module).__new__(type(module))
    copy.__dict__ |= {key: value for key, value in module.__dict__.items() if key not in _NOT_COPIED}
    copy.__dict__ |= {hooks: OrderedDict() for hooks in HOOKS}
    return copy


def _copy(module: nn.Module, place: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy without hooks, its own tensors placed elsewhere, its children shared."""
    copy = bare(module)
    state = copy.__dict__
    # A weight that was assigned is a plain attribute.
    state |= {name: place(value) for name, value in state.items() if isinstance(value, Tensor)}
    state["_buffers"] = {name: None if held is None else place(held) for name, held in state["_buffers"].items()}
    state["_parameters"] = {
        name: None if held is None else nn.Parameter(place(held), requires_grad=False)
        for name, held in state["_parameters"].items()
    }
    return copy


def is_ordinary(module: nn.Module) -> bool:
    """Whether a module's own parameters are what its class computes with, in some floating point dtype."""
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if not all(isinstance(size, int) for size in sizes):  # PEFT's wrappers of norms have them too, as None
        return True
    return type(module) is nn.Linear and all(
        p is None
        or (type(p) is nn.Parameter and (p.dtype in KERNEL_DTYPES or p.dtype == torch.float64 or p.dtype in _CAST))
        for p in module._parameters.values()
    )


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
        random = torch.randn(tensor.shape, generator=generator, device="cpu")
        # A matrix that keeps the size of its inputs; anything else is a scale, a shift or a table.
        random = random / tensor.shape[-1] ** 0.5 if tensor.ndim == 2 else random + 1
        tensor = random.to(tensor.dtype) if tensor.is_floating_point() else torch.zeros_like(tensor, device="cpu")
    return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
