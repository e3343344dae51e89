"""Decides the branches that the configuration of a module decides, so that rules see one straight line.

``if self.use_dual_attention:`` is one branch for a module whose attribute is False. What was assumed is a fact of the
plan; the guard checks it at every call, since ``set_chunk_feed_forward`` and the like change it.
"""

from __future__ import annotations

import ast
import copy
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from diffkern.rewrite.expressions import ROTATES, is_per_channel
from diffkern.rewrite.facts import LAST_DIM, PRESENT, UNKNOWN, Facts
from diffkern.rewrite.flow import Flow
from diffkern.rewrite.syntax import (
    arguments_of,
    blocks,
    body_start,
    names_in,
    nodes_in,
    only_target,
    statements_of,
    stored_in,
)
from diffkern.rewrite.template import Template

#: Behind every line of a source.
ALWAYS = (float("inf"), 0.0)

_COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda one, others: one in others,
    ast.NotIn: lambda one, others: one not in others,
}
#: ComfyUI's flag for plain torch ops in the place of kernels without gradients.
_TRAINING = "comfy.model_management.in_training"
_HAS_KEY, _GETS = Template("_key in _name"), Template("_argument.get(_, {})")


@dataclass(frozen=True)
class Given:
    """What is known of an argument up to a line and column of the source: None, PRESENT, or whether it is true."""

    value: object
    end: tuple[float, float]


def decide_branches(tree: ast.FunctionDef, facts: Facts | None, given: Mapping[str, Given] | None = None) -> bool:
    """Replaces each decidable ``if`` of a tree by the branch that runs.

    Args:
        tree: It is changed.
        facts: Knows the attributes of the module; None decides tests of constants alone, as inlined helpers have them.
        given: Arguments that are known to be None, known not to be (PRESENT), or known to be true or false.

    Returns:
        Whether anything was decided.
    """
    decider = _Decider(facts, _stored_attributes(tree), given or {})
    decider.visit(tree)
    if decider.decided:
        tidy_blocks(tree)
    decided = _decide_made(tree) or decider.decided
    if decided:
        ast.fix_missing_locations(tree)
    return decided


def _decide_made(tree: ast.FunctionDef) -> bool:
    """Decides ``if temb is not None`` behind ``temb = self.proj(temb)[:, :, None, None]``, which is never None."""
    decided = False
    for block in blocks(tree):
        for index, made in enumerate(block):
            target = only_target(made)
            if not isinstance(target, ast.Name) or not is_per_channel(made.value):  # type: ignore[attr-defined]
                continue
            decider = _Decider(None, set(), {target.id: Given(PRESENT, ALWAYS)})
            at = index + 1
            while at < len(block) and _first_store(block[at], target.id) == ALWAYS:
                kept = decider.visit(block[at])
                block[at : at + 1] = kept if isinstance(kept, list) else [kept]
                at += len(kept) if isinstance(kept, list) else 1
            decided |= decider.decided
    if decided:
        tidy_blocks(tree)
    return decided


