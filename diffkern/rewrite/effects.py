"""What evaluating an expression does beside giving a value, and whose storage a value may share."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from diffkern.rewrite.flow import Definition
from diffkern.rewrite.syntax import root_of

if TYPE_CHECKING:
    from diffkern.rewrite.match import Scope


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Methods that return a view of a tensor, or the tensor itself.
VIEWS = _words(
    "unsqueeze squeeze view view_as reshape expand expand_as flatten unflatten transpose permute movedim "
    "contiguous narrow select chunk split unbind t detach"
)
#: Methods that change the dtype of a tensor alone; any of them may return the tensor itself.
CASTS = frozenset(["to", "float", "half", "bfloat16", "double", "type_as", "type"])
#: Attributes that tell about a tensor without reading its data.
METADATA = frozenset(["shape", "dtype", "ndim", "device", "itemsize", "layout", "is_cuda", "requires_grad", "names"])
#: Functions of Python that leave their arguments alone.
BUILTINS = _words(
    "len int float bool str tuple list dict set range zip enumerate isinstance hasattr getattr type min max "
    "sum abs round sorted reversed print repr map all any callable slice ValueError TypeError RuntimeError"
)
#: The name under which rewritten code calls its sites.
SITES = "_sites"


class Effects:
    """Effects in one function.

    Args:
        scope: Its def-use, and what is known of its modules.
        is_pure_function: Whether a global function, or a method ``self.name``, only reads its arguments.
    """

    def __init__(self, scope: Scope, is_pure_function: Callable[[str], bool]) -> None:
        self.flow, self._facts, self._is_pure_function = scope.flow, scope.facts, is_pure_function
        self._roots: dict[Definition, frozenset[object]] = {}

    def is_side_effect_free(self, node: ast.expr) -> bool:
        """Whether an expression may be evaluated at another time, as long as its names mean the same."""
        for part in ast.walk(node):
            if isinstance(part, ast.Call) and not (self._is_pure_method(part) or self.is_pure_helper(part)):
                return False
            if isinstance(part, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.Lambda, ast.IfExp)):
                return False
        return True

    def written(self, node: ast.AST) -> frozenset[object]:
        """The storages that evaluating one node, its operands apart, writes or may write; empty for none."""
        if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, (ast.Store, ast.Del)):
            return self.storage(node.value)
        if isinstance(node, ast.AugAssign):
            target = self.flow.augmented.get(node, node.target)
            return self.storage(target) if isinstance(target, ast.Name) else self.storage(target.value)
        if not isinstance(node, ast.Call):
            return frozenset()
        if site_called(node) >= 0:
            return self._union(*written_by(node))
        out = [keyword.value for keyword in node.keywords if keyword.arg in ("out", "inplace")]
        if isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_"):
            return self.storage(node.func.value).union(*map(self.storage, node.args))
        if out:
            return self._union(*out, *node.args)
        if self.is_known(node):
            return frozenset()
        return self._union(*self._reads(node)) | {"unknown"}

    def is_known(self, call: ast.Call) -> bool:
        """Whether a call is known to leave its arguments alone."""
        function = call.func
        if isinstance(function, ast.Name):
            return self.is_pure_helper(call) or (function.id in BUILTINS and not self.flow.is_local(function))
        if not isinstance(function, ast.Attribute):
            return False
        base = root_of(function, (ast.Attribute,))
        if isinstance(base, ast.Name) and base.id in ("torch", "F", "nn", "math", "logger", "warnings"):
            return not self.flow.is_local(base)
        return self._is_pure_method(call) or self._is_pure_child(function) or self.is_pure_helper(call)

    def is_pure_helper(self, call: ast.Call) -> bool:
        """Whether a call is that of a global function, or a static method, which only reads its arguments."""
        function = call.func
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            return function.value.id == self._facts.receiver and self._is_pure_function(f"self.{function.attr}")
        if not isinstance(function, ast.Name) or self.flow.is_local(function):
            return False
        return self._is_pure_function(function.id)

    def storage(self, node: ast.AST) -> frozenset[object]:
        """The storages that the value of an expression may share: names of parameters and attributes, and makers."""
        if isinstance(node, ast.Name):
            reaching = self.flow.definitions.get(node, frozenset())
            return self._of_definitions(reaching) if reaching else frozenset({("global", node.id)})
        if isinstance(node, (ast.Subscript, ast.Starred, ast.NamedExpr)):
            return self.storage(node.value)
        if isinstance(node, ast.Attribute):
            if node.attr in METADATA:
                return frozenset()
            return self.storage(node.value) if not self._is_own(node) else frozenset({("attribute", ast.unparse(node))})
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            return self._union(*node.elts)
        if isinstance(node, ast.IfExp):
            return self._union(node.body, node.orelse)
        if isinstance(node, (ast.BoolOp, ast.Dict)):
            return self._union(*node.values)
        if isinstance(node, ast.Call):
            if site_called(node) >= 0 or self._is_fresh_child(node.func):
                return self._union(*written_by(node)) | {node}
            # A view, a cast that changes nothing, or a function that hands its argument back.
            shared = self._union(*self._reads(node))
            return frozenset(root for root in shared if not _is_callee(root)) | {node}
        return frozenset({node})  # arithmetic makes a new tensor

    def _reads(self, call: ast.Call) -> list[ast.expr]:
        """The arguments of a call and, of a method of anything but the module, the object."""
        function = call.func
        receiver = [function.value] if isinstance(function, ast.Attribute) and not self._is_own(function) else []
        return [*receiver, *call.args, *[keyword.value for keyword in call.keywords]]

    def _is_own(self, node: ast.Attribute) -> bool:
        """Whether this is an attribute of the module, or of one of its submodules."""
        base = root_of(node)
        return isinstance(base, ast.Name) and base.id == self._facts.receiver

    def _is_pure_child(self, callee: ast.expr) -> bool:
        """Whether a call of a submodule leaves its arguments alone, as norms and activations do."""
        path, facts = self._facts.path(self.flow, callee), self._facts
        return path is not None and bool(
            facts.norm(path) or facts.activation(path) or facts.is_convolution(path) or facts.is_linear(path)
        )

    def _is_fresh_child(self, callee: ast.expr) -> bool:
        """Whether such a call returns a new tensor, as norms and linear layers do."""
        path, facts = self._facts.path(self.flow, callee), self._facts
        return path is not None and bool(facts.norm(path) or facts.is_projection(path) or facts.is_convolution(path))

    def _union(self, *nodes: ast.AST) -> frozenset[object]:
        return frozenset[object]().union(*map(self.storage, nodes))

    def _of_definitions(self, definitions: frozenset[Definition]) -> frozenset[object]:
        roots: frozenset[object] = frozenset()
        for definition in definitions:
            if definition not in self._roots:
                self._roots[definition] = frozenset({definition})  # cuts the circles of loops
                source = definition.value if definition.value is not None else definition.source
                if source is not definition.value and site_called(source) >= 0:
                    self._roots[definition] = frozenset({("result", source, definition.name)})  # each is a new tensor
                elif source is not None:
                    self._roots[definition] = self.storage(source)
            roots |= self._roots[definition]
        return roots

    def _is_pure_method(self, call: ast.Call) -> bool:
        """Whether this is a method of tensors, called on a local value, that writes nothing."""
        function = call.func
        if not isinstance(function, ast.Attribute) or function.attr.endswith("_"):
            return False
        return hasattr(torch.Tensor, function.attr) and not self._is_own(function)


def site_called(node: ast.AST | None) -> int:
    """The number of the site that an expression calls, or -1."""
    function = node.func if isinstance(node, ast.Call) else None
    if not isinstance(function, ast.Subscript) or not isinstance(function.value, ast.Name):
        return -1
    return function.slice.value if function.value.id == SITES else -1  # type: ignore[attr-defined]


def written_by(site: ast.Call) -> list[ast.expr]:
    """The operand that a call of a site writes into, and returns."""
    return [site.args[site._written]] if hasattr(site, "_written") else []


def _is_callee(root: object) -> bool:
    return isinstance(root, tuple) and root[0] in ("global", "attribute")
