"""Where a forward modulates what a norm gives, as its source has it."""

from __future__ import annotations

import ast
from typing import NamedTuple

from diffkern.blocks.weave import INSIDE

#: Methods of tensors that change nothing.
_VIEWS = {"unsqueeze", "squeeze", "view", "reshape", "to"}


class ModulatedSource(NamedTuple):
    """What was found in a forward.

    Attributes:
        norms: The names of the norms.
        wide: Whether all is computed in float32, and the result cast back.
    """

    norms: tuple[str, ...]
    wide: bool


def take_out(tree: ast.FunctionDef) -> ModulatedSource | None:
    """Puts calls of :data:`INSIDE` in the place of modulated norms: ``INSIDE(norm, x, scale, shift)``.

    Args:
        tree: The forward; it is changed.

    Returns:
        What was found; None for nothing, or for norms that are not computed alike.
    """
    rewriter = _Rewriter()
    tree.body = rewriter.rewritten(tree.body)
    if len(set(rewriter.wide)) != 1:
        return None
    return ModulatedSource(tuple(dict.fromkeys(rewriter.norms)), rewriter.wide[0])


class _Modulation(NamedTuple):
    """``base * (1 + scale) + shift``."""

    base: ast.expr
    scale: ast.expr
    shift: ast.expr


class _Rewriter(ast.NodeTransformer):
    """Puts calls of :data:`INSIDE` in the place of modulated norms.

    Attributes:
        norms: The names of the norms.
        wide: Of each, whether it is computed in float32 and cast back.
    """

    def __init__(self) -> None:
        self.norms: list[str] = []
        self.wide: list[bool] = []

    def rewritten(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """The same statements but for what is fused; branches and loops, whose insides may not run, as they are."""
        done: list[ast.stmt] = []
        for statement in statements:
            joined = self._joined(done[-1], statement) if done else None
            if joined is not None:
                done[-1] = joined
            elif isinstance(statement, (ast.Assign, ast.Return)):
                done.append(self.visit(statement))
            else:
                done.append(statement)
        return done

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """An expression that is cast back."""
        found = _modulation(node.func.value) if _is_method(node, "type_as") else None  # type: ignore[attr-defined]
        normed = None if found is None else _normed(found.base)
        if found is not None and normed is not None and len(node.args) == 1 and not node.keywords:
            norm, x = normed
            if _is_method(x, "float") and not x.args and isinstance(x.func.value, ast.Name):  # type: ignore[attr-defined]
                like = x.func.value  # type: ignore[attr-defined]
                if _is_name(node.args[0], like.id):
                    return self._call(norm, like, found, node, wide=True)
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """An expression that is all of it."""
        self.generic_visit(node)
        found = _modulation(node)
        normed = None if found is None else _normed(found.base)
        if found is None or normed is None:
            return node
        return self._call(*normed, found, node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        """Nothing in it: what is in there may not run."""
        return node

    visit_Lambda = visit_BoolOp = visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_IfExp  # type: ignore[assignment]

    def _joined(self, first: ast.stmt, second: ast.stmt) -> ast.stmt | None:
        """``y = norm(x)`` and ``y = y * (1 + scale) + shift`` as one statement, or None if they are not that."""
        name = _target(first)
        if name is None or name != _target(second):
            return None
        assert isinstance(first, ast.Assign) and isinstance(second, ast.Assign)
        normed, found = _normed(first.value), _modulation(second.value)
        if normed is None or found is None or not _is_name(found.base, name):
            return None
        if any(_is_name(node, name) for part in (found.scale, found.shift) for node in ast.walk(part)):
            return None
        return ast.copy_location(ast.Assign(second.targets, self._call(*normed, found, second.value)), second)

    def _call(
        self, norm: ast.Attribute, x: ast.expr, found: _Modulation, place: ast.AST, wide: bool = False
    ) -> ast.Call:
        self.norms.append(norm.attr)
        self.wide.append(wide)
        call = ast.Call(ast.Name(INSIDE, ast.Load()), [norm, x, found.scale, found.shift], [])
        return ast.copy_location(call, place)


def _modulation(node: ast.expr) -> _Modulation | None:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
        return None
    product = node.left
    if not isinstance(product, ast.BinOp) or not isinstance(product.op, ast.Mult):
        return None
    for base, factor in ((product.left, product.right), (product.right, product.left)):
        scale = _more_than_one(factor)
        if scale is not None and _is_quiet(scale) and _is_quiet(node.right):
            return _Modulation(base, scale, node.right)
    return None


def _more_than_one(factor: ast.expr) -> ast.expr | None:
    """The scale of ``1 + scale``, or of parts and views of that."""
    if isinstance(factor, ast.Subscript):
        scale = _more_than_one(factor.value)
        return None if scale is None else ast.copy_location(ast.Subscript(scale, factor.slice, ast.Load()), factor)
    if isinstance(factor, ast.BinOp) and isinstance(factor.op, ast.Add):
        one = factor.left
        if isinstance(one, ast.Constant) and type(one.value) is int and one.value == 1:
            return factor.right
    return None


def _is_quiet(node: ast.expr) -> bool:
    """Whether an expression may be evaluated before the norm instead of after it: it calls nothing but views."""
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and not (isinstance(part.func, ast.Attribute) and part.func.attr in _VIEWS):
            return False
        if isinstance(part, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)):
            return False
    return True


def _normed(node: ast.expr) -> tuple[ast.Attribute, ast.expr] | None:
    """The norm, and what it is called with, if that is ``self.norm(x)``."""
    if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
        return None
    norm = node.func
    return (norm, node.args[0]) if isinstance(norm, ast.Attribute) and _is_name(norm.value, "self") else None


def _target(statement: ast.stmt) -> str | None:
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target = statement.targets[0]
    return target.id if isinstance(target, ast.Name) else None


def _is_method(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
