"""What is kept of a module between calls: beside the module, never in it, and gone with its patches."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

_memories: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()


def memory(module: nn.Module) -> dict[str, Any]:
    """Returns what is kept of ``module``, to read and to write. Copies of the module start with nothing."""
    return _memories.setdefault(module, {})


def drop(module: nn.Module) -> bool:
    """Drops every tensor that is kept of ``module``; returns whether there was anything. Its patches stay."""
    kept = _memories.get(module, {})
    held = bool(kept)
    kept.clear()
    return held
