"""What single expressions are: casts, views, numbers, calls of norms and activations."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from diffkern.rewrite.effects import CASTS, METADATA, VIEWS
from diffkern.rewrite.facts import ANY_NORM
from diffkern.rewrite.flow import Definition, Flow
from diffkern.rewrite.syntax import only_argument

if TYPE_CHECKING:
    from diffkern.rewrite.match import Scope

#: Activations that ops know, as functions and methods of torch spell them.
_ACTIVATIONS = frozenset({"silu", "gelu", "tanh", "sigmoid"})
#: How sources spell ``torch.nn.functional``.
FUNCTIONAL = ("F", "nn.functional", "torch.nn.functional")
#: An activation whose name does not say what it computes: the proof tries what there is.
ANY_ACTIVATION = "any"
#: What the names of functions say that rotate: by its shape alone any function of two arguments might.
ROTATES = re.compile("rotary|rope|rotate")


def rotates(name: str) -> bool:
    """Whether a function, by its name, rotates queries and keys."""
    return name.startswith("apply_rotary")


def is_cast(node: ast.expr) -> bool:
    """Whether an expression is ``x.float()``, ``x.to(...)``, ``x.type_as(y)`` and the like."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in CASTS:
        return False
    values = [*node.args, *[keyword.value for keyword in node.keywords]]
    return not any(isinstance(part, ast.Call) for value in values for part in ast.walk(value))


def is_addcmul(flow: Flow, node: ast.expr) -> bool:
    """Whether an expression is ``torch.addcmul(a, x, y)``, which rounds once."""
    function = node.func if isinstance(node, ast.Call) and len(node.args) == 3 and not node.keywords else None
    if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Name):
        return False
    return function.attr == "addcmul" and function.value.id == "torch" and not flow.is_local(function.value)


def is_view(node: ast.expr) -> bool:
    """Whether an expression is a view of a tensor that keeps its last dimension where it is."""
    if isinstance(node, ast.Subscript):
        return True
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in VIEWS


def is_per_channel(node: ast.expr | None) -> bool:
    """Whether an expression is ``x[:, :, None]``, with any number of None: one value for each sample and channel."""
    index = node.slice.elts if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple) else []
    return len(index) > 2 and [ast.unparse(part) for part in index] == [":", ":", *["None"] * (len(index) - 2)]


def is_number(flow: Flow, node: ast.expr, seen: frozenset[Definition] = frozenset()) -> bool:
    """Whether an expression is a Python number, or a shape: no tensor, as far as the source says."""
    if isinstance(node, (ast.Constant, ast.Tuple, ast.List, ast.JoinedStr, ast.Compare, ast.Dict)):
        return True
    if isinstance(node, ast.Attribute):
        return node.attr in METADATA
    if isinstance(node, (ast.Subscript, ast.UnaryOp)):
        return is_number(flow, node.value if isinstance(node, ast.Subscript) else node.operand, seen)
    if isinstance(node, ast.BinOp):
        return is_number(flow, node.left, seen) and is_number(flow, node.right, seen)
    if isinstance(node, ast.Call):
        function = node.func
        if isinstance(function, ast.Name):
            return function.id in ("len", "int", "float", "range", "str", "tuple", "list")
        return isinstance(function, ast.Attribute) and function.attr in ("size", "dim", "numel", "item", "tolist")
    if isinstance(node, ast.Name):
        reaching = flow.definitions.get(node, frozenset()) - seen
        sources = [definition.value or definition.source for definition in reaching]
        return bool(sources) and all(
            source is not None and not isinstance(source, ast.Name) and is_number(flow, source, seen | reaching)
            for source in sources
        )
    return False


def norm_call(scope: Scope, node: ast.expr, over: str) -> ast.expr | None:
    """The callee, if an expression is the call with one argument of a norm over ``over``."""
    if not isinstance(node, ast.Call) or only_argument(node) is None:
        return None
    path = scope.facts.path(scope.flow, node.func)
    return node.func if path is not None and scope.facts.norm(path) in (over, ANY_NORM) else None


def function_norm(scope: Scope, node: ast.expr) -> dict[str, object] | None:
    """Which norm ``F.rms_norm(x, (x.shape[-1],), eps=...)`` is, or ``F.layer_norm``; None for other calls."""
    if not isinstance(node, ast.Call) or len(node.args) != 2 or not isinstance(node.func, ast.Attribute):
        return None
    name, namespace = ast.unparse(node.func), ast.unparse(node.func.value)
    kind = {"rms_norm": "rms", "layer_norm": "layer"}.get(node.func.attr)
    x, shape = node.args
    if kind is None or namespace not in FUNCTIONAL or not isinstance(x, ast.Name):
        return None
    is_one = isinstance(shape, (ast.Tuple, ast.List)) and len(shape.elts) == 1
    if not is_one and ast.unparse(shape) != f"{x.id}.shape[-1:]":
        return None
    eps = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
    if eps.keys() != {"eps"} or type(eps["eps"]) is not float or name.partition(".")[0] in scope.flow.parameters:
        return None
    return {"norm": kind, "eps": eps["eps"]}


def activation(scope: Scope, node: ast.expr) -> tuple[str, ast.expr, ast.expr | None] | None:
    """The name of an activation, its argument, and its callee if that is a module or a method of the class."""
    if not isinstance(node, ast.Call):
        return None
    function = node.func
    path = scope.facts.path(scope.flow, function)
    if path is not None:
        name, argument = scope.facts.activation(path), only_argument(node)
        return None if name is None or argument is None else (name, argument, function)
    if not isinstance(function, ast.Attribute) or function.attr not in _ACTIVATIONS:
        return None
    if _is_global(scope, function.value):  # F.silu(x), torch.tanh(x), nn.functional.silu(x)
        if len(node.args) != 1:
            return None
        return _with_keywords(function.attr, node), node.args[0], None
    if node.args or node.keywords or function.attr not in ("tanh", "sigmoid"):
        return None
    return function.attr, function.value, None


def _is_global(scope: Scope, namespace: ast.expr) -> bool:
    """Whether a name is none of the function's own, or an attribute of such a name is ``torch.nn.functional``."""
    if ast.unparse(namespace) in FUNCTIONAL:
        while isinstance(namespace, ast.Attribute):
            namespace = namespace.value
    return isinstance(namespace, ast.Name) and not scope.flow.is_local(namespace)


def _with_keywords(name: str, call: ast.Call) -> str:
    for keyword in call.keywords:
        if keyword.arg == "approximate" and name == "gelu":
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            return {"none": "gelu", "tanh": "gelu_tanh"}.get(str(value), ANY_ACTIVATION)
        return "no activation"
    return name
