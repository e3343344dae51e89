"""Shapes over def-use: what a rule looks for, whatever way it is spelled.

A shape matches an expression through single definitions, casts, and, on operands that broadcast, views. Sums and
products match in either order. What a shape does not look into is an operand, which stays as it is written.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import TYPE_CHECKING, Any, Protocol

from diffkern.rewrite.expressions import (
    ANY_ACTIVATION,
    activation,
    function_norm,
    is_addcmul,
    is_cast,
    is_number,
    is_per_channel,
    is_view,
    norm_call,
    rotates,
)
from diffkern.rewrite.facts import LAST_DIM, Facts
from diffkern.rewrite.flow import Definition, Flow
from diffkern.rewrite.functions import read_by

if TYPE_CHECKING:
    from diffkern.rewrite.plan import SitePlan

#: Methods that write into a tensor, and return it.
_WRITES = frozenset({"add_", "mul_", "addcmul_"})


@dataclass(frozen=True, eq=False)
class Operand:
    """An operand of a match: an expression of the source, with the views to take of its value, innermost first."""

    node: ast.expr
    views: tuple[ast.expr, ...] = ()


@dataclass(frozen=True, eq=False)
class Match:
    """How a shape was found.

    Attributes:
        operands: Operands by their names in the rule.
        modules: Callees that the op computes in the place of, by their names in the rule.
        options: Further findings: activations, the offset of a scale.
        passed: Loads that were looked through, with their definitions.
        steps: The nodes that the op computes.
        kept: The definition whose value the op gives, too, if it is used elsewhere.
        functions: Global functions that the op computes in the place of.
    """

    operands: Mapping[str, Operand] = field(default_factory=dict)
    modules: Mapping[str, ast.expr] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    passed: tuple[tuple[ast.Name, Definition], ...] = ()
    steps: tuple[ast.expr, ...] = ()
    kept: Definition | None = None
    functions: tuple[str, ...] = ()

    def step(self, node: ast.expr) -> Match:
        """The match with one more node that the op computes."""
        return replace(self, steps=(*self.steps, node))


@dataclass(frozen=True)
class Scope:
    """What shapes ask: def-use of the function, what is known about its modules, its globals, and the sites so far."""

    flow: Flow
    facts: Facts
    namespace: Mapping[str, Any] = field(default_factory=dict)
    sites: Sequence[SitePlan] = ()


class Shape(Protocol):
    """A pattern over expressions."""

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """Yields the ways in which ``node`` has this shape, each as an extension of ``match``."""


def through_definitions(scope: Scope, node: ast.expr, match: Match) -> tuple[ast.expr, Match]:
    """Goes through single definitions, of which the match has each."""
    while isinstance(node, ast.Name) and (definition := scope.flow.single(node)) is not None:
        assert definition.value is not None
        match, node = replace(match, passed=(*match.passed, (node, definition))), definition.value
    return node, match


def peel(scope: Scope, node: ast.expr, match: Match, keep: bool = False) -> tuple[ast.expr, Match]:
    """Goes through casts and single definitions; with ``keep`` the first of those is marked as kept."""
    while True:
        if is_cast(node):
            match, node = match.step(node), node.func.value  # type: ignore[attr-defined]
            continue
        definition = scope.flow.single(node)
        if definition is None or not isinstance(node, ast.Name):
            return node, match
        assert definition.value is not None
        match = replace(match, passed=(*match.passed, (node, definition)))
        if keep and match.kept is None:
            match = replace(match, kept=definition)
        node = definition.value


@dataclass(frozen=True)
class Leaf:
    """Any expression that may be a tensor. Its casts belong to the match."""

    name: str

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`Shape`."""
        while is_cast(node):
            match, node = match.step(node), node.func.value  # type: ignore[attr-defined]
        if not is_number(scope.flow, node):
            yield replace(match, operands={**match.operands, self.name: Operand(node)})


@dataclass(frozen=True)
class Sum:
    """``a + b`` in either order, or ``torch.addcmul(a, x, y)`` where ``b`` is a product."""

    a: Shape
    b: Shape

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`Shape`."""
        node, match = peel(scope, node, match)
        yield from _binary(ast.Add, "add_", self.a, self.b, scope, node, match)
        if is_addcmul(scope.flow, node):
            match = match.step(node)
            term, x, y = node.args  # type: ignore[attr-defined]
            for one, other in ((self.a, self.b), (self.b, self.a)):
                for found in one.match(scope, term, match):
                    yield from _product_of(other, x, y, scope, found)


@dataclass(frozen=True)
class Product:
    """``a * b`` in either order."""

    a: Shape
    b: Shape

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`Shape`."""
        node, match = peel(scope, node, match)
        yield from _binary(ast.Mult, "mul_", self.a, self.b, scope, node, match)
        factor = next((one for one in getattr(self.b, "shapes", (self.b,)) if isinstance(one, OnePlus)), None)
        if factor is None:
            return
        if _is_method(node, "addcmul_", 2) and _is_new(scope, node):
            term, factors = node.func.value, node.args  # type: ignore[attr-defined]
        elif is_addcmul(scope.flow, node):
            term, *factors = node.args  # type: ignore[attr-defined]
        else:
            return
        for x, scale in (factors, factors[::-1]):  # x + x * scale
            definition = scope.flow.single(term)
            if definition is not None and definition is scope.flow.single(x):
                step = replace(match.step(node), passed=(*match.passed, (term, definition)))
                for found in self.a.match(scope, x, step):
                    yield from factor.plus_one(scope, scale, found)


