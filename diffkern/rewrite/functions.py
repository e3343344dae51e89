"""The functions that a source calls by name: where it finds them, and which others they call.

A site computes in the place of some of them, so the guard checks that they are still the ones that were read, and
those of a library must be its own: another one may do more than it returns, or return something else later.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable, Mapping
from importlib.util import resolve_name
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from diffkern.matching.genuine import in_library, replaced_function


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
