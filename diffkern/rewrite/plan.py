"""Plans a function: where it has which sites, its rewritten text, and why the rest stays as it is."""

from __future__ import annotations

import ast
import copy
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from types import CodeType
from typing import Any

from torch import nn

from diffkern.matching.genuine import in_library
from diffkern.rewrite import inline
from diffkern.rewrite.effects import SITES, Effects, site_called
from diffkern.rewrite.emit import Region, attributes_read, free_temporaries, replace_match, write_region
from diffkern.rewrite.facts import Facts, Path, child_of
from diffkern.rewrite.flow import Flow
from diffkern.rewrite.functions import functions_called, global_at, is_pure
from diffkern.rewrite.halves import separate_halves
from diffkern.rewrite.identity import DividedByOne, ImageOfTokens
from diffkern.rewrite.masked import MaskedAttention, PairMask
from diffkern.rewrite.match import Match, Scope
from diffkern.rewrite.patches import PatchEmbedding
from diffkern.rewrite.pixels import InOrderSite, PutBefore
from diffkern.rewrite.placement import Placer, is_made_here, is_viewed, is_written, needs_own_memory
from diffkern.rewrite.query_key import (
    ROTATED_IN_PART,
    QueryKey,
    concatenated,
    pair_statements,
    separate_statements,
)
from diffkern.rewrite.rules import RULES, Rule
from diffkern.rewrite.sequential import unroll_sequences
from diffkern.rewrite.source import Source, _imported_in_file, compiled
from diffkern.rewrite.stores import name_starts, separate_pairs
from diffkern.rewrite.streams import Repeated, SideBySide
from diffkern.rewrite.syntax import blocks, body_start, names_in, only_target, statements_of
from diffkern.rewrite.twins import put_twins
from diffkern.rewrite.variants import (
    activate_in_branches,
    decide_branches,
    drop_options,
    norms_into_branches,
    split_by_arguments,
    split_by_flags,
)

#: Names in rewritten functions: what decides which sites are on, what runs if none may, what concatenates behind a
#: site's result, and what calls the layer that reads that.
ENTER, STOCK, JOIN, READ = NAMES = "_enter", "_stock", "_join", "_read"
#: What of queries and keys may be read before they are there.
_KNOWN = frozenset({"dtype", "device", "shape", "ndim"})


@dataclass(frozen=True, eq=False)
class SitePlan:
    """One place where an op computes what the source says. Holds code, never a function of the model.

    Attributes:
        index: Its number in the rewritten function.
        rule: The rule that found it.
        line: The line of the file.
        places: Lines and columns of what the op computes.
        text: The expression.
        original: Code of the expression as a function of ``self`` and the leaves.
        operands: Code that makes the operands of the op from the same arguments.
        names: Names of the operands.
        roles: For each leaf the operand that it is, or "".
        modules: Paths of the modules that the op computes in the place of, by their names in the rule.
        options: Options of the op as found in the source.
        gives_residual: Whether the site returns the new residual before the result.
        moves_calls: Whether a module would be called in another order than in the source.
        halves: The names of operands that are the parts of one tensor, in their order there; empty if none are.
        read_by: Path of the linear layer that alone reads the result, behind something else; empty if none does.
        functions: Names of global functions that the op computes in the place of, see
            :func:`~diffkern.rewrite.functions.global_at`.
        attended: Whether the results are queries and keys that a call of attention alone reads.
    """

    index: int
    rule: Rule
    line: int
    places: tuple[tuple[int, int], ...]
    text: str
    original: CodeType
    operands: CodeType
    names: tuple[str, ...]
    roles: tuple[str, ...]
    modules: Mapping[str, Path]
    options: Mapping[str, object]
    gives_residual: bool
    moves_calls: bool
    halves: tuple[str, ...] = ()
    read_by: Path = ()
    functions: tuple[str, ...] = ()
    attended: bool = False

    def computes_what(self, other: SitePlan) -> bool:
        """Whether another site is the same place of the source, in another branch of the rewritten function."""
        code = {"index", "original", "operands", "read_by", "attended"}
        return all(getattr(self, one.name) == getattr(other, one.name) for one in fields(self) if one.name not in code)


