"""What a tiny denoiser is, and how the inputs of a call are drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import Tensor, nn


@dataclass
class Draw:
    """Draws the inputs of one call, the same on every device."""

    generator: torch.Generator
    device: torch.device
    dtype: torch.dtype

    def __call__(self, *shape: int) -> Tensor:
        """Normal numbers."""
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def time(self, scale: float = 1000.0) -> Tensor:
        """One time step in float32, between 0 and ``scale``."""
        return (torch.rand(1, generator=self.generator) * scale).to(self.device)

    def integers(self, *shape: int, below: int = 10) -> Tensor:
        """Integers, such as tokens or classes."""
        return torch.randint(below, shape, generator=self.generator).to(self.device)

    def mask(self, *shape: int) -> Tensor:
        """A mask that hides the last token."""
        mask = torch.ones(shape, dtype=torch.int64)
        mask[..., -1] = 0
        return mask.to(self.device)

    def ids(self, count: int, axes: int = 3) -> Tensor:
        """Positions of tokens."""
        return torch.arange(count).remainder(5)[:, None].expand(count, axes).float().to(self.device)


Inputs = Callable[[Draw, int], dict[str, Any]]


@dataclass(frozen=True)
class Denoiser:
    """One tiny model.

    Attributes:
        cls: Its class in diffusers.
        config: The arguments of the constructor; one that is a tuple of tiny models takes those, built.
        inputs: Draws the arguments of a call, at a size of 8 or 12.
        prepare: What a user does with such a model before the first call.
    """

    cls: str
    config: dict[str, Any]
    inputs: Inputs
    prepare: Callable[[Any], object] = id

    def build(self) -> nn.Module:
        """The model in float32 on the CPU, with weights behind which no wrong kernel could hide."""
        torch.manual_seed(0)
        config = {name: _built(value) for name, value in self.config.items()}
        model: nn.Module = getattr(diffusers, self.cls)(**config)
        self.prepare(model)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.75 * module.in_features**-0.5)
        for parameter in model.parameters():
            values = parameter.data
            if values.numel() > 1 and bool((values == values.flatten()[0]).all()):
                values.add_(torch.randn_like(values), alpha=0.1)
        return model.eval().requires_grad_(False)

    def in_dtype(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The model on a device and in a dtype, as ``from_pretrained`` loads it: some modules stay in float32."""
        model = self.build().to(device, dtype)
        kept = getattr(model, "_keep_in_fp32_modules", None) or ()
        for path, module in model.named_modules():
            if any(part in kept for part in path.split(".")):
                module.float()
        return model


def _built(value: Any) -> Any:
    of_models = isinstance(value, tuple) and value and all(isinstance(part, Denoiser) for part in value)
    return [part.build() for part in value] if of_models else value
