"""Takes sequences of layers apart, so that rules see what stands in them.

``self.layers(x)`` with an ``nn.Sequential`` of two becomes ``self.layers[1](self.layers[0](x))``, and a loop over one
with norms in it becomes its body for one layer after the other. The guard checks at every call that it still is one,
without hooks, of as many layers; for a loop, whose tests of classes are decided, of the same classes.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping
from typing import Any

from torch import nn

from diffkern.matching import full_name
from diffkern.rewrite.facts import Facts
from diffkern.rewrite.flow import Flow
from diffkern.rewrite.functions import global_at
from diffkern.rewrite.inline import Helpers
from diffkern.rewrite.syntax import only_argument

#: The layers of a loop that is taken apart at most.
_MOST_LAYERS = 8


def unroll_sequences(
    tree: ast.FunctionDef, facts: Facts, namespace: Mapping[str, Any], only: set[str] | None = None
) -> Helpers:
    """Changes ``tree``, and returns what the guard has to check.

    Args:
        tree: The source of a function.
        facts: Knows the submodules.
        namespace: The globals of the function.
        only: The names of the sequences to take apart, as :data:`~diffkern.rewrite.inline.Helpers` have them; all by
            default.
    """
    unroller = _Unroller(Flow(tree), facts, namespace, only)
    unroller.visit(tree)
    return unroller.found


class _Unroller(ast.NodeTransformer):
    def __init__(self, flow: Flow, facts: Facts, namespace: Mapping[str, Any], only: set[str] | None) -> None:
        self._flow, self._facts, self._namespace, self._only = flow, facts, namespace, only
        self.found: Helpers = {}

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """The calls of its layers, if the callee is a sequence of them that takes one argument."""
        self.generic_visit(node)
        alone = isinstance(node.func, ast.Attribute) and only_argument(node) is not None
        path = self._facts.path(self._flow, node.func) if alone else None
        length = self._facts.length(path) if path else 0
        name = f"self.{'.'.join(path)}.forward" if path else ""
        if not length or (self._only is not None and name not in self._only):
            return node
        self.found[name] = nn.Sequential.forward
        value = node.args[0]
        for index in range(length):
            layer = ast.Subscript(node.func, ast.Constant(index), ast.Load())
            value = ast.copy_location(ast.Call(layer, [value], []), node)
            value._helper = name  # type: ignore[attr-defined]
        return ast.fix_missing_locations(value)

    def visit_For(self, node: ast.For) -> Any:
        """The body for each layer, if the loop is over a sequence with a norm in it and leaves nothing behind."""
        path = self._facts.path(self._flow, node.iter) if isinstance(node.iter, ast.Attribute) else None
        length = self._facts.length(path) if path else 0
        layers = [(*path, str(index)) for index in range(length)] if path else []
        name = f"self.{'.'.join(path)}.__iter__" if path else ""
        taken = self._only is None or name in self._only
        if not 0 < length <= _MOST_LAYERS or not taken or node.orelse or not self._stays_inside(node):
            return self.generic_visit(node)
        if not any(map(self._facts.norm, layers)):
            return self.generic_visit(node)
        self.found[name] = nn.Sequential.__iter__
        body: list[ast.stmt] = []
        for index, layer in enumerate(layers):
            place = ast.Subscript(node.iter, ast.Constant(index), ast.Load())
            classes = self._facts.classes(layer)
            put = _Layer(node.target.id, place, classes, self._namespace, name)  # type: ignore[attr-defined]
            body += [put.visit(copy.deepcopy(statement)) for statement in node.body]
        return [ast.fix_missing_locations(statement) for statement in body]

    def _stays_inside(self, loop: ast.For) -> bool:
        """Whether the variable of a loop is that of its head wherever it is read, and nothing ends the loop early."""
        inside = list(ast.walk(loop))
        if not isinstance(loop.target, ast.Name) or any(isinstance(one, (ast.Break, ast.Continue)) for one in inside):
            return False
        definition, definitions = self._flow.bound(loop.target), self._flow.definitions
        names = {one for one in inside if isinstance(one, ast.Name) and one.id == loop.target.id} - {loop.target}
        alone = all(definitions.get(one) == frozenset([definition]) for one in definition.uses)
        return alone and not definition.is_captured and names == {*definition.uses}


class _Layer(ast.NodeTransformer):
    """Puts a layer in the place of the variable of a loop, and decides what the loop asks of its class."""

    def __init__(
        self, name: str, place: ast.expr, classes: tuple[str, ...], namespace: Mapping[str, Any], helper: str
    ) -> None:
        self._name, self._place, self._classes = name, place, classes
        self._namespace, self._helper = namespace, helper

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.copy_location(copy.deepcopy(self._place), node) if node.id == self._name else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if ast.unparse(node.func) == "isinstance" and ast.unparse(node.args[0]) == self._name:
            asked = global_at(self._namespace, ast.unparse(node.args[1]))
            if isinstance(asked, type):
                return ast.copy_location(ast.Constant(full_name(asked) in self._classes), node)
        if isinstance(node.func, ast.Name) and node.func.id == self._name:
            node._helper = self._helper  # type: ignore[attr-defined]
        self.generic_visit(node)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        """``x`` in the place of ``True and x``, and False in that of ``False and x``."""
        self.generic_visit(node)
        if not isinstance(node.op, ast.And) or not isinstance(node.values[0], ast.Constant):
            return node
        first, *rest = node.values
        if not node.values[0].value or not rest:
            return first
        return rest[0] if len(rest) == 1 else ast.copy_location(ast.BoolOp(node.op, rest), node)
