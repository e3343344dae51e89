"""What is kept of a module between calls: beside the module, never in it, and gone with its patches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

#: The entry with the functions that undo what a recipe did to the module itself, each called with the module. Entries
#: whose names begin with it are what these functions need: :func:`drop` leaves them alone.
UNDO = "undo"

_T = TypeVar("_T")

_memories: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()


def memory(module: nn.Module) -> dict[str, Any]:
    """Returns what is kept of ``module``, to read and to write. Copies of the module start with nothing."""
    return _memories.setdefault(module, {})


def kept_of(module: nn.Module, name: str, make: Callable[[], _T]) -> _T:
    """Returns what is kept of ``module`` under a name, made at the first question."""
    kept = memory(module)
    if name not in kept:
        kept[name] = make()
    held: _T = kept[name]
    return held


def drop(module: nn.Module) -> bool:
    """Drops every tensor that is kept of ``module``; returns whether there was anything. Its patches stay."""
    kept = _memories.get(module, {})
    names = [name for name in tuple(kept) if not name.startswith(UNDO)]
    for name in names:
        kept.pop(name, None)
    return bool(names)


def forget(module: nn.Module) -> None:
    """Drops all that is kept of ``module`` and undoes what was done to it: its patches are gone."""
    for undo in memory(module).pop(UNDO, ()):
        undo(module)
    _memories.pop(module, None)
