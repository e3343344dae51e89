"""Attention processors: the forward of an attention module runs the rewritten ``__call__`` of its processor.

The processor stays the object that it is. Wherever the forward calls ``self.processor(...)``, it asks a :class:`Route`
what to call: the rewritten function while class and ``__call__`` of the processor are those that were read, otherwise
the processor itself.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from diffkern.rewrite.guard import Guard
from diffkern.rewrite.source import Source
from diffkern.rewrite.twins import put_twins, twins_in

#: The name of the route in rewritten forwards.
ROUTE = "_route"

_ROUTED: WeakKeyDictionary[Callable[..., Any], tuple[CodeType, dict[str, Any]] | str] = WeakKeyDictionary()


class Route:
    """What an attention module calls as its processor.

    Args:
        cls: The class of the processor that was read.
        call: Its ``__call__``.
        rewritten: What runs instead.
        guard: Of the sites in it.
    """

    def __init__(self, cls: type, call: Callable[..., Any], rewritten: Callable[..., Any], guard: Guard) -> None:
        self._cls, self._call, self._rewritten, self._guard = cls, call, rewritten, guard

    def __call__(self, module: nn.Module, processor: Any) -> Callable[..., Any]:
        """Returns what to call in the place of a processor."""
        if type(processor) is self._cls and self._cls.__call__ is self._call:
            return partial(self._rewritten, processor)
        if self._guard.observer is not None and not torch.compiler.is_compiling():
            self._guard.observer(module, "its processor is another than when it was patched")
        called: Callable[..., Any] = processor
        return called


def routed(forward: Callable[..., Any]) -> tuple[CodeType, dict[str, Any]] | str:
    """Returns the code of a forward that asks :data:`ROUTE` for its processor, or why there is none.

    Beside it stand the twins that it calls, see :mod:`~diffkern.rewrite.twins`.
    """
    if forward not in _ROUTED:
        source = Source.of(forward)
        _ROUTED[forward] = source if isinstance(source, str) else _routed(source)
    return _ROUTED[forward]


def _routed(source: Source) -> tuple[CodeType, dict[str, Any]] | str:
    receiver, found = source.tree.args.args[0].arg, False
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"{receiver}.processor":
            route = ast.Call(ast.Name(ROUTE, ast.Load()), [ast.Name(receiver, ast.Load()), node.func], [])
            node.func, found = ast.copy_location(route, node.func), True
    if not found:
        return "it calls no processor"
    names = put_twins(source.tree, source.function)
    return source.code(ast.fix_missing_locations(source.tree), [ROUTE, *names]), twins_in(source.function)
