"""Makes one straight line of the body of a helper, of statements or of a single value."""

from __future__ import annotations

import ast
import copy
from collections.abc import Collection

from diffkern.rewrite.expressions import ROTATES
from diffkern.rewrite.identity import IMAGE_OF_TOKENS
from diffkern.rewrite.syntax import Substitute, names_in, nodes_in, only_target, stored_by

#: Statements that a helper may consist of, before the one return at its end.
_STATEMENTS = (ast.Assign, ast.AnnAssign, ast.If, ast.Expr, ast.Return, ast.Raise, ast.Pass)
#: What the body of a helper must not hold: scopes of their own, and what would leave the caller.
FORBIDDEN = (
    ast.Lambda,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
    ast.NamedExpr,
    ast.Await,
    ast.Yield,
)
#: The variable of a helper with several returns that takes the value of each.
_RESULT = "result"


def single_value(function: ast.FunctionDef) -> ast.expr | None:
    """What a function returns, as one expression; None if that would change the order of evaluation."""
    if function.decorator_list or not has_plain_arguments(function):
        return None
    *rest, last = function.body
    value = last.value if isinstance(last, ast.Return) else None
    if value is None or any(isinstance(node, FORBIDDEN) for node in nodes_in(function.body)):
        return None
    for statement in reversed(rest):
        target = only_target(statement)
        if not isinstance(target, ast.Name) or not _reads_first(value, target.id):
            return None
        value = Substitute({target.id: statement.value}).visit(copy.deepcopy(value))  # type: ignore[attr-defined]
    return value


def _reads_first(value: ast.expr, name: str) -> bool:
    """Whether an expression reads a name once, always, before it evaluates anything but names and attributes."""
    if isinstance(value, (ast.IfExp, ast.BoolOp, ast.Compare)):
        return False
    if [node.id for node in ast.walk(value) if isinstance(node, ast.Name)].count(name) != 1:
        return False
    for child in ast.iter_child_nodes(value):
        if name in names_in(child):
            return isinstance(child, ast.Name) or (isinstance(child, ast.expr) and _reads_first(child, name))
        if isinstance(child, ast.expr) and not is_load(child):
            return False
    return False


def fold_rebound(function: ast.FunctionDef) -> None:
    """Makes ``x = self.norm(x.float()) * scale`` of three statements that bind ``x`` one after the other.

    What the next statement reads first of all, and nothing after it, goes there: the order of evaluation stays.
    """
    block = function.body
    for index in reversed(range(len(block) - 1)):
        made, following = block[index : index + 2]
        targets = [ast.unparse(target) for target in getattr(made, "targets", ())]
        binds = [ast.unparse(target) for target in getattr(following, "targets", ())]
        if len(targets) != 1 or not (isinstance(following, ast.Return) or binds == targets):
            continue
        value = following.value  # type: ignore[attr-defined]
        if value is not None and _reads_first(value, targets[0]):
            following.value = Substitute({targets[0]: made.value}).visit(value)  # type: ignore[attr-defined]
            del block[index]


def rebound(helper: ast.FunctionDef, name: str) -> int:
    """The statement that binds a parameter to another value, on every path and before any other; -1 if none does."""
    for index, statement in enumerate(helper.body):
        binds = [node for node in ast.walk(statement) if name in stored_by(node)]  # generators do so in their scope
        if binds:
            return index if isinstance(statement, ast.Assign) and statement.targets == binds else -1
    return -1


def of_generators(helper: ast.FunctionDef) -> set[str]:
    """The variables of generators, which are bound in these alone."""
    inside = set(nodes_in(node for node in ast.walk(helper) if isinstance(node, ast.GeneratorExp)))
    outside = {name for node in ast.walk(helper) if node not in inside for name in stored_by(node)}
    arguments = {argument.arg for argument in helper.args.args}
    return {name for node in inside for name in stored_by(node)} - outside - arguments


def has_plain_arguments(function: ast.FunctionDef) -> bool:
    """Whether each argument of a function may be given by its position, or by its name."""
    arguments = function.args
    return not (arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.posonlyargs)


def is_load(node: ast.expr) -> bool:
    """Whether an expression reads variables and attributes, and does nothing else."""
    return all(isinstance(part, (ast.Name, ast.Attribute, ast.Constant, ast.expr_context)) for part in ast.walk(node))


def is_straight(helper: ast.FunctionDef, besides: tuple[type, ...] = ()) -> bool:
    """Whether a function is a few statements with one return at the end, with nothing forbidden but ``besides``."""
    nodes = list(ast.walk(helper))[1:]
    if any(isinstance(node, ast.stmt) and not isinstance(node, _STATEMENTS) for node in nodes):
        return False
    if any(isinstance(node, FORBIDDEN) and not isinstance(node, besides) for node in nodes):
        return False
    returns = [node for node in nodes if isinstance(node, ast.Return)]
    return len(returns) == 1 and helper.body[-1] is returns[0] and returns[0].value is not None


def computes(helper: ast.FunctionDef) -> bool:
    """Whether a function computes something that a rule knows."""
    for node in ast.walk(helper):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            return True
        if isinstance(node, ast.Attribute) and node.attr in ("addcmul", "addcmul_", "rms_norm"):
            return True
        if isinstance(node, ast.Call) and IMAGE_OF_TOKENS.fill(None, node):
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and ROTATES.search(node.func.id):
            return True
    return False


def only_scales(helper: ast.FunctionDef, factors: Collection[str]) -> bool:
    """Whether a function does no arithmetic but products with some of its arguments."""
    for node in ast.walk(helper):
        if isinstance(node, ast.BinOp):
            names = [part.id for part in (node.left, node.right) if isinstance(part, ast.Name)]
            if not isinstance(node.op, ast.Mult) or not any(name in factors for name in names):
                return False
    return True


def tests_of(tree: ast.FunctionDef) -> list[ast.expr]:
    """What a function branches by."""
    return [node.test for node in ast.walk(tree) if isinstance(node, (ast.If, ast.IfExp))]


def with_one_return(helper: ast.FunctionDef) -> bool:
    """Makes one return, at the end, of a function that returns at the end of each of its branches."""
    if isinstance(helper.body[-1], ast.Return) and sum(isinstance(n, ast.Return) for n in ast.walk(helper)) == 1:
        return True
    if not _assign_returns(helper.body):
        return False
    last = helper.body[-1]
    helper.body.append(ast.copy_location(ast.Return(ast.Name(_RESULT, ast.Load())), last))
    ast.fix_missing_locations(helper)
    return _RESULT not in names_in(helper.args)


def _assign_returns(block: list[ast.stmt]) -> bool:
    """Whether every path through a block ended in a return, all of which are assignments now."""
    for index, statement in enumerate(block):
        if isinstance(statement, ast.Return) and statement.value is not None:
            result = ast.Assign([ast.Name(_RESULT, ast.Store())], statement.value)
            block[index:] = [ast.copy_location(result, statement)]
            return True
        if isinstance(statement, ast.If) and any(isinstance(node, ast.Return) for node in ast.walk(statement)):
            rest, open_ends = block[index + 1 :], 0
            for branch in (statement.body, statement.orelse):
                if not branch or not isinstance(branch[-1], (ast.Return, ast.Raise, ast.If)):
                    branch += rest
                    open_ends += 1
            del block[index + 1 :]
            return open_ends <= 1 and _assign_returns(statement.body) and _assign_returns(statement.orelse)
    return bool(block) and isinstance(block[-1], ast.Raise)
