"""Tokens that become an image again, as a shape."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

from diffkern.rewrite.match import Match, Operand, Scope

_TO_CHANNELS = "permute(0, 3, 1, 2)"


def is_image_of_tokens(node: ast.AST) -> bool:
    """Whether a node is ``tokens.permute(0, 3, 1, 2).contiguous()``."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "contiguous":
        return False
    made = node.func.value
    if node.args or node.keywords or not isinstance(made, ast.Call) or not isinstance(made.func, ast.Attribute):
        return False
    return ast.unparse(ast.Call(ast.Name(made.func.attr), made.args, made.keywords)) == _TO_CHANNELS


@dataclass(frozen=True)
class ImageOfTokens:
    """``tokens.permute(0, 3, 1, 2).contiguous()``, which in channels last lies as it shall without a copy.

    The operand is what is made contiguous.
    """

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`diffkern.rewrite.match.Shape`."""
        if is_image_of_tokens(node):
            operands = {"x": Operand(node.func.value)}  # type: ignore[attr-defined]
            yield replace(match.step(node), operands=operands, options={"dim": 1})
