"""A convolution that cuts images or videos into patches, whose result becomes tokens: as a shape, and as one product.

cuDNN converts images to channels last for such a convolution, and its result back, which is wide; then ``flatten`` and
``transpose`` leave that in an order which the first sum or concatenation has to turn. As a product of patches its rows
are the tokens, and all that is copied are the pixels.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from diffkern.blocks.pieces import has_plain_parameters
from diffkern.rewrite.facts import child_of, takes_patches
from diffkern.rewrite.match import Leaf, Linear, Match, Scope, peel
from diffkern.rewrite.site import AllowedInStrict, FusedSite, Way
from diffkern.rewrite.template import Template

#: ``y`` with two dimensions of its samples, which any order in memory allows.
SPLIT_SAMPLES = "_y.view(_, _, *_y.shape[1:])"
_TOKENS = Template("_y.flatten(2).transpose(1, 2)", f"{SPLIT_SAMPLES}.flatten(3).transpose(2, 3)", casts=True)


@dataclass(frozen=True)
class PatchEmbedding:
    """``proj(x)`` where ``proj`` has a kernel as large as its stride, and ``.flatten(2).transpose(1, 2)`` comes behind.

    The samples may get back two dimensions in between, as those of CogVideoX do:
    ``y.view(batch, frames, *y.shape[1:]).flatten(3).transpose(2, 3)``. Nothing else may read the result.
    """

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`diffkern.rewrite.match.Shape`."""
        if isinstance(node, ast.Call):
            for found in Linear(Leaf("x"), "patches").match(scope, node, match):
                if any(node is made for made in _made_tokens(scope)):
                    yield found


def _made_tokens(scope: Scope) -> Iterator[ast.expr]:
    """What is made tokens of, where nothing else reads it, or asks for more than its shape."""
    asked = {node.value for node in scope.flow.nodes if isinstance(node, ast.Attribute) and node.attr == "shape"}
    for node in scope.flow.nodes:
        filled = _TOKENS.fill(scope, node) if isinstance(node, ast.Call) else None
        if filled is None:
            continue
        made, match = peel(scope, filled[0]["_y"], filled[1])
        passed = {name for name, _ in match.passed} | asked
        if all(use in passed for _, definition in match.passed for use in definition.uses):
            yield made


class PatchesSite(FusedSite):
    """A convolution as a product of its patches, whose result lies in channels last; else as it is written."""

    not_quick, is_proven_ahead, lies_otherwise = None, False, True

    def __call__(self, module: nn.Module, *leaves: Any) -> Any:
        """Computes the site for its leaf."""
        (x,), conv = leaves, child_of(module, self.plan.modules["patches"])
        if torch.compiler.is_compiling() or type(x) is not Tensor or conv is None:
            return self.original(module, x)
        fits = takes_patches(conv) and x.ndim == 2 + len(conv.kernel_size)  # type: ignore[arg-type]
        if not fits or not has_plain_parameters(conv, x.device, x.dtype):
            why = "its convolution has a hook, an adapter or other settings than when it was read"
            return self.run_original(module, x, reason=AllowedInStrict(f"{self}: {why}"))
        if len(x) == 1:
            # ``flatten`` gives it another stride than the results of blocks have, and the compiler would make a graph
            # of its own for it.
            return self.run_original(module, x, reason=AllowedInStrict(f"{self}: a single sample lies as in stock"))
        return super().__call__(module, x)

    @override
    def call_op(self, module: nn.Module, operands: dict[str, Any], way: Way, provider: str | None) -> Any:
        return of_patches(operands["x"], child_of(module, self.plan.modules["patches"]))


def of_patches(x: Tensor, conv: Any) -> Tensor:
    r"""Computes a convolution whose kernel is its stride, without padding, as a product.

    .. math:: y_{b d i} = \sum_{c k} w_{d c k} \, x_{b, c, i s + k} + b_d

    Args:
        x: Images ``[B, C, H, W]`` or videos ``[B, C, T, H, W]``, any strides, in the dtype of the weight.
        conv: The convolution; pixels behind the last whole patch count for nothing, as they do there.

    Returns:
        ``[B, D, ...]`` with a position for each patch, as a view of rows of ``D``. It rounds once, with the bias.
    """
    for dim, size in enumerate(conv.kernel_size):
        x = x.unfold(2 + dim, size, size)
    of_patch = len(conv.kernel_size) + 1
    patches = x.movedim(1, of_patch).flatten(of_patch)  # [B, ..., C * pixels]
    rows = F.linear(patches.flatten(0, -2), conv.weight.flatten(1), conv.bias)
    return rows.view(*patches.shape[:-1], -1).movedim(-1, 1)
