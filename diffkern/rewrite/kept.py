"""What is kept: for one call of the model, or as long as a text stays the same."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from diffkern.blocks.pieces import plain_linear
from diffkern.cache.in_call import once_in_call
from diffkern.cache.text import drop_layer_of_text, layer_of_text
from diffkern.matching import full_name
from diffkern.rewrite.facts import child_of
from diffkern.rewrite.match import Leaf, Linear, Match, Scope
from diffkern.rewrite.query_key import is_processor
from diffkern.rewrite.site import AllowedInStrict, FusedSite

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


class OnceSite(FusedSite):
    """A site that computes its expression as it is written, once for all layers in a call of the model."""

    not_quick, is_proven_ahead = None, False

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._compute = partial(self.original, None)  # it reads nothing of the module
        self.is_once_in_call = True

    def __call__(self, module: nn.Module, *leaves: Any) -> Any:
        """Computes the site for its leaves."""
        if torch.compiler.is_compiling():
            return self._compute(*leaves)
        result = once_in_call(self._compute, *leaves)
        self.count_fused(module)
        return result


class TextSite(FusedSite):
    """A linear layer of attention, whose result is kept where it is called with a text; else as it is written."""

    not_quick, is_proven_ahead = None, False

    def __call__(self, module: nn.Module, *leaves: Any) -> Any:
        """Computes the site for its leaves."""
        (states,), path = leaves, self.plan.modules["linear"]
        layer = child_of(module, path)
        if torch.compiler.is_compiling() or type(states) is not Tensor or layer is None:
            return self.original(module, states)
        if not plain_linear(layer, states.device, states.dtype):
            why = "its layer has a hook or an adapter"
            return self.run_original(module, states, reason=AllowedInStrict(f"{self}: {why}"))
        result = layer_of_text(module, path[-1], layer, states, lambda: self.original(module, states))
        if result is None:
            return self.original(module, states)
        self.count_fused(module)
        return result

    def run_original(self, module: nn.Module, *leaves: Any, reason: str = "") -> Any:
        """Calls the layer, which has a hook or an adapter, and keeps nothing."""
        drop_layer_of_text(module, self.plan.modules["linear"][-1])
        return super().run_original(module, *leaves, reason=reason)
