"""Writes matches into the source: the call of a site in the place of what it computes, and that as functions."""

from __future__ import annotations

import ast
import copy
import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from diffkern.rewrite.effects import SITES
from diffkern.rewrite.expressions import is_cast, is_view
from diffkern.rewrite.flow import Definition, Flow
from diffkern.rewrite.match import Match, Operand, Scope
from diffkern.rewrite.placement import Placement, cast_arguments
from diffkern.rewrite.query_key import nested_function
from diffkern.rewrite.syntax import Swap, nodes_in, path_of, stored_in

#: Variables of inlined helpers and of sites.
_TEMPORARY = re.compile(r"_[her]\d+_")


@dataclass(frozen=True, eq=False)
class Region:
    """A match as functions of its leaves.

    Attributes:
        leaves: The expressions that it reads, in the order of evaluation.
        original: The source of the region: ``def original(self, *leaves)``.
        operands: The source of the operands of the op: ``def operands(self, *leaves)``, a dict by name.
        names: Their names.
        roles: For each leaf the operand that it is, or "".
    """

    leaves: tuple[ast.expr, ...]
    original: ast.FunctionDef
    operands: ast.FunctionDef
    names: tuple[str, ...]
    roles: tuple[str, ...]


class _Writer:
    """Renders nodes of a match with its leaves as variables."""

    def __init__(self, scope: Scope, match: Match, root: ast.expr) -> None:
        self._flow, self._facts = scope.flow, scope.facts
        self._passed = {name: definition for name, definition in match.passed}
        self._definitions = {definition: f"_v{i}" for i, definition in enumerate(dict.fromkeys(self._passed.values()))}
        self._leaves: dict[object, tuple[str, ast.expr]] = {}
        self._callees = {step.func for step in match.steps if isinstance(step, ast.Call)}
        wanted = [operand.node for operand in match.operands.values()]
        wanted += [node for step in match.steps for node in _aside(step) if self._is_leaf(node)]
        for node in sorted(set(wanted), key=lambda node: self._flow.order[node]):
            self._leaves.setdefault(self._key(node), (f"_x{len(self._leaves)}", node))
        self._operands = {operand.node for operand in match.operands.values()}
        self._match, self._root = match, root

    def region(self, kept: Definition | None) -> Region:
        used = sorted(self._definitions, key=lambda definition: self._flow.order[definition.statement])  # type: ignore[index]
        called = [step.func for step in self._match.steps if isinstance(step, ast.Call)]
        nested = [nested_function(self._flow, name) for name in called if isinstance(name, ast.Name)]
        body: list[ast.stmt] = [function for function in dict.fromkeys(nested) if function is not None]
        for definition in used:
            assert definition.value is not None and definition.statement is not None
            target = ast.Name(self._definitions[definition], ast.Store())
            body.append(ast.copy_location(ast.Assign([target], self.render(definition.value)), definition.statement))
        result = self.render(self._root)
        statement = self._flow.statement[self._root]
        if isinstance(statement, ast.AugAssign) and "in_place" in self._match.options:
            residual = self._leaves[self._key(self._flow.augmented[statement])][0]
            added = ast.AugAssign(ast.Name(residual, ast.Store()), statement.op, result)
            body.append(ast.copy_location(added, statement))
            result = ast.Name(residual, ast.Load())
        if kept is not None:
            result = ast.Tuple([ast.Name(self._definitions[kept], ast.Load()), result], ast.Load())
        body.append(ast.copy_location(ast.Return(result), self._root))
        operands = {ast.Constant(name): self._operand(operand) for name, operand in self._match.operands.items()}
        values = ast.copy_location(ast.Return(ast.Dict([*operands], [*operands.values()])), self._root)
        leaves = tuple(node for _, node in self._leaves.values())
        names = {self._key(operand.node): name for name, operand in self._match.operands.items()}
        roles = tuple([names.get(key, "") for key in self._leaves])
        original, operands_of = self._function("original", body), self._function("operands", [values])
        return Region(leaves, original, operands_of, tuple(self._match.operands), roles)

    def render(self, node: ast.AST) -> ast.expr:
        rendered = _Render(self).visit(node)
        assert isinstance(rendered, ast.expr)
        return rendered

    def name_of(self, node: ast.AST) -> str | None:
        """The variable that stands for a node, if one does."""
        if node in self._operands:
            return self._leaves[self._key(node)][0]
        if not isinstance(node, ast.Name):
            return None
        definition = self._passed.get(node) or self._internal(node)
        if definition is not None:
            return self._definitions[definition]
        return self._leaves[self._key(node)][0] if self._is_leaf(node) else None

    def _internal(self, node: ast.Name) -> Definition | None:
        """The definition inside of the match that an argument of a cast reads."""
        reaching = self._flow.definitions.get(node, frozenset())
        return next((definition for definition in reaching if definition in self._definitions), None)

    def _is_leaf(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.Name) or node in self._passed or node.id == self._facts.receiver:
            return False
        nested = nested_function(self._flow, node)
        is_value = nested is None or (isinstance(nested, ast.ImportFrom) and node not in self._callees)
        return is_value and self._flow.is_local(node) and self._internal(node) is None

    def _key(self, node: ast.expr) -> object:
        return (node.id, self._flow.definitions.get(node)) if isinstance(node, ast.Name) else node

    def _operand(self, operand: Operand) -> ast.expr:
        value = self.render(operand.node)
        for view in operand.views:
            inner = view.value if isinstance(view, ast.Subscript) else view.func.value  # type: ignore[attr-defined]
            rendered = _Render(self, {inner: value}).visit(view)
            assert isinstance(rendered, ast.expr)
            value = rendered
        return value

    def _function(self, name: str, body: list[ast.stmt]) -> ast.FunctionDef:
        names = [self._facts.receiver, *[name for name, _ in self._leaves.values()]]
        function = ast.parse(f"def {name}({', '.join(names)}): pass").body[0]
        assert isinstance(function, ast.FunctionDef)
        function.body = body
        return ast.fix_missing_locations(ast.copy_location(function, self._root))


