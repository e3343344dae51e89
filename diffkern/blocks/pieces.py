"""What the recipes share: guards that say whether a child may be computed around, and parts of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
import torch.nn.modules.module as torch_module
from torch import Tensor, nn

from diffkern.matching.forward import unfit_input
from diffkern.matching.genuine import functional_is_torchs, is_own
from diffkern.providers import KERNEL_DTYPES
from diffkern.providers.dispatch_modes import transforms_active

#: Functions that, bound to a module as its forward, compute what the forward of its class computes.
EQUIVALENT_FORWARDS: set[Callable[..., Any]] = set()
#: The hooks of all modules.
GLOBAL_HOOKS = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)


def untouched(module: nn.Module | None, cls: type[nn.Module]) -> bool:
    """Whether ``module`` is exactly a ``cls`` that runs the forward it was written with, without hooks.

    Hooks of accelerate and diffusers stand in ``module.forward``; torch's have their own dictionaries.
    """
    if type(module) is not cls:
        return False
    state = module.__dict__
    if (
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
        or not is_own(cls.forward, cls)
    ):
        return False
    if "forward" not in state:
        return True
    forward = state["forward"]
    if type(forward) is not MethodType or forward.__self__ is not module:
        return False
    return forward.__func__ is cls.forward or forward.__func__ in EQUIVALENT_FORWARDS


def calls_otherwise(cls: type[nn.Module]) -> bool:
    """Whether a call of a module of a class does more than to run its forward and hooks."""
    return cls.__call__ is not nn.Module.__call__


def runs_fused(module: nn.Module) -> bool:
    """Whether the forward of an untouched module is a fused one. Hooks that go leave its class's own there."""
    return getattr(module.__dict__.get("forward"), "__func__", None) in EQUIVALENT_FORWARDS


def calls_are_watched() -> bool:
    """Whether every call of a module is watched, as profilers and FLOP counters do with global hooks."""
    hooks, pre_hooks, backward_hooks, backward_pre_hooks = GLOBAL_HOOKS
    return bool(hooks or pre_hooks or backward_hooks or backward_pre_hooks)


def unfit_surroundings() -> str | None:
    """Why calls of modules and functions must be made as they are written, whatever they are called with; or None."""
    if calls_are_watched():
        return "global hooks watch the calls of all modules"
    if not functional_is_torchs():
        return "a function of torch.nn.functional was replaced"
    return None


def unfit(x: Any) -> str | None:
    """Why hidden states are not for kernels, or None."""
    reason = unfit_input("the hidden states are", x)
    if reason is None and x.is_meta:
        reason = "the hidden states are not an ordinary dense tensor"
    return reason or unfit_surroundings()


def unfit_for_inference(module: nn.Module, call: tuple[Any, ...]) -> str | None:
    """Why what has no backward, and no rule for a transform, cannot compute a call; or None."""
    if not torch.compiler.is_compiling() and transforms_active():
        return "a transform of torch.func looks into it"
    tensors = (*call, *module.parameters())
    if torch.is_grad_enabled() and any([isinstance(x, Tensor) and x.requires_grad for x in tensors]):
        return "gradients are wanted: run it under torch.no_grad() to have it fused"
    return None


def plain(parameter: Any, device: torch.device) -> bool:
    """Whether a parameter is an ordinary tensor on ``device`` that kernels can read."""
    kind = type(parameter)
    return (
        (kind is nn.Parameter or kind is Tensor)
        and parameter.device == device
        and parameter.dtype in KERNEL_DTYPES
        and parameter.layout is torch.strided
    )


def plain_linear(module: nn.Module | None, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a linear layer is torch's own, with ordinary weights for inputs of ``dtype`` on ``device``.

    Layers with adapters or quantised weights, offloaded and sharded ones are not.
    """
    return module is not None and untouched(module, nn.Linear) and has_plain_parameters(module, device, dtype)


def has_plain_parameters(
    layer: nn.Module, device: torch.device, dtype: torch.dtype, of_weight: torch.device | None = None
) -> bool:
    """Whether the weights of a linear layer are ordinary tensors of ``dtype`` on ``device``, but for ``of_weight``."""
    parameters: Any = layer._parameters
    weight = parameters.get("weight")  # either may have become a plain attribute, or be hidden by one
    if (
        weight is None
        or "weight" in layer.__dict__
        or "bias" in layer.__dict__
        or "bias" not in parameters
        or weight.dtype is not dtype
        or not plain(weight, of_weight or device)
    ):
        return False
    bias = parameters["bias"]
    return bias is None or (bias.dtype is dtype and plain(bias, device))


def are_silent(layers: Iterable[nn.Module]) -> bool:
    """Whether layers are dropouts that drop nothing, without hooks."""
    return all(untouched(layer, nn.Dropout) and not layer.training for layer in layers)
