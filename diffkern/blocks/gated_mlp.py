"""The gated feed-forward of language models: a SiLU or GELU of one projection times another."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from diffkern.blocks.inner import InnerRecipe, Inside, unfit
from diffkern.blocks.pieces import untouched
from diffkern.ops import glu

#: Classes of activations without arguments that matter: their names in :mod:`diffkern.ops`.
ACTIVATIONS = {
    "torch.nn.modules.activation.SiLU": "silu",
    "transformers.activations.SiLUActivation": "silu",
    "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.GELUTanh": "gelu_tanh",
    "transformers.activations.PytorchGELUTanh": "gelu_tanh",
}


@dataclass(frozen=True)
class GatedMLP(InnerRecipe):
    """``down(activation(gate(x)) * up(x))``.

    Attributes:
        activation: Name of the module's activation.
        gate: Name of the layer that gives the gate.
        up: Name of the layer that gives what is gated; None if ``gate`` gives both, the gate first.
        down: Name of the last layer.
    """

    activation: str
    gate: str
    up: str | None
    down: str
    op = "glu"

    @override
    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        return args if len(args) == 1 and not kwargs else None

    @override
    def declines(self, module: nn.Module, call: tuple[Any, ...]) -> str | None:
        activation: Any = module._modules.get(self.activation)
        if activation is None or not untouched(activation, type(activation)):
            return "its activation has a hook, or another forward"
        return self.lacks(module) or unfit(call[0])

    @override
    def sources(self, module: nn.Module) -> tuple[Callable[..., Any], ...]:
        return (type(module._modules[self.activation]).forward,)  # type: ignore[union-attr]

    @override
    def lacks(self, module: nn.Module) -> str | None:
        if self.function(module) is not None:
            return None
        return f"its activation is a {type(module._modules[self.activation]).__name__}, which no kernel computes"

    def function(self, module: nn.Module) -> str | None:
        """The name of the module's activation in :mod:`diffkern.ops`, or None."""
        cls = type(module._modules[self.activation])
        name = ACTIVATIONS.get(f"{cls.__module__}.{cls.__qualname__}")
        if name == "gelu" and getattr(module._modules[self.activation], "act", None) is not nn.functional.gelu:
            return None  # transformers has a slow one in Python, too
        return name

    @override
    def forward(self, inside: Inside) -> Callable[..., Any]:
        def forward(module: Any, x: Tensor) -> Any:
            children = module._modules
            if self.up is None:
                gate, up = children[self.gate](x).chunk(2, dim=-1)
            else:
                gate, up = children[self.gate](x), children[self.up](x)
            return children[self.down](inside(module, (gate, up)))

        return forward

    @override
    def stock(self, module: nn.Module | None, inputs: tuple[Tensor, ...]) -> Tensor:
        assert module is not None
        gate, up = inputs
        product: Tensor = module._modules[self.activation](gate) * up  # type: ignore[misc]
        return product

    @override
    def fused(self, module: nn.Module | None, inputs: tuple[Tensor, ...], provider: str | None) -> Tensor:
        assert module is not None
        gate, up = inputs
        return glu(up, gate, self.function(module) or "", round_activation=True, provider=provider)

    @override
    def samples(self, module: nn.Module, rows: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        generator = torch.Generator("cpu").manual_seed(3)
        gate, up = (2 * torch.randn(rows, 512, generator=generator, device="cpu")).to(device, dtype).chunk(2, dim=-1)
        # Halves of one tensor where one layer makes both: a kernel may want them so, and another not.
        return (gate, up) if self.up is None else (gate.contiguous(), up.contiguous())

    @override
    def kind(self, module: nn.Module) -> Hashable:
        return self, type(module._modules[self.activation]), self.function(module)
