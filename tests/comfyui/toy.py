"""A model like those of ComfyUI, of torch alone, with a recipe of its own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffkern.blocks.pieces import unfit_input
from diffkern.comfyui.recipe import MODULATION, QK_NORM_ROPE, ComfyRecipe, Samples
from diffkern.comfyui.verification_clone import input_size
from diffkern.ops import norm_modulate

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


class Recipe(ComfyRecipe):
    op = "toy_block"
    ops = ("norm_modulate",)
    families = frozenset({MODULATION})
    words = frozenset({"dim", "eps", "negate"})
    versions = "the toy"
    fingerprints = frozenset[str]()

    @staticmethod
    def arguments(x: Tensor, modulation: Tensor, transformer_options: dict[str, Any] | None = None) -> tuple[Any, ...]:
        return x, modulation, transformer_options or {}

    def declines(self, module: nn.Module, call: tuple[Any, ...]) -> str | None:
        return "an option turns its sign" if call[2].get("negate") else unfit_input(call[0])

    def stock_pieces(self, module: nn.Module, call: tuple[Any, ...]) -> tuple[str, ...]:
        return ()

    def compute(self, module: Any, call: tuple[Any, ...], provider: str | None, stock: tuple[str, ...]) -> Tensor:
        x, modulation, _ = call
        shift, scale, gate = modulation.chunk(3, dim=-1)
        if self.exact:
            y = F.rms_norm(x, (SIZE,), eps=1e-6) * (1 + scale) + shift
            return x.add_(module.linear(y) * gate)
        return x.addcmul_(module.linear(norm_modulate(x, scale, shift, eps=1e-6, provider=provider)), gate)

    def sources(self) -> tuple[Any, ...]:
        return (Block.forward,)

    def samples(self, module: Any, tokens: int, device: torch.device, dtype: torch.dtype) -> list[tuple[Any, ...]]:
        random, size = Samples(device, dtype), input_size(module.linear)
        return [(random(2, tokens, size), random(2, 1, 3 * size), {})]


class Wrong(Recipe):
    """Forgets the gate."""

    def compute(self, module: Any, call: tuple[Any, ...], provider: str | None, stock: tuple[str, ...]) -> Tensor:
        x, modulation, _ = call
        shift, scale, _ = modulation.chunk(3, dim=-1)
        return x.add_(module.linear(norm_modulate(x, scale, shift, provider=provider)))


class Elsewhere(Recipe):
    """Computes the same, in a new tensor."""

    def compute(self, module: Any, call: tuple[Any, ...], provider: str | None, stock: tuple[str, ...]) -> Tensor:
        return super().compute(module, (call[0].clone(), *call[1:]), provider, stock)


class HalfWrong(Wrong):
    """Forgets it with one of its families."""

    families = frozenset({MODULATION, QK_NORM_ROPE})

    def compute(self, module: Any, call: tuple[Any, ...], provider: str | None, stock: tuple[str, ...]) -> Tensor:
        kind = Wrong if QK_NORM_ROPE in self.chosen else Recipe
        return kind.compute(self, module, call, provider, stock)


class Ignorant(Recipe):
    """Was written against a forward without the option."""

    words = frozenset({"dim", "eps"})


RECIPE, WRONG, HALF_WRONG, IGNORANT, ELSEWHERE = Recipe(), Wrong(), HalfWrong(), Ignorant(), Elsewhere()


def inputs(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 70, SIZE, generator=generator), torch.randn(2, 1, 3 * SIZE, generator=generator)
