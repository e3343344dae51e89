"""A forward in two functions: the span from its first loop over blocks to its last one, and what stands around it.

The statements of the span are taken as they are written into a function of their own, which the forward calls in their
place. A caller can then replay that function from a CUDA graph, while the statements before and after it (tables made
on the CPU, reads of values) run as they are.
"""

from __future__ import annotations

import ast
import builtins
import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

from torch import nn

from diffkern.rewrite.source import LOCK, Source, compiled, recompile
from diffkern.rewrite.syntax import arguments_of, nodes_in

#: What a variable has that had no value when the span began or ended; no source that runs without spans reads it.
UNBOUND = "diffkern: no value"
#: The names that a forward with a span has beside its own.
_RUN, _LOCALS = "_diffkern_span", "_diffkern_locals"
#: Names that see more of a function than its variables.
_SEE_FRAMES = frozenset({"locals", "eval", "exec", "vars", "super", "__class__", "globals"})

#: Runs a span: the module, the span, and the values of the variables that it reads.
Run = Callable[[nn.Module, "Span", dict[str, Any]], tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class Span:
    """The blocks of a forward and what stands between them.

    Attributes:
        function: Computes it: the module and the variables it reads, by name; returns those that are read later.
        reads: The names of the former.
        lines: Its first and last line in the file.
    """

    function: FunctionType
    reads: tuple[str, ...]
    lines: tuple[int, int]

    def __call__(self, module: nn.Module, values: dict[str, Any]) -> tuple[Any, ...]:
        """Runs it as it is written."""
        result: tuple[Any, ...] = self.function(module, **values)
        return result


def with_span(module: nn.Module, run: Run, skip: int = 0) -> FunctionType | str:
    """Returns the forward of a module's class with its blocks run by ``run``, or the reason why it has no such form.

    Args:
        module: It is not changed.
        run: Runs the span at each call.
        skip: How many of the first loops over blocks shall stand before the span.
    """
    with LOCK:
        source = Source.of(type(module).forward)
        if isinstance(source, str):
            return source
        tree = copy.deepcopy(source.tree)
        arguments = [*tree.args.posonlyargs, *tree.args.args]
        if not arguments:
            return "it takes no module"
        receiver = arguments[0].arg
        lists = {f"{receiver}.{name}" for name, child in module._modules.items() if isinstance(child, nn.ModuleList)}
        places = [i for i, statement in enumerate(tree.body) if _loops_over(statement, lists)][skip:]
        if not places:
            return "it has no other loop over blocks" if skip else "it has no loop over blocks"
        first, end = places[0], places[-1] + 1
        span, tail = tree.body[first:end], tree.body[end:]
        reason = _unfit(tree, span)
        if reason is not None:
            return reason
        written = _stored(span) - {receiver}
        later = sorted(written & _loaded(tail))
        before = {*arguments_of(tree, with_any_number=True)} | _stored(tree.body[:first])
        reads = tuple(sorted((_loaded(span) | set(later)) & before - {receiver}))
        function = _function_of(span, receiver, reads, later, source)
        found = Span(function, reads, (span[0].lineno, span[-1].end_lineno or 0))
        tree.body[first:end] = _call_of(receiver, later, span[0])
        code = source.code(ast.fix_missing_locations(tree), (_RUN, _LOCALS))

        def run_span(owner: nn.Module, scope: dict[str, Any]) -> tuple[Any, ...]:
            return run(owner, found, {name: scope[name] for name in reads if name in scope})

        return recompile(source.decorated, code, {_RUN: run_span, _LOCALS: builtins.locals})


def _loops_over(statement: ast.stmt, lists: set[str]) -> bool:
    """Whether a statement has a loop over one of some lists of modules."""
    read = nodes_in(loop.iter for loop in ast.walk(statement) if isinstance(loop, ast.For))
    return any(isinstance(part, ast.Attribute) and ast.unparse(part) in lists for part in read)


def _unfit(tree: ast.FunctionDef, span: list[ast.stmt]) -> str | None:
    """Why statements of a function cannot be a function of their own, or None."""
    for statement in span:
        for node in _own_nodes(statement):
            if isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom, ast.Await)):
                return f"line {node.lineno} leaves it between the blocks"
    for node in ast.walk(tree):
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            return f"line {node.lineno} declares a variable of another scope"
        if isinstance(node, ast.Name) and node.id in _SEE_FRAMES:
            return f"line {node.lineno} calls {node.id}, which sees more than variables"
    # A function that was made on one side sees variables that the other side sets.
    inside = {id(node) for node in nodes_in(span)}
    written = _stored(span)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.Lambda)) and node is not tree and id(node) not in inside:
            body = node.body if isinstance(node, ast.FunctionDef) else [node.body]
            if written & _loaded(body):
                return f"line {node.lineno} has a function that sees what the blocks set"
    return None


