"""Linear layers of attention to a text, as a shape: what they make of it is the same at every step, and kept."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from diffkern.matching import full_name
from diffkern.rewrite.match import Leaf, Linear, Match, Scope
from diffkern.rewrite.query_key import is_processor

#: Classes of attention whose keys and values are kept: many tokens attend to a text of not so few, and the memory that
#: this takes is a small part of what the model takes.
KEEPS = frozenset(
    {
        "diffusers.models.transformers.transformer_ltx.LTXAttention",
        "diffusers.models.transformers.transformer_ltx2.LTX2Attention",
    }
)


@dataclass(frozen=True)
class OfText:
    """``attn.to_k(states)`` in a processor, where the states may be those of a text."""

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`diffkern.rewrite.match.Shape`."""
        if not isinstance(node, ast.Call) or not is_processor(scope) or scope.facts.cls is None:
            return
        if full_name(scope.facts.cls) in KEEPS and scope.facts.path(scope.flow, node.func) in (("to_k",), ("to_v",)):
            yield from Linear(Leaf("x")).match(scope, node, match)