class _Decider(ast.NodeTransformer):
    def __init__(self, facts: Facts | None, stored: set[str], given: Mapping[str, Given]) -> None:
        self._facts, self._stored, self._given = facts, stored, given
        self.decided = self._inside = False

    def visit_If(self, node: ast.If) -> Any:
        """The branch that runs, if that is decided."""
        test = self._value(node.test)
        if test is UNKNOWN:
            return self.generic_visit(node)
        self.decided = True
        kept = [self.visit(statement) for statement in (node.body if test else node.orelse)]
        return [one for part in kept for one in (part if isinstance(part, list) else [part])]

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        """The value that is taken, if that is decided."""
        test = self._value(node.test)
        if test is UNKNOWN:
            return self.generic_visit(node)
        self.decided = True
        return self.visit(node.body if test else node.orelse)

    def visit_Lambda(self, node: ast.AST) -> Any:
        """Nothing in it, as in a class: it runs at another time, in a scope of its own."""
        return node

    visit_ClassDef = visit_Lambda

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        """The body of the function itself; nested functions, which run at another time, stay."""
        inside, self._inside = self._inside, True
        return node if inside else self.generic_visit(node)

    def _value(self, node: ast.expr) -> Any:
        """The value of an expression, or UNKNOWN."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            values = [self._value(element) for element in node.elts]
            return UNKNOWN if UNKNOWN in values else values
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            value = self._value(node.operand)
            return UNKNOWN if value is UNKNOWN else not value
        if isinstance(node, ast.BoolOp):
            return self._bool_op(node)
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARE:
            one, other = self._value(node.left), self._value(node.comparators[0])
            if isinstance(node.left, ast.Name) and isinstance(node.ops[0], (ast.Is, ast.IsNot)):
                given = self._given.get(node.left.id)
                known = given is not None and (node.lineno, node.col_offset) < given.end
                one = given.value if given is not None and known else UNKNOWN
            if one is UNKNOWN or other is UNKNOWN:
                return UNKNOWN
            return _COMPARE[type(node.ops[0])](one, other)
        if isinstance(node, ast.Name):
            flag = self._given.get(node.id)
            return flag.value if flag is not None and isinstance(flag.value, bool) else UNKNOWN
        if self._facts is None or not isinstance(node, ast.Attribute) or node.attr in self._stored:
            return UNKNOWN
        own = isinstance(node.value, ast.Name) and node.value.id == self._facts.receiver
        return self._facts.value((node.attr,)) if own else UNKNOWN

    def _bool_op(self, node: ast.BoolOp) -> Any:
        """In source order: what stands behind an unknown part may not be evaluated without it."""
        value: Any = UNKNOWN
        for part in node.values:
            value = self._value(part)
            if value is UNKNOWN or bool(value) == isinstance(node.op, ast.Or):
                return value
        return value


def activate_in_branches(tree: ast.FunctionDef, facts: Facts) -> None:
    """Moves what follows branches into each, where it reads the norm that one of them ends with, and nothing else.

    ``if zq is None: h = self.norm(h) else: h = self.norm(h, zq)`` and then ``h = silu(h)``: after the branches a rule
    would see either value, in them each by itself.
    """
    for block in blocks(tree):  # outer blocks before inner ones
        for index, branches in enumerate(block):
            after = block[index + 1] if index + 1 < len(block) else None
            if isinstance(branches, ast.If) and after is not None and _reads_norm(after, branches, facts):
                _append(branches, block.pop(index + 1))


def _reads_norm(statement: ast.stmt, branches: ast.If, facts: Facts) -> bool:
    """Whether a statement calls something with the variable that is bound to a norm's result where a branch ends.

    That call may be the first argument of another one, as in ``conv(silu(h), cache)``.
    """
    call = statement.value if isinstance(statement, ast.Assign) else None
    if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Call):
        call = call.args[0]
    if not isinstance(call, ast.Call) or len(call.args) != 1 or not isinstance(call.args[0], ast.Name):
        return False
    for block in (branches.body, branches.orelse):
        last = block[-1] if block else None
        if isinstance(last, ast.If) and _reads_norm(statement, last, facts):
            return True
        if not isinstance(last, ast.Assign) or not isinstance(last.value, ast.Call):
            continue
        norm, targets = last.value.func, [target.id for target in last.targets if isinstance(target, ast.Name)]
        if not isinstance(norm, ast.Attribute) or targets != [call.args[0].id]:
            continue
        if isinstance(norm.value, ast.Name) and norm.value.id == facts.receiver and facts.norm((norm.attr,)):
            return True
    return False


def _append(branches: ast.If, statement: ast.stmt) -> None:
    for block in (branches.body, branches.orelse):
        if not block or not isinstance(block[-1], (ast.Return, ast.Raise, ast.Break, ast.Continue)):
            block.append(copy.deepcopy(statement))


def split_by_arguments(tree: ast.FunctionDef, facts: Facts, most: int = 2) -> None:
    """Makes two branches of a body that rotates, or joins streams, if an argument is given: with it and without.

    So what stands before that ``if`` and what stands in it are one straight line. Of several such arguments, ``most``
    at most make branches.
    """
    arguments = arguments_of(tree)
    tests = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    for name in arguments:
        asking = [test for test in tests if _rotates_or_joins(test, name, arguments[0] != facts.receiver)]
        end = _first_store(tree, name) if asking else ALWAYS
        if any((test.lineno, test.col_offset) < end for test in asking):
            break
    else:
        return
    without, given = [_branch(tree, facts, {name: Given(value, end)}) for value in (None, PRESENT)]
    for branch in (without, given) if most > 1 else ():
        split_by_arguments(branch, facts, most - 1)
    start = body_start(tree)
    tree.body[start:] = [_if(f"{name} is None", without.body, given.body, tree.body[start])]


def _branch(tree: ast.FunctionDef, facts: Facts, given: Mapping[str, Given]) -> ast.FunctionDef:
    """A copy of a function, without its docstring, as it is for some arguments."""
    branch = copy.copy(tree)
    branch.body = copy.deepcopy(tree.body[body_start(tree) :])
    decide_branches(branch, facts, given)
    return branch


def _if(test: str, body: list[ast.stmt], orelse: list[ast.stmt], like: ast.stmt) -> ast.If:
    (made,) = statements_of(f"if {test}: pass", like)
    assert isinstance(made, ast.If)
    made.body, made.orelse = body, orelse
    return made


def split_by_flags(tree: ast.FunctionDef, facts: Facts) -> None:
    """Makes a branch of a body for all of its flags true, one for all false, and one for any other choice.

    Flags are arguments, by default True or False, that decide whether something is added to a variable:
    ``if use_cross_attention: x = x + ...``. So the sums and norms before, in and behind that ``if`` are one straight
    line. Sites of one place are the same in all branches.
    """
    stored = stored_in(tree)
    flags = {name: None for name in _flags(tree) if name not in stored}
    tests = [node.test for node in ast.walk(tree) if isinstance(node, ast.If) and _adds(node)]
    asked = [_asked(test) for test in tests]
    names = list(dict.fromkeys(name for one in asked if one and one <= flags.keys() for name in sorted(one)))
    if not names:
        return
    every, none = [_branch(tree, facts, {name: Given(value, ALWAYS) for name in names}).body for value in (True, False)]
    start = body_start(tree)
    first, rest = tree.body[start], tree.body[start:]
    other: list[ast.stmt] = none if len(names) == 1 else [_if(f"not ({' or '.join(names)})", none, rest, first)]
    tree.body[start:] = [_if(" and ".join(names), every, other, first)]


def _flags(tree: ast.FunctionDef) -> list[str]:
    """The arguments that are True or False by default."""
    arguments = tree.args
    positional = [*arguments.posonlyargs, *arguments.args][::-1]
    pairs = [*zip(positional, arguments.defaults[::-1], strict=False)]
    pairs += [
        (one, default) for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default
    ]
    return [one.arg for one, default in pairs if isinstance(default, ast.Constant) and isinstance(default.value, bool)]


def _adds(node: ast.If) -> bool:
    """Whether a branch adds to a variable that is there before it."""
    assigned = [part for part in nodes_in(node.body) if isinstance(part, ast.Assign)]
    return any(
        isinstance(part.value, ast.BinOp)
        and isinstance(part.value.op, ast.Add)
        and ast.unparse(part.targets[0]) in (ast.unparse(part.value.left), ast.unparse(part.value.right))
        for part in assigned
    )


def _asked(test: ast.expr) -> set[str]:
    """The variables of which a test asks the truth, and nothing else; empty for other tests."""
    if isinstance(test, ast.Name):
        return {test.id}
    parts = [test.operand] if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else []
    parts = test.values if isinstance(test, ast.BoolOp) else parts
    names = [_asked(part) for part in parts]
    return set().union(*names) if all(names) else set()


def norms_into_branches(tree: ast.FunctionDef, facts: Facts) -> None:
    """Moves a norm that stands before two branches into both, where each rotates or modulates what it gives.

    The test may ask for its shape, which is that of what it normalises.
    """
    flow = Flow(tree)
    for branches in [node for node in ast.walk(tree) if isinstance(node, ast.If) and node in flow.places]:
        if flow.decline is None and _uses_norm(branches.body) and _uses_norm(branches.orelse):
            _move_norms(flow.places[branches].block, branches, flow, facts)


def _uses_norm(branch: list[ast.stmt]) -> bool:
    """Whether a branch comes from a helper, or rotates something."""
    calls = [node.func for node in nodes_in(branch) if isinstance(node, ast.Call)]
    rotates = any(isinstance(called, ast.Name) and ROTATES.search(called.id) for called in calls)
    return bool(branch) and (hasattr(branch[-1], "_helper") or rotates)


def _move_norms(block: list[ast.stmt], branches: ast.If, flow: Flow, facts: Facts) -> None:
    inside = set(nodes_in((*branches.body, *branches.orelse)))
    asked = list(ast.walk(branches.test))
    if any(isinstance(node, ast.Call) for node in asked):
        return
    shapes = {node.value for node in asked if isinstance(node, ast.Attribute) and node.attr == "shape"}
    passed: set[str] = set()
    for statement in reversed(block[: block.index(branches)]):
        target = only_target(statement)
        if not isinstance(statement, ast.Assign) or not isinstance(target, ast.Name):
            return
        value, definition = statement.value, flow.bound(target)
        is_norm = isinstance(value, ast.Call) and len(value.args) == 1 and not value.keywords
        path = facts.path(flow, value.func) if is_norm else None  # type: ignore[attr-defined]
        read = names_in(value)
        in_place_of_x = is_norm and ast.unparse(value.args[0]) == target.id  # type: ignore[attr-defined]
        where = inside | shapes if in_place_of_x else inside
        only_there = not definition.is_captured and not definition.deleted and where.issuperset(definition.uses)
        if path is not None and facts.norm(path) == LAST_DIM and only_there and not read & passed:
            block.remove(statement)
            for branch in (branches.body, branches.orelse):
                branch.insert(0, copy.deepcopy(statement))
        elif any(isinstance(node, ast.Call) for node in ast.walk(value)):
            return
        passed.add(target.id)


def _first_store(tree: ast.stmt, name: str) -> tuple[float, float]:
    """Where in the source a variable is bound first, behind which it is no longer the argument."""
    body = tree.body if isinstance(tree, ast.FunctionDef) else [tree]
    places, nodes = [ALWAYS], [(statement, False) for statement in body]
    while nodes:
        node, repeated = nodes.pop()
        if isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load):
            places.append((0, 0) if repeated else (node.lineno, node.col_offset))
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Lambda)):  # which have variables of their own
            repeated = repeated or isinstance(node, (ast.For, ast.While))
            nodes += [(child, repeated) for child in ast.iter_child_nodes(node)]  # type: ignore[misc]
    return min(places)


def _rotates_or_joins(node: ast.If, name: str, is_processor: bool) -> bool:
    """Whether a branch asks for an argument, and rebinds a variable by a call with both, or by a concatenation."""
    tests = [part for part in ast.walk(node.test) if isinstance(part, ast.Compare)]
    tests = [part for part in tests if isinstance(part.left, ast.Name) and part.left.id == name]
    if not any(ast.unparse(part) in (f"{name} is not None", f"{name} is None") for part in tests):
        return False
    for statement in nodes_in((*node.body, *node.orelse)):
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
            stored, call = statement.targets[0], statement.value
            targets = set(map(_base, stored.elts if isinstance(stored, ast.Tuple) else [stored])) - {name}
            read = names_in(call)
            function = ast.unparse(call.func)
            rotates = ROTATES.search(function) is not None and name in read
            joins = name in read or len(call.args) > 1 or function in ("torch.cat", "torch.concat")
            fits = joins and not isinstance(stored, ast.Tuple) if is_processor else rotates
            if targets and targets <= read and fits:
                return True
    return False


def _base(target: ast.expr) -> str:
    return ast.unparse(target.value if isinstance(target, ast.Subscript) else target)


def _stored_attributes(tree: ast.FunctionDef) -> set[str]:
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return {node.attr for node in attributes if not isinstance(node.ctx, ast.Load)}


def tidy_blocks(tree: ast.FunctionDef) -> None:
    """Drops what stands behind a return, and fills blocks that have become empty."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                ends = [i for i, one in enumerate(block) if isinstance(one, (ast.Return, ast.Raise))]
                del block[ends[0] + 1 if ends else len(block) :]
        if isinstance(node, (ast.FunctionDef, ast.If, ast.For, ast.While, ast.With, ast.Try)) and not node.body:
            node.body.append(ast.Pass())


