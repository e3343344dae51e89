"""Where a match may be computed: in the place of its last part, of its residual, or in front of its last statement.

The proof of a site takes its leaves as given, so it cannot see a wrong place. Moving is legal only if every leaf keeps
its definition or is read where it stood, nothing in between reads a moved value, and nothing in between writes, or may
write, to a storage that the match reads.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass

from diffkern.rewrite.effects import Effects
from diffkern.rewrite.expressions import is_cast
from diffkern.rewrite.flow import Definition, Flow
from diffkern.rewrite.functions import shape_arguments
from diffkern.rewrite.match import Match, Scope
from diffkern.rewrite.patches import SPLIT_SAMPLES
from diffkern.rewrite.syntax import nodes_in, root_of
from diffkern.rewrite.template import Template

#: Methods of lists and dicts that keep an argument.
_KEEP = frozenset({"append", "extend", "insert", "update", "setdefault", "add"})
_SPLIT_SAMPLES = Template(SPLIT_SAMPLES)
#: What fails, or answers something else, with a tensor whose dimensions lie in another order in memory.
_OF_ORDER = frozenset({"view", "view_as", "as_strided", "stride", "is_contiguous", "data_ptr"})


@dataclass(frozen=True, eq=False)
class Placement:
    """How the parts of a match come together.

    Attributes:
        kind: ``"inline"``: in the place of the root. ``"hoist"``: in the place of the statement that binds the
            residual. ``"sink"``: right before the statement of the root.
        early: Leaves that are evaluated where their statement stood, since they cannot move.
        removed: Definitions that nothing needs any longer.
        moved: Definitions of norms that others modulate, too, and that follow the residual to where it is computed.
        moves_calls: Whether a module is called in another order, or more often, than in the source.
    """

    kind: str
    early: tuple[ast.expr, ...]
    removed: tuple[Definition, ...]
    moved: tuple[Definition, ...]
    moves_calls: bool


class Placer:
    """Finds places in one function."""

    def __init__(self, scope: Scope, effects: Effects) -> None:
        self._scope = scope
        self._flow: Flow = scope.flow
        self._effects = effects

    def place(self, root: ast.expr, match: Match, leaves: tuple[ast.expr, ...]) -> Placement | str:
        """Returns the place, or the reason why there is none.

        Args:
            root: The outermost node of the match.
            match: The match.
            leaves: The expressions that it reads, in the order of evaluation.
        """
        flow, statement = self._flow, self._flow.statement[root]
        if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)):
            return f"it stands in the head of a statement: {type(statement).__name__.lower()}"
        definitions = tuple({definition: None for _, definition in match.passed})
        if root in flow.guarded and definitions:
            return "it stands in a condition or a nested function"
        for definition in definitions:
            assert definition.statement is not None
            reason = self._unreachable(definition.statement, statement)
            if reason is not None:
                return reason
        kept = match.kept if match.kept is not None and self._other_uses(match.kept, match) else None
        removed, shared = [], []
        for definition in definitions:
            if definition is kept or (is_alias(definition) and self._other_uses(definition, match)):
                continue
            if not self._other_uses(definition, match):
                removed.append(definition)
            elif self._is_modulated_twice(definition, match):
                shared.append(definition)
            else:
                return f"{definition.name} is used again"
        for kind in ("inline",) if kept is None else ("hoist", "sink"):
            found = self._try(kind, root, match, leaves, tuple(removed), kept, tuple(shared))
            if isinstance(found, Placement):
                return found
        return found

    def _try(
        self,
        kind: str,
        root: ast.expr,
        match: Match,
        leaves: tuple[ast.expr, ...],
        removed: tuple[Definition, ...],
        kept: Definition | None,
        shared: tuple[Definition, ...],
    ) -> Placement | str:
        flow, end = self._flow, self._flow.statement[root]
        home = end
        point = flow.order[root]
        if kept is not None:
            assert kept.statement is not None
            if flow.places[kept.statement].block is not flow.places[end].block:
                return "the residual and the norm stand in different branches"
            if kind == "hoist":
                home, point = kept.statement, flow.order[kept.statement]
            else:
                point = flow.first[end]
                others = [use for definition in (kept, *shared) for use in self._other_uses(definition, match)]
                if any(flow.order[use] < point for use in others):
                    return f"{kept.name} is used between the residual and the norm"
                if any(flow.single(_argument(definition)) is not kept for definition in shared):
                    return "a norm that is modulated twice does not read the residual itself"
        early = []
        for leaf in leaves:
            stands = flow.statement[leaf]
            if stands is home and (kind != "sink"):
                continue
            if stands is end and kind == "sink" and not self._effects.is_side_effect_free(leaf):
                return "an operand that calls something would be evaluated earlier"
            dropped = (*removed, kept) if kind == "sink" and kept is not None else removed
            if self._effects.is_side_effect_free(leaf) and self._means_the_same(leaf, home, dropped):
                continue
            if kind == "hoist" and self._effects.is_side_effect_free(leaf) and self._reads_shape(leaf, home, match):
                continue
            if flow.order[leaf] > point:
                return f"an operand is not there yet where the residual is: {ast.unparse(leaf)}"
            early.append(leaf)
        reason = self._disturbed(match, leaves, point)
        if reason is not None:
            return reason
        moves = bool(shared) or self._passes_calls(match, point)
        return Placement(kind, tuple(early), removed, shared if kind == "sink" else (), moves)

    def _unreachable(self, start: ast.stmt, end: ast.stmt) -> str | None:
        """Why what stands in ``start`` cannot be computed at ``end``: loops and contexts are not entered."""
        outer, inner = self._flow.places[start].parents, self._flow.places[end].parents
        if inner[: len(outer)] != outer:
            return "its parts stand in different branches"
        if not all(isinstance(parent, ast.If) for parent in inner[len(outer) :]):
            return "its parts stand on both sides of a loop or a context"
        return None

    def _other_uses(self, definition: Definition, match: Match) -> list[ast.Name]:
        """The loads of a definition outside of the match."""
        inside: set[ast.AST] = {name for name, _ in match.passed}
        inside |= {part for step in match.steps for part in cast_arguments(step)}
        return [use for use in definition.uses if use not in inside]

    def _is_modulated_twice(self, definition: Definition, match: Match) -> bool:
        """Whether all other uses of a norm's result are modulations as well, each of which computes the norm."""
        value = definition.value
        if not isinstance(value, ast.Call) or "norm" not in match.modules or value not in match.steps:
            return False
        factors = {
            operand
            for node in self._flow.nodes
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)
            for operand in (node.left, node.right)
        }
        return all(use in factors for use in self._other_uses(definition, match))

    def _means_the_same(self, leaf: ast.expr, statement: ast.stmt, dropped: tuple[Definition, ...]) -> bool:
        """Whether the names of a leaf have the same definitions at a statement, once others are dropped."""
        names = [node for node in ast.walk(leaf) if isinstance(node, ast.Name)]
        return all(
            self._reaching(statement, name.id, dropped) == self._flow.definitions.get(name, frozenset())
            for name in names
        )

    def _reads_shape(self, leaf: ast.expr, statement: ast.stmt, match: Match) -> bool:
        """Whether a leaf reads the new residual's shape alone, and its names else mean the same at a statement.

        The old residual has that shape, and is what the name means there.
        """
        residual = match.operands["residual"].node
        shapes = {
            call.args[position]
            for call in ast.walk(leaf)
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and self._effects.is_pure_helper(call)
            for position in shape_arguments(self._scope.namespace.get(call.func.id))
            if position < len(call.args)
        }
        definitions = self._flow.definitions
        for name in [node for node in ast.walk(leaf) if isinstance(node, ast.Name)]:
            is_new = name in shapes and definitions.get(name) == frozenset([match.kept])
            meant = residual if is_new and isinstance(residual, ast.Name) else name
            if self._flow.reaching(statement, name.id) != definitions.get(meant, frozenset()):
                return False
        return True

    def _reaching(self, statement: ast.stmt, name: str, dropped: tuple[Definition, ...]) -> frozenset[Definition]:
        reaching = self._flow.reaching(statement, name)
        for definition in dropped:
            if reaching == {definition} and definition.statement is not None:
                return self._reaching(definition.statement, name, dropped)
        return reaching

    def _disturbed(self, match: Match, leaves: tuple[ast.expr, ...], point: int) -> str | None:
        """Why something in between may write to what the match reads."""
        read = frozenset[object]().union(*map(self._effects.storage, leaves))
        read |= frozenset[object]().union(*[self._effects.storage(name) for name, _ in match.passed])
        orders = [point, *[self._flow.order[step] for step in match.steps if step in self._flow.order]]
        for node in self._flow.nodes[min(orders) + 1 : max(orders)]:
            if node in match.steps:
                continue
            written = self._effects.written(node)
            parameters = {root for root in written if isinstance(root, Definition)}
            if written & read or (parameters and "unknown" not in written and _any_parameter(read)):
                return f"{ast.unparse(node)} may write to an operand"
        return None

    def _passes_calls(self, match: Match, point: int) -> bool:
        """Whether a module of the match changes places with another call."""
        calls = [step for step in match.steps if isinstance(step, ast.Call) and step.func in match.modules.values()]
        spans = [sorted((self._flow.order[call], point)) for call in calls]
        return any(
            isinstance(node, ast.Call)
            and node not in match.steps
            and not _is_method_of_torch(node, self._scope.facts.receiver)
            for start, end in spans
            for node in self._flow.nodes[start + 1 : end]
        )


