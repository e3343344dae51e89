"""How tracing learns what the ops return."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ._ops import add_op_namespace_prefix, ops


def fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as what tracing asks about an op. It is called with every argument of the schema."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        if not hasattr(ops, name):
            return function  # an op that other builds have
        defaults = [argument.default_value for argument in getattr(ops, name).default._schema.arguments]

        def complete(*given: Any) -> Any:
            _check_devices(name, given)
            # Torch leaves out the last arguments that have their default, and the plain form of an op has fewer.
            return function(*given, *defaults[len(given) :])

        for form in (name, f"{name}_plain"):
            if hasattr(ops, form):
                torch.library.register_fake(add_op_namespace_prefix(form), complete)
        return function

    return register


def rows_of_8_bits(like: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Values in e4m3 of a shape, and the scale of each row."""
    return like.new_empty(shape, dtype=torch.float8_e4m3fn), like.new_empty((*shape[:-1], 1), dtype=torch.float32)


def _check_devices(name: str, given: Iterable[Any]) -> None:
    lists = (value if isinstance(value, list) else [value] for value in given)
    devices = {str(value.device) for values in lists for value in values if isinstance(value, Tensor)}
    if len(devices) > 1:
        raise RuntimeError(f"{name}: the tensors are on different devices: {', '.join(sorted(devices))}")