def _function_of(
    span: list[ast.stmt], receiver: str, reads: Iterable[str], later: list[str], source: Source
) -> FunctionType:
    parameters = [f"{name}={UNBOUND!r}" for name in reads]
    tree = ast.parse(f"def span({', '.join([receiver, *parameters])}): pass").body[0]
    assert isinstance(tree, ast.FunctionDef)
    unset = [name for name in later if name not in set(reads)]
    first: list[ast.stmt] = [ast.Assign([ast.Name(name, ast.Store())], ast.Constant(UNBOUND)) for name in unset]
    result = ast.Tuple([ast.Name(name, ast.Load()) for name in later], ast.Load())
    tree.body = [
        *[ast.copy_location(s, span[0]) for s in first],
        *span,
        ast.copy_location(ast.Return(result), span[-1]),
    ]
    ast.copy_location(tree, span[0])
    function = source.function
    code = compiled(ast.fix_missing_locations(tree), function, function.__code__.co_freevars, set())
    assert code is not None
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    closure: tuple[CellType, ...] = tuple([cells[name] for name in code.co_freevars])
    return FunctionType(code, function.__globals__, "span", (UNBOUND,) * len(parameters), closure)


def _call_of(receiver: str, later: list[str], like: ast.stmt) -> list[ast.stmt]:
    """The statement that runs the span and sets the variables that are read later."""
    scope = ast.Call(ast.Name(_LOCALS, ast.Load()), [], [])
    call = ast.Call(ast.Name(_RUN, ast.Load()), [ast.Name(receiver, ast.Load()), scope], [])
    targets = ast.Tuple([ast.Name(name, ast.Store()) for name in later], ast.Store())
    statement: ast.stmt = ast.Assign([targets], call) if later else ast.Expr(call)
    return [ast.copy_location(statement, like)]


def _own_nodes(statement: ast.AST) -> Iterable[ast.AST]:
    """The nodes of a statement, those of nested functions aside."""
    yield statement
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            yield from _own_nodes(child)


def _stored(statements: Iterable[ast.AST]) -> set[str]:
    """The variables that statements set or delete, those of nested functions aside."""
    names: set[str] = set()
    for statement in statements:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            names.add(statement.name)
            continue
        for node in _own_nodes(statement):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                names.add(node.id)
            elif isinstance(node, ast.alias):
                names.add((node.asname or node.name).partition(".")[0])
            elif isinstance(node, ast.ExceptHandler) and node.name:
                names.add(node.name)
            names |= {
                child.name for child in ast.iter_child_nodes(node) if isinstance(child, (ast.FunctionDef, ast.ClassDef))
            }
    return names


def _loaded(statements: Iterable[ast.AST]) -> set[str]:
    """The variables that statements read, in nested functions as well; what is added to is read."""
    nodes = nodes_in(statements)
    added = [node.target for node in nodes if isinstance(node, ast.AugAssign)]
    names = [node for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store)]
    return {node.id for node in (*names, *added) if isinstance(node, ast.Name)}
