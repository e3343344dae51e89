"""Takes the bodies of a model's own helpers into the function that calls them, so that rules see through them.

``x, gate = self._modulate(self.norm(x), table)`` becomes the statements of ``_modulate`` with its variables renamed.
The guard checks at every call that the helper is still the function that was read.
"""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from diffkern.rewrite.facts import Facts
from diffkern.rewrite.match import rotates
from diffkern.rewrite.source import Source

#: Statements that a helper may consist of, before the one return at its end.
_STATEMENTS = (ast.Assign, ast.AnnAssign, ast.If, ast.Expr, ast.Return, ast.Raise, ast.Pass)
#: What the body of a helper must not hold: scopes of their own, and what would leave the caller.
_FORBIDDEN = (
    ast.Lambda,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
    ast.NamedExpr,
    ast.Await,
    ast.Yield,
)
#: Helpers in one function, helpers of helpers included.
_LIMIT = 16

#: Methods are known as ``self.name``, functions of the file by their name.
Helpers = dict[str, Callable[..., Any]]


def inline_helpers(
    tree: ast.FunctionDef, function: FunctionType, facts: Facts, only: set[str] | None = None
) -> Helpers:
    """Changes ``tree``, and returns the helpers that became part of it.

    Args:
        tree: The source of ``function``.
        function: Whose globals the helpers are looked up in.
        facts: Knows the class that methods are looked up on.
        only: The names of the helpers to take in; all by default.
    """
    inliner = _Inliner(function, facts, only)
    inliner.block(tree.body)
    return inliner.helpers


def inline_nested(tree: ast.FunctionDef) -> None:
    """Puts nested functions of a single value, which read variables around them, in the place of their calls.

    ``def rotated(x): y = self.norm(x); return rotate(y, table)`` becomes ``rotate(self.norm(x), table)``.
    """
    for function in [statement for statement in tree.body if isinstance(statement, ast.FunctionDef)]:
        value = _single_value(function)
        outer = {name for one in tree.body if one is not function for node in ast.walk(one) for name in _stored(node)}
        outer |= {argument.arg for argument in tree.args.args}
        own = {argument.arg for argument in function.args.args}
        if value is None or not outer - own & {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}:
            continue
        uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == function.name]
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.func in uses]
        bound = [_bound(call, function, is_method=False) for call in calls]
        scopes = [
            node for node in ast.walk(tree) if node is not tree and isinstance(node, (*_FORBIDDEN, ast.FunctionDef))
        ]
        if len(calls) != len(uses) or any(use in ast.walk(scope) for scope in scopes for use in uses):
            continue
        if any(arguments is None or not all(map(_is_load, arguments.values())) for arguments in bound):
            continue
        for call, arguments in zip(calls, bound, strict=True):
            assert arguments is not None
            _Swap(call, ast.copy_location(_Substitute(arguments).visit(copy.deepcopy(value)), call)).visit(tree)
        tree.body.remove(function)
    ast.fix_missing_locations(tree)


def _single_value(function: ast.FunctionDef) -> ast.expr | None:
    """What a function returns, as one expression; None if that would change the order of evaluation."""
    if function.decorator_list or not _has_plain_arguments(function):
        return None
    *rest, last = function.body
    value = last.value if isinstance(last, ast.Return) else None
    if value is None or any(
        isinstance(node, _FORBIDDEN) for statement in function.body for node in ast.walk(statement)
    ):
        return None
    for statement in reversed(rest):
        target = statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
        if not isinstance(target, ast.Name) or not _reads_first(value, target.id):
            return None
        value = _Substitute({target.id: statement.value}).visit(copy.deepcopy(value))  # type: ignore[attr-defined]
    return value


def _reads_first(value: ast.expr, name: str) -> bool:
    """Whether an expression reads a name once, before it evaluates anything but names and attributes."""
    if [node.id for node in ast.walk(value) if isinstance(node, ast.Name)].count(name) != 1:
        return False
    for child in ast.iter_child_nodes(value):
        if any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(child)):
            return isinstance(child, ast.Name) or (isinstance(child, ast.expr) and _reads_first(child, name))
        if isinstance(child, ast.expr) and not _is_load(child):
            return False
    return False


