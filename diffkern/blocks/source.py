"""What a forward says, apart from how it is laid out: for classes that copy one another word for word."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def body(function: Callable[..., Any]) -> str | None:
    """Returns the statements of a function as text, without docstring, comments and annotations.

    The first parameter after ``self``, if it is a method, is called ``x``.

    Args:
        function: A Python function, not decorated.

    Returns:
        The text, or None if there is no source.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    if not isinstance(tree, ast.FunctionDef):
        return None
    return _text(tree)


def normalised(source: str) -> str:
    """Returns the body of a function that is given as text, as :func:`body` does."""
    tree = ast.parse(textwrap.dedent(source)).body[0]
    assert isinstance(tree, ast.FunctionDef)
    return _text(tree)


def _text(tree: ast.FunctionDef) -> str:
    names = [argument.arg for argument in tree.args.args]
    renamed = names[1] if names[:1] == ["self"] and len(names) > 1 else ""
    statements = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    return "\n".join(ast.unparse(_Plain(renamed).visit(statement)) for statement in statements)


@cache
def calls(function: Callable[..., Any], name: str) -> list[ast.Call]:
    """Returns the calls of the function called ``name`` in the source of ``function``."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return []
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in found if isinstance(call.func, ast.Name) and call.func.id == name]


class _Plain(ast.NodeTransformer):
    """Drops annotations, and renames one variable to ``x``."""

    def __init__(self, renamed: str) -> None:
        self.renamed = renamed

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        if node.value is None:
            return node
        return ast.copy_location(ast.Assign([node.target], node.value, lineno=node.lineno), node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name("x", node.ctx) if node.id == self.renamed else node