@dataclass(frozen=True, eq=False)
class Plan:
    """What becomes of one function for all modules about which the facts hold.

    Attributes:
        sites: The sites, in the order of their numbers.
        code: The rewritten function; it reads :data:`NAMES`.
        text: Its source, with calls of modules as they are written.
        facts: What was assumed about modules.
        helpers: Functions whose bodies were taken into it, or that an op computes in the place of: (path or global
            name) -> function, to be checked at calls.
        refused: Expressions that have the shape of a rule and stay as they are, with the reason.
        repeats: Whether two sites compute the same expression, such as the one norm of two modulations.
    """

    sites: tuple[SitePlan, ...]
    code: CodeType
    text: str
    facts: Facts
    helpers: Mapping[str, Callable[..., Any]]
    refused: tuple[tuple[int, str, str], ...] = field(default=())
    repeats: bool = False

    def helpers_hold(self, module: nn.Module, namespace: Mapping[str, Any]) -> bool:
        """Whether the helpers of a module and its file are the ones that were read."""
        return all(helper_at(module, name, namespace) is function for name, function in self.helpers.items())


def helper_at(module: nn.Module, name: str, namespace: Mapping[str, Any]) -> Any:
    """The helper of a name in :data:`diffkern.rewrite.inline.Helpers`; None if there is none."""
    if not name.startswith("self."):
        return global_at(namespace, name)
    *path, last = name.split(".")[1:]
    return getattr(type(child_of(module, tuple(path))), last, None)


def plan(source: Source, facts: Facts, at_calls: bool = False) -> Plan | str:
    """Plans a function, or says why nothing in it can be fused.

    Args:
        source: The function. Its tree is changed.
        facts: What is known about the module.
        at_calls: As for :func:`diffkern.rewrite.inline.inline_helpers`.
    """
    tree, function = source.tree, source.function
    if names_in(tree) & {SITES, *NAMES}:
        return "it is rewritten already"
    is_processor = tree.args.args[0].arg != facts.receiver
    projections: inline.Helpers = {}
    if is_processor:
        projections = inline.inline_projections(tree, function, facts)
        decide_branches(tree, facts)
        split_by_arguments(tree, facts)
        separate_pairs(tree)
        name_starts(tree)
    else:
        inline.inline_nested(tree)
        split_by_flags(tree, facts)
    options = drop_options(tree)
    # A processor's rotation is a call that the shape knows, whatever it computes.
    wanted: set[str] | None = set() if is_processor else None
    as_written = tree if is_processor else copy.deepcopy(tree)
    while True:
        sequences = unroll_sequences(tree, facts, function.__globals__, only=wanted)
        helpers, without = inline.inline_helpers(tree, function, facts, wanted, at_calls)
        helpers |= sequences
        decide_branches(tree, facts)
        if not is_processor:
            split_by_arguments(tree, facts)
        separate_halves(tree, facts)
        activate_in_branches(tree, facts)
        norms_into_branches(tree, facts)
        planner = _Planner(source, facts)
        reason = planner.run()
        if reason is not None:
            return reason
        if wanted is not None or helpers.keys() <= planner.helpers:
            break
        wanted, tree = planner.helpers, as_written  # what no site needs stays a call
        source = replace(source, tree=tree)
    rules = [site.rule for site in planner.sites if not issubclass(site.rule.site, InOrderSite)]
    if all(isinstance(rule.shape, (MaskedAttention, Repeated, SideBySide)) for rule in rules):
        return planner.refused[0][2] if planner.refused else "no rule finds anything in it"
    _join_in_place(tree, planner.sites, facts)
    _attend_unrotated(tree, planner.sites)
    free_temporaries(tree.body)
    _add_entry(tree, facts.receiver, options, without)
    ast.fix_missing_locations(tree)
    text = ast.unparse(tree)
    twins = put_twins(tree, function) if in_library(function) else ()
    names = (*function.__code__.co_freevars, *NAMES, *twins)
    code = compiled(tree, function, names, _imported_in_file(function))
    assert code is not None
    functions = {**projections, **helpers, **planner.replaced}
    return Plan(tuple(planner.sites), code, text, facts, functions, tuple(planner.refused), planner.repeats)