def _binary(
    operator: type[ast.operator], method: str, a: Shape, b: Shape, scope: Scope, node: ast.expr, match: Match
) -> Iterator[Match]:
    """Yields the ways in which ``x + y``, or ``x.add_(y)`` where nothing else has its ``x``, is ``a`` and ``b``."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, operator):
        yield from _in_either_order(a, b, node.left, node.right, scope, match.step(node))
    elif _is_method(node, method, 1) and _is_new(scope, node):
        for found in a.match(scope, node.func.value, match.step(node)):  # type: ignore[attr-defined]
            yield from b.match(scope, node.args[0], found)  # type: ignore[attr-defined]


def _in_either_order(a: Shape, b: Shape, x: ast.expr, y: ast.expr, scope: Scope, match: Match) -> Iterator[Match]:
    for first, second in ((x, y), (y, x)):
        for found in a.match(scope, first, match):
            yield from b.match(scope, second, found)


def _is_method(node: ast.expr, name: str, count: int) -> bool:
    """Whether an expression is ``x.name(...)`` with so many arguments."""
    function = node.func if isinstance(node, ast.Call) and len(node.args) == count and not node.keywords else None
    return isinstance(function, ast.Attribute) and function.attr == name


def _is_new(scope: Scope, node: ast.expr) -> bool:
    """Whether an expression gives a tensor of its own: arithmetic, or a norm, and what writes into such a one."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _WRITES:
        base, inside = node.func.value, set(ast.walk(node))
        definition = scope.flow.single(base)
        if definition is not None and definition.value is not None and inside.issuperset(definition.uses):
            base = definition.value
        return _is_new(scope, base)
    if isinstance(node, ast.BinOp) or is_addcmul(scope.flow, node) or function_norm(scope, node) is not None:
        return True
    return norm_call(scope, node, LAST_DIM) is not None


def _product_of(shape: Shape, x: ast.expr, y: ast.expr, scope: Scope, match: Match) -> Iterator[Match]:
    """Yields the ways in which ``x * y``, which is not written so, has a shape."""
    if isinstance(shape, Either):
        for one in shape.shapes:
            yield from _product_of(one, x, y, scope, match)
    elif isinstance(shape, Product):
        yield from _in_either_order(shape.a, shape.b, x, y, scope, match)


@dataclass(frozen=True)
class AddedInPlace:
    """What ``residual += ...`` adds, which is written into the residual."""

    added: Shape

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`Shape`."""
        statement = scope.flow.statement.get(node)
        if not isinstance(statement, ast.AugAssign) or not isinstance(statement.op, ast.Add):
            return
        residual = scope.flow.augmented.get(statement)
        if residual is not None and statement.value is node:
            match = replace(match, operands={"residual": Operand(residual)}, options={"in_place": True})
            yield from self.added.match(scope, node, match)


@dataclass(frozen=True)
class OnePlus:
    """``1 + leaf``, and views of that."""

    name: str

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`Shape`."""
        node, match, views = through_views(scope, node, match)
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
            return
        for one, leaf in ((node.left, node.right), (node.right, node.left)):
            if isinstance(one, ast.Constant) and type(one.value) in (int, float) and one.value == 1:
                for found in self.plus_one(scope, leaf, match.step(node)):
                    yield _viewed(found, self.name, views)

    def plus_one(self, scope: Scope, leaf: ast.expr, match: Match) -> Iterator[Match]:
        """Yields the match of what 1 is added to."""
        match = replace(match, options={**match.options, f"{self.name}_offset": 1.0})
        yield from Leaf(self.name).match(scope, leaf, match)


