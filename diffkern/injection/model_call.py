"""A denoiser whose blocks compute some things alike: masks, and rotary tables. A call of it says how long they hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from diffkern.injection.twin_fusion import TwinFusion


def _stock(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


@dataclass(frozen=True)
class ModelCall(TwinFusion):
    """A model that runs as it is written. A call is its arguments; None while a graph of the compiler is traced."""

    forward: Callable[..., Any] = _stock

    is_model = True
    only_watches = True

    @property
    @override
    def op(self) -> str:
        return "model_call"

    @override
    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return None if torch.compiler.is_compiling() else (args, kwargs)

    @override
    def declines(self, module: nn.Module, call: Any) -> str | None:
        return "inside of torch.compile" if call is None else None
