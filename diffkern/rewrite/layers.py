"""Calls of modules as libraries write them, without the questions of such a call that find nothing.

``layer(x)`` runs two functions of Python before the forward, and a linear layer takes its parameters by another two.
Where the host waits for small kernels that is a large part of a step. Here one function asks whether something watches
the layer, or stands in the place of what its class computes; if not, it runs that forward, or a twin of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffkern.blocks.pieces import GLOBAL_HOOKS
from diffkern.matching.genuine import replaced_function, stays
from diffkern.providers.dispatch_modes import modes_active

# Bound once, since every call asks.
_is_traced = torch.compiler.is_dynamo_compiling
_CALL, _IMPLEMENTATION = nn.Module._wrapped_call_impl, nn.Module._call_impl
_HOOKS, _PRE_HOOKS, _BACKWARD_HOOKS, _BACKWARD_PRE_HOOKS = GLOBAL_HOOKS


def call_layer(layer: Any, x: Any) -> Any:
    """``layer(x)``."""
    if _is_traced():  # first: the compiler knows no type of what some calls look like
        return layer(x)
    cls = type(layer)
    known = _KNOWN[cls] if cls in _KNOWN else _learn(cls)
    if known is None or getattr(cls, "forward", None) is not known[0] or _is_watched(layer, cls):
        return layer(x)
    state = layer.__dict__
    if "forward" in state:
        return state["forward"](x)
    if cls is not nn.Linear:
        return known[1](layer, x)
    parameters = state["_parameters"]
    if "weight" in state or "bias" in state or "weight" not in parameters or "bias" not in parameters:
        return F.linear(x, layer.weight, layer.bias)
    return F.linear(x, parameters["weight"], parameters["bias"])


def call_module(module: Any, *args: Any, **kwargs: Any) -> Any:
    """``module(*args, **kwargs)``."""
    if _is_traced():
        return module(*args, **kwargs)
    cls = type(module)
    known = _KNOWN[cls] if cls in _KNOWN else _learn(cls)
    if known is None or getattr(cls, "forward", None) is not known[0] or _is_watched(module, cls):
        return module(*args, **kwargs)
    state = module.__dict__
    return state["forward"](*args, **kwargs) if "forward" in state else known[1](module, *args, **kwargs)


def call_processor(processor: Any, *args: Any, **kwargs: Any) -> Any:
    """``processor(*args, **kwargs)`` of an attention module."""
    if _is_traced():
        return processor(*args, **kwargs)
    cls = type(processor)
    known = _KNOWN[cls] if cls in _KNOWN else _learn(cls)
    if known is not None and cls.__call__ is known[0]:
        return known[1](processor, *args, **kwargs)
    return processor(*args, **kwargs)


def call_function(function: Any, *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)`` of a function of the file."""
    if _is_traced() or type(function) is not FunctionType:
        return function(*args, **kwargs)
    known = _KNOWN[function] if function in _KNOWN else _learn(function)
    return (function if known is None else known[1])(*args, **kwargs)


def _is_watched(module: nn.Module, cls: Any) -> bool:
    """Whether a call of a module does more than to run its forward, as :meth:`torch.nn.Module.__call__` decides."""
    state = module.__dict__
    return bool(
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
        or _HOOKS
        or _PRE_HOOKS
        or _BACKWARD_HOOKS
        or _BACKWARD_PRE_HOOKS
        or "_compiled_call_impl" in state
        or cls.__call__ is not _CALL
        or cls._call_impl is not _IMPLEMENTATION
    )


def _silu(layer: Any, x: Any) -> Any:
    return F.silu(x, inplace=layer.inplace)


def _dropout(layer: Any, x: Any) -> Any:
    if type(x) is Tensor and not (layer.training or modes_active() or torch._C._len_torch_function_stack()):
        return x
    return F.dropout(x, layer.p, layer.training, layer.inplace)


_LAYERS: dict[type, Callable[..., Any]] = {nn.SiLU: _silu, nn.Dropout: _dropout}
_Known = tuple[Callable[..., Any], Callable[..., Any]] | None
#: By class or function: its forward, ``__call__`` or itself, and what runs in the place of that; None if nothing may.
#: Only what its library holds for good.
_KNOWN: dict[Any, _Known] = dict.fromkeys((MethodType, FunctionType, partial))


def _learn(called: Any) -> _Known:
    if not stays(called):
        return None
    own = called
    if isinstance(called, type):
        own = getattr(called, "forward", None) if issubclass(called, nn.Module) else called.__call__
    known = None
    if isinstance(own, FunctionType) and replaced_function((own,)) is None:
        from diffkern.rewrite.twins import twin_of  # which makes calls of functions of this file

        known = own, _LAYERS.get(called) or twin_of(own) or own
    return _KNOWN.setdefault(called, known)