class _Render(ast.NodeTransformer):
    """A copy of a node with variables in the place of what they stand for."""

    def __init__(self, writer: _Writer, known: dict[ast.expr, ast.expr] | None = None) -> None:
        self._writer = writer
        self._known = known or {}

    def visit(self, node: ast.AST) -> ast.AST:
        if node in self._known:
            return self._known[node]
        name = self._writer.name_of(node)
        if name is not None:
            return ast.copy_location(ast.Name(name, ast.Load()), node)
        new = copy.copy(node)
        for field, value in ast.iter_fields(node):
            if isinstance(value, list):
                setattr(new, field, [self.visit(item) if isinstance(item, ast.AST) else item for item in value])
            elif isinstance(value, ast.AST) and not isinstance(value, (ast.expr_context, ast.operator)):
                setattr(new, field, self.visit(value))
        return new


def attributes_read(region: Region) -> set[tuple[str, ...]]:
    """What a match reads of its module, as paths: its callees, and attributes in casts, views and arguments."""
    attributes = [node for node in ast.walk(region.original) if isinstance(node, ast.Attribute)]
    inner, receiver = {node.value for node in attributes}, region.original.args.args[0].arg
    return {path for node in attributes if node not in inner and (path := path_of(node, receiver)) is not None}


def write_region(scope: Scope, root: ast.expr, match: Match, kept: Definition | None) -> Region:
    """Returns a match as functions of its leaves; with ``kept`` they give that value, too, before the result."""
    return _Writer(scope, match, root).region(kept)


def replace_match(
    scope: Scope,
    root: ast.expr,
    match: Match,
    region: Region,
    placement: Placement,
    kept: Definition | None,
    index: int,
) -> None:
    """Changes the tree: calls site ``index`` where ``placement`` says, and drops what nothing needs any longer."""
    flow, end = scope.flow, scope.flow.statement[root]
    early = {leaf: f"_e{index}_{i}" for i, leaf in enumerate(placement.early)}
    arguments: list[ast.expr] = [ast.Name(scope.facts.receiver, ast.Load())]
    arguments += [ast.Name(early[leaf], ast.Load()) if leaf in early else leaf for leaf in region.leaves]
    site = ast.Subscript(ast.Name(SITES, ast.Load()), ast.Constant(index), ast.Load())
    call: ast.expr = ast.Call(site, arguments, [])
    in_place = "in_place" in match.options
    if in_place:
        call._written = 1 + region.roles.index("residual")  # type: ignore[attr-defined]

    def evaluated_early(statement: ast.stmt) -> list[ast.stmt]:
        leaves = [leaf for leaf in placement.early if flow.statement[leaf] is statement]
        return [ast.Assign([ast.Name(early[leaf], ast.Store())], leaf) for leaf in leaves]

    gone = {definition.statement for definition in placement.removed}
    stay = {flow.statement[leaf] for leaf in placement.early} - gone - {kept.statement if kept is not None else None}
    for statement in stay:
        _insert(flow.places[statement].block, statement, evaluated_early(statement))
    if kept is not None:
        assert kept.statement is not None
        result = f"_r{index}_result"
        targets = ast.Tuple([ast.Name(kept.name, ast.Store()), ast.Name(result, ast.Store())], ast.Store())
        both = ast.Assign([targets], call)
        replaced = evaluated_early(kept.statement)
        if placement.kind == "hoist":
            replaced.append(both)
        else:
            moved = [definition.statement for definition in placement.moved if definition.statement is not None]
            _insert(flow.places[end].block, end, [both, *[copy.copy(statement) for statement in moved]])
            for statement in moved:
                _replace(flow.places[statement].block, statement, [], like=statement)
        _replace(flow.places[kept.statement].block, kept.statement, replaced, like=kept.statement)
        call = ast.Name(result, ast.Load())
    for old in gone:
        assert old is not None
        _replace(flow.places[old].block, old, evaluated_early(old), like=old)
    dropped = [target for definition in placement.removed for target in definition.deleted]
    _undelete(flow, end, dropped, placement.removed)
    if in_place and isinstance(end, ast.AugAssign):
        _replace(flow.places[end].block, end, [ast.Assign([end.target], call)], like=end)
    else:
        Swap(root, ast.copy_location(call, root)).visit(end)
    ast.fix_missing_locations(end)