class _Substitute(ast.NodeTransformer):
    """Puts expressions in the place of variables."""

    def __init__(self, values: dict[str, ast.expr]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """The expression, or the name."""
        value = self._values.get(node.id)
        return node if value is None else ast.copy_location(copy.deepcopy(value), node)


def _stored(node: ast.AST) -> list[str]:
    return [node.id] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else []


def helper_of(node: ast.AST) -> str | None:
    """The helper that a node of the changed tree comes from."""
    return getattr(node, "_helper", None)


class _Inliner:
    def __init__(self, function: FunctionType, facts: Facts, only: set[str] | None) -> None:
        self._function, self._facts, self._only = function, facts, only
        self._bodies: dict[Callable[..., Any], ast.FunctionDef | None] = {}
        self._count = 0
        self.helpers: Helpers = {}

    def block(self, block: list[ast.stmt]) -> None:
        index = 0
        while index < len(block):
            statement = block[index]
            for name in ("body", "orelse", "finalbody"):
                if isinstance(statement, (ast.If, ast.For, ast.While, ast.With, ast.Try)):
                    self.block(getattr(statement, name, []))
            before = self._expanded(statement) if self._count < _LIMIT else None
            if before is None:
                index += 1
            else:
                block[index:index] = before  # and look again: helpers call helpers

    def _expanded(self, statement: ast.stmt) -> list[ast.stmt] | None:
        """The statements to put before one whose first helper call was taken out; None without such a call."""
        if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr)) or statement.value is None:
            return None
        for call in _movable_calls(statement.value):
            found = self._helper(call)
            if found is None:
                continue
            name, helper, is_method = found
            body = self._body(helper)
            arguments = None if body is None else _bound(call, body, is_method)
            if body is None or arguments is None:
                continue
            statements, result = self._renamed(body, arguments, name, call)
            if helper.__globals__ is not self._function.__globals__:  # lines of another file say nothing in this one
                for node in [node for one in (*statements, result) for node in ast.walk(one)]:
                    ast.copy_location(node, call)
            if statement.value is call:
                statement.value = result
            else:
                variable = f"_h{self._count}_return"
                statements.append(ast.copy_location(ast.Assign([ast.Name(variable, ast.Store())], result), call))
                _Swap(call, ast.copy_location(ast.Name(variable, ast.Load()), call)).visit(statement)
            self._count += 1
            self.helpers[name] = helper
            return [ast.fix_missing_locations(one) for one in statements]
        return None

    def _helper(self, call: ast.Call) -> tuple[str, FunctionType, bool] | None:
        """The name and the function that a call runs, if that is a helper of the same file or class."""
        callee, is_method = call.func, False
        if isinstance(callee, ast.Name):
            name, helper = callee.id, self._function.__globals__.get(callee.id)
            if rotates(name):
                return None  # which a rule takes as a whole
            if name in self._function.__code__.co_varnames or name in self._function.__code__.co_cellvars:
                return None
        elif isinstance(callee, ast.Attribute) and isinstance(callee.value, ast.Name):
            if callee.value.id != self._facts.receiver or self._facts.cls is None:
                return None
            name = f"self.{callee.attr}"
            helper = inspect.getattr_static(self._facts.cls, callee.attr, None)
            is_method = not isinstance(helper, staticmethod)
            helper = helper.__func__ if isinstance(helper, staticmethod) else helper
        else:
            return None
        if not isinstance(helper, FunctionType) or not _means_the_same(helper, self._function.__globals__):
            return None
        if helper.__closure__ or (self._only is not None and name not in self._only):
            return None
        return name, helper, is_method

    def _body(self, helper: FunctionType) -> ast.FunctionDef | None:
        if helper not in self._bodies:
            source = Source.of(helper)
            fits = isinstance(source, Source) and source.function is helper and _is_straight(source.tree)
            self._bodies[helper] = source.tree if fits else None  # type: ignore[union-attr]
        return self._bodies[helper]

    def _renamed(
        self, helper: ast.FunctionDef, arguments: dict[str, ast.expr], name: str, call: ast.Call
    ) -> tuple[list[ast.stmt], ast.expr]:
        names = {*arguments}
        names |= {
            node.id for node in ast.walk(helper) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        stored = {
            node.id for node in ast.walk(helper) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        # A parameter that stands for a variable is that variable: nothing in the helper binds the caller's names.
        same = {
            old: arguments.pop(old)
            for old in names - stored
            if isinstance(arguments.get(old), (ast.Name, ast.Constant))
        }
        mapping: dict[str, ast.expr] = {old: ast.Name(f"_h{self._count}_{old}", ast.Load()) for old in names}
        mapping.update(same)
        statements: list[ast.stmt] = [
            ast.copy_location(ast.Assign([ast.Name(f"_h{self._count}_{parameter}", ast.Store())], value), call)
            for parameter, value in arguments.items()
        ]
        copies: Any = [_Rename(mapping, name).visit(copy.deepcopy(one)) for one in helper.body]
        body: list[ast.stmt] = copies
        if ast.get_docstring(helper, clean=False) is not None:
            body = body[1:]
        *rest, last = body
        assert isinstance(last, ast.Return) and last.value is not None
        return [*statements, *rest], last.value


class _Rename(ast.NodeTransformer):
    def __init__(self, mapping: dict[str, ast.expr], helper: str) -> None:
        self._mapping, self._helper = mapping, helper

    def visit(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node, ast.Name) and node.id in self._mapping:
            value = copy.copy(self._mapping[node.id])
            if isinstance(value, ast.Name):
                value.ctx = node.ctx
            node = ast.copy_location(value, node)
        if isinstance(node, (ast.expr, ast.stmt)):
            node._helper = self._helper  # type: ignore[union-attr]
        return node


class _Swap(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self._new if node is self._old else self.generic_visit(node)


def _movable_calls(node: ast.expr) -> Iterator[ast.Call]:
    """The calls of an expression, innermost first, before which nothing but names and attributes is evaluated."""
    if isinstance(node, (ast.Lambda, ast.IfExp, ast.BoolOp, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        return
    for child in ast.iter_child_nodes(node):
        operand = child.value if isinstance(child, ast.keyword) else child
        if not isinstance(operand, ast.expr):
            continue
        yield from _movable_calls(operand)
        if not _is_load(operand):
            break
    if isinstance(node, ast.Call):
        yield node


def _is_load(node: ast.expr) -> bool:
    return all(isinstance(part, (ast.Name, ast.Attribute, ast.Constant, ast.expr_context)) for part in ast.walk(node))


def _means_the_same(helper: FunctionType, namespace: Mapping[str, Any]) -> bool:
    """Whether the body of a helper, of whatever file, means the same with the globals of another function."""
    if helper.__globals__ is namespace:
        return True
    names = [name for name in helper.__code__.co_names if name in helper.__globals__]
    values = [(helper.__globals__[name], namespace.get(name)) for name in names]
    return all(isinstance(value, ModuleType) and value is other for value, other in values)


def _is_straight(helper: ast.FunctionDef) -> bool:
    """Whether a function is a few statements with one return at the end, and computes something that a rule knows."""
    if not _has_plain_arguments(helper):
        return False
    nodes = list(ast.walk(helper))[1:]
    if any(isinstance(node, ast.stmt) and not isinstance(node, _STATEMENTS) for node in nodes):
        return False
    if any(isinstance(node, _FORBIDDEN) for node in nodes):
        return False
    returns = [node for node in nodes if isinstance(node, ast.Return)]
    if len(returns) != 1 or helper.body[-1] is not returns[0] or returns[0].value is None:
        return False
    return any(
        (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult))
        or (isinstance(node, ast.Attribute) and node.attr == "addcmul")
        for node in nodes
    )


def _has_plain_arguments(function: ast.FunctionDef) -> bool:
    arguments = function.args
    return not (arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.posonlyargs)


def _bound(call: ast.Call, helper: ast.FunctionDef, is_method: bool) -> dict[str, ast.expr] | None:
    """The arguments of a call by parameter, in the order of evaluation; None if they cannot be told apart."""
    names = [argument.arg for argument in helper.args.args]
    if any(isinstance(value, ast.Starred) for value in call.args) or any(word.arg is None for word in call.keywords):
        return None
    bound: dict[str, ast.expr] = {}
    if is_method:
        assert isinstance(call.func, ast.Attribute)
        bound[names[0]] = call.func.value
    positional = names[len(bound) :]
    if len(call.args) > len(positional):
        return None
    bound.update(zip(positional, call.args, strict=False))
    for word in call.keywords:
        assert word.arg is not None
        if word.arg in bound or word.arg not in names:
            return None
        bound[word.arg] = word.value
    defaults = dict(zip(reversed(names), reversed(helper.args.defaults), strict=False))
    for name in names:
        if name not in bound:
            if not isinstance(defaults.get(name), ast.Constant):
                return None
            bound[name] = copy.deepcopy(defaults[name])
    return bound
