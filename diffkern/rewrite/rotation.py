"""How ``qk_norm_rope`` is called for queries and keys of a site. What a helper computes is not parsed.

Tables have a few forms. A site takes the first with which the op computes, in float64 and on random tables, what its
expression computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffkern.cache.rotary import rotary_tables

Tables = tuple[Tensor, Tensor]


def _cos_sin(tables: list[Tensor]) -> Tables:
    cos, sin = tables
    return cos, sin


def _even_odd(tables: list[Tensor]) -> Tables:
    cos, sin = tables
    return cos[..., 0::2], sin[..., 1::2]


def _complex(tables: list[Tensor]) -> Tables:
    (table,) = tables
    cos, sin = torch.view_as_real(table).unbind(-1)
    return cos, sin


def _matrices(tables: list[Tensor]) -> Tables:
    (table,) = tables
    return table[..., 0, 0], table[..., 1, 0]


#: What tables are in models: name -> how they become cosines and sines.
TABLES: Mapping[str, Callable[[list[Tensor]], Tables]] = {
    "cosines and sines": _cos_sin,
    "cosines at even places, sines at odd ones": _even_odd,
    "complex numbers": _complex,
    "2x2 matrices": _matrices,
}
#: 2x2 matrices that need not rotate, whose tables are kept for the other sites of one call of the model.
ANY_MATRICES = "any 2x2 matrices"


@dataclass(frozen=True)
class Form:
    """One way of calling the op.

    Attributes:
        tables: One of :data:`TABLES`, or :data:`ANY_MATRICES`; None for norms without a rotation.
        heads_dim: Where the tables lack the dimension of the heads, counted from the end; None if they do not.
        pairing: As in :func:`diffkern.ops.rope`.
        across_heads: Whether the norm is one over all heads.
    """

    tables: str | None = None
    heads_dim: int | None = None
    pairing: str = "interleaved"
    across_heads: bool = False

    def of(self, tables: list[Tensor]) -> Tables | tuple[None, None]:
        """Cosines and sines that broadcast against queries or keys."""
        if self.tables is None:
            return None, None
        if self.tables == ANY_MATRICES:
            cos, sin = rotary_tables(*tables, self.pairing)
        else:
            cos, sin = TABLES[self.tables](tables)
        if self.heads_dim is not None:
            cos, sin = cos.unsqueeze(self.heads_dim), sin.unsqueeze(self.heads_dim)
        return cos, sin


#: The forms that are tried, in this order.
FORMS = tuple(
    [
        Form(tables, heads_dim, pairing, across_heads)
        for across_heads in (False, True)
        for tables in (*TABLES, ANY_MATRICES)
        for pairing in ("interleaved", "half")
        for heads_dim in (None, -2, -3)
    ]
)
NORMS = (Form(), Form(across_heads=True))


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a leaf: itself, or those of a tuple or a list."""
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in tensors_in(part)]
    return [value] if isinstance(value, Tensor) else []


def tables_of(operands: Mapping[str, Any], side: str) -> list[Tensor]:
    """The tables among the operands of one side, ``"q"`` or ``"k"``."""
    return [
        tensor for name, value in operands.items() if name.startswith(f"{side}_table") for tensor in tensors_in(value)
    ]


def part_of(table: Tensor, like: Tensor, dim: int, start: int) -> Tensor:
    """The rows of a table that belong to one of several streams of tokens, which begins at ``start``."""
    at = dim % like.ndim - like.ndim + table.ndim
    return table if at < 0 or table.shape[at] == 1 else table.narrow(at, start, like.shape[dim])
