"""Branches of ComfyUI's models that other nodes switch on in a call: without them rules see one straight line."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from diffkern.rewrite.syntax import arguments_of, names_in
from diffkern.rewrite.template import Template
from diffkern.rewrite.variants import tidy_blocks

#: ComfyUI's flag for plain torch ops in the place of kernels without gradients.
_TRAINING = "comfy.model_management.in_training"
_HAS_KEY, _GETS = Template("_key in _name"), Template("_argument.get(_, {})")


def drop_options(tree: ast.FunctionDef) -> list[str]:
    """Drops branches that run if a dictionary among the arguments has a key; returns the tests, to be made at entry.

    ComfyUI's models run what other nodes put into ``transformer_options["patches"]`` between two statements that are
    one op. Without a patch the two stand one after the other; with one the stock forward runs.
    """
    branches = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    found = {node: test for node in branches if (test := _option(tree, node.test)) is not None}
    if not found:
        return []
    dropper = _DropOptions(found)
    dropper.visit(tree)
    _drop_unread(tree, dropper.read)
    tidy_blocks(tree)
    return list(dict.fromkeys(dropper.tests))


class _DropOptions(ast.NodeTransformer):
    def __init__(self, found: Mapping[ast.If, str]) -> None:
        self._found = found
        self.tests: list[str] = []
        #: The variables that dropped branches read.
        self.read: set[str] = set()

    def visit_If(self, node: ast.If) -> Any:
        """What runs without the option."""
        if node not in self._found:
            return self.generic_visit(node)
        self.tests.append(self._found[node])
        self.read |= names_in(node)
        return [self.visit(statement) for statement in node.orelse]


def _drop_unread(tree: ast.FunctionDef, names: set[str]) -> None:
    """Drops ``name["key"] = value`` where nothing reads the variable any longer, and it is a copy made here."""
    nodes = list(ast.walk(tree))
    stores = {
        statement.targets[0].value: statement
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Subscript)
        and isinstance(statement.targets[0].value, ast.Name)
        and not any(isinstance(node, ast.Call) for node in ast.walk(statement))
    }
    for name in names:
        loads = [n for n in nodes if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)]
        bound = [s for s in tree.body if isinstance(s, ast.Assign) and ast.unparse(s.targets[0]) == name]
        is_copy = len(bound) == 1 and ast.unparse(bound[0].value).endswith(".copy()")
        if is_copy and loads and all(load in stores for load in loads):
            for load in loads:
                tree.body.remove(stores[load])


def _option(tree: ast.FunctionDef, test: ast.expr) -> str | None:
    """The test to be made at entry, which says what it finds, for the test of a branch to drop; None for others.

    ``"key" in name`` becomes one of arguments alone, where ``name = argument.get("...", {})`` is bound once.
    """
    if isinstance(test, ast.Attribute) and ast.unparse(test) == _TRAINING:
        return f"{_TRAINING} and 'ComfyUI is training'"
    blanks, _ = _HAS_KEY.fill(None, test) or ({}, None)
    key, name = blanks.get("_key"), blanks.get("_name")
    if not isinstance(key, ast.Constant) or not isinstance(name, ast.Name):
        return None
    stores = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    bound = [one for one in tree.body if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == name.id]
    if len(bound) != 1 or [node.id for node in stores].count(name.id) != 1:
        return None
    call = bound[0].value
    blanks, _ = _GETS.fill(None, call) or ({}, None)
    argument = blanks.get("_argument")
    arguments = {*arguments_of(tree)}
    if not isinstance(argument, ast.Name) or argument.id not in arguments - {node.id for node in stores}:
        return None
    return f"{ast.unparse(key)} in {ast.unparse(call)} and 'another node patches what it computes'"
