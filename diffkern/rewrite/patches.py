"""A convolution that cuts images or videos into patches, whose result becomes tokens, as a shape."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from diffkern.rewrite.match import Leaf, Linear, Match, Scope, peel
from diffkern.rewrite.template import Template

#: ``y`` with two dimensions of its samples, which any order in memory allows.
SPLIT_SAMPLES = "_y.view(_, _, *_y.shape[1:])"
_TOKENS = Template("_y.flatten(2).transpose(1, 2)", f"{SPLIT_SAMPLES}.flatten(3).transpose(2, 3)", casts=True)


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
    for node in scope.flow.nodes:
        filled = _TOKENS.fill(scope, node) if isinstance(node, ast.Call) else None
        if filled is None:
            continue
        made, match = peel(scope, filled[0]["_y"], filled[1])
        passed = {name for name, _ in match.passed} | asked
        if all(use in passed for _, definition in match.passed for use in definition.uses):
            yield made
