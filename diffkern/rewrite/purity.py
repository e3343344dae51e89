"""Which functions of a model's files only read their arguments, and of which arguments only the shape."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch

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
