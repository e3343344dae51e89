"""A convolution that cuts images or videos into patches, whose result becomes tokens, as a shape."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from diffkern.rewrite.match import Leaf, Linear, Match, Scope, peel


@dataclass(frozen=True)
class PatchEmbedding:
    """``proj(x)`` where ``proj`` has a kernel as large as its stride, and ``.flatten(2).transpose(1, 2)`` comes behind.

    The samples may get back two dimensions in between, as those of CogVideoX do:
    ``y.view(batch, frames, *y.shape[1:]).flatten(3).transpose(2, 3)``. Nothing else may read the result.
    """

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`diffkern.rewrite.match.Shape`."""
        if isinstance(node, ast.Call):
            for found in Linear(Leaf("x"), "patches").match(scope, node, match):
                if any(node is made for made in _made_tokens(scope)):
                    yield found


def _made_tokens(scope: Scope) -> Iterator[ast.expr]:
    """What is made tokens of, where nothing else reads it, or asks for more than its shape."""
    asked = {node.value for node in scope.flow.nodes if isinstance(node, ast.Attribute) and node.attr == "shape"}
    for node, dim in product(scope.flow.nodes, (2, 3)):
        flat = _before(scope, node, Match(), "transpose", f"{dim - 1}, {dim}")
        image = None if flat is None else _before(scope, *flat, "flatten", str(dim))
        if image is None:
            continue
        made, match = image
        if dim == 3:
            viewed = split_samples(made)
            if viewed is None:
                continue
            made, match = peel(scope, viewed, match)
        passed = {name for name, _ in match.passed} | asked
        if all(use in passed for _, definition in match.passed for use in definition.uses):
            yield made


def _before(scope: Scope, node: ast.AST, match: Match, method: str, arguments: str) -> tuple[ast.expr, Match] | None:
    """``x`` of ``x.method(arguments)``, through single definitions; None for anything else."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.keywords:
        return None
    if node.func.attr != method or ", ".join(map(ast.unparse, node.args)) != arguments:
        return None
    return peel(scope, node.func.value, match)


def split_samples(node: ast.AST) -> ast.expr | None:
    """``y`` of ``y.view(batch, frames, *y.shape[1:])``, which any order in memory allows."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "view":
        return None
    y = node.func.value
    rest = f"*{ast.unparse(y)}.shape[1:]"
    return y if len(node.args) == 3 and not node.keywords and ast.unparse(node.args[2]) == rest else None