# --- branches that other nodes of ComfyUI switch on in a call ---------------------------------------------


def drop_options(tree: ast.FunctionDef) -> list[str]:
    """Drops branches that run if a dictionary among the arguments has a key; returns the tests, to be made at entry.

    ComfyUI's models run what other nodes put into ``transformer_options["patches"]`` between two statements that are
    one op. Without a patch the two stand one after the other; with one the stock forward runs.
    """
    branches = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    found = {node: test for node in branches if (test := _option(tree, node.test)) is not None}
    if not found:
        return []
    dropper = _DropOptions(found)
    dropper.visit(tree)
    _drop_unread(tree, dropper.read)
    tidy_blocks(tree)
    return list(dict.fromkeys(dropper.tests))


class _DropOptions(ast.NodeTransformer):
    def __init__(self, found: Mapping[ast.If, str]) -> None:
        self._found = found
        self.tests: list[str] = []
        #: The variables that dropped branches read.
        self.read: set[str] = set()

    def visit_If(self, node: ast.If) -> Any:
        """What runs without the option."""
        if node not in self._found:
            return self.generic_visit(node)
        self.tests.append(self._found[node])
        self.read |= names_in(node)
        return [self.visit(statement) for statement in node.orelse]


def _drop_unread(tree: ast.FunctionDef, names: set[str]) -> None:
    """Drops ``name["key"] = value`` where nothing reads the variable any longer, and it is a copy made here."""
    nodes = list(ast.walk(tree))
    stores = {
        statement.targets[0].value: statement
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Subscript)
        and isinstance(statement.targets[0].value, ast.Name)
        and not any(isinstance(node, ast.Call) for node in ast.walk(statement))
    }
    for name in names:
        loads = [n for n in nodes if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)]
        bound = [s for s in tree.body if isinstance(s, ast.Assign) and ast.unparse(s.targets[0]) == name]
        is_copy = len(bound) == 1 and ast.unparse(bound[0].value).endswith(".copy()")
        if is_copy and loads and all(load in stores for load in loads):
            for load in loads:
                tree.body.remove(stores[load])


def _option(tree: ast.FunctionDef, test: ast.expr) -> str | None:
    """The test to be made at entry, which says what it finds, for the test of a branch to drop; None for others.

    ``"key" in name`` becomes one of arguments alone, where ``name = argument.get("...", {})`` is bound once.
    """
    if isinstance(test, ast.Attribute) and ast.unparse(test) == _TRAINING:
        return f"{_TRAINING} and 'ComfyUI is training'"
    blanks, _ = _HAS_KEY.fill(None, test) or ({}, None)
    key, name = blanks.get("_key"), blanks.get("_name")
    if not isinstance(key, ast.Constant) or not isinstance(name, ast.Name):
        return None
    stores = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    bound = [one for one in tree.body if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == name.id]
    if len(bound) != 1 or [node.id for node in stores].count(name.id) != 1:
        return None
    call = bound[0].value
    blanks, _ = _GETS.fill(None, call) or ({}, None)
    argument = blanks.get("_argument")
    arguments = {*arguments_of(tree)}
    if not isinstance(argument, ast.Name) or argument.id not in arguments - {node.id for node in stores}:
        return None
    return f"{ast.unparse(key)} in {ast.unparse(call)} and 'another node patches what it computes'"
