"""How often a patch ran fused and stock, right also where several threads call one module."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from threading import get_ident
from typing import Protocol

from diffkern.verify.isolation import MEASURING


class Counts(Protocol):
    """What a report reads of a patch of any kind."""

    @property
    def fused_calls(self) -> int:
        """Calls that ran fused."""

    @property
    def stock_calls(self) -> Counter[str]:
        """Calls that ran stock, by reason."""

    @property
    def stock_pieces(self) -> Counter[str]:
        """Of the fused calls, those in which a part ran stock, by part."""


@dataclass
class CountRecord:
    """Counts as they were when a report was copied."""

    fused_calls: int = 0
    stock_calls: Counter[str] = field(default_factory=Counter)
    stock_pieces: Counter[str] = field(default_factory=Counter)
    restored: bool = False


_FUSED, _STOCK, _PIECE = range(3)


class CallCounts:
    """Counts calls without a lock: reading a number and writing it back is no single step, so no two threads share one.

    An entry belongs to a thread; readers sum over all of them.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int, str], int] = {}

    def add_fused(self, calls: int = 1) -> None:
        """Counts calls that ran fused; -1 for one that did not after all."""
        self._add(_FUSED, "", calls)

    def add_stock(self, reason: str) -> None:
        """Counts a call that ran stock."""
        self._add(_STOCK, reason, 1)

    def add_pieces(self, pieces: tuple[str, ...]) -> None:
        """Counts the parts of a fused call that ran stock."""
        for piece in pieces:
            self._add(_PIECE, piece, 1)

    @property
    def fused_calls(self) -> int:
        """Calls that ran fused."""
        return self._sum(_FUSED)[""]

    @property
    def stock_calls(self) -> Counter[str]:
        """Calls that ran the stock forward, by reason."""
        return self._sum(_STOCK)

    @property
    def stock_pieces(self) -> Counter[str]:
        """Of the fused calls, those in which a part ran stock, by part."""
        return self._sum(_PIECE)

    def _add(self, kind: int, name: str, calls: int) -> None:
        thread = get_ident()
        if thread not in MEASURING:
            key = thread, kind, name
            self._counts[key] = self._counts.get(key, 0) + calls

    def _sum(self, kind: int) -> Counter[str]:
        total: Counter[str] = Counter()
        for (_, of_kind, name), calls in list(self._counts.items()):
            if of_kind == kind:
                total[name] += calls
        return total
