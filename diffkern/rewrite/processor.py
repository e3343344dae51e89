"""Attention processors: the forward of an attention module runs the rewritten ``__call__`` of its processor.

The processor stays the object that it is. Wherever the forward calls ``self.processor(...)``, it asks a :class:`Route`
what to call: the rewritten function while class and ``__call__`` of the processor are those that were read, otherwise
the processor itself.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from diffkern.rewrite.guard import Guard
from diffkern.rewrite.source import Source, recompile

#: The names of the route and of :func:`signature` in rewritten forwards.
ROUTE, SIGNATURE = "_route", "_signature"

_SIGNATURES: WeakKeyDictionary[FunctionType, inspect.Signature] = WeakKeyDictionary()
_CODES: WeakKeyDictionary[Callable[..., Any], CodeType | str] = WeakKeyDictionary()
_ASKING_ONCE: WeakKeyDictionary[Callable[..., Any], FunctionType | None] = WeakKeyDictionary()


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


def asking_once(forward: Callable[..., Any]) -> FunctionType | None:
    """A forward that asks once for the signature of its processor; None if it does not ask for that, or has no source.

    It calls the processor as it is, and computes what the forward computes.
    """
    if forward not in _ASKING_ONCE:
        code = routed(forward)
        asks = not isinstance(code, str) and SIGNATURE in code.co_freevars
        names = {ROUTE: lambda module, processor: processor, SIGNATURE: signature}
        _ASKING_ONCE[forward] = recompile(forward, code, names) if asks else None  # type: ignore[arg-type]
    return _ASKING_ONCE[forward]


def signature(method: Any) -> inspect.Signature:
    """``inspect.signature(method)``, asked once for each function: that takes 20 us, and forwards ask at every call."""
    function = method.__func__ if type(method) is MethodType else None
    # What is in its dictionary, such as another signature or what it wraps, may change.
    if type(function) is not FunctionType or function.__dict__ or torch.compiler.is_compiling():
        return inspect.signature(method)
    found = _SIGNATURES.get(function)
    if found is None:
        found = _SIGNATURES[function] = inspect.signature(method)
    return found


def routed(forward: Callable[..., Any]) -> CodeType | str:
    """Returns the code of a forward that asks :data:`ROUTE` for its processor, or why there is none."""
    if forward not in _CODES:
        source = Source.of(forward)
        _CODES[forward] = source if isinstance(source, str) else _routed(source)
    return _CODES[forward]


def _routed(source: Source) -> CodeType | str:
    receiver, found = source.tree.args.args[0].arg, False
    of_python = source.function.__globals__.get("inspect") is inspect
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called == "inspect.signature" and of_python and len(node.args) == 1 and not node.keywords:
            node.func = ast.copy_location(ast.Name(SIGNATURE, ast.Load()), node.func)
        elif called == f"{receiver}.processor":
            route = ast.Call(ast.Name(ROUTE, ast.Load()), [ast.Name(receiver, ast.Load()), node.func], [])
            node.func, found = ast.copy_location(route, node.func), True
    if not found:
        return "it calls no processor"
    return source.code(ast.fix_missing_locations(source.tree), [ROUTE, SIGNATURE])
