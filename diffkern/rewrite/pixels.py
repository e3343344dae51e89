"""Copies of images and videos that leave channels last: as shapes, and laid out in channels last.

``x.unflatten(...).permute(...).flatten(...)`` copies into row-major order, whatever the order of ``x``, and so do
``repeat``, and ``torch.cat`` with an empty slice: what follows writes and reads scattered memory then, until a
convolution copies everything back. Where a model computes in channels last, one copy leaves the result so, with a
residual added to it; and no copy is made of what nothing is put before.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from diffkern.blocks.layout import is_last
from diffkern.ops.group_norm import follows_layout
from diffkern.providers.dispatch_modes import modes_active, transforms_active
from diffkern.rewrite.identity import SharingSite, _may_be_written
from diffkern.rewrite.match import Match, Operand, Scope, peel
from diffkern.rewrite.query_key import concatenated
from diffkern.rewrite.template import Template

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
#: With fewer channels an image is the input of a model, or its result, which is not in channels last.
_FEWEST_CHANNELS = 16
_REPEATED = Template("_x.repeat(1, _n, 1, 1)", "_x.repeat(1, _n, 1, 1, 1)")
_FIRST_FRAMES = Template("_x[:, :, :_n]")


@dataclass(frozen=True)
class Pixels:
    """``x.permute(...).flatten(1, 4)``, or with several such methods, of what has four or five dimensions then.

    The operand is what is permuted.
    """

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`diffkern.rewrite.match.Shape`."""
        flattened: tuple[tuple[int, int], ...] = ()
        node, match = peel(scope, node, match)
        while (dims := _dims(node, "flatten")) is not None and len(dims) == 2:
            flattened = ((dims[0], dims[1]), *flattened)
            match = match.step(node)
            node, match = peel(scope, node.func.value, match)  # type: ignore[attr-defined]
        permuted = _dims(node, "permute")
        left = len(permuted or ()) - sum([end - start for start, end in flattened])
        keeps_samples = permuted and permuted[0] == 0 and all(start > 0 for start, _ in flattened)
        if flattened and keeps_samples and left in _LAST and _convolves(scope):
            operands = {**match.operands, "x": Operand(node)}
            yield replace(match, operands=operands, options={"flattened": flattened})


@dataclass(frozen=True)
class RepeatedChannels:
    """``x.repeat(1, n, 1, 1, 1)``."""

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`diffkern.rewrite.match.Shape`."""
        filled = _REPEATED.fill(None, node, match)
        if filled is not None and _convolves(scope):
            yield _x_and_n(*filled)


@dataclass(frozen=True)
class PutBefore:
    """``torch.cat([x[:, :, :n], x], dim=2)``, which is ``x`` where ``n`` is 0."""

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`diffkern.rewrite.match.Shape`."""
        parts, dim = concatenated(node) or ((), 0)
        if dim != 2 or len(parts) != 2 or not isinstance(parts[1], ast.Name):
            return
        filled = _FIRST_FRAMES.fill(scope, parts[0], match.step(node), {"_x": parts[1]})
        if filled is not None and _convolves(scope):
            yield _x_and_n(*filled)


def _x_and_n(blanks: dict[str, ast.expr], match: Match) -> Match:
    return replace(match, operands={"x": Operand(blanks["_x"]), "n": Operand(blanks["_n"])})


def _convolves(scope: Scope) -> bool:
    """Whether a function computes a convolution over several places: others have no images in channels last."""
    if any("convolution" in site.modules for site in scope.sites):
        return True
    facts, calls = scope.facts, [node for node in scope.flow.nodes if isinstance(node, ast.Call)]
    paths = [path for call in calls if (path := facts.path(scope.flow, call.func))]
    return any(facts.is_convolution(path) and not facts.is_patches(path) for path in paths)


def _dims(node: ast.expr, method: str) -> list[int] | None:
    """The arguments of ``x.method(...)``, where these are numbers that are not negative; None for anything else."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != method:
        return None
    dims = [part.value for part in node.args if isinstance(part, ast.Constant) and type(part.value) is int]
    return dims if len(dims) == len(node.args) and not node.keywords else None


class InOrderSite(SharingSite):
    """An expression that copies, whose result is laid out in channels last where a model computes so."""

    lies_otherwise = True
    #: The result for the operands, laid out so; None where it is computed as it is written.
    made: Callable[..., Tensor | None]

    @override
    def __call__(self, module: nn.Module, *leaves: Any) -> Any:
        """Computes the site for its leaves."""
        if torch.compiler.is_compiling():
            return self.original(module, *leaves)
        seen = torch.is_grad_enabled() or transforms_active() or modes_active() or not follows_layout()
        made = None
        if not seen and not _may_be_written(module):
            made = self.made(**self.operands(module, leaves), **self.plan.options)
        if made is None:
            self.idle_calls += 1
            self.original_calls += 1
            return self.original(module, *leaves)
        self.count_fused(module)
        return made


def _rearranged(x: Any, flattened: tuple[tuple[int, int], ...], residual: Any = None) -> Tensor | None:
    """``x`` flattened, and the sum with a residual, by one kernel."""
    if type(x) is not Tensor or not x.numel():
        return None
    shape = list(x.shape)
    for start, end in flattened:
        shape[start : end + 1] = [torch.Size(shape[start : end + 1]).numel()]
    if shape[1] < _FEWEST_CHANNELS or _is_view(x, shape):
        return None
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=_LAST[len(shape)])
    if residual is None:
        y.view(x.shape).copy_(x)
        return y
    if type(residual) is not Tensor or residual.shape != y.shape or residual.dtype is not x.dtype:
        return None
    if residual.device != x.device:
        return None
    torch.add(x, residual.view(x.shape), out=y.view(x.shape))
    return y


def _is_view(x: Tensor, shape: list[int]) -> bool:
    """Whether a shape is another view of the memory of a tensor."""
    try:
        x.view(shape)
    except RuntimeError:
        return False
    return True


def _repeated(x: Any, n: Any) -> Tensor | None:
    """``x`` with its channels ``n`` times."""
    if type(x) is not Tensor or type(n) is not int or n < 1 or not is_last(x):
        return None
    shape = x.shape[0], n * x.shape[1], *x.shape[2:]
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=_LAST[x.ndim])
    y.unflatten(1, (n, -1)).copy_(x.unsqueeze(1))
    return y


class PixelsSite(InOrderSite):
    """A rearrangement of pixels, with or without a residual."""

    made = staticmethod(_rearranged)


class RepeatedChannelsSite(InOrderSite):
    """A repetition of channels."""

    made = staticmethod(_repeated)


class PutBeforeSite(InOrderSite):
    """A concatenation that is its second operand, where the first one is empty."""

    made = staticmethod(lambda x, n: x if type(x) is Tensor and type(n) is int and n == 0 else None)