@dataclass(frozen=True)
class Activated:
    """An activation, and views of that; the option ``<name>_activation`` says which.

    Its argument is the operand ``name`` unless it has a shape of its own.
    """

    name: str
    among: frozenset[str]
    argument: Shape | None = None

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`Shape`."""
        node, match, views = through_views(scope, node, match)
        found = activation(scope, node)
        if found is None:
            return
        function, argument, module = found
        if function != ANY_ACTIVATION and function not in self.among:
            return
        option = f"{self.name}_activation"
        match = replace(match.step(node), options={**match.options, option: function})
        if module is not None:
            match = replace(match, modules={**match.modules, option: module})
        if self.argument is not None:
            if not views:
                yield from self.argument.match(scope, argument, match)
            return
        for leaf in Leaf(self.name).match(scope, argument, match):
            yield _viewed(leaf, self.name, views)


@dataclass(frozen=True)
class Norm:
    """A call of a norm that takes its statistics over ``over``; its module has the name ``norm``."""

    argument: Shape
    name: str = "norm"
    over: str = LAST_DIM

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`Shape`."""
        node, match = peel(scope, node, match)
        module = norm_call(scope, node, self.over)
        if module is not None:
            assert isinstance(node, ast.Call)
            _, match = peel(scope, node.func, match)
            match = replace(match.step(node), modules={**match.modules, self.name: module})
            yield from self.argument.match(scope, node.args[0], match)
        found = function_norm(scope, node) if self.over == LAST_DIM else None
        if found is not None:
            assert isinstance(node, ast.Call)
            match = replace(match.step(node), options={**match.options, **found})
            yield from self.argument.match(scope, node.args[0], match)


@dataclass(frozen=True)
class PerChannel:
    """A value for each sample and channel: what is written, here or where it is defined, as ``x[:, :, None, None]``."""

    name: str

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`Shape`."""
        definition = scope.flow.single(node)
        if is_per_channel(node if definition is None else definition.value):
            yield from Leaf(self.name).match(scope, node, match)


@dataclass(frozen=True)
class Linear:
    """A call of a linear layer, or of another kind of layer; its module has the name of that kind."""

    argument: Shape
    kind: str = "linear"

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`Shape`."""
        node, match = peel(scope, node, match)
        if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
            module = scope.facts.path(scope.flow, node.func)
            if module is not None and getattr(scope.facts, f"is_{self.kind}")(module):
                match = replace(match.step(node), modules={**match.modules, self.kind: node.func})
                yield from self.argument.match(scope, node.args[0], match)


@dataclass(frozen=True)
class Rotation:
    """``q, k = rotate(q, k, cos, sin)`` with a function of the file, as the models of transformers turn both at once.

    What the function does with the tables, the proof finds out; where it puts a dimension in for the heads, its
    argument ``unsqueeze_dim`` says.
    """

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`Shape`."""
        statement = scope.flow.statement.get(node)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not rotates(node.func.id):
            return
        if not isinstance(statement, ast.Assign) or statement.value is not node or scope.flow.is_local(node.func):
            return
        (target,) = statement.targets[:1]
        function = scope.namespace.get(node.func.id)
        constant = all(word.arg == "unsqueeze_dim" and isinstance(word.value, ast.Constant) for word in node.keywords)
        pair = isinstance(target, ast.Tuple) and len(target.elts) == 2 and len(statement.targets) == 1
        if not pair or len(node.args) != 4 or not constant or not isinstance(function, FunctionType):
            return
        default = inspect.signature(function).parameters.get("unsqueeze_dim")
        dim = node.keywords[0].value.value if node.keywords else None if default is None else default.default  # type: ignore[attr-defined]
        match = replace(match.step(node), functions=read_by(node.func.id, scope.namespace))
        match = replace(match, options={"unsqueeze_dim": -2 if dim is None else dim})
        for name, argument in zip(("q", "k", "cos", "sin"), node.args, strict=True):
            match = next(Leaf(name).match(scope, argument, match), match)
        if len(match.operands) == 4 and len(match.steps) == 1:
            yield match


@dataclass(frozen=True)
class Kept:
    """A shape whose value the op returns, too, since it is used elsewhere."""

    shape: Shape

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`Shape`."""
        yield from self.shape.match(scope, *peel(scope, node, match, keep=True))


@dataclass(frozen=True)
class Either:
    """The first of several shapes that fits, and then the others."""

    shapes: tuple[Shape, ...]

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`Shape`."""
        for shape in self.shapes:
            yield from shape.match(scope, node, match)


def through_views(scope: Scope, node: ast.expr, match: Match) -> tuple[ast.expr, Match, tuple[ast.expr, ...]]:
    """Goes through casts, single definitions and views; returns the views, too, innermost first."""
    views: tuple[ast.expr, ...] = ()
    while True:
        node, match = peel(scope, node, match)
        if not is_view(node):
            return node, match, views
        views = (node, *views)
        match = match.step(node)
        node = node.value if isinstance(node, ast.Subscript) else node.func.value  # type: ignore[attr-defined]


def _viewed(match: Match, name: str, views: tuple[ast.expr, ...]) -> Match:
    operand = match.operands[name]
    return replace(match, operands={**match.operands, name: Operand(operand.node, (*operand.views, *views))})
