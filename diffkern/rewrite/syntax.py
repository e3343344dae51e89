"""What several readers and writers of syntax trees need."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Iterator, Mapping


def nodes_in(trees: Iterable[ast.AST]) -> list[ast.AST]:
    """All nodes of some trees."""
    return [node for tree in trees for node in ast.walk(tree)]


def names_in(*trees: ast.AST) -> set[str]:
    """The variables that trees name."""
    return {node.id for node in nodes_in(trees) if isinstance(node, ast.Name)}


def stored_by(node: ast.AST) -> list[str]:
    """The variable that a node binds, if it is one."""
    return [node.id] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else []


def stored_in(*trees: ast.AST) -> set[str]:
    """The variables that trees bind."""
    return {name for node in nodes_in(trees) for name in stored_by(node)}


def arguments_of(tree: ast.FunctionDef, with_any_number: bool = False) -> list[str]:
    """The arguments of a function, with those that take any number of values or without."""
    one = [*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs]
    many = [argument for argument in (tree.args.vararg, tree.args.kwarg) if argument is not None]
    return [argument.arg for argument in (*one, *(many if with_any_number else ()))]


def only_argument(call: ast.AST) -> ast.expr | None:
    """The argument of a call that has one, by its position; None for any other expression."""
    if not isinstance(call, ast.Call) or len(call.args) != 1 or call.keywords or isinstance(call.args[0], ast.Starred):
        return None
    return call.args[0]


def path_of(node: ast.expr, receiver: str) -> tuple[str, ...] | None:
    """The attributes that lead from a variable to an expression; None for other expressions."""
    if isinstance(node, ast.Attribute):
        base = path_of(node.value, receiver)
        return None if base is None else (*base, node.attr)
    return () if isinstance(node, ast.Name) and node.id == receiver else None


def root_of(node: ast.expr, through: tuple[type, ...] = (ast.Attribute, ast.Subscript)) -> ast.expr:
    """What an expression reads attributes, or elements, of."""
    while isinstance(node, through):
        node = node.value  # type: ignore[attr-defined]
    return node


def only_target(statement: ast.AST | None) -> ast.expr | None:
    """The target of an assignment that has one; None for other statements."""
    return statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None


def body_start(tree: ast.FunctionDef) -> int:
    """The number of the first statement of a function behind its docstring."""
    return 0 if ast.get_docstring(tree, clean=False) is None else 1


def blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements in a function or a statement, each before those inside of it; not nested functions."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block
            for statement in list(block):
                if not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                    yield from blocks(statement)


def statements_of(text: str, like: ast.AST) -> list[ast.stmt]:
    """The statements of a text, with the line and column of something else."""
    made = ast.parse(text).body
    for node in nodes_in(made):
        if "lineno" in node._attributes:
            ast.copy_location(node, like)
    return made


def separated(statement: ast.stmt, value: ast.expr | None = None) -> list[ast.Assign]:
    """``a, b = x, y`` as two statements, maybe with another value; nothing for others, or if ``y`` reads ``a``."""
    target, value = only_target(statement), value or getattr(statement, "value", None)
    if not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple) or len(target.elts) != len(value.elts):
        return []
    names = [element.id for element in target.elts if isinstance(element, ast.Name)]
    if len(names) != len(target.elts) or any(one in names_in(*value.elts[i + 1 :]) for i, one in enumerate(names)):
        return []
    pairs = zip(target.elts, value.elts, strict=True)
    return [ast.copy_location(ast.Assign([element], part), statement) for element, part in pairs]


class Swap(ast.NodeTransformer):
    """Puts one node in the place of another."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        """The other node, or the node with what is in it."""
        return self._new if node is self._old else self.generic_visit(node)


class Substitute(ast.NodeTransformer):
    """Puts expressions in the place of variables."""

    def __init__(self, values: Mapping[str, ast.expr]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """The expression, or the name."""
        value = self._values.get(node.id)
        return node if value is None else ast.copy_location(copy.deepcopy(value), node)
