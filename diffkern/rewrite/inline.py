"""Takes the bodies of a model's own helpers into the function that calls them, so that rules see through them.

``x, gate = self._modulate(self.norm(x), table)`` becomes the statements of ``_modulate`` with its variables renamed.
The guard checks at every call that the helper is still the function that was read.
"""

from __future__ import annotations

import ast
import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from diffkern.rewrite.expressions import ROTATES, is_view
from diffkern.rewrite.facts import PRESENT, Facts
from diffkern.rewrite.frames import pads_frames
from diffkern.rewrite.functions import global_at
from diffkern.rewrite.query_key import concatenated
from diffkern.rewrite.source import Source
from diffkern.rewrite.straight import (
    FORBIDDEN,
    computes,
    fold_rebound,
    has_plain_arguments,
    is_load,
    is_straight,
    of_generators,
    only_scales,
    rebound,
    single_value,
    tests_of,
    with_one_return,
)
from diffkern.rewrite.syntax import (
    Substitute,
    Swap,
    body_start,
    names_in,
    nodes_in,
    only_target,
    path_of,
    root_of,
    separated,
    stored_by,
    stored_in,
)
from diffkern.rewrite.variants import ALWAYS, Given, decide_branches

#: Helpers in one function, helpers of helpers included.
_LIMIT = 48

#: Methods are known as ``self.name``, forwards of submodules as ``self.path.forward``, functions of the file by their
#: name, dots in it where they are functions of a module that the file imports.
Helpers = dict[str, Callable[..., Any]]
#: Values that are not None.
_VALUES = (ast.BinOp, ast.Tuple, ast.List, ast.Dict)


def inline_helpers(
    tree: ast.FunctionDef, function: FunctionType, facts: Facts, only: set[str] | None = None, at_calls: bool = False
) -> tuple[Helpers, list[str]]:
    """Changes ``tree``, and returns the helpers that became part of it, and arguments that must be None then.

    A helper may have branches; those that an argument of the call decides are gone. One that only an argument of
    ``tree`` decides, such as slices of tokens that have modulations of their own, is read without it.

    Args:
        tree: The source of ``function``.
        function: Whose globals the helpers are looked up in.
        facts: Knows the class that methods are looked up on.
        only: The names of the helpers to take in; all by default.
        at_calls: Whether what a helper holds gets the line and column of its call, and not those that it has.
    """
    inliner = _Inliner(tree, function, facts, only, at_calls)
    inliner.block(tree.body)
    return inliner.helpers, list(inliner.without)


def inline_projections(tree: ast.FunctionDef, function: FunctionType, facts: Facts) -> Helpers:
    """Takes helpers into a processor that call the layers whose results it concatenates, and returns them.

    ``q, k, v, text_q, text_k, text_v = _get_qkv_projections(attn, image, text)`` becomes the statements of the helper
    for such a module, and then those of the one that it hands this on to.
    """
    helpers: Helpers = {}
    while names := _projecting(tree, facts.receiver) - helpers.keys():
        inliner = _Inliner(tree, function, facts, names, at_calls=False, projects=True)
        inliner.block(tree.body)
        if not inliner.helpers:
            break
        helpers |= inliner.helpers
    return helpers


