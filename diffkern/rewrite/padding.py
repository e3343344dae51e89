"""Padding of images and videos with pixels of their own, as shapes; and padding that keeps the order of memory.

On a GPU torch copies what lies in channels last into row-major order before it repeats or mirrors the outer pixels, and
the convolution behind that copies the result back: three passes, in which neighbours in memory are read far apart. Here
whole pixels are gathered in one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from diffkern.blocks.layout import is_last
from diffkern.rewrite.match import Leaf, Linear, Match, Operand, Scope, peel
from diffkern.rewrite.query_key import concatenated

_FUNCTIONS = ("F.pad", "torch.nn.functional.pad", "nn.functional.pad")
#: The slices of the first frame and of the last one.
_FIRST, _FINAL = (":, :, :1", ":, :, :1, :, :", ":, :, :1, ..."), (":, :, -1:", ":, :, -1:, :, :", ":, :, -1:, ...")


@dataclass(frozen=True)
class Padded:
    """``F.pad(x, padding, mode=mode)`` with any mode but a constant, or a convolution that pads so by itself."""

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`diffkern.rewrite.match.Shape`."""
        path = scope.facts.path(scope.flow, node.func) if isinstance(node, ast.Call) else None
        if path and scope.facts.pads(path):
            yield from Linear(Leaf("x"), "convolution").match(scope, node, match)
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in _FUNCTIONS or len(node.args) != 2:
            return
        words = {word.arg: word.value for word in node.keywords}
        if isinstance(node.args[1], ast.Tuple) and len(node.args[1].elts) == 2:
            return  # sound, which has no order to keep
        if words.keys() == {"mode"} and getattr(words["mode"], "value", None) != "constant":
            found = {"x": node.args[0], "padding": node.args[1], "mode": words["mode"]}
            yield replace(match.step(node), operands={name: Operand(part) for name, part in found.items()})


@dataclass(frozen=True)
class RepeatedFrames:
    """``torch.cat([x[:, :, :1].repeat(1, 1, n, 1, 1), x], dim=2)``, with copies of the last frame behind it or not."""

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`diffkern.rewrite.match.Shape`."""
        found = concatenated(node)
        if found is None or found[1] != 2 or len(found[0]) not in (2, 3):
            return
        first, x, *final = found[0]
        match = replace(match.step(node), operands={"x": Operand(x)})
        for name, part, frame in [("front", first, _FIRST), *[("back", part, _FINAL) for part in final]]:
            part, match = peel(scope, part, match)
            sliced = part.func.value if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) else None
            if not isinstance(sliced, ast.Subscript) or part.func.attr != "repeat" or part.keywords:  # type: ignore[attr-defined]
                return
            given = part.args[0].elts if isinstance(part.args[0], ast.Tuple) else part.args  # type: ignore[attr-defined]
            base, definitions = sliced.value, scope.flow.definitions
            if not (isinstance(x, ast.Name) and isinstance(base, ast.Name) and base.id == x.id):
                return
            same = definitions.get(base) == definitions.get(x)
            if not same or ast.unparse(sliced.slice).strip("()") not in frame or len(given) != 5:
                return
            if [ast.unparse(size) for size in given[:2] + given[3:]] != ["1"] * 4:
                return
            operands = {**match.operands, name: Operand(given[2])}
            match = replace(match.step(part).step(sliced), operands=operands)
        yield match


def padded(x: Tensor, padding: Sequence[int], mode: str) -> Tensor:
    """``F.pad(x, padding, mode)``, but in channels last where ``x`` is, on every device."""
    followed = mode in _PLACES and len(padding) == 2 * x.ndim - 4 and min(padding) >= 0
    if not followed or not is_last(x) or not reorders(x) or (torch.is_grad_enabled() and x.requires_grad):
        return F.pad(x, padding, mode)
    places = torch.arange(x.shape[0], device=x.device)
    for dim, size in enumerate(x.shape[2:], 3 - x.ndim):
        before, behind = padding[2 * -dim :][:2]
        if mode != "replicate" and max(before, behind) > size - (mode == "reflect"):
            return F.pad(x, padding, mode)  # which says what is wrong
        at = _PLACES[mode](torch.arange(-before, size + behind, device=x.device), size)
        places = places[..., None] * size + at
    pixels = x.movedim(1, -1).flatten(0, -2)  # a view
    return pixels[places.flatten()].view(*places.shape, -1).movedim(-1, 1)


#: Which pixel of a row is at a place beside it, by the mode.
_PLACES: dict[str, Any] = {
    "replicate": lambda at, size: at.clamp_(0, size - 1),
    "reflect": lambda at, size: size - 1 - (size - 1 - at.abs_()).abs_(),
    "circular": lambda at, size: at.remainder_(size),
}


def reorders(x: Tensor) -> bool:
    """Whether torch brings what it pads into row-major order."""
    return x.is_cuda and not torch.compiler.is_compiling()
