"""Queries and keys of attention: their norms, and the rotation behind them, as one shape.

``query = rotate(norm_q(query), tables)`` and the same for the key are two statements. While a rule is tried they are
one, ``query, key = ...``, whose value the shape matches.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

from diffkern.rewrite.facts import LAST_DIM
from diffkern.rewrite.flow import Flow
from diffkern.rewrite.match import Match, Operand, Scope, is_cast, norm_call, peel, through_views


@dataclass(frozen=True)
class QueryKey:
    """``norm(q), norm(k)``, or with ``rotated`` ``rotate(norm(q), ...), rotate(norm(k), ...)``, views in between.

    What is rotated may be several streams one after the other: ``rotate(cat([norm(text), norm(image)]), ...)``. The
    operands are ``q0``, ``k0``, ``q1`` ..., and the tables of each side; the norms are ``q_norm0`` and so on.
    """

    rotated: bool

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`diffkern.rewrite.match.Shape`."""
        if not isinstance(node, ast.Tuple) or not isinstance(node.ctx, ast.Load) or len(node.elts) != 2:
            return
        for name, side in zip("qk", node.elts, strict=True):
            found = self._side(scope, side, match, name)
            if found is None:
                return
            match = found
        streams = [sum(part.startswith(name) for part in match.modules) for name in ("q_norm", "k_norm")]
        if match.operands["q0"].node is match.operands["k0"].node:
            return  # two calls that read one query, such as attention to two texts
        if streams[0] == streams[1]:
            yield match

    def _side(self, scope: Scope, node: ast.expr, match: Match, name: str) -> Match | None:
        node, match = peel(scope, node, match)
        if not self.rotated:
            return _normed(scope, node, match, f"{name}0")
        if not is_rotation(scope, node):
            return None
        assert isinstance(node, ast.Call)
        match = match.step(node)
        arguments = [*node.args[1:], *[keyword.value for keyword in node.keywords]]
        tables = [part.value if isinstance(part, ast.Starred) else part for part in arguments]
        tables = [part for part in tables if _reads_local(scope, part)]
        operands = {f"{name}_table{i}": Operand(part) for i, part in enumerate(tables)}
        match = replace(match, operands={**match.operands, **operands})
        streams = _concatenated(scope, node.args[0], match)
        if streams is None:
            return _normed(scope, node.args[0], match, f"{name}0")
        parts, found, dim = streams
        found = replace(found, options={**found.options, "stream_dim": dim})
        for i, part in enumerate(parts):
            after = _normed(scope, part, found, f"{name}{i}")
            if after is None:
                return None
            found = after
        return found


def _normed(scope: Scope, node: ast.expr, match: Match, name: str) -> Match | None:
    """The match of ``norm(x)``, or of views of that; ``x`` is the operand ``name``."""
    node, match, views = through_views(scope, node, match)
    module = norm_call(scope, node, LAST_DIM)
    if module is None:
        return None
    assert isinstance(node, ast.Call)
    _, match = peel(scope, node.func, match)
    operands = {**match.operands, name: Operand(node.args[0], views)}
    modules = {**match.modules, f"{name[0]}_norm{name[1:]}": module}
    return replace(match.step(node), operands=operands, modules=modules)


def _concatenated(scope: Scope, node: ast.expr, match: Match) -> tuple[list[ast.expr], Match, int] | None:
    """The parts, the match and the dimension of ``torch.cat([...], dim=...)``; None for anything else."""
    node, match = peel(scope, node, match)
    if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ("torch.cat", "torch.concat"):
        return None
    given = [*node.args, *[keyword.value for keyword in node.keywords]]
    if len(given) != 2 or not isinstance(given[0], (ast.List, ast.Tuple)):
        return None
    try:
        dim = ast.literal_eval(given[1])
    except ValueError:
        return None
    return (given[0].elts, match.step(node), dim) if type(dim) is int else None


def is_rotation(scope: Scope, node: ast.expr) -> bool:
    """Whether an expression may rotate its first argument: a function of the file, called with more than that."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not node.args:
        return False
    if isinstance(node.args[0], ast.Starred) or any(keyword.arg is None for keyword in node.keywords):
        return False
    if scope.flow.is_local(node.func) and nested_function(scope.flow, node.func) is None:
        return False
    return len(node.args) + len(node.keywords) > 1


def nested_function(flow: Flow, name: ast.Name) -> ast.FunctionDef | None:
    """The nested function that a name stands for, if it reads nothing of the function around it."""
    reaching = flow.definitions.get(name, frozenset())
    statements = [definition.statement for definition in reaching]
    if len(statements) != 1 or not isinstance(statements[0], ast.FunctionDef) or statements[0].decorator_list:
        return None
    function = statements[0]
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    own = {argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)}
    own |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
    outer = {node.id for node in ast.walk(flow.tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    body = {node.id for statement in function.body for node in ast.walk(statement) if isinstance(node, ast.Name)}
    return None if (body - own) & (outer | set(flow.parameters)) else function


def _reads_local(scope: Scope, node: ast.expr) -> bool:
    names = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
    return any(scope.flow.is_local(name) and name.id != scope.facts.receiver for name in names)


# --- two statements as one -----------------------------------------------------------------------------


def pair_statements(scope: Scope, rotated: bool) -> None:
    """Makes one statement of each two that rotate, or normalise, one tensor each, one after the other."""
    for block in _blocks(scope.flow.tree):
        index = 0
        while index + 1 < len(block):
            both = _paired(scope, block[index], block[index + 1], rotated)
            if both is not None:
                block[index : index + 2] = [both]
            index += 1


def separate_statements(tree: ast.FunctionDef) -> None:
    """Takes back what :func:`pair_statements` did where no site came of it."""
    for block in _blocks(tree):
        for index in reversed(range(len(block))):
            single, value = getattr(block[index], "_single", None), getattr(block[index], "value", None)
            if single is not None and isinstance(value, ast.Tuple):
                block[index : index + 1] = single


def _paired(scope: Scope, one: ast.stmt, other: ast.stmt, rotated: bool) -> ast.Assign | None:
    if not isinstance(one, ast.Assign) or not isinstance(other, ast.Assign):
        return None
    targets = [*one.targets, *other.targets]
    if len(targets) != 2 or not all(isinstance(target, ast.Name) for target in targets):
        return None
    calls = []
    for value in (one.value, other.value):
        while is_cast(value):
            value = value.func.value  # type: ignore[attr-defined]
        if not (is_rotation(scope, value) if rotated else norm_call(scope, value, LAST_DIM) is not None):
            return None
        calls.append(value)
    if rotated and len({ast.unparse(call.func) for call in calls}) != 1:  # type: ignore[attr-defined]
        return None
    names = [target.id for target in targets]  # type: ignore[attr-defined]
    read = {node.id for node in ast.walk(other.value) if isinstance(node, ast.Name)}
    if names[0] in {*read, names[1]}:
        return None
    both = ast.Assign([ast.Tuple(targets, ast.Store())], ast.Tuple([one.value, other.value], ast.Load()))
    both._single = [one, other]  # type: ignore[attr-defined]
    return ast.fix_missing_locations(ast.copy_location(both, one))


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block
            for statement in list(block):
                if not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                    yield from _blocks(statement)
