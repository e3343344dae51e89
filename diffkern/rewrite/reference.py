"""The float64 reference of a site: the expression of the source itself, no cast to a narrower dtype in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from diffkern.rewrite.facts import Path

_NARROWER = (torch.float32, torch.float16, torch.bfloat16)
#: Rows of a weight that are enough to see what a linear layer computes.
_LINEAR_ROWS = 64


class CastsLifted(TorchDispatchMode):
    """Casts of floating point tensors to a narrower dtype give float64: modules and helpers cast inside.

    So do reductions of float64 that are told to compute in a narrower dtype.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in _NARROWER and args and isinstance(args[0], Tensor):
            casts = func is torch.ops.aten._to_copy.default and args[0].is_floating_point()
            if casts or args[0].dtype is torch.float64:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def to_float64(leaf: Any) -> Any:
    """A leaf in float64; what is no floating point tensor, or a dtype, as it is."""
    if isinstance(leaf, (tuple, list)):
        return type(leaf)([to_float64(part) for part in leaf])
    if isinstance(leaf, Tensor):
        if leaf.is_complex():
            return leaf.detach().to(torch.complex128)
        return leaf.detach().double() if leaf.is_floating_point() else leaf.detach()
    return leaf


def float64_twin(module: nn.Module, paths: list[Path]) -> nn.Module:
    """A copy of a module whose submodules at ``paths`` have float64 parameters and no hooks; the rest is shared."""
    return clone_for_verification(module, paths, to_float64, _LINEAR_ROWS)


def clone_for_verification(
    module: nn.Module, paths: list[Path], convert: Callable[[Any], Any] = lambda tensor: tensor, rows: int | None = None
) -> nn.Module:
    """A copy of a module, to try things on, whose submodules at ``paths`` have converted parameters and no hooks."""
    twin = _bare(module)
    for path in paths:
        parent = twin
        for name in path[:-1]:
            parent._modules[name] = parent = _bare(parent._modules[name])  # type: ignore[arg-type]
        child = parent._modules.get(path[-1])
        if child is not None:  # a method has no copy
            parent._modules[path[-1]] = _converted(child, convert, rows)
    return twin


def _bare(module: nn.Module) -> nn.Module:
    twin: nn.Module = module.__class__.__new__(module.__class__)
    twin.__dict__.update(module.__dict__)
    twin.__dict__.pop("forward", None)
    for name in ("_modules", "_parameters", "_buffers"):
        twin.__dict__[name] = dict(module.__dict__[name])
    for name in module.__dict__:
        if name.endswith("_hooks") or name.endswith("_hooks_with_kwargs"):
            twin.__dict__[name] = type(module.__dict__[name])()
    return twin


def _converted(module: nn.Module, convert: Callable[[Any], Any], rows: int | None) -> nn.Module:
    twin = _bare(module)
    kept = slice(rows) if type(module) is nn.Linear and rows is not None else ...
    state = twin.__dict__
    for values in (state, state["_parameters"], state["_buffers"]):  # a weight may have become a plain attribute
        values.update({key: convert(value[kept]) for key, value in values.items() if isinstance(value, Tensor)})
    children = twin._modules.items()
    twin._modules = {name: None if child is None else _converted(child, convert, rows) for name, child in children}
    return twin
