"""Queries and keys of attention: their norms, the rotation behind them and the join of two streams, as shapes.

``query = rotate(norm_q(query), tables)`` and the same for the key are two statements. While a rule is tried they are
one, ``query, key = ...``, whose value the shape matches.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from diffkern.rewrite.expressions import ROTATES, is_cast, norm_call
from diffkern.rewrite.facts import LAST_DIM
from diffkern.rewrite.flow import Flow
from diffkern.rewrite.match import Match, Operand, Scope, peel, through_views
from diffkern.rewrite.stores import without_store
from diffkern.rewrite.syntax import blocks, names_in, only_target, stored_in

#: ``rotate(cat([norm(text), norm(image)]), ...)``, whose tables ``q_table0`` ... are those of both streams;
#: ``cat([rotate(norm(text), ...), rotate(norm(image), ...)])``, either of them without its rotation; no streams; no
#: streams and no rotation; no streams and no norms; ``cat([rotate(x[..., :n], ...), x[..., n:]])``, of a part of heads;
#: no streams, and keys that are not rotated; ``x[:, n:] = rotate(x[:, n:], ...)`` in ``x = cat([norm(a), norm(b)])``.
KINDS = (
    "joined first", "joined last", "rotated", "normed", "rotated alone", "rotated in part", "query rotated",
    "joined, then rotated",
)  # fmt: skip
JOINED_FIRST, JOINED_LAST, ROTATED, NORMED, ROTATED_ALONE, ROTATED_IN_PART, QUERY_ROTATED, JOINED_THEN = KINDS


@dataclass(frozen=True)
class QueryKey:
    """``rotate(norm(q), ...), rotate(norm(k), ...)`` with views in between, and what differs from that by its kind.

    The operands are ``q0`` and ``k0`` with the tables ``q0_table0`` ..., and the norms ``q_norm0`` and ``k_norm0``.
    Of several streams one after the other, the next are ``q1``, ``q_norm1`` and so on.

    Attributes:
        kind: One of :data:`KINDS`.
    """

    kind: str

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`diffkern.rewrite.match.Shape`."""
        if not isinstance(node, ast.Tuple) or not isinstance(node.ctx, ast.Load) or len(node.elts) != 2:
            return
        for name, side in zip("qk", node.elts, strict=True):
            found = self._side(scope, side, match, name)
            if found is None:
                return
            match = found
        if match.operands["q0"].node is match.operands["k0"].node:
            return  # two calls that read one query, such as attention to two texts
        operands = [name for name in match.operands if self.kind != QUERY_ROTATED or "_table" not in name]
        named = [{part[1:] for part in (*match.modules, *operands) if part[0] == side} for side in "qk"]
        if named[0] == named[1]:
            yield match

    def _side(self, scope: Scope, node: ast.expr, match: Match, name: str) -> Match | None:
        node, match = peel(scope, node, match)
        if self.kind == ROTATED or (self.kind == QUERY_ROTATED and name == "q"):
            return _stream(scope, node, match, f"{name}0") if rotation(scope, node) else None
        if self.kind in (NORMED, QUERY_ROTATED):
            found = _normed(scope, node, match, f"{name}0")
            return found if found is None or name == "q" or _of_query_and_key(scope, found) else None
        if self.kind == ROTATED_ALONE:
            return _rotated_alone(scope, node, match, name)
        if self.kind == JOINED_THEN:
            return _rotated_behind(scope, node, match, name)
        if self.kind == ROTATED_IN_PART:
            return _rotated_in_part(scope, node, match, name)
        if self.kind == JOINED_FIRST:
            call = rotation(scope, node)
            if call is None:
                return None
            match, node = _with_tables(scope, call, match, name), call.args[0]
        return _joined_streams(scope, node, match, name, _stream if self.kind == JOINED_LAST else _normed)


