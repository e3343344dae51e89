"""Streams of attention, as shapes: their concatenation, the linear layers around that, and their repetition.

See :mod:`diffkern.rewrite.rooms` for what becomes of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from diffkern.rewrite.effects import site_called
from diffkern.rewrite.match import Leaf, Linear, Match, Operand, Scope, through_views
from diffkern.rewrite.query_key import concatenated, is_processor
from diffkern.rewrite.template import Template

if TYPE_CHECKING:
    from diffkern.rewrite.plan import SitePlan

#: The dimension of tokens, with heads behind them and in front.
TOKENS_FIRST, HEADS_FIRST = (1, -3), (2, -2)
#: Ops whose results may have room around their rows.
MODULATES = frozenset({"norm_modulate", "gate_residual_norm_modulate"})
_REPEATED = Template("_x.repeat_interleave(_a // _b, dim=_dim)")


@dataclass(frozen=True)
class LinearOfStream:
    """``attn.to_v(x)`` in a processor, whose result is concatenated with another; or ``attn.to_out[0](x[:, :n])``."""

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`diffkern.rewrite.match.Shape`."""
        if not isinstance(node, ast.Call) or not is_processor(scope) or len(node.args) != 1:
            return
        for found in Linear(Leaf("x")).match(scope, node, match):
            joins = any(node is part for part in _joined_parts(scope))
            if joins or _is_slice(scope, node.args[0]):
                yield replace(found, options={"joins": joins})


@dataclass(frozen=True)
class Joined:
    """``torch.cat([text, image], dim=2)`` in a processor: streams with heads before tokens, whatever they are.

    The operands are ``q0``, ``q1`` and so on. Values are joined so, and queries and keys without norms. With tokens
    before heads a concatenation copies whole rows already, and stays as it is written unless one of the streams is
    computed where it shall be.
    """

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`diffkern.rewrite.match.Shape`."""
        found = concatenated(node)
        if found is None or not is_processor(scope) or len(found[0]) < 2:
            return
        if found[1] in HEADS_FIRST or (found[1] in TOKENS_FIRST and any(_site(scope, part) for part in found[0])):
            operands = {f"q{i}": Operand(part) for i, part in enumerate(found[0])}
            yield replace(match.step(node), operands=operands, options={"stream_dim": found[1]})


@dataclass(frozen=True)
class SideBySide:
    """``torch.cat([text, image], dim=1)`` of two variables, which may be parts of one tensor in this order.

    The operands are ``a`` and ``b``. What was one tensor and is needed as one again is no copy of itself: single-stream
    blocks hand their streams on as two halves of a tensor.

    Attributes:
        of_sites: Whether both are results of modulated norms instead, read by nothing else in what is no processor:
            these leave room for each other.
    """

    of_sites: bool = False

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`diffkern.rewrite.match.Shape`."""
        found = concatenated(node)
        if found is None or found[1] not in (1, -2) or len(found[0]) != 2:
            return
        if self.of_sites and is_processor(scope):
            return
        if all(_comes_from_norm(scope, part) if self.of_sites else _is_handed_in(scope, part) for part in found[0]):
            a, b = map(Operand, found[0])
            yield replace(match.step(node), operands={"a": a, "b": b}, options={"dim": found[1]})


@dataclass(frozen=True)
class Repeated:
    """``x.repeat_interleave(a // b, dim=3)`` in a processor: heads of keys and values, for as many as queries have.

    The operands are ``x`` and ``n``, the quotient. It is 1 where all have as many heads, and no branch asks for that.
    """

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`diffkern.rewrite.match.Shape`."""
        if not isinstance(node, ast.Call) or not is_processor(scope) or not (filled := _REPEATED.fill(None, node)):
            return
        x, dim = filled[0]["_x"], filled[0]["_dim"]
        if isinstance(x, ast.Name) and isinstance(dim, ast.Constant) and type(dim.value) is int:
            operands = {"x": Operand(x), "n": Operand(node.args[0])}
            yield replace(match.step(node), operands=operands, options={"dim": dim.value})


def _is_handed_in(scope: Scope, part: ast.expr) -> bool:
    """Whether a name stands for an argument, a slice, or one of several results of a call, which is none of a site."""
    definition = scope.flow.only(part)
    if definition is None:
        return False
    source = definition.value or definition.source
    unpacked = isinstance(source, ast.Call) and definition.value is None and _site(scope, source) is None
    return definition.statement is None or unpacked or isinstance(source, ast.Subscript)


def _comes_from_norm(scope: Scope, part: ast.expr) -> bool:
    """Whether a name stands for the result of a modulated norm, or for one of two, which nothing else reads."""
    definition = scope.flow.only(part)
    if definition is None or definition.uses != [part]:
        return False
    source = definition.value or definition.source
    if isinstance(source, ast.Name):
        return _comes_from_norm(scope, source)
    site = None if source is None else _site(scope, source)
    return site is not None and site.rule.op in MODULATES


def _joined_parts(scope: Scope) -> Iterator[ast.expr]:
    """What the parts of concatenations are views of, where nothing else reads it, or asks for more than its shape."""
    asked = {
        node.value for node in scope.flow.nodes if isinstance(node, ast.Attribute) and node.attr in ("shape", "dtype")
    }
    for node in scope.flow.nodes:
        found = concatenated(node) if isinstance(node, ast.expr) else None
        for part in () if found is None or found[1] not in (*TOKENS_FIRST, *HEADS_FIRST) else found[0]:
            base, match, _ = through_views(scope, part, Match())
            passed = {name for name, _ in match.passed} | asked
            if all(use in passed for _, definition in match.passed for use in definition.uses):
                yield base


def _is_slice(scope: Scope, node: ast.expr) -> bool:
    """Whether a name stands for ``x[:, a:b]``."""
    definition = scope.flow.only(node)
    source = None if definition is None else definition.source or definition.value
    index = source.slice if isinstance(source, ast.Subscript) else None
    return isinstance(index, ast.Tuple) and len(index.elts) == 2 and isinstance(index.elts[1], ast.Slice)


def _site(scope: Scope, part: ast.expr) -> SitePlan | None:
    base = through_views(scope, part, Match())[0]
    index = site_called(base)
    return scope.sites[index] if index >= 0 else None
