"""Modules that have nothing to fuse, and a forward that computes the same bits with less work of the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from diffkern.verify.fusion import Fusion

#: As reports name it; no kernel computes it.
OP = "asked_once"


@dataclass(frozen=True)
class TwinFusion(Fusion):
    """A module that computes as it is written, and asks once for what stays the same. A call is its arguments.

    Attributes:
        forward: See :func:`diffkern.rewrite.twins.with_twins`.
    """

    forward: Callable[..., Any]

    proves_itself = True
    served_by = "python"

    @property
    @override
    def op(self) -> str:
        return OP

    @property
    @override
    def direct(self) -> Callable[..., Any]:
        return self.forward

    @override
    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return args, kwargs

    @override
    def primary_input(self, call: Any) -> Tensor:
        args, kwargs = call
        return next((part for part in (*args, *kwargs.values()) if isinstance(part, Tensor)), _NO_TENSOR)

    @override
    def compute(self, module: nn.Module, call: Any, provider: str | None, stock: tuple[str, ...]) -> Any:
        args, kwargs = call
        return self.forward(module, *args, **kwargs)


#: In the place of a first tensor where a call has none.
_NO_TENSOR = torch.empty(0, device="cpu")
