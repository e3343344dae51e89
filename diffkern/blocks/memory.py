"""What recipes remember between calls: beside the modules, never in them, and gone with the patch."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

#: Where there are functions that take back what was done to a module itself, each called with it.
UNDO = "undo"

_memories: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()


def memory(module: nn.Module) -> dict[str, Any]:
    """Returns what is remembered of ``module``, to read and to write. Copies of the module start with nothing."""
    return _memories.setdefault(module, {})


def forget(module: nn.Module) -> None:
    """Drops everything that is remembered of ``module``, and the memory it took; takes back what was done to it."""
    for undo in memory(module).pop(UNDO, ()):
        undo(module)
    _memories.pop(module, None)


def version(tensor: Tensor) -> int | None:
    """How often the data of ``tensor`` was written in place; None where torch does not count (inference mode)."""
    return None if tensor.is_inference() else tensor._version
