"""Whether a forward is simple enough that running it on some inputs tells what it does on all of them.

A probe compares results. It cannot see a branch on ``self.training``, a factor that is set later, a
detached statistic, or what happens from 1000 rows on. So only forwards are probed whose source is a straight
line of the operations that norms are made of, reading parameters, eps and shapes, and nothing else.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from torch import nn

#: Functions and methods that a norm is made of. None of them depends on state or cuts a gradient.
_CALLS = frozenset(
    (
        *("float", "double", "half", "bfloat16", "to", "type", "type_as", "is_floating_point", "finfo"),
        *("pow", "square", "mean", "var", "rsqrt", "sqrt", "reciprocal", "sum", "mul", "add", "sub", "div", "neg"),
        *("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "expand", "permute", "transpose"),
        *("movedim", "contiguous", "size", "dim", "len"),
        *("rms_norm", "layer_norm", "normalize", "norm", "vector_norm", "super", "forward"),
    )
)
#: Attributes of the module, besides its parameters, that a norm may read.
_SHAPES = frozenset({"dim", "size", "hidden_size", "normalized_shape", "channel_dim", "channel_first"})
_STATEMENTS = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr, ast.If, ast.Pass)


def unprobeable_reason(cls: type[nn.Module], parameters: set[str]) -> str | None:
    """Says what in the forward of ``cls`` a probe could not judge, or None; ``parameters`` may hold None."""
    return _check(cls, cls.forward, parameters, set())


def _check(cls: type, function: Callable[..., Any], parameters: set[str], seen: set[Any]) -> str | None:
    if function in seen:
        return "it calls itself"
    seen.add(function)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return "the source of its forward cannot be read"
    if not isinstance(tree, ast.FunctionDef):
        return "its forward is no plain function"
    if any(ast.unparse(decorator) != "staticmethod" for decorator in tree.decorator_list):
        return "its forward is decorated"
    for node in ast.walk(tree):
        if node is tree:
            continue
        reason = _judge(node, cls, function, parameters, seen)
        if reason is not None:
            return reason
    return None


def _judge(node: ast.AST, cls: type, function: Callable[..., Any], parameters: set[str], seen: set[Any]) -> str | None:
    if isinstance(node, ast.stmt) and not isinstance(node, _STATEMENTS):
        return f"its forward has a {type(node).__name__.lower()} statement"
    if isinstance(node, (ast.If, ast.IfExp)) and not _asks_for_parameter(node.test, parameters):
        return f"its forward branches on {ast.unparse(node.test)}"
    if isinstance(node, (ast.Lambda, ast.ListComp, ast.GeneratorExp, ast.Await, ast.Yield, ast.NamedExpr)):
        return f"its forward has a {type(node).__name__.lower()}"
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        if not isinstance(node.ctx, ast.Load):
            return f"its forward writes self.{node.attr}"
        return _judge_attribute(node.attr, cls, parameters, seen)
    if isinstance(node, ast.Call):
        return _judge_call(node, cls, function, parameters, seen)
    return None


def _judge_attribute(name: str, cls: type, parameters: set[str], seen: set[Any]) -> str | None:
    if name in parameters or name in _SHAPES or "eps" in name or name == "forward":
        return None
    method = inspect.getattr_static(cls, name, None)
    if isinstance(method, staticmethod):
        method = method.__func__
    if inspect.isfunction(method):
        return _check(cls, method, parameters, seen)
    return f"its forward reads self.{name}"


def _judge_call(
    node: ast.Call, cls: type, function: Callable[..., Any], parameters: set[str], seen: set[Any]
) -> str | None:
    called = node.func
    if isinstance(called, ast.Attribute):
        if isinstance(called.value, ast.Name) and called.value.id == "self":
            return None  # judged as an attribute
        if called.attr == "forward" and isinstance(called.value, ast.Call):
            base = next((b for b in cls.__mro__[1:] if "forward" in vars(b)), None)
            return None if base is None else _check(base, vars(base)["forward"], parameters, seen)
        name = called.attr
    elif isinstance(called, ast.Name):
        name = called.id
    else:
        return f"its forward calls {ast.unparse(called)}"
    return None if name in _CALLS else f"its forward calls {name}, which a probe cannot judge"


def _asks_for_parameter(test: ast.expr, parameters: set[str]) -> bool:
    """Whether a condition only asks if a parameter is there, or which dtype it has."""
    names = [n for n in ast.walk(test) if isinstance(n, ast.Attribute)]
    own = [n for n in names if isinstance(n.value, ast.Name) and n.value.id == "self"]
    others = [n.attr for n in names if n not in own]
    plain = all(n.attr in parameters for n in own) and set(others) <= {"dtype", "float16", "bfloat16", "float32"}
    return bool(own) and plain and not any(isinstance(n, ast.Call) for n in ast.walk(test))
