"""Linear attention as a shape: the positive parts of queries and keys, two products in float32, and a division.

Sana's processors write the sum of weights as one more row of the values, and as a product of its own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

from diffkern.rewrite.match import Match, Operand, Scope
from diffkern.rewrite.query_key import is_processor
from diffkern.rewrite.template import Template

#: Sums of weighted values, with those of the weights as their last row.
_SUMS = (
    "torch.matmul(torch.matmul("
    "F.pad(_v.transpose(1, 2).unflatten(*_).float(), (0, 0, 0, 1), mode='constant', value=1.0), "
    "F.relu(_k.transpose(1, 2).unflatten(*_).transpose(2, 3)).float()), "
    "F.relu(_q.transpose(1, 2).unflatten(*_)).float())"
)
_WITH_ROW_OF_ONES = f"{_SUMS}[:, :, :-1] / ({_SUMS}[:, :, -1:] + _eps)"
_WITH_OWN_SUMS = (
    "torch.matmul(torch.matmul(_v.permute(0, 2, 3, 1).float(), "
    "_k_rotated.permute(0, 2, 3, 1).float().transpose(-1, -2)), _q_rotated.permute(0, 2, 3, 1).float())"
    " * (1 / (_k.permute(0, 2, 3, 1).sum(dim=-1, keepdim=True).transpose(-2, -1) @ _q.permute(0, 2, 3, 1) + _eps))"
)
#: Each with its operands and options.
_SPELLINGS = tuple(
    [
        (Template(f"({text}).flatten(1, 2).transpose(1, 2).to(*_)"), operands, options)
        for text, operands, options in (
            (_WITH_ROW_OF_ONES, ("q", "k", "v"), {}),
            (_WITH_OWN_SUMS, ("q", "k", "q_rotated", "k_rotated", "v"), {"relu": False}),
        )
    ]
)


@dataclass(frozen=True)
class LinearAttention:
    """``(v @ k.T @ q / sums).flatten(1, 2).transpose(1, 2).to(dtype)`` in a processor, with tokens last.

    The operands are ``q``, ``k`` and ``v``, with their heads or before they have them, and ``q_rotated`` and
    ``k_rotated`` where the numerator has others. The option ``eps`` is what is added to the sums.
    """

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`diffkern.rewrite.match.Shape`."""
        for template, names, options in _SPELLINGS if is_processor(scope) and isinstance(node, ast.Call) else ():
            blanks, found = template.fill(scope, node, match) or ({}, match)
            eps = getattr(blanks.get("_eps"), "value", None)
            operands = {name: Operand(blanks[f"_{name}"]) for name in names if f"_{name}" in blanks}
            if type(eps) is float and all(isinstance(operand.node, ast.Name) for operand in operands.values()):
                yield replace(found, operands=operands, options={"eps": eps, **options})
