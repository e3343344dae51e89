"""Masks of attention, as shapes: such that every layer makes from the same argument, and calls that are given one.

The former are made once in a call; :mod:`diffkern.rewrite.masked` computes the latter.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

from diffkern.rewrite.effects import METADATA, VIEWS
from diffkern.rewrite.expressions import is_number
from diffkern.rewrite.match import Match, Operand, Scope
from diffkern.rewrite.query_key import is_processor
from diffkern.rewrite.template import Template

#: Methods that a mask is made with, beside views.
_METHODS = VIEWS | {"repeat", "bool"}
#: Functions that compute attention, and the dimension of tokens in what they are given.
_FUNCTIONS = {"dispatch_attention_fn": 1, "F.scaled_dot_product_attention": 2}
_PAIRS = Template("_mask & _mask.transpose(*_)")
#: The operands of such a match.
OPERANDS = ("query", "key", "value", "attn_mask")
#: Further arguments that change nothing about which keys are seen, and such that must be off.
_FREE = frozenset({"backend", "parallel_config", "enable_gqa", "scale"})
_OFF = {"dropout_p": 0.0, "is_causal": False}


@dataclass(frozen=True)
class PairMask:
    """``mask & mask.transpose(...)`` in a processor, of arguments and sizes alone: which tokens see which.

    Each argument is an operand, and so is each size.
    """

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`diffkern.rewrite.match.Shape`."""
        if not is_processor(scope) or not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.BitAnd):
            return
        if _PAIRS.fill(scope, node):
            found = _of_arguments(scope, node, match)
            if found is not None and found.operands:
                yield found


def _of_arguments(scope: Scope, node: ast.AST, match: Match) -> Match | None:
    """The match with what makes the value of an expression; None if that is more than arguments and sizes."""
    if isinstance(node, ast.Constant):
        return match
    if isinstance(node, ast.Name):
        definition = scope.flow.single(node)
        if definition is not None:
            assert definition.value is not None
            return _of_arguments(scope, definition.value, replace(match, passed=(*match.passed, (node, definition))))
        reaching = scope.flow.definitions.get(node, frozenset())
        if reaching != {scope.flow.parameters.get(node.id)} and not is_number(scope.flow, node):
            return None
        return replace(match, operands={**match.operands, f"of{len(match.operands)}": Operand(node)})
    parts: list[ast.AST] = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Call):
        function = node.func
        if not isinstance(function, ast.Attribute):
            return None
        of_torch = isinstance(function.value, ast.Name) and not scope.flow.is_local(function.value)
        if not (ast.unparse(function) == "F.pad" if of_torch else function.attr in _METHODS):
            return None
        parts = [*([] if of_torch else [function.value]), *node.args, *[word.value for word in node.keywords]]
    elif isinstance(node, ast.Attribute):
        if node.attr not in METADATA:
            return None
    elif not isinstance(node, (ast.BinOp, ast.Subscript, ast.Tuple, ast.UnaryOp)):
        return None
    found: Match | None = match.step(node)
    for part in parts:
        if isinstance(part, ast.expr) and found is not None:
            found = _of_arguments(scope, part, found)
    return found


@dataclass(frozen=True)
class MaskedAttention:
    """``dispatch_attention_fn(query, key, value, attn_mask=mask)`` in a processor, or the same of torch.

    The operands have the names of its arguments.
    """

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`diffkern.rewrite.match.Shape`."""
        if not isinstance(node, ast.Call) or not is_processor(scope) or len(node.args) > 3:
            return
        tokens = _FUNCTIONS.get(ast.unparse(node.func))
        given = dict(zip(OPERANDS, node.args, strict=False))
        given |= {str(word.arg): word.value for word in node.keywords}
        if tokens is None or not all(isinstance(given.get(name), ast.Name) for name in OPERANDS):
            return
        for name, off in _OFF.items():
            value = given.pop(name, ast.Constant(off))
            if not isinstance(value, ast.Constant) or value.value != off:
                return
        if given.keys() <= _FREE | {*OPERANDS} and not isinstance(given.get("scale"), ast.Constant):
            operands = {name: Operand(value) for name, value in given.items() if not isinstance(value, ast.Constant)}
            yield replace(match.step(node), operands=operands, options={"tokens": tokens})