def _argument(definition: Definition) -> ast.expr:
    """What a norm reads whose result a definition is."""
    assert isinstance(definition.value, ast.Call)
    return definition.value.args[0]


def is_alias(definition: Definition) -> bool:
    """Whether a definition only gives another name to a variable or a submodule."""
    value = definition.value
    return value is not None and isinstance(root_of(value, (ast.Attribute,)), ast.Name)


def cast_arguments(step: ast.expr) -> list[ast.AST]:
    """The nodes of a cast that say what to cast to."""
    if not isinstance(step, ast.Call):
        return []
    return nodes_in((*step.args, *step.keywords)) if is_cast(step) else []


def _any_parameter(read: frozenset[object]) -> bool:
    return any(isinstance(root, Definition) for root in read)


def _is_method_of_torch(call: ast.Call, receiver: str) -> bool:
    return isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) != receiver


# --- results that may not lie in memory otherwise, or in that of another -----------------------------------


def is_viewed(effects: Effects, root: ast.expr) -> bool:
    """Whether a result, or a view of it, is asked for its order in memory, which is that of the streams."""
    sides = frozenset(root.elts if isinstance(root, ast.Tuple) else [root])
    splits = {
        node.func for node in effects.flow.nodes if isinstance(node, ast.Call) and _SPLIT_SAMPLES.fill(None, node)
    }
    for node in effects.flow.nodes:
        if isinstance(node, ast.Attribute) and node in splits:
            continue
        if isinstance(node, ast.Attribute) and node.attr in _OF_ORDER and sides & effects.storage(node.value):
            base = node.value.func if isinstance(node.value, ast.Call) else None
            if not (isinstance(base, ast.Attribute) and base.attr == "contiguous"):
                return True
    return False