@dataclass(frozen=True)
class RotatedTogether:
    """``query, key = rotate(query, key, ...)`` with the operands of a :class:`QueryKey`.

    The two are normed, or joined of normed streams.

    Attributes:
        alone: Whether they may be anything instead, in a processor.
    """

    alone: bool = False

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`diffkern.rewrite.match.Shape`."""
        statement, call = scope.flow.statement.get(node), rotation(scope, node, named=True)
        target = only_target(statement)
        if call is None or len(call.args) < 3 or getattr(statement, "value", None) is not node:
            return
        if not isinstance(target, ast.Tuple) or len(target.elts) != 2 or (self.alone and not is_processor(scope)):
            return
        if len(call.args) > 3 and not self.alone:
            return  # cosines and sines are those of a Rotation
        for name in "qk":
            match = _with_tables(scope, call, match, name, 2)
        q, k, *_ = call.args
        sides: list[Callable[..., Match | None]] = [partial(_joined_streams, stream=_normed), _normed_alone]
        for part in [_anything] if self.alone else sides:
            of_q = part(scope, q, match, "q")
            both = None if of_q is None else part(scope, k, of_q, "k")
            if both is not None:
                yield both


def _joined_streams(
    scope: Scope, node: ast.expr, match: Match, name: str, stream: Callable[..., Match | None]
) -> Match | None:
    """The match of a concatenation of streams."""
    streams = _concatenated(scope, node, match)
    if streams is None:
        return None
    parts, found, dim = streams
    found = replace(found, options={**found.options, "stream_dim": dim})
    for i, part in enumerate(parts):
        after = stream(scope, part, found, f"{name}{i}")
        if after is None:
            return None
        found = after
    return found


def _rotated_behind(scope: Scope, node: ast.expr, match: Match, name: str) -> Match | None:
    """The match of ``torch.cat([x[:, :n], rotate(x[:, n:], ...)], dim=1)`` with ``x = torch.cat([norm(a), norm(b)])``.

    What it computes is ``norm(a), rotate(norm(b), ...)`` where ``a`` has the length ``n``, which is an operand.
    """
    streams = _concatenated(scope, node, match)
    turned = rotation(scope, streams[0][1]) if streams is not None and len(streams[0]) == 2 else None
    if streams is None or turned is None:
        return None
    (front, _), match, dim = streams
    match, back = _with_tables(scope, turned, match, f"{name}1"), turned.args[0]
    if not isinstance(front, ast.Subscript) or not isinstance(back, ast.Subscript):
        return None
    end, start = _bound(front, dim, "upper"), _bound(back, dim, "lower")
    joined = _concatenated(scope, front.value, match.step(front))
    again = None if joined is None else _concatenated(scope, back.value, joined[1].step(back))
    if joined is None or again is None or again[0] is not joined[0] or len(again[0]) != 2 or again[2] != dim:
        return None
    if end is None or start is None or end.id != start.id:
        return None
    found: Match | None = replace(again[1], options={**again[1].options, "stream_dim": dim})
    for i, part in enumerate(joined[0]):
        found = found and _normed(scope, part, found, f"{name}{i}")
    return found and replace(found, operands={**found.operands, f"{name}0_length": Operand(end)})


def _bound(part: ast.Subscript, dim: int, which: str) -> ast.Name | None:
    """The variable that bounds a slice along a dimension, which is the only one that is cut; None for other slices."""
    slices = part.slice.elts if isinstance(part.slice, ast.Tuple) else [part.slice]
    if not all(isinstance(one, ast.Slice) and one.step is None for one in slices):
        return None
    cut = [(at, one) for at, one in enumerate(slices) if one.lower is not None or one.upper is not None]  # type: ignore[attr-defined]
    if len(cut) != 1 or cut[0][0] != dim or (cut[0][1].lower is None) is not (which == "upper"):  # type: ignore[attr-defined]
        return None
    bound = getattr(cut[0][1], which)
    return bound if isinstance(bound, ast.Name) else None


def is_processor(scope: Scope) -> bool:
    """Whether a function takes the module as its second argument, as processors of attention do."""
    return scope.flow.tree.args.args[0].arg != scope.facts.receiver


def _normed_alone(scope: Scope, node: ast.expr, match: Match, name: str) -> Match | None:
    return _normed(scope, node, match, f"{name}0")


def _anything(scope: Scope, node: ast.expr, match: Match, name: str) -> Match | None:
    return replace(match, operands={f"{name}0": Operand(node), **match.operands})


def _rotated_alone(scope: Scope, node: ast.expr, match: Match, name: str) -> Match | None:
    """The match of ``rotate(x, ...)`` in a processor, whatever ``x`` is."""
    call = rotation(scope, node, named=True) if is_processor(scope) else None
    return None if call is None else _anything(scope, call.args[0], _with_tables(scope, call, match, name), name)


def _rotated_in_part(scope: Scope, node: ast.expr, match: Match, name: str) -> Match | None:
    """The match of ``torch.cat([rotate(x[..., :n], ...), x[..., n:]], dim=-1)`` in a processor, whatever ``x`` is."""
    found = _concatenated(scope, node, match) if is_processor(scope) else None
    if found is None or found[2] != -1 or len(found[0]) != 2:
        return None
    (turned, rest), match, _ = found
    turned, match = peel(scope, turned, match)
    call = rotation(scope, turned, named=True)
    if call is None:
        return None
    match, whole = _with_tables(scope, call, match, name), []
    for part in (call.args[0], rest):
        node, match = peel(scope, part, match)
        if not isinstance(node, ast.Subscript):
            return None
        x, match = _uncast(scope, node.value, match.step(node))
        whole.append(x)
    read = [scope.flow.definitions.get(x) if isinstance(x, ast.Name) else None for x in whole]
    if not read[0] or read[0] != read[1]:
        return None
    return _anything(scope, whole[0], match, name)


def _uncast(scope: Scope, node: ast.expr, match: Match) -> tuple[ast.expr, Match]:
    """Goes through casts, and definitions that are casts."""
    while True:
        definition = scope.flow.single(node)
        if is_cast(node):
            match, node = match.step(node), node.func.value  # type: ignore[attr-defined]
        elif definition is not None and definition.value is not None and is_cast(definition.value):
            assert isinstance(node, ast.Name)
            match, node = replace(match, passed=(*match.passed, (node, definition))), definition.value
        else:
            return node, match


def _stream(scope: Scope, node: ast.expr, match: Match, name: str) -> Match | None:
    """The match of ``rotate(norm(x), ...)`` or ``norm(x)``."""
    node, match = peel(scope, node, match)
    call = rotation(scope, node)
    if call is not None:
        match, node = _with_tables(scope, call, match, name), call.args[0]
    return _normed(scope, node, match, name)


def _with_tables(scope: Scope, call: ast.Call, match: Match, name: str, first: int = 1) -> Match:
    """The match with a rotation, and its arguments from the first table on as operands."""
    arguments = [*call.args[first:], *[keyword.value for keyword in call.keywords]]
    tables = [part.value if isinstance(part, ast.Starred) else part for part in arguments]
    tables = [part for part in tables if _reads_local(scope, part)]
    operands = {f"{name}_table{i}": Operand(part) for i, part in enumerate(tables)}
    step = match if call in match.steps else match.step(call)
    return replace(step, operands={**match.operands, **operands})


def _normed(scope: Scope, node: ast.expr, match: Match, name: str) -> Match | None:
    """The match of ``norm(x)``, or of views of that; ``x`` is the operand ``name``."""
    node, match, views = through_views(scope, node, match)
    module = norm_call(scope, node, LAST_DIM)
    if module is None:
        return None
    assert isinstance(node, ast.Call)
    _, match = peel(scope, node.func, match)
    x = node.args[0]
    if is_cast(x) and ast.unparse(x).endswith((".float()", ".to(torch.float32)")):
        x = x.func.value  # type: ignore[attr-defined]  # kernels read any dtype, and compute in float32
    operands = {**match.operands, name: Operand(x, views)}
    modules = {**match.modules, f"{name[0]}_norm{name[1:]}": module}
    return replace(match.step(node), operands=operands, modules=modules)


def _of_query_and_key(scope: Scope, match: Match) -> bool:
    """Whether two norms are those of queries and keys, by their names; any two may stand one after the other."""
    paths = [scope.facts.path(scope.flow, match.modules[name]) for name in ("q_norm0", "k_norm0")]
    query, key = [path[-1] if path else "" for path in paths]
    return query != key and key in (query.replace("query", "key"), query.replace("q", "k"))


def _concatenated(scope: Scope, node: ast.expr, match: Match) -> tuple[list[ast.expr], Match, int] | None:
    """The parts, the match and the dimension of a concatenation; None for anything else."""
    node, match = peel(scope, node, match)
    found = concatenated(node)
    return None if found is None else (found[0], match.step(node), found[1])


_CONCATENATES = frozenset({"torch.cat", "torch.concat", "torch.concatenate"})


def concatenated(node: ast.expr) -> tuple[list[ast.expr], int] | None:
    """The parts and the dimension of ``torch.cat([...], dim=...)``; None for anything else."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    if not isinstance(node.func.value, ast.Name) or f"{node.func.value.id}.{node.func.attr}" not in _CONCATENATES:
        return None
    given = [*node.args, *[keyword.value for keyword in node.keywords]]
    if len(given) != 2 or not isinstance(given[0], (ast.List, ast.Tuple)):
        return None
    try:
        dim = ast.literal_eval(given[1])
    except ValueError:
        return None
    return (given[0].elts, dim) if type(dim) is int else None


