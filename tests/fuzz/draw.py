"""Random shapes, dtypes, values and layouts, all from one seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALVES)

#: Sizes of a dimension: none, one, odd, powers of two and their neighbours.
_SIZES = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65, 72, 96, 127, 128, 130, 257)
#: Sizes of rows long enough for every path of a kernel.
_LONG = (512, 768, 1000, 1024, 1025, 2048, 3072, 4096, 5120, 6145)


@dataclass(frozen=True)
class Values:
    """How the values of a tensor are distributed: normally, with NaN and infinities among them if ``special``."""

    scale: float = 1.0
    shift: float = 0.0
    special: bool = False


STANDARD = Values()


class Draw:
    """A source of random choices.

    Args:
        seed: Determines every choice and every value.
        device: Where tensors are made.
        everything: Whether every optional operand is there.
        budget: The most elements of a tensor.
    """

    def __init__(self, seed: int, device: str = "cpu", *, everything: bool = False, budget: int = 20_000) -> None:
        self._random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self.everything = everything
        self._budget = budget
        self.device = device

    def chance(self, probability: float) -> bool:
        """Whether something of this probability happens."""
        return self._random.random() < probability

    def maybe(self, value: T) -> T | None:
        """An optional operand, or None."""
        there = self.chance(0.6)
        return value if there or self.everything else None

    def one_of(self, *values: T) -> T:
        """One of the values."""
        return self._random.choice(values)

    def size(self, *, least: int = 1, multiple: int = 1) -> int:
        """The size of a dimension, a multiple of ``multiple``; rarely 0 if ``least`` allows."""
        if least == 0 and not self.everything and self.chance(0.04):
            return 0
        if multiple == 1 and self.chance(0.15):
            return self._random.choice(_LONG)
        return max(least, multiple * self._random.choice(_SIZES[: 12 if multiple > 1 else None]))

    def lead(self, last: int, *, dims: tuple[int, int] = (0, 3)) -> list[int]:
        """Leading dimensions for rows of ``last`` elements, within the budget."""
        left = self._budget // max(last, 1)
        shape = []
        for _ in range(self._random.randint(*dims)):
            size = 0 if not self.everything and self.chance(0.02) else self._random.choice((1, 2, 3, 4, 5, 7, 8, 33))
            size = min(size, max(left, 1))
            left //= max(size, 1)
            shape.append(size)
        return shape

    def dtype(self) -> torch.dtype:
        """A dtype that kernels compute."""
        return self.one_of(*FLOATS)

    def other(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of another operand: nearly always the same."""
        return dtype if dtype == torch.float64 or self.chance(0.7) else self.dtype()

    def values(self) -> Values:
        """A distribution."""
        scale, shift = self.one_of((1.0, 0.0), (1.0, 0.0), (1e-3, 0.0), (30.0, 0.0), (1.0, 5.0), (1e-3, -20.0))
        return Values(scale, shift, self.chance(0.08))

    def tensor(
        self, shape: Sequence[int], dtype: torch.dtype, values: Values = STANDARD, *, plain: bool = False
    ) -> Tensor:
        """A tensor of these values in some layout, between elements of NaN that no kernel may read.

        Args:
            shape: Its shape.
            dtype: Its dtype.
            values: Their distribution.
            plain: Whether it is contiguous and by itself.
        """
        shape = list(shape)
        layout = "plain" if plain else self.one_of(*_LAYOUTS)
        if layout == "overlapping" and len(shape) >= 2 and min(shape) > 0:
            line = self._filled([shape[-1] + shape[-2] - 1], dtype, values)
            rows = line.as_strided(shape[-2:], (1, 1))
            return rows.expand(shape)
        stored = list(shape)
        if layout == "expanded" and shape:
            for dim in self._random.sample(range(len(shape)), self._random.randint(1, len(shape))):
                stored[dim] = min(stored[dim], 1)
        order = list(range(len(shape)))
        if layout in ("permuted", "expanded", "stepped"):
            self._random.shuffle(order)
        steps = [self._random.choice((1, 1, 2, 3)) if layout == "stepped" else 1 for _ in shape]
        offset = self._random.choice((0, 1, 3)) if layout in ("stepped", "shifted") else 0
        memory = [stored[dim] * steps[dim] for dim in order]
        count = 1
        for size in memory:
            count *= size
        buffer = torch.full((offset + count,), torch.nan, dtype=torch.float32).to(dtype).to(self.device)
        view = buffer[offset:].view(memory).permute([order.index(dim) for dim in range(len(shape))])
        view = view[tuple(slice(None, None, step) for step in steps)] if shape else view
        if view.numel():
            view.copy_(self._filled(list(view.shape), dtype, values))
        return view.expand(shape)

    def _filled(self, shape: list[int], dtype: torch.dtype, values: Values) -> Tensor:
        drawn = torch.randn(shape, generator=self._generator, dtype=torch.float64) * values.scale + values.shift
        if values.special and drawn.numel():
            flat = drawn.view(-1)
            for value in (torch.nan, torch.inf, -torch.inf):
                if self.chance(0.6):
                    flat[self._random.randrange(flat.numel())] = value
        return drawn.to(dtype).to(self.device)


_LAYOUTS = ("plain", "plain", "permuted", "expanded", "stepped", "stepped", "shifted", "overlapping")