class _Planner:
    """Applies the rules to one tree, one match after the other."""

    def __init__(self, source: Source, facts: Facts) -> None:
        self._source, self._facts = source, facts
        self.sites: list[SitePlan] = []
        self.refused: list[tuple[int, str, str]] = []
        self.helpers: set[str] = set()
        self.replaced: inline.Helpers = {}
        self._pure: dict[str, bool] = {}
        self._computed: set[ast.expr] = set()
        self.repeats = False

    def run(self) -> str | None:
        flow = Flow(self._source.tree)
        for rule in RULES:
            scope = Scope(flow, self._facts, self._source.function.__globals__, self.sites)
            kind = rule.shape.kind if isinstance(rule.shape, QueryKey) else None
            pairs = kind is not None and flow.decline is None and pair_statements(scope, kind)
            if pairs:
                scope = replace(scope, flow=(flow := Flow(self._source.tree)))
            while flow.decline is None and self._apply(rule, scope):
                scope = replace(scope, flow=(flow := Flow(self._source.tree)))  # the tree has changed
            if pairs:
                separate_statements(self._source.tree)
                flow = Flow(self._source.tree)
        if flow.decline is not None:
            return flow.decline
        found = {site.line for site in self.sites}
        self.refused = [entry for entry in dict.fromkeys(self.refused) if entry[0] not in found]
        return None

    def _apply(self, rule: Rule, scope: Scope) -> bool:
        """Applies a rule once; False if it finds nothing any more."""
        flow, nothing, kind = scope.flow, Match(), getattr(rule.shape, "kind", None)
        effects = Effects(scope, self._is_pure_function)
        placer = Placer(scope, effects)
        for node in flow.roots:
            for match in rule.shape.match(scope, node, nothing):
                reason = _misfit(scope, match)
                moves = "stream_dim" in match.options or kind == ROTATED_IN_PART
                moves |= isinstance(rule.shape, (ImageOfTokens, PatchEmbedding, Repeated))
                moves |= issubclass(rule.site, InOrderSite)
                if reason is None and moves and is_viewed(effects, node):
                    reason = "what reads it takes views that need heads before tokens in memory"
                once = isinstance(rule.shape, PairMask)
                if reason is None and once and is_written(effects, frozenset({node})):
                    reason = "it is written into, and would be shared"
                shares = isinstance(rule.shape, (ImageOfTokens, PutBefore, Repeated, SideBySide))
                if shares and needs_own_memory(effects, node, match):
                    reason = ""
                divides = isinstance(rule.shape, DividedByOne)
                if divides and not is_made_here(effects, match.operands["x"].node, self._divided(flow)):
                    reason = ""
                if reason is None:
                    found = self._place(rule, scope, placer, node, match)
                    if found is None:
                        return True
                    reason = found
                if reason:
                    self.refused.append((node.lineno, f"{rule.name}: {ast.unparse(node)}", reason))
        return False

    def _divided(self, flow: Flow) -> list[ast.expr]:
        """What divisions by one, which were found before, are given."""
        calls = [node for node in flow.nodes if isinstance(node, ast.Call) and site_called(node) >= 0]
        found = [call for call in calls if isinstance(self.sites[site_called(call)].rule.shape, DividedByOne)]
        return [part for call in found for part in call.args[1:]]

    def _is_pure_function(self, name: str) -> bool:
        if name not in self._pure:
            self._pure[name] = is_pure(self._function(name))
        return self._pure[name]

    def _function(self, name: str) -> object:
        """The global function of a name, or of ``self.name`` the static method."""
        if not name.startswith("self."):
            return global_at(self._source.function.__globals__, name)
        method = inspect.getattr_static(self._facts.cls, name[5:], None)
        return method.__func__ if isinstance(method, staticmethod) else None

    def _place(self, rule: Rule, scope: Scope, placer: Placer, root: ast.expr, match: Match) -> str | None:
        """Writes a match into the tree; the reason if there is no place for it."""
        kept = match.kept if match.kept is not None and placer._other_uses(match.kept, match) else None
        region = write_region(scope, root, match, kept)
        changing = [path for path in sorted(attributes_read(region)) if not scope.facts.is_settled(path)]
        if changing:
            return f"what it computes depends on {'.'.join((scope.facts.receiver, *changing[0]))}, which may change"
        placement = placer.place(root, match, region.leaves)
        if isinstance(placement, str):
            return placement
        pure = [name for name, is_known in self._pure.items() if is_known]  # what the place may depend on
        called = () if isinstance(rule.shape, MaskedAttention) else functions_called(region.original, scope.namespace)
        functions = tuple(dict.fromkeys((*match.functions, *called)))
        self.replaced.update({name: self._function(name) for name in (*functions, *pure)})  # type: ignore[misc]
        found = {helper for step in match.steps if (helper := inline.helper_of(step)) is not None}
        if not match.operands.keys() >= {"residual", "scale"}:
            found -= inline.modulating(self._facts, found)  # which are patched themselves
        self.helpers |= found
        paths = {name: scope.facts.path(scope.flow, callee) for name, callee in match.modules.items()}
        site = SitePlan(
            len(self.sites), rule, root.lineno, tuple([(step.lineno, step.col_offset) for step in match.steps]),
            " ; ".join(map(ast.unparse, region.original.body)), *self._compiled(region),
            region.names, region.roles, {name: path for name, path in paths.items() if path},
            {**rule.options, **match.options}, kept is not None, placement.moves_calls, _halves(scope.flow, match),
            functions=functions,
        )  # fmt: skip
        same = next((known for known in self.sites if known.computes_what(site)), None)
        if same is None:
            self.sites.append(site)
        self.repeats |= not self._computed.isdisjoint(match.steps)
        self._computed.update(match.steps)
        replace_match(scope, root, match, region, placement, kept, (same or site).index)
        return None

    def _compiled(self, region: Region) -> tuple[CodeType, CodeType]:
        """The code of a region and of its operands, of which the former calls twins."""
        function = self._source.function
        imported = _imported_in_file(function)
        twins = put_twins(region.original, function) if in_library(function) else ()
        original = compiled(ast.fix_missing_locations(region.original), function, tuple(twins), imported)
        operands = compiled(region.operands, function, (), imported)
        assert original is not None and operands is not None
        return original, operands


