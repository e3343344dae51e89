"""Padding of images and videos with pixels of their own, as shapes; and padding that keeps the order of memory.

On a GPU torch looks up where each number of the result comes from, at a fifth of the speed of memory, and copies what
lies in channels last into row-major order before, which the convolution behind it copies back. Here one copy of the
image and one of each of its sides, which are small, do the same.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from diffkern.blocks.layout import is_last
from diffkern.ops.copying import in_words
from diffkern.rewrite.expressions import FUNCTIONAL
from diffkern.rewrite.match import Leaf, Linear, Match, Operand, Scope, Shape, peel
from diffkern.rewrite.query_key import concatenated
from diffkern.rewrite.syntax import only_argument
from diffkern.rewrite.template import Template

_FUNCTIONS = tuple(f"{name}.pad" for name in FUNCTIONAL)
_SIZES = "1, 1, _n, 1, 1", "(1, 1, _n, 1, 1)"
#: The first frame and the last one, so many times.
FIRST, FINAL = (
    Template(*[f"_x[:, :, {one}{rest}].repeat({n})" for rest in ("", ", :, :", ", ...") for n in _SIZES])
    for one in (":1", "-1:")
)


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
    """``torch.cat([x[:, :, :1].repeat(1, 1, n, 1, 1), x], dim=2)``, with copies of the last frame behind it or not.

    ``x`` is an operand unless it has a shape of its own.
    """

    argument: Shape | None = None

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`diffkern.rewrite.match.Shape`."""
        found = concatenated(node)
        if found is None or found[1] != 2 or len(found[0]) not in (2, 3):
            return
        first, x, *final = found[0]
        definition = scope.flow.single(x)
        match = match.step(node)
        for name, part, frame in [("front", first, FIRST), *[("back", part, FINAL) for part in final]]:
            filled = frame.fill(scope, *peel(scope, part, match), {"_x": x})
            if filled is None or not isinstance(x, ast.Name):
                return
            blanks, match = filled
            match = replace(match, operands={**match.operands, name: Operand(blanks["_n"])})
            if self.argument is not None and definition is not None:
                load = match.steps[-1].value  # type: ignore[attr-defined]
                match = replace(match, passed=(*match.passed, (load, definition)))
        if self.argument is None:
            yield replace(match, operands={"x": Operand(x), **match.operands})
        elif definition is not None:
            yield from self.argument.match(scope, x, match)


@dataclass(frozen=True)
class Undropped:
    """A shape, or a dropout of it by the probability 0, which is that itself."""

    shape: Shape

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`diffkern.rewrite.match.Shape`."""
        yield from self.shape.match(scope, node, match)
        node, match = peel(scope, node, match)
        argument = only_argument(node)
        if argument is None:
            return
        dropout = node.func  # type: ignore[attr-defined]
        path = scope.facts.path(scope.flow, dropout)
        if path is not None and scope.facts.drops_nothing(path):
            match = replace(match.step(node), modules={**match.modules, "dropout": dropout})
            yield from self.shape.match(scope, argument, match)


def padded(x: Tensor, padding: Sequence[int], mode: str) -> Tensor:
    """``F.pad(x, padding, mode)``, but laid out as ``x`` is: a copy of the image, then copies of its sides."""
    followed = mode in _PLACES and len(padding) == 2 * x.ndim - 4 and min(padding) >= 0 and x.numel()
    if not followed or not reorders(x) or (torch.is_grad_enabled() and x.requires_grad):
        return F.pad(x, padding, mode)
    sides = list(zip(x.shape[2:], padding[-2::-2], padding[::-2], strict=True))
    if mode != "replicate" and any(max(sizes) > size - (mode == "reflect") for size, *sizes in sides):
        return F.pad(x, padding, mode)  # which says what is wrong
    shape = *x.shape[:2], *(size + before + behind for size, before, behind in sides)
    last = is_last(x)
    y = torch.empty(
        shape, dtype=x.dtype, device=x.device, memory_format=_LAST[x.ndim] if last else torch.contiguous_format
    )
    pixels, result = in_words(x.movedim(1, -1), y.movedim(1, -1)) if last else (x, y)
    inner = result
    for dim, (size, before, _) in enumerate(sides, 1 if last else 2):
        inner = inner.narrow(dim, before, size)
    inner.copy_(pixels)
    for dim, (size, before, behind) in enumerate(sides, 1 if last else 2):
        _copy_sides(result, dim, size, before, behind, mode)
    return y


def _copy_sides(y: Tensor, dim: int, size: int, before: int, behind: int, mode: str) -> None:
    """Fills what lies before and behind ``size`` places of one dimension."""
    if mode == "replicate":
        for place, count, outer in ((0, before, before), (before + size, behind, before + size - 1)):
            if count:
                y.narrow(dim, place, count).copy_(y.narrow(dim, outer, 1))
        return
    for at in (*range(-before, 0), *range(size, size + behind)):
        y.select(dim, before + at).copy_(y.select(dim, before + _PLACES[mode](at, size)))


_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
#: Which place of a row of so many is also the one at a place beside it, by the mode.
_PLACES: dict[str, Callable[[int, int], int]] = {
    "replicate": lambda at, size: min(max(at, 0), size - 1),
    "reflect": lambda at, size: size - 1 - abs(size - 1 - abs(at)),
    "circular": lambda at, size: at % size,
}


def reorders(x: Tensor) -> bool:
    """Whether torch pads in row-major order alone, and slowly."""
    return x.is_cuda and not torch.compiler.is_compiling()
