"""Halves of the channels that a convolution gives, as a shape: ``a, b = conv(x).chunk(2, dim=1)``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from diffkern.rewrite.facts import Facts
from diffkern.rewrite.flow import Flow
from diffkern.rewrite.match import Match, Scope, Shape, peel
from diffkern.rewrite.syntax import only_target, statements_of
from diffkern.rewrite.template import Template

#: Variables for both halves, see :func:`separate_halves`.
_BOTH = "_h{}_halves"
_SIZES = ("2, 1", "2, dim=1", "chunks=2, dim=1", "dim=1, chunks=2")
_CHUNKED = Template(*[f"{call}{sizes})" for call in ("torch.chunk(_x, ", "_x.chunk(") for sizes in _SIZES])


@dataclass(frozen=True)
class HalfOfChannels:
    """``both[index]`` of ``both = torch.chunk(x, 2, dim=1)``, the other half of which has the same ``x``."""

    index: int
    of: Shape

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`diffkern.rewrite.match.Shape`."""
        node, match = peel(scope, node, match)
        if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Constant):
            return
        if type(node.slice.value) is not int or node.slice.value != self.index:
            return
        chunk, match = peel(scope, node.value, match.step(node))
        x = _halved(chunk)
        for found in () if x is None else self.of.match(scope, x, match.step(chunk)):
            other = match.operands.get("x")
            if other is None or other.node is found.operands["x"].node:
                yield found


def separate_halves(tree: ast.FunctionDef, facts: Facts) -> None:
    """Makes ``both = x.chunk(2, dim=1)``, ``a = both[0]`` and ``b = both[1]`` of ``a, b = x.chunk(2, dim=1)``.

    Only where ``x`` is what a convolution gives, so that a rule may read through both assignments.
    """
    flow, made = Flow(tree), 0
    for statement, place in [*flow.places.items()] if flow.decline is None else ():
        pair = only_target(statement)
        x = _halved(statement.value) if isinstance(pair, ast.Tuple) else None  # type: ignore[attr-defined]
        definition = None if x is None else flow.single(x)
        call = None if definition is None else definition.value
        path = facts.path(flow, call.func) if isinstance(call, ast.Call) else None
        if path is None or not facts.is_convolution(path):
            continue
        assert isinstance(statement, ast.Assign) and isinstance(pair, ast.Tuple)
        if len(pair.elts) != 2 or not all(isinstance(half, ast.Name) for half in pair.elts):
            continue
        both, (a, b) = _BOTH.format(made), map(ast.unparse, pair.elts)
        new = statements_of(f"{both} = 0\n{a} = {both}[0]\n{b} = {both}[1]", statement)
        new[0].value = statement.value  # type: ignore[attr-defined]
        at = place.block.index(statement)
        place.block[at : at + 1] = new
        made += 1


def _halved(node: ast.expr) -> ast.expr | None:
    """The tensor in ``torch.chunk(x, 2, dim=1)`` and ``x.chunk(2, dim=1)``."""
    filled = _CHUNKED.fill(None, node)
    return filled and filled[0]["_x"]
