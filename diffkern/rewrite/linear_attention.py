"""Linear attention as a shape: the positive parts of queries and keys, two products in float32, and a division.

Sana's processors write the sum of weights as one more row of the values, and as a product of its own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

from diffkern.rewrite.match import Match, Operand, Scope
from diffkern.rewrite.query_key import is_processor


@dataclass(frozen=True)
class LinearAttention:
    """``(v @ k.T @ q / sums).flatten(1, 2).transpose(1, 2).to(dtype)`` in a processor, with tokens last.

    The operands are ``q``, ``k`` and ``v``, with their heads or before they have them, and ``q_rotated`` and
    ``k_rotated`` where the numerator has others. The option ``eps`` is what is added to the sums.
    """

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`diffkern.rewrite.match.Shape`."""
        if is_processor(scope) and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            reader = _Reader(scope, match)
            found = reader.method(node, "to", None)
            heads = None if found is None else reader.method(found, "transpose", "1, 2")
            y = None if heads is None else reader.method(heads, "flatten", "1, 2")
            if y is not None and (reader.with_row_of_ones(y) or reader.with_own_sums(y)):
                yield reader.match


class _Reader:
    """Reads one expression after the other, from the outside to the inside, and keeps what was found on the way."""

    def __init__(self, scope: Scope, match: Match) -> None:
        self._scope, self.match = scope, match

    def with_row_of_ones(self, y: ast.expr) -> bool:
        """``y[:, :, :-1] / (y[:, :, -1:] + eps)`` of ``F.pad(v, (0, 0, 0, 1), value=1.0) @ k @ q``."""
        before = self.match
        quotient = self._operation(y, ast.Div)
        sums = None if quotient is None else self._sum_with_eps(quotient[1])
        if quotient is None or sums is None:
            self.match = before
            return False
        parts = [self._subscript(part, text) for part, text in ((quotient[0], ":, :, :-1"), (sums, ":, :, -1:"))]
        products = [None if part is None else self._product(part) for part in parts]
        if products[0] is None or products[0] != products[1]:
            self.match = before
            return False
        scores, q = products[0]
        inner = self._product(scores)
        padded = None if inner is None else self._padded(inner[0])
        if inner is None or padded is None:
            self.match = before
            return False
        operands = (q, "q", None), (inner[1], "k", "2, 3"), (padded, "v", None)
        for node, name, turned in operands:
            x = self.method(node, "float", "")
            x = x if x is None or name == "v" else self._positive(x)
            x = x if x is None or turned is None else self.method(x, "transpose", turned)
            x = None if x is None else self.method(x, "unflatten", None)
            x = None if x is None else self.method(x, "transpose", "1, 2")
            if x is None or not self._operand(x, name):
                self.match = before
                return False
        return True

    def with_own_sums(self, y: ast.expr) -> bool:
        """``v @ k_rotated.T @ q_rotated * z`` with ``z = 1 / (k.sum(dim=-1, keepdim=True).T @ q + eps)``."""
        before = self.match
        factors = self._operation(y, ast.Mult)
        outer = None if factors is None else self._product(factors[0])
        inner = None if outer is None else self._product(outer[0])
        keys = None if inner is None else self.method(inner[1], "transpose", "-1, -2")
        quotient = None if factors is None or keys is None else self._operation(factors[1], ast.Div)
        sums = None if quotient is None else self._sum_with_eps(quotient[1])
        weights = None if sums is None else self._operation(sums, ast.MatMult)
        turned = None if weights is None else self.method(weights[0], "transpose", "-2, -1")
        k = None if turned is None else self.method(turned, "sum", "dim=-1, keepdim=True")
        if k is None or keys is None or outer is None or inner is None or quotient is None or weights is None:
            self.match = before
            return False
        found = {"q": weights[1], "k": k, "q_rotated": outer[1], "k_rotated": keys, "v": inner[0]}
        is_one = ast.unparse(quotient[0]) == "1"
        for name, node in found.items():
            x = node if name in ("q", "k") else self.method(node, "float", "")
            x = None if x is None else self.method(x, "permute", "0, 2, 3, 1")
            if x is None or not is_one or not self._operand(x, name):
                self.match = before
                return False
        self.match = replace(self.match, options={**self.match.options, "relu": False})
        return True

    def method(self, node: ast.expr, name: str, arguments: str | None) -> ast.expr | None:
        """``x`` in ``x.name(...)``, where the arguments are those, or any."""
        node = self._through(node)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != name:
            return None
        if arguments is not None and _arguments(node) != arguments:
            return None
        self.match = self.match.step(node)
        return node.func.value

    def _through(self, node: ast.expr) -> ast.expr:
        """The value of a variable that has one definition."""
        while isinstance(node, ast.Name) and (definition := self._scope.flow.single(node)) is not None:
            assert definition.value is not None
            self.match = replace(self.match, passed=(*self.match.passed, (node, definition)))
            node = definition.value
        return node

    def _operation(self, node: ast.expr, operator: type[ast.operator]) -> tuple[ast.expr, ast.expr] | None:
        node = self._through(node)
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, operator):
            return None
        self.match = self.match.step(node)
        return node.left, node.right

    def _sum_with_eps(self, node: ast.expr) -> ast.expr | None:
        terms = self._operation(node, ast.Add)
        if terms is None or not isinstance(terms[1], ast.Constant) or type(terms[1].value) is not float:
            return None
        self.match = replace(self.match, options={**self.match.options, "eps": terms[1].value})
        return terms[0]

    def _subscript(self, node: ast.expr, index: str) -> ast.expr | None:
        node = self._through(node)
        if not isinstance(node, ast.Subscript) or ast.unparse(node.slice).strip("()") != index:
            return None
        self.match = self.match.step(node)
        return node.value

    def _call(self, node: ast.expr, name: str, count: int) -> ast.Call | None:
        """``torch.name(...)`` or ``F.name(...)``, with so many positional arguments."""
        node = self._through(node)
        if not isinstance(node, ast.Call) or ast.unparse(node.func) != name or len(node.args) != count:
            return None
        base = node.func.value if isinstance(node.func, ast.Attribute) else node.func
        if isinstance(base, ast.Name) and self._scope.flow.is_local(base):
            return None
        self.match = self.match.step(node)
        return node

    def _product(self, node: ast.expr) -> tuple[ast.expr, ast.expr] | None:
        call = self._call(node, "torch.matmul", 2)
        return None if call is None or call.keywords else (call.args[0], call.args[1])

    def _padded(self, node: ast.expr) -> ast.expr | None:
        call = self._call(node, "F.pad", 2)
        known = "(0, 0, 0, 1), mode='constant', value=1.0"
        return None if call is None or _arguments(call).partition(", ")[2] != known else call.args[0]

    def _positive(self, node: ast.expr) -> ast.expr | None:
        call = self._call(node, "F.relu", 1)
        return None if call is None or call.keywords else call.args[0]

    def _operand(self, node: ast.expr, name: str) -> bool:
        if isinstance(node, ast.Name):
            self.match = replace(self.match, operands={**self.match.operands, name: Operand(node)})
        return isinstance(node, ast.Name)


