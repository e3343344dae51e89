"""Takes sequences of layers apart, so that rules see what stands in them.

``self.layers(x)`` with an ``nn.Sequential`` of two becomes ``self.layers[1](self.layers[0](x))``. The guard checks at
every call that it still is one, without hooks, of as many layers.
"""

from __future__ import annotations

import ast

from torch import nn

from diffkern.rewrite.facts import Facts
from diffkern.rewrite.flow import Flow
from diffkern.rewrite.inline import Helpers


def unroll_sequences(tree: ast.FunctionDef, facts: Facts, only: set[str] | None = None) -> Helpers:
    """Changes ``tree``, and returns what the guard has to check.

    Args:
        tree: The source of a function.
        facts: Knows the submodules.
        only: The names of the sequences to take apart, as :data:`~diffkern.rewrite.inline.Helpers` have them; all by
            default.
    """
    unroller = _Unroller(Flow(tree), facts, only)
    unroller.visit(tree)
    return unroller.found


class _Unroller(ast.NodeTransformer):
    def __init__(self, flow: Flow, facts: Facts, only: set[str] | None) -> None:
        self._flow, self._facts, self._only = flow, facts, only
        self.found: Helpers = {}

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """The calls of its layers, if the callee is a sequence of them that takes one argument."""
        self.generic_visit(node)
        alone = len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Starred)
        path = self._facts.path(self._flow, node.func) if alone and isinstance(node.func, ast.Attribute) else None
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
