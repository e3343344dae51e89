"""Shapes as text: expressions with blanks."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from diffkern.rewrite.match import Match, Scope, peel, through_definitions

_NOTHING, _NO_BLANKS = Match(), dict[str, ast.expr]()


class Template:
    """An expression as text, or several spellings of one; names that begin with ``_`` are blanks.

    A blank stands for any expression, and for the same one wherever it stands; ``_`` alone for any, and ``*_`` for any
    further arguments of a call. Other names are those of globals. With ``casts`` any part may be cast.
    """

    def __init__(self, *texts: str, casts: bool = False) -> None:
        self._patterns, self._casts = [ast.parse(text, mode="eval").body for text in texts], casts

    def fill(
        self, scope: Scope | None, node: ast.AST, match: Match = _NOTHING, known: Mapping[str, ast.expr] = _NO_BLANKS
    ) -> tuple[dict[str, ast.expr], Match] | None:
        """What the blanks are where an expression is so, and the match with all its steps; None where it is not.

        Args:
            scope: Knows the single definitions, which are looked through; None to read what is written alone.
            node: The expression.
            match: What was found before.
            known: Blanks that are known before.
        """
        for pattern in self._patterns:
            reader = _Reader(scope, self._casts, match, dict(known))
            if reader.fits(pattern, node):
                return reader.blanks, reader.match
        return None


class _Reader:
    def __init__(self, scope: Scope | None, casts: bool, match: Match, blanks: dict[str, ast.expr]) -> None:
        self._scope, self._casts, self.match, self.blanks = scope, casts, match, blanks

    def fits(self, pattern: ast.AST, node: ast.AST) -> bool:
        if isinstance(pattern, ast.Name) and pattern.id.startswith("_") and isinstance(node, ast.expr):
            return pattern.id == "_" or self._is_same(self.blanks.setdefault(pattern.id, node), node)
        if isinstance(pattern, (ast.Call, ast.BinOp, ast.Subscript)) and isinstance(node, ast.expr):
            if self._scope is not None:
                through = peel if self._casts else through_definitions
                node, self.match = through(self._scope, node, self.match)
            if node not in self.match.steps:
                self.match = self.match.step(node)
        if type(pattern) is not type(node):
            return False
        if isinstance(node, ast.Name) and self._scope is not None and self._scope.flow.is_local(node):
            return False
        if isinstance(pattern, ast.Call) and isinstance(node, ast.Call) and _takes_any(pattern):
            pattern = ast.Call(pattern.func, pattern.args[:-1], [])
            node = ast.Call(node.func, node.args[: len(pattern.args)], [])
        fields = [field for field in pattern._fields if field != "ctx"]
        return all(self._fits_field(getattr(pattern, field), getattr(node, field)) for field in fields)

    def _fits_field(self, pattern: object, value: object) -> bool:
        if isinstance(pattern, list) and isinstance(value, list):
            return len(pattern) == len(value) and all(map(self._fits_field, pattern, value))
        if isinstance(pattern, ast.AST) and isinstance(value, ast.AST):
            return self.fits(pattern, value)
        return repr(pattern) == repr(value)  # 1 is not 1.0

    def _is_same(self, one: ast.expr, other: ast.expr) -> bool:
        """Whether two expressions are spelled alike, of names that mean the same."""
        if one is other or self._scope is None:
            return one is other or ast.unparse(one) == ast.unparse(other)
        definitions = self._scope.flow.definitions
        read = [[definitions.get(x) for x in ast.walk(side) if isinstance(x, ast.Name)] for side in (one, other)]
        return ast.unparse(one) == ast.unparse(other) and read[0] == read[1]


def _takes_any(call: ast.Call) -> bool:
    last = call.args[-1] if call.args else None
    return isinstance(last, ast.Starred) and isinstance(last.value, ast.Name) and last.value.id == "_"