def rotation(scope: Scope, node: ast.expr, named: bool = False) -> ast.Call | None:
    """A call that may rotate its first argument: of a function of the file, ``named`` so, with more than that."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not node.args:
        return None
    if isinstance(node.args[0], ast.Starred) or any(keyword.arg is None for keyword in node.keywords):
        return None
    if scope.flow.is_local(node.func) and nested_function(scope.flow, node.func) is None:
        return None
    fits = len(node.args) + len(node.keywords) > 1 and (not named or ROTATES.search(node.func.id))
    return node if fits else None


def nested_function(flow: Flow, name: ast.Name) -> ast.FunctionDef | ast.ImportFrom | None:
    """The nested function that a name stands for, if it reads nothing of the function around it; or its import."""
    reaching = flow.definitions.get(name, frozenset())
    statements = [definition.statement for definition in reaching]
    if len(statements) == 1 and isinstance(statements[0], ast.ImportFrom):
        return statements[0]
    if len(statements) != 1 or not isinstance(statements[0], ast.FunctionDef) or statements[0].decorator_list:
        return None
    function = statements[0]
    own = {argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)} | stored_in(function)
    outer = stored_in(flow.tree) | set(flow.parameters)
    return None if (names_in(*function.body) - own) & outer else function


def _reads_local(scope: Scope, node: ast.expr) -> bool:
    names = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
    return any(scope.flow.is_local(name) and name.id != scope.facts.receiver for name in names)


# --- two statements as one -----------------------------------------------------------------------------


def pair_statements(scope: Scope, kind: str) -> bool:
    """Makes one statement of each two that compute what a :class:`QueryKey` of a kind does, one after the other.

    Returns:
        Whether there are any.
    """
    found = False
    for block in blocks(scope.flow.tree):
        index = 0
        while index + 1 < len(block):
            both = _paired(scope, block[index], block[index + 1], kind)
            if both is not None:
                block[index : index + 2] = [both]
                found = True
            index += 1
    return found


def separate_statements(tree: ast.FunctionDef) -> None:
    """Takes back what :func:`pair_statements` did where no site came of it."""
    for block in blocks(tree):
        for index in reversed(range(len(block))):
            single, value = getattr(block[index], "_single", None), getattr(block[index], "value", None)
            if single is not None and isinstance(value, ast.Tuple):
                block[index : index + 1] = single


def _paired(scope: Scope, one: ast.stmt, other: ast.stmt, kind: str) -> ast.Assign | None:
    single = [one, other]
    if kind in (JOINED_LAST, JOINED_THEN):
        one, other = without_store(one), without_store(other)
    if kind == JOINED_THEN and (one is single[0] or other is single[1]):
        return None
    if not isinstance(one, ast.Assign) or not isinstance(other, ast.Assign):
        return None
    if kind == QUERY_ROTATED and _is_norm(scope, one.value):
        one, other = other, one  # neither reads the other, see below
    targets = [*one.targets, *other.targets]
    if len(targets) != 2 or not all(isinstance(target, ast.Name) for target in targets):
        return None
    calls: list[ast.expr] = []
    if kind == ROTATED_IN_PART and is_cast(one.value) != is_cast(other.value):
        return None  # what is cast back later is not what the other is
    for value in (one.value, other.value):
        while is_cast(value):
            value = value.func.value  # type: ignore[attr-defined]
        if not (_is_norm(scope, value) if kind == QUERY_ROTATED and calls else _is_of(scope, value, kind)):
            return None
        calls.append(value)
    if kind in (JOINED_FIRST, ROTATED, ROTATED_ALONE) and len({ast.unparse(call.func) for call in calls}) != 1:  # type: ignore[attr-defined]
        return None
    names = [target.id for target in targets]  # type: ignore[attr-defined]
    if names[0] in {*names_in(other.value), names[1]}:
        return None
    if kind == QUERY_ROTATED and names[1] in names_in(one.value):
        return None
    both = ast.Assign([ast.Tuple(targets, ast.Store())], ast.Tuple([one.value, other.value], ast.Load()))
    both._single = single  # type: ignore[attr-defined]
    return ast.fix_missing_locations(ast.copy_location(both, one))


def _is_of(scope: Scope, node: ast.expr, kind: str) -> bool:
    if kind in (JOINED_LAST, JOINED_THEN, ROTATED_IN_PART):
        return _concatenated(scope, node, Match()) is not None
    return _is_norm(scope, node) if kind == NORMED else rotation(scope, node) is not None


def _is_norm(scope: Scope, node: ast.expr) -> bool:
    return norm_call(scope, node, LAST_DIM) is not None
