"""Expressions whose result is their operand itself, by what a setting or a layout is, as shapes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

from diffkern.rewrite.match import Match, Operand, Scope, Shape
from diffkern.rewrite.template import Template

#: Tokens in channels last, as an image.
IMAGE_OF_TOKENS = Template("_x.permute(0, 3, 1, 2).contiguous()")


@dataclass(frozen=True)
class ImageOfTokens:
    """``tokens.permute(0, 3, 1, 2).contiguous()``, which in channels last lies as it shall without a copy.

    The operand is what is made contiguous.
    """

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`diffkern.rewrite.match.Shape`."""
        if IMAGE_OF_TOKENS.fill(None, node):
            operands = {"x": Operand(node.func.value)}  # type: ignore[attr-defined]
            yield replace(match.step(node), operands=operands, options={"dim": 1})


@dataclass(frozen=True)
class DividedByOne:
    """``x / attn.rescale_output_factor``, where the setting of the module is 1.

    The operands are ``x`` and ``n``, unless ``x`` has a shape of its own.
    """

    dividend: Shape | None = None

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`diffkern.rewrite.match.Shape`."""
        divisor = node.right if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) else None
        if not isinstance(divisor, ast.Attribute) or scope.facts.path(scope.flow, divisor.value) != ():
            return
        value = scope.facts.value((divisor.attr,))
        if type(value) in (int, float) and value == 1:
            if self.dividend is not None:
                yield from self.dividend.match(scope, node.left, match.step(node))  # type: ignore[attr-defined]
                return
            operands = {"x": Operand(node.left), "n": Operand(divisor)}  # type: ignore[attr-defined]
            yield replace(match.step(node), operands=operands, options={"dim": 0})