def is_written(effects: Effects, memory: frozenset[object]) -> bool:
    """Whether a statement writes into one of some storages; calls that are not known are trusted not to."""
    stores = (node for node in effects.flow.nodes if not isinstance(node, ast.Call) or _ends_in_underscore(node))
    return any(memory & effects.written(node) for node in stores)


def is_made_here(effects: Effects, node: ast.expr, shared: Iterable[ast.expr] = ()) -> bool:
    """Whether a function makes all that an expression may be, and neither writes into that, nor keeps or shares it."""
    memory = effects.storage(node)
    if not all(isinstance(root, ast.AST) for root in memory) or is_written(effects, memory):
        return False
    return not any(memory & effects.storage(other) for other in (*_kept(effects), *shared))


def needs_own_memory(effects: Effects, root: ast.expr, match: Match) -> bool:
    """Whether a result may not lie in that of its operands; calls that are not known are trusted not to write."""
    memory = frozenset({root}).union(*[effects.storage(operand.node) for operand in match.operands.values()])
    if is_written(effects, memory):
        return True
    return any(root in effects.storage(node) for node in _kept(effects))


def _kept(effects: Effects) -> list[ast.expr]:
    """What a function returns or keeps."""
    nodes = effects.flow.nodes
    kept = [node.value for node in nodes if isinstance(node, (ast.Return, ast.Yield)) and node.value is not None]
    for node in nodes:
        if isinstance(node, ast.Assign) and not all(isinstance(t, (ast.Name, ast.Tuple)) for t in node.targets):
            kept.append(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _KEEP:
            kept += node.args
    return kept


def _ends_in_underscore(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr.endswith("_")