def _projecting(tree: ast.FunctionDef, receiver: str) -> set[str]:
    """The functions that get the module first, and one of whose results is a part of a concatenation."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    joined = names_in(*[part for call in calls for part in (concatenated(call) or ([],))[0]])
    found = set()
    for node in ast.walk(tree):
        target, call = only_target(node), getattr(node, "value", None)
        if not isinstance(target, ast.Tuple) or not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            continue
        results = {name for element in target.elts for name in stored_by(element)}
        if call.args and ast.unparse(call.args[0]) == receiver and results & joined:
            found.add(call.func.id)
    return found


def inline_nested(tree: ast.FunctionDef) -> None:
    """Puts nested functions of a single value in the place of their calls.

    ``def rotated(x): y = self.norm(x); return rotate(y, table)`` becomes ``rotate(self.norm(x), table)``.
    """
    for function in [statement for statement in tree.body if isinstance(statement, ast.FunctionDef)]:
        value = single_value(function)
        uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == function.name]
        inside = list(ast.walk(tree))[1:]
        inner = set(nodes_in(node for node in inside if isinstance(node, (*FORBIDDEN, ast.FunctionDef))))
        calls = [node for node in inside if isinstance(node, ast.Call) and node.func in uses and node not in inner]
        bound = [_bound(call, function) for call in calls]
        bindings = [node for node in ast.walk(tree) if function.name in (getattr(node, "name", ""), *stored_by(node))]
        if value is None or not calls or bindings != [function]:
            continue
        if any(arguments is None or not all(map(is_load, arguments.values())) for arguments in bound):
            continue
        for call, arguments in zip(calls, bound, strict=True):
            assert arguments is not None
            Swap(call, ast.copy_location(Substitute(arguments).visit(copy.deepcopy(value)), call)).visit(tree)
        if len(calls) < len(uses):  # another nested function calls it, too, or it is handed on
            continue
        tree.body.remove(function)
    ast.fix_missing_locations(tree)


def modulating(facts: Facts, helpers: set[str]) -> set[str]:
    """The helpers that are forwards of submodules which compute more than norms: what modulates them."""
    forwards = {name: name.split(".") for name in helpers if name.startswith("self.") and name.endswith(".forward")}
    return {name for name, (_, *path, _) in forwards.items() if facts.modulates(tuple(path))}


def helper_of(node: ast.AST) -> str | None:
    """The helper that a node of the changed tree comes from."""
    return getattr(node, "_helper", None)


class _Inliner:
    def __init__(
        self,
        tree: ast.FunctionDef,
        function: FunctionType,
        facts: Facts,
        only: set[str] | None,
        at_calls: bool,
        projects: bool = False,
    ) -> None:
        self._function, self._facts, self._only, self._at_calls = function, facts, only, at_calls
        self._projects = projects
        self._trees: dict[FunctionType, ast.FunctionDef | None] = {}
        self._count = 0
        names = [argument.arg for argument in tree.args.args]
        defaults = zip(reversed(names), reversed(tree.args.defaults), strict=False)
        stored = stored_in(tree)
        self._own = {*names, *stored}
        self._optional = {name for name, default in defaults if ast.unparse(default) == "None"} - stored
        self.helpers: Helpers = {}
        self.without: dict[str, None] = {}

    def block(self, block: list[ast.stmt]) -> None:
        index = 0
        while index < len(block):
            statement = block[index]
            for name in ("body", "orelse", "finalbody"):
                if isinstance(statement, (ast.If, ast.For, ast.While, ast.With, ast.Try)):
                    self.block(getattr(statement, name, []))
            before = self._expanded(statement) if self._count < _LIMIT else None
            if before is None:
                index += 1
            else:
                block[index:index] = before  # and look again: helpers call helpers

    def _expanded(self, statement: ast.stmt) -> list[ast.stmt] | None:
        """The statements to put before one whose first helper call was taken out; None without such a call."""
        if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)):
            return None
        if statement.value is None or (isinstance(statement, ast.AugAssign) and not is_load(statement.target)):
            return None
        for call in _movable_calls(statement.value):
            found = self._helper(call)
            if found is None:
                continue
            name, helper, is_method = found
            tree = self._tree(helper)
            own = None if not is_method else call.func if name.endswith(".forward") else call.func.value  # type: ignore[attr-defined]
            arguments = None if tree is None else _bound(call, tree, own)
            body = None if tree is None or arguments is None else self._body(tree, arguments, name)
            if body is None or arguments is None:
                continue
            statements, result = self._renamed(body, arguments, name, call, helper)
            # Lines of another file say nothing in this one.
            if self._at_calls or helper.__globals__ is not self._function.__globals__:
                for node in nodes_in((*statements, result)):
                    if helper_of(node) == name:
                        ast.copy_location(node, call)
            if statement.value is call and (pairs := separated(statement, result)):
                statements, statement.value = [*statements, *pairs[:-1]], pairs[-1].value
                statement.targets = pairs[-1].targets  # type: ignore[union-attr]
            elif statement.value is call:
                statement.value = result
            else:
                variable = f"_h{self._count}_return"
                statements.append(ast.copy_location(ast.Assign([ast.Name(variable, ast.Store())], result), call))
                Swap(call, ast.copy_location(ast.Name(variable, ast.Load()), call)).visit(statement)
            self._count += 1
            self.helpers[name] = helper
            return [ast.fix_missing_locations(one) for one in statements]
        return None

    def _helper(self, call: ast.Call) -> tuple[str, FunctionType, bool] | None:
        """The name and the function that a call runs, if that is a helper of the same file or class."""
        callee, is_method = call.func, False
        base = root_of(callee, (ast.Attribute,))
        if isinstance(callee, ast.Attribute) and isinstance(base, ast.Name) and base.id not in self._own:
            name = ast.unparse(callee)
            helper = global_at(self._function.__globals__, name)
            if ROTATES.search(name) or name.partition(".")[0] == "torch":
                return None
        elif isinstance(callee, ast.Name):
            name, helper = callee.id, self._function.__globals__.get(callee.id)
            if ROTATES.search(name):
                return None  # which a rule takes as a whole
            if name in self._function.__code__.co_varnames or name in self._function.__code__.co_cellvars:
                return None
        else:
            path = path_of(callee, self._facts.receiver)
            if not path or self._facts.cls is None:
                return None
            name, is_method = f"self.{'.'.join(path)}", True
            helper = inspect.getattr_static(self._facts.cls, path[0], None) if len(path) == 1 else None
            if isinstance(helper, staticmethod):
                helper, is_method = helper.__func__, False
            elif helper is None:
                name, helper = f"{name}.forward", self._facts.forward_of_norms(path)
                helper = helper or self._facts.forward_of_convolution(path)
        if not isinstance(helper, FunctionType) or not self._is_within_reach(helper):
            return None
        if helper.__closure__ or (self._only is not None and name not in self._only):
            return None
        return name, helper, is_method

    def _tree(self, helper: FunctionType) -> ast.FunctionDef | None:
        if helper not in self._trees:
            source = Source.of(helper)
            fits = isinstance(source, Source) and source.function is helper and has_plain_arguments(source.tree)
            self._trees[helper] = source.tree if fits else None  # type: ignore[union-attr]
        return self._trees[helper]

    def _body(self, tree: ast.FunctionDef, arguments: dict[str, ast.expr], name: str) -> ast.FunctionDef | None:
        """The tree of a helper as one straight line with a return at its end, for a call with such arguments."""
        if not name.endswith(".forward") and is_straight(tree) and computes(tree):
            return tree
        stored = stored_in(tree)
        given = {}
        for parameter in arguments.keys() - stored:
            value = arguments[parameter]
            is_value = isinstance(value, _VALUES) or (isinstance(value, ast.Call) and is_view(value))
            if is_value or ast.unparse(value) == "None":
                given[parameter] = Given(PRESENT if is_value else None, ALWAYS)
        if name.endswith(".forward"):  # which calls norms, and multiplies what they return
            body = copy.deepcopy(tree)
            decide_branches(body, None, given)
            if self._facts.forward_of_convolution(tuple(name.split(".")[1:-1])):
                return body if is_straight(body) and pads_frames(body) else None
            modulates = bool(modulating(self._facts, {name}))  # by what its own layers make, or by its arguments
            if not is_straight(body, (ast.GeneratorExp,) * modulates):
                return None
            if not modulates and not only_scales(body, arguments.keys() - stored):
                return None
            fold_rebound(body)
            return body
        if self._projects:
            body, own = copy.deepcopy(tree), self._facts.receiver
            decide_branches(body, self._facts if ast.unparse(arguments.get(own, tree.args)) == own else None, given)
            return body if is_straight(body) else None
        optional = {
            parameter: value.id
            for parameter, value in arguments.items()
            if isinstance(value, ast.Name) and value.id in self._optional and parameter not in stored
        }
        for without in ({}, optional):
            body = copy.deepcopy(tree)
            decide_branches(body, None, given | dict.fromkeys(without, Given(None, ALWAYS)))
            if with_one_return(body) and is_straight(body) and computes(body):
                asked = names_in(*tests_of(tree))
                self.without.update(dict.fromkeys([value for key, value in without.items() if key in asked]))
                return body
        return None

    def _is_within_reach(self, helper: FunctionType) -> bool:
        """Whether the globals of a helper mean the same in the function, or can be imported from its module."""
        module = sys.modules.get(helper.__module__)
        return not self._foreign(helper) or getattr(module, "__dict__", None) is helper.__globals__

    def _foreign(self, helper: FunctionType) -> list[str]:
        """The globals of a helper that mean something else, or nothing, in the file of the function."""
        namespace = self._function.__globals__
        if helper.__globals__ is namespace:
            return []
        names = [name for name in helper.__code__.co_names if name in helper.__globals__]
        values = {name: helper.__globals__[name] for name in names}
        return [n for n, value in values.items() if not (isinstance(value, ModuleType) and namespace.get(n) is value)]

    def _renamed(
        self, helper: ast.FunctionDef, arguments: dict[str, ast.expr], name: str, call: ast.Call, function: FunctionType
    ) -> tuple[list[ast.stmt], ast.expr]:
        foreign = [global_name for global_name in self._foreign(function) if global_name in names_in(helper)]
        stored = stored_in(helper) - of_generators(helper)
        names = {*arguments, *stored, *foreign}
        # A parameter that stands for a variable is that variable: nothing in the helper binds the caller's names.
        same = {
            old: arguments.pop(old)
            for old in names - stored
            if isinstance(arguments.get(old), (ast.Name, ast.Constant))
            or (name.endswith(".forward") and arguments.get(old) is call.func)
        }
        mapping: dict[str, ast.expr] = {old: ast.Name(f"_h{self._count}_{old}", ast.Load()) for old in names}
        mapping.update(same)
        # And so is one that is bound to another value later, until then. Forwards of norms alone get what another norm
        # made and a residual was added to, as in Mochi: that sum is part of a site with the other norm already.
        of_norms = name.endswith(".forward") and not modulating(self._facts, {name})
        again = [old for old, value in arguments.items() if isinstance(value, ast.Name) and not of_norms]
        ends = {old: rebound(helper, old) for old in again}
        first = {old: arguments.pop(old) for old, end in ends.items() if end >= 0}
        statements: list[ast.stmt] = [
            ast.copy_location(ast.Assign([ast.Name(f"_h{self._count}_{parameter}", ast.Store())], value), call)
            for parameter, value in arguments.items()
        ]
        for global_name in foreign:  # looked up at every call, as in the helper
            alias = ast.alias(global_name, f"_h{self._count}_{global_name}")
            statements.append(ast.copy_location(ast.ImportFrom(function.__module__, [alias], 0), call))
        loads = [{old: value for old, value in first.items() if i <= ends[old]} for i in range(len(helper.body))]
        copies: Any = [
            _Rename(mapping, name, {**mapping, **known}).visit(copy.deepcopy(one))
            for one, known in zip(helper.body, loads, strict=True)
        ]
        *rest, last = copies[body_start(helper) :]
        assert isinstance(last, ast.Return) and last.value is not None
        return [*statements, *rest], last.value


class _Rename(ast.NodeTransformer):
    def __init__(self, mapping: dict[str, ast.expr], helper: str, loads: dict[str, ast.expr]) -> None:
        self._mapping, self._helper, self._loads = mapping, helper, loads

    def visit(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node, ast.Name) and node.id in self._mapping:
            value = copy.deepcopy((self._loads if isinstance(node.ctx, ast.Load) else self._mapping)[node.id])
            if isinstance(value, ast.Name):
                value.ctx = node.ctx
            node = ast.copy_location(value, node)
        if isinstance(node, (ast.expr, ast.stmt)):
            node._helper = self._helper  # type: ignore[union-attr]
        return node


def _movable_calls(node: ast.expr) -> Iterator[ast.Call]:
    """The calls of an expression, innermost first, before which nothing but names and attributes is evaluated."""
    if isinstance(node, (ast.Lambda, ast.IfExp, ast.BoolOp, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        return
    for child in ast.iter_child_nodes(node):
        operand = child.value if isinstance(child, ast.keyword) else child
        if not isinstance(operand, ast.expr):
            continue
        yield from _movable_calls(operand)
        if not is_load(operand) and not _is_viewed(operand):
            break
    if isinstance(node, ast.Call):
        yield node


def _is_viewed(node: ast.expr) -> bool:
    """Whether an expression only views a variable, which shows what is written into it meanwhile."""
    while is_view(node):
        base = node.value if isinstance(node, ast.Subscript) else node.func.value  # type: ignore[attr-defined]
        index = node.slice.elts if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple) else []
        parts = index if isinstance(node, ast.Subscript) else [*node.args, *node.keywords]  # type: ignore[attr-defined]
        if isinstance(node, ast.Subscript) and not parts:  # an item of a list
            return False
        if not all(isinstance(inner, (ast.Constant, ast.Slice, ast.UnaryOp, ast.unaryop)) for inner in nodes_in(parts)):
            return False
        node = base
    return is_load(node)


def _bound(call: ast.Call, helper: ast.FunctionDef, own: ast.expr | None = None) -> dict[str, ast.expr] | None:
    """The arguments of a call by parameter, in the order of evaluation; None if they cannot be told apart.

    The first one is ``own``, if that is given.
    """
    names = [argument.arg for argument in helper.args.args]
    if any(isinstance(value, ast.Starred) for value in call.args) or any(word.arg is None for word in call.keywords):
        return None
    bound: dict[str, ast.expr] = {}
    if own is not None:
        bound[names[0]] = own
    positional = names[len(bound) :]
    if len(call.args) > len(positional):
        return None
    bound.update(zip(positional, call.args, strict=False))
    for word in call.keywords:
        assert word.arg is not None
        if word.arg in bound or word.arg not in names:
            return None
        bound[word.arg] = word.value
    defaults = dict(zip(reversed(names), reversed(helper.args.defaults), strict=False))
    for name in names:
        if name not in bound:
            if not isinstance(defaults.get(name), ast.Constant):
                return None
            bound[name] = copy.deepcopy(defaults[name])
    return bound
