"""A denoiser whose blocks compute some things alike: masks, and rotary tables. A call of it says how long they hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from diffkern.verify.fusion import Fusion


@dataclass(frozen=True)
class ModelCall(Fusion):
    """A model that runs as it is written. A call is its arguments; None while a graph of the compiler is traced."""

    op = "model_call"
    is_model = True
    only_watches = True
    proves_itself = True
    served_by = "python"

    @property
    @override
    def direct(self) -> Callable[..., Any]:
        return _stock

    @override
    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return None if torch.compiler.is_compiling() else (args, kwargs)

    @override
    def declines(self, module: nn.Module, call: Any) -> str | None:
        return "inside of torch.compile" if call is None else None

    @override
    def primary_input(self, call: Any) -> Tensor:
        args, kwargs = call
        return next((part for part in (*args, *kwargs.values()) if isinstance(part, Tensor)), _NO_TENSOR)

    @override
    def compute(self, module: nn.Module, call: Any, provider: str | None, stock: tuple[str, ...]) -> Any:
        args, kwargs = call
        return _stock(module, *args, **kwargs)


def _stock(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


#: In the place of a first tensor where a call has none.
_NO_TENSOR = torch.empty(0, device="cpu")
