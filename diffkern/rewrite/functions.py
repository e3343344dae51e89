"""The functions that a source calls by name: where it finds them, what they call, and which only read their arguments.

A site computes in the place of some of them, so the guard checks that they are still the ones that were read, and
those of a library must be its own: another one may do more than it returns, or return something else later.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import sys
from collections.abc import Iterable, Mapping
from importlib.util import resolve_name
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from diffkern.matching.genuine import in_library, replaced_function
from diffkern.rewrite.effects import BUILTINS, METADATA
from diffkern.rewrite.source import Source
from diffkern.rewrite.syntax import nodes_in, stored_in

#: How deep functions that call functions are looked into.
_DEPTH = 3
_STATEMENTS = (ast.Assign, ast.AnnAssign, ast.If, ast.Return, ast.Raise, ast.Pass, ast.Expr)
_FORBIDDEN = (ast.Lambda, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.Starred)
#: Methods of tensors that tell about their shape.
_SHAPES = frozenset({"size", "dim", "numel", "is_contiguous"})
#: What was found, by function.
_KNOWN: WeakKeyDictionary[FunctionType, tuple[bool, frozenset[int]]] = WeakKeyDictionary()


def global_at(namespace: Mapping[str, Any], name: str) -> Any:
    """What a name means, dots in it where it belongs to a module; None if it means nothing.

    ``"package.module:name"`` is what ``from package.module import name`` finds.
    """
    module, colon, imported = name.rpartition(":")
    if colon:
        return getattr(sys.modules.get(module), imported, None)
    first, *rest = name.split(".")
    value = namespace.get(first)
    for attribute in rest:
        value = value.__dict__.get(attribute) if isinstance(value, ModuleType) else None
    return value


def functions_called(region: ast.FunctionDef, namespace: Mapping[str, Any]) -> tuple[str, ...]:
    """The functions that a region calls by name, as :func:`global_at` finds them."""
    imports = [statement for statement in ast.walk(region) if isinstance(statement, ast.ImportFrom)]
    imported = {
        alias.asname or alias.name: f"{_module_of(statement, namespace)}:{alias.name}"
        for statement in imports
        for alias in statement.names
    }
    calls = [node for node in ast.walk(region) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    seen: tuple[str, ...] = ()
    for name in dict.fromkeys([str(call.func.id) for call in calls]):  # type: ignore[attr-defined]
        seen = read_by(imported.get(name, name), namespace, seen)
    return seen


def _module_of(statement: ast.ImportFrom, namespace: Mapping[str, Any]) -> str:
    name = f"{'.' * statement.level}{statement.module or ''}"
    return resolve_name(name, namespace["__package__"]) if statement.level else name


def read_by(name: str, namespace: Mapping[str, Any], seen: tuple[str, ...] = ()) -> tuple[str, ...]:
    """A function, and those of its file that it calls; of another callable, which can be put there, its name."""
    found = global_at(namespace, name)
    if name in seen or not _is_function(found):
        return seen
    seen, function = (*seen, name), inspect.unwrap(found)
    if not isinstance(function, FunctionType):
        return seen
    file = name.rpartition(":")[0]
    for called in function.__code__.co_names:
        if _is_function(function.__globals__.get(called)) and (file or function.__globals__ is namespace):
            seen = read_by(f"{file}:{called}" if file else called, namespace, seen)
    return seen


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


def put_in_place(names: Iterable[str], namespace: Mapping[str, Any]) -> str | None:
    """Says which of some functions of a library's file is another one than that of the library; None if all are its."""
    for name in names:
        file, _, own = name.rpartition(":")
        function = global_at(namespace, name)
        if isinstance(function, BuiltinFunctionType) or in_library(type(function)):  # of torch, or of its compiler
            continue
        other = replaced_function((function,), file or str(namespace.get("__name__")))
        if other is not None:
            return f"the function {own} was replaced by {other}"
    return None


def is_pure(function: object) -> bool:
    """Whether a function is a few statements that bind local names and call what leaves its arguments alone."""
    return _read(function, _DEPTH)[0]


def shape_arguments(function: object) -> frozenset[int]:
    """The positions of the arguments of which a function reads no data."""
    return _read(function, _DEPTH)[1]


def _read(function: object, depth: int) -> tuple[bool, frozenset[int]]:
    if not isinstance(function, FunctionType) or function.__closure__ or depth == 0:
        return False, frozenset()
    if function not in _KNOWN:
        source = Source.of(function)
        tree = source.tree if isinstance(source, Source) and source.function is function else None
        known = tree is not None and _is_pure(tree, function, depth)
        _KNOWN[function] = known, _shape_arguments(tree) if known and tree is not None else frozenset()
    return _KNOWN[function]


def _is_pure(tree: ast.FunctionDef, function: FunctionType, depth: int) -> bool:
    for node in nodes_in(tree.body):
        if isinstance(node, ast.stmt) and not isinstance(node, _STATEMENTS):
            return False
        if isinstance(node, _FORBIDDEN):
            return False
        if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            return False
        if isinstance(node, ast.Call) and not _calls_pure(node, function.__globals__, tree, depth):
            return False
    return True


def _shape_arguments(tree: ast.FunctionDef) -> frozenset[int]:
    parents = {child: node for node in nodes_in(tree.body) for child in ast.iter_child_nodes(node)}
    found = set()
    for position, argument in enumerate(tree.args.args):
        uses = [node for node in nodes_in(tree.body) if isinstance(node, ast.Name) and node.id == argument.arg]
        if uses and all(_reads_shape(parents.get(use), parents) for use in uses):
            found.add(position)
    return frozenset(found)


def _reads_shape(node: ast.AST | None, parents: Mapping[ast.AST, ast.AST]) -> bool:
    if not isinstance(node, ast.Attribute):
        return False
    call = parents.get(node)
    is_called = isinstance(call, ast.Call) and call.func is node
    return (node.attr in METADATA and not is_called) or (node.attr in _SHAPES and is_called)


def _calls_pure(call: ast.Call, namespace: Mapping[str, Any], tree: ast.FunctionDef, depth: int) -> bool:
    if any(keyword.arg in (None, "out", "inplace") for keyword in call.keywords):
        return False
    function = call.func
    local = {argument.arg for argument in tree.args.args}
    local |= stored_in(*tree.body)
    if isinstance(function, ast.Name):
        if function.id in local:
            return False
        if function.id in namespace:
            return _read(namespace[function.id], depth - 1)[0]
        return function.id in BUILTINS and hasattr(builtins, function.id)
    if not isinstance(function, ast.Attribute) or function.attr.endswith("_"):
        return False
    base = function.value
    if isinstance(base, ast.Name) and base.id not in local and isinstance(namespace.get(base.id), ModuleType):
        return namespace[base.id] is torch
    return hasattr(torch.Tensor, function.attr)
