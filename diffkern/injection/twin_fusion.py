"""Modules that have nothing to fuse: their forward computes the same bits with less work of the host, or is watched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from diffkern.verify.fusion import Fusion

#: As reports name it; no kernel computes it.
OP = "asked_once"


@dataclass(frozen=True)
class TwinFusion(Fusion):
    """A module that computes as it is written, and asks once for what stays the same. A call is its arguments."""

    forward: Callable[..., Any]  # see :func:`diffkern.rewrite.twins.with_twins`

    op = OP
    proves_itself = True
    served_by = "python"

    @property
    @override
    def direct(self) -> Callable[..., Any]:
        return self.forward

    @override
    def compute(self, module: nn.Module, call: Any, provider: str | None, stock: tuple[str, ...]) -> Any:
        args, kwargs = call
        return self.forward(module, *args, **kwargs)


def _stock(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


@dataclass(frozen=True)
class ModelCall(TwinFusion):
    """A denoiser that runs as it is written, and whose blocks compute some things alike: masks, and rotary tables.

    A call of it says how long these hold. It is its arguments; None while a graph of the compiler is traced.
    """

    forward: Callable[..., Any] = _stock

    op = "model_call"
    is_model = True
    only_watches = True

    @override
    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return None if torch.compiler.is_compiling() else (args, kwargs)

    @override
    def declines(self, module: nn.Module, call: Any) -> str | None:
        return "inside of torch.compile" if call is None else None
