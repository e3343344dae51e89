"""Expressions whose result is an operand itself, or lies in its memory, by what a setting or a layout is.

The shapes of divisions and images, and their sites; :mod:`~diffkern.rewrite.streams` has the shape of repetitions.
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
from diffkern.rewrite.match import Match, Operand, Scope, Shape
from diffkern.rewrite.site import AllowedInStrict, FusedSite
from diffkern.rewrite.template import Template

# Bound once, since every call asks.
_is_traced = torch.compiler.is_dynamo_compiling
_is_dense = torch.ops.aten.is_non_overlapping_and_dense.default
#: Tokens in channels last, as an image.
IMAGE_OF_TOKENS = Template("_x.permute(0, 3, 1, 2).contiguous()")


@dataclass(frozen=True)
class ImageOfTokens:
    """``tokens.permute(0, 3, 1, 2).contiguous()``, which in channels last lies as it shall without a copy.

    The operand is what is made contiguous.
    """

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`diffkern.rewrite.match.Shape`."""
        if IMAGE_OF_TOKENS.fill(None, node):
            operands = {"x": Operand(node.func.value)}  # type: ignore[attr-defined]
            yield replace(match.step(node), operands=operands, options={"dim": 1})


@dataclass(frozen=True)
class DividedByOne:
    """``x / attn.rescale_output_factor``, where the setting of the module is 1.

    The operands are ``x`` and ``n``, unless ``x`` has a shape of its own.
    """

    dividend: Shape | None = None

    def match(self, scope: Scope, node: ast.expr, match: Match) -> Iterator[Match]:
        """See :class:`diffkern.rewrite.match.Shape`."""
        divisor = node.right if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) else None
        if not isinstance(divisor, ast.Attribute) or scope.facts.path(scope.flow, divisor.value) != ():
            return
        value = scope.facts.value((divisor.attr,))
        if type(value) in (int, float) and value == 1:
            if self.dividend is not None:
                yield from self.dividend.match(scope, node.left, match.step(node))  # type: ignore[attr-defined]
                return
            operands = {"x": Operand(node.left), "n": Operand(divisor)}  # type: ignore[attr-defined]
            yield replace(match.step(node), operands=operands, options={"dim": 0})


class WrittenOffGpus(FusedSite):
    """A site that is of use on GPUs: elsewhere the copy takes less time than to do without it."""

    @property
    @override
    def entry(self) -> Callable[..., Any]:
        """The site, which runs the expression as it is written but on GPUs."""
        original = self.original

        def as_written_off_gpus(module: nn.Module, *leaves: Any) -> Any:
            x = leaves[0]
            if not _is_traced() and type(x) is Tensor and not x.is_cuda and self.on_new_size is not None:
                self.idle_calls += 1
                self.original_calls += 1
                return original(module, *leaves)
            return self(module, *leaves)

        return as_written_off_gpus


class SharingSite(FusedSite):
    """An expression whose result lies in the memory of an operand where that holds it; else as it is written."""

    is_proven_ahead = False
    #: The result for the module, the operands and the dimension where it needs no memory of its own; None elsewhere.
    shared: Callable[..., Tensor | None]

    def __call__(self, module: nn.Module, *leaves: Any) -> Any:
        """Computes the site for its leaves."""
        if torch.compiler.is_compiling():
            return self.original(module, *leaves)
        shared, seen = None, torch.is_grad_enabled() or transforms_active() or modes_active() or _may_be_written(module)
        if not seen:
            shared = self.shared(module, *self.operands(module, leaves).values(), self.plan.options["dim"])
        if shared is None:
            why = "a backward, a hook or a mode may see its operands" if seen else "its result is not in memory yet"
            return self.run_original(module, *leaves, reason=AllowedInStrict(f"{self}: {why}"))
        self.count_fused(module)
        return shared


def _may_be_written(module: nn.Module) -> bool:
    """Whether a hook sees what a layer of the module is given: it may write into that."""
    if torch.nn.modules.module._global_forward_pre_hooks:
        return True
    children = [child for child in module._modules.values() if child is not None]
    inner = [one for child in children for one in child._modules.values() if one is not None]
    return any([child._forward_pre_hooks or child._forward_hooks for child in (*children, *inner)])


def _once(x: Any, n: Any, dim: int) -> Tensor | None:
    """``x.repeat_interleave(n, dim)`` as ``x`` itself, if that is the same."""
    once = type(n) is int and n == 1 and type(x) is Tensor and not x.requires_grad
    return x if once and -x.ndim <= dim < x.ndim else None


def _in_channels_last(x: Any, dim: int) -> Tensor | None:
    """``x.contiguous()`` as ``x`` itself, if it lies in channels last, and images may lie so here."""
    return x if type(x) is Tensor and follows_layout() and is_last(x) and not x.requires_grad else None


def _undivided(x: Any, n: Any, dim: int) -> Tensor | None:
    """``x / n`` as ``x`` itself, if that is the same."""
    by_one = type(n) in (int, float) and n == 1 and type(x) is Tensor and x.is_floating_point()
    if not by_one or x.requires_grad:
        return None
    return x if x.is_contiguous() or _is_dense(x) else None  # a quotient is dense, in the order of the dividend


class DividedSite(SharingSite):
    """A division by a setting, which is the dividend itself where that is 1."""

    shared = staticmethod(lambda module, *given: _undivided(*given))


class ImageSite(SharingSite, WrittenOffGpus):
    """Tokens as an image: a view of them where the model computes in channels last, as they lie already."""

    lies_otherwise = True
    shared = staticmethod(lambda module, *given: _in_channels_last(*given))


class RepeatedSite(SharingSite):
    """A repetition of each element along a dimension, which is the tensor itself where it is one of each."""

    lies_otherwise = True
    shared = staticmethod(lambda module, *given: _once(*given))