def _arguments(call: ast.Call) -> str:
    values = [ast.unparse(value) for value in call.args]
    return ", ".join([*values, *[f"{word.arg}={ast.unparse(word.value)}" for word in call.keywords]])


def separate_casts(tree: ast.FunctionDef) -> None:
    """Makes ``a = a.float()`` and ``b = b.float()`` of ``a, b = a.float(), b.float()``."""
    for parent in ast.walk(tree):
        for field in ("body", "orelse"):
            block = getattr(parent, field, None)
            if not isinstance(block, list):
                continue
            for index in reversed(range(len(block))):
                statement = block[index]
                pairs = _own_casts(statement)
                if pairs:
                    block[index : index + 1] = [
                        ast.copy_location(ast.Assign([name], value), statement) for name, value in pairs
                    ]
    ast.fix_missing_locations(tree)


def _own_casts(statement: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """The names and the casts of a statement that casts several variables."""
    target = statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
    value = getattr(statement, "value", None)
    if not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple) or len(target.elts) != len(value.elts):
        return []
    pairs = [*zip(target.elts, value.elts, strict=True)]
    names = [getattr(name, "id", None) for name in target.elts]
    own = len({*names}) == len(names) and all(
        isinstance(name, ast.Name) and ast.unparse(cast) == f"{name.id}.float()" for name, cast in pairs
    )
    return pairs if own else []