def _misfit(scope: Scope, match: Match) -> str | None:
    """Why a shape that fits is not meant; empty for what is not worth a word."""
    flow = scope.flow
    operands = [operand.node for operand in match.operands.values()]
    nested = [node for node in (*operands, *match.steps) if node in flow.guarded]
    if nested and not all(node in flow.guarded for node in (*operands, *match.steps)):
        return "part of it stands in a condition or a nested function"
    if any(isinstance(flow.statement.get(node), (ast.For, ast.While, ast.If)) for node in match.steps[:1]):
        return ""
    if "residual" in match.operands:
        names = ["residual"] if "gate" in match.operands else ["residual", "x"]
        if any(_is_product(flow, match.operands[name].node) for name in names):
            return ""  # a * b + c * d is a rotation or an interpolation, and r + g * y another match
    return None


def _halves(flow: Flow, match: Match) -> tuple[str, ...]:
    """The names of operands that one statement unpacks, ``a, b = x.chunk(2, dim=-1)``, in its order."""
    names = {}
    for name, operand in match.operands.items():
        definition = flow.only(operand.node)
        if definition is not None:
            names[definition.statement, definition.name] = name
    for statement, _ in names:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Call):  # type: ignore[union-attr]
            found = [names.get((statement, getattr(element, "id", ""))) for element in target.elts]
            if len(found) == 2 and None not in found:
                return tuple(filter(None, found))
    return ()


def _is_product(flow: Flow, node: ast.expr) -> bool:
    definition = flow.single(node)
    value = definition.value if definition is not None else node
    return isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult)