def _undelete(flow: Flow, end: ast.stmt, dropped: list[ast.Name], removed: tuple[Definition, ...]) -> None:
    """Drops targets of ``del`` whose definitions are gone; what had such a name before is deleted behind the site."""
    block = flow.places[end].block
    for statement in [node for node in ast.walk(flow.tree) if isinstance(node, ast.Delete)] if dropped else ():
        statement.targets = [target for target in statement.targets if target not in dropped]
        if not statement.targets:
            _replace(flow.places[statement].block, statement, [], like=statement)
    before = {one.name: flow.reaching(one.statement, one.name) for one in removed if one.statement is not None}
    behind = [
        ast.Name(name, ast.Del())
        for name in dict.fromkeys(target.id for target in dropped)
        if before[name] - {*removed} and name not in flow.parameters and flow.reaching(end, name) <= {*removed}
    ]
    if behind and not isinstance(end, ast.Return):
        block.insert(block.index(end) + 1, ast.copy_location(ast.Delete([*behind]), end))


def free_temporaries(block: list[ast.stmt], later: frozenset[str] = frozenset()) -> None:
    """Deletes variables of helpers and sites behind their last use: a helper has left them by then.

    Args:
        block: Statements of the rewritten function; changed.
        later: Variables that statements behind the block may read.
    """
    reads = [_loaded(statement) for statement in block]
    bound = list(accumulate(map(_surely_bound, block), operator.or_))
    behind = later
    for index in reversed(range(len(block))):
        statement = block[index]
        looped = behind | reads[index] if isinstance(statement, (ast.For, ast.While)) else behind
        for name in ("body", "orelse", "finalbody"):
            if isinstance(statement, (ast.If, ast.For, ast.While, ast.With, ast.Try)):
                free_temporaries(getattr(statement, name, []), looped)
        names = [part.asname or "" for part in statement.names] if isinstance(statement, ast.ImportFrom) else []
        if names and not behind.intersection(names) and all(map(_TEMPORARY.match, names)):
            block.remove(statement)
        over = {name for name in reads[index] & bound[index] - behind if _TEMPORARY.match(name)}
        if over and not isinstance(statement, (ast.Return, ast.Raise)):
            delete = ast.Delete([ast.Name(name, ast.Del()) for name in sorted(over)])
            block.insert(index + 1, ast.copy_location(delete, statement))
        behind |= reads[index]


def _loaded(statement: ast.AST) -> frozenset[str]:
    names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
    return frozenset([node.id for node in names if isinstance(node.ctx, ast.Load)])


def _surely_bound(statement: ast.stmt) -> frozenset[str]:
    if isinstance(statement, ast.If):
        branches = [frozenset().union(*map(_surely_bound, block)) for block in (statement.body, statement.orelse)]
        return branches[0] & branches[1]
    return frozenset(stored_in(statement)) if isinstance(statement, (ast.Assign, ast.AnnAssign)) else frozenset()


def _replace(block: list[ast.stmt], old: ast.stmt, new: list[ast.stmt], like: ast.stmt) -> None:
    index = block.index(old)
    if not new and len(block) == 1:
        new = [ast.Pass()]
    block[index : index + 1] = [_located(statement, like) for statement in new]


def _insert(block: list[ast.stmt], before: ast.stmt, new: list[ast.stmt]) -> None:
    index = block.index(before)
    block[index:index] = [_located(statement, before) for statement in new]


def _located(statement: ast.stmt, like: ast.stmt) -> ast.stmt:
    return ast.fix_missing_locations(ast.copy_location(statement, like))


def _aside(step: ast.expr) -> Iterable[ast.expr]:
    """The names that a cast or a view reads beside the tensor: a dtype, a size, an index."""
    if is_cast(step):
        return [part for part in cast_arguments(step) if isinstance(part, ast.expr)]
    if isinstance(step, ast.Subscript):
        return [part for part in ast.walk(step.slice) if isinstance(part, ast.expr)]
    if isinstance(step, ast.Call) and is_view(step):
        values = [*step.args, *[keyword.value for keyword in step.keywords]]
        return [part for part in nodes_in(values) if isinstance(part, ast.expr)]
    return []
