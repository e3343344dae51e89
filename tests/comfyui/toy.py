"""A model like those of ComfyUI, of torch alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE = 32


class Block(nn.Module):
    """A modulated norm, a linear layer, and a gated sum that is written into the input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor, modulation: Tensor, transformer_options: dict[str, Any] = {}) -> Tensor:  # noqa: B006
        shift, scale, gate = modulation.chunk(3, dim=-1)
        y = F.rms_norm(x, (SIZE,), eps=1e-6) * (1 + scale) + shift
        if transformer_options.get("negate"):
            y = -y
        x += self.linear(y) * gate
        return x


class Denoiser(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor, modulation: Tensor, **options: Any) -> Tensor:
        x = x.clone()
        for block in self.blocks:
            x = block(x, modulation, **options)
        return x


def inputs(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 70, SIZE, generator=generator), torch.randn(2, 1, 3 * SIZE, generator=generator)
