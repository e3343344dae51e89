"""Whether what runs is what its library wrote: a class or a function can be replaced for all models at once.

Adapter managers put their own ``torch.nn.Linear.forward`` there, others a function into ``torch.nn.functional``. What
diffkern computes around must not hide that, be it there before the injection or come later.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from diffkern.providers.dispatch_modes import constant_in_graphs

#: Libraries whose classes must run what stands in their files, whatever it is decorated with by one of them.
_LIBRARIES = frozenset({"torch", "diffusers", "transformers"})
#: Where decorators come from.
_DECORATORS = _LIBRARIES | {"contextlib", "functools", "accelerate"}

#: Functions of :mod:`torch.nn.functional` that fused code computes the work of. Attention is not among them: it is
#: called by its name there.
_FUNCTIONS = ("linear", "gelu", "silu", "layer_norm", "rms_norm", "group_norm")

#: The forward that a class had when it was first looked at and ran its own.
_own: dict[type[nn.Module], Callable[..., Any]] = {}


@constant_in_graphs
def is_own(forward: Callable[..., Any], cls: type[nn.Module]) -> bool:
    """Whether the forward that a class has is its own: as its library wrote it; of others, as it was first seen.

    A graph depends on the forward, which is given for that, and not on a table of classes that grows.
    """
    own = _own.get(cls)
    if own is None and replacement(cls) is None:
        own = _own[cls] = cls.forward
    return forward is own


def replacement(cls: type[nn.Module]) -> str | None:
    """Names what was put in the place of the forward of a library's class, or returns None."""
    definer = next((base for base in cls.__mro__ if "forward" in base.__dict__), None)
    if definer is None or issubclass(cls, torch.jit.ScriptModule):  # whose forward is no function of Python
        return None
    return _foreign(cls.forward, definer.__module__)


def in_library(what: Any) -> bool:
    """Whether a class or function is of torch, diffusers or transformers, as far as it says so itself."""
    return str(getattr(what, "__module__", "")).partition(".")[0] in _LIBRARIES


def stays(what: Any) -> bool:
    """Whether a file of those libraries holds a class or function by its name, and so for good."""
    return in_library(what) and getattr(sys.modules.get(what.__module__), what.__qualname__, None) is what


def replaced_function(functions: tuple[Callable[..., Any], ...], module: str = "diffusers") -> str | None:
    """Names the first of some functions of a library's module that another one stands in the place of, or None.

    It suffices that a library wrote them.
    """
    return next((name for function in functions if (name := _foreign(function, module))), None)


def functional_is_torchs() -> bool:
    """Whether :data:`_FUNCTIONS` are those of torch."""
    return (
        F.linear is _linear
        and F.gelu is _gelu
        and F.silu is _silu
        and F.layer_norm is _layer_norm
        and F.rms_norm is _rms_norm
        and F.group_norm is _group_norm
    )


def _foreign(forward: Any, module: str) -> str | None:
    library = module.partition(".")[0]
    if library not in _LIBRARIES:
        return None
    function, allowed = forward, _DECORATORS
    while isinstance(function, FunctionType):
        inner = function.__dict__.get("__wrapped__")
        if inner is None:
            allowed = _LIBRARIES
        if str(function.__globals__.get("__name__")).partition(".")[0] not in allowed:
            # By its code: a replacement may carry the name of what it replaces.
            return f"{function.__globals__.get('__name__')}.{function.__code__.co_name}"
        if inner is None:
            return None
        function = inner
    return repr(function)


def _of_torch(name: str) -> Any:
    """A function as torch has it; where it was replaced before, something that nothing is."""
    function = getattr(F, name)
    builtin = getattr(torch._C._nn, name, None)
    own = function is builtin or (
        isinstance(function, FunctionType) and function.__code__.co_filename == sys.modules[F.__name__].__file__
    )
    return function if own else object()


#: Those functions as torch has them.
OF_TORCH = {name: _of_torch(name) for name in _FUNCTIONS}
_linear, _gelu, _silu, _layer_norm, _rms_norm, _group_norm = OF_TORCH.values()