def _join_in_place(tree: ast.FunctionDef, sites: list[SitePlan], facts: Facts) -> None:
    """Lets ``torch.cat([front, y], dim)`` reuse the memory of ``y`` where that is the result of a site, read once.

    Where the function has a linear layer read that and nothing else, it may be in the form which the layer takes.
    """
    flow = Flow(tree)
    for node in flow.nodes:
        found = concatenated(node) if isinstance(node, ast.expr) else None
        if found is None or len(found[0]) != 2 or found[1] not in (2, -1) or not isinstance(found[0][1], ast.Name):
            continue
        (front, y), dim = found
        definition = flow.single(y)
        value = None if definition is None or definition.uses != [y] else definition.value
        index = site_called(value)
        if index >= 0 and sites[index].rule.op == "linear_gelu":
            assert isinstance(node, ast.Call)
            reader = _only_reader(flow, node, facts) if len(sites[index].places) == 2 else None  # no casts, no views
            node.func = ast.copy_location(ast.Name(JOIN, ast.Load()), node)
            node.args, node.keywords = [value.func, front, y, ast.Constant(dim)], []  # type: ignore[union-attr]
            if reader is not None:
                path = facts.path(flow, reader.func)
                assert path is not None
                sites[index] = replace(sites[index], read_by=path)
                node.args.append(copy.deepcopy(reader.func))
                reader.args = [reader.func, *reader.args]
                reader.func = ast.copy_location(ast.Name(READ, ast.Load()), reader)


def _attend_unrotated(tree: ast.FunctionDef, sites: list[SitePlan]) -> None:
    """Lets attention read queries and keys before their rotation, where the statement behind a site calls it."""
    flow, calls, attended = Flow(tree), Counter[int](), Counter[int]()
    for node in ast.walk(tree):
        calls[site_called(node)] += 1
    for made, read in [pair for block in blocks(tree) for pair in pairwise(block)]:
        if isinstance(made, ast.Assign) and isinstance(read, ast.Assign):
            site = site_called(read.value)
            through_diffusers = site >= 0 and sites[site].options.get("tokens") == 1
            attended[site_called(made.value)] += through_diffusers and _goes_into(flow, made, read.value)
    for index, made_by in enumerate(sites):
        if attended[index] and attended[index] == calls[index] and made_by.rule.op == "qk_norm_rope":
            sites[index] = replace(made_by, attended=True)


def _goes_into(flow: Flow, made: ast.Assign, attention: ast.expr) -> bool:
    """Whether two values that a statement makes go into a site of attention as queries and keys, and nowhere else."""
    both = made.targets[0].elts if isinstance(made.targets[0], ast.Tuple) else ()
    if not isinstance(attention, ast.Call) or len(both) != 2:
        return False
    known = {node.value for node in flow.nodes if isinstance(node, ast.Attribute) and node.attr in _KNOWN}
    for target, argument in zip(both, attention.args[1:], strict=False):  # behind the module
        definition = flow.bound(target) if isinstance(target, ast.Name) else None
        if definition is None or definition.is_captured or argument not in definition.uses:
            return False
        others = known | {argument}
        if any(use not in others or flow.definitions[use] != {definition} for use in definition.uses):
            return False
    return True


def _only_reader(flow: Flow, node: ast.expr, facts: Facts) -> ast.Call | None:
    """The call of a linear layer that alone reads a value; None if others may."""
    statement = flow.statement[node]
    target = only_target(statement) if getattr(statement, "value", None) is node else None
    uses = flow.bound(target).uses if isinstance(target, ast.Name) else []
    if not uses or flow.single(uses[0]) is not flow.bound(target):  # type: ignore[arg-type]
        return None
    for call in flow.nodes:
        if isinstance(call, ast.Call) and call.args == uses and not call.keywords:  # one use
            path = facts.path(flow, call.func)
            return call if path is not None and facts.is_linear(path) else None
    return None


def _add_entry(tree: ast.FunctionDef, receiver: str, options: list[str], without: list[str]) -> None:
    """Puts the decision which sites are on in front of the body: none with an option, or with one of some arguments."""
    arguments = tree.args
    words = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    words += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    words += [f"{argument.arg}={argument.arg}" for argument in arguments.kwonlyargs]
    words += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    tests = [*options, *[f"{name} is not None and 'it is given {name}'" for name in without]]
    given = ", ".join([receiver, *([" or ".join(tests)] if tests else [])])
    text = f"{SITES} = {ENTER}({given})\nif {SITES} is None:\n    return {STOCK}({', '.join(words)})"
    start = body_start(tree)
    tree.body[start:start] = statements_of(text, tree.body[min(start, len(tree.body) - 1)])
