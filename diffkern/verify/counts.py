"""How often a patch ran fused and stock, right also where several threads call one module."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from threading import get_ident

from diffkern.verify.isolation import MEASURING


@dataclass
class CountRecord:
    """Counts as they were when a report was copied."""

    fused_calls: int = 0
    stock_calls: Counter[str] = field(default_factory=Counter)
    stock_pieces: Counter[str] = field(default_factory=Counter)
    restored: bool = False


class CallCounts:
    """Counts calls without a lock: a step of an iterator of C is one that no other thread interrupts."""

    def __init__(self) -> None:
        self._fused, self._taken_back = count(), count()
        self._stock: dict[str, count[int]] = {}
        self._pieces: dict[str, count[int]] = {}

    def add_fused(self) -> None:
        """Counts a call that ran fused."""
        if not (MEASURING and get_ident() in MEASURING):
            next(self._fused)

    def take_fused_back(self) -> None:
        """Counts that a call did not run fused after all."""
        if not (MEASURING and get_ident() in MEASURING):
            next(self._taken_back)

    def add_stock(self, reason: str) -> None:
        """Counts a call that ran stock."""
        if not (MEASURING and get_ident() in MEASURING):
            next(self._stock.get(reason) or self._stock.setdefault(reason, count()))

    def add_pieces(self, pieces: tuple[str, ...]) -> None:
        """Counts the parts of a fused call that ran stock."""
        if not (MEASURING and get_ident() in MEASURING):
            for piece in pieces:
                next(self._pieces.get(piece) or self._pieces.setdefault(piece, count()))

    @property
    def fused_calls(self) -> int:
        """Calls that ran fused."""
        return _steps(self._fused) - _steps(self._taken_back)

    @property
    def stock_calls(self) -> Counter[str]:
        """Calls that ran the stock forward, by reason."""
        return Counter({reason: _steps(calls) for reason, calls in list(self._stock.items())})

    @property
    def stock_pieces(self) -> Counter[str]:
        """Of the fused calls, those in which a part ran stock, by part."""
        return Counter({piece: _steps(calls) for piece, calls in list(self._pieces.items())})


def _steps(iterator: count[int]) -> int:
    """How many steps an iterator made; to ask it for the number would be one more."""
    return int(repr(iterator).removeprefix("count(").removesuffix(")"))
