r"""Forwards that modulate what a layer norm gives: there, the norm and the modulation are one op.

.. math:: \mathrm{norm}(x) \cdot (1 + \mathrm{scale}) + \mathrm{shift}

So do the blocks of many diffusion transformers, and nearly all of the models behind their last block; some in float32,
and back: ``(norm(x.float()) * (1 + scale) + shift).type_as(x)``. The place is found in the source of the forward,
whoever's that is, and all around it is left as it is.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from diffkern.blocks.inner import InnerRecipe, Inside, unfit
from diffkern.blocks.pieces import untouched
from diffkern.blocks.weave import INSIDE, Pattern
from diffkern.ops import norm_modulate
from diffkern.providers import KERNEL_DTYPES

#: Methods of tensors that change nothing.
_VIEWS = {"unsqueeze", "squeeze", "view", "reshape", "to"}


@dataclass(frozen=True)
class ModulatedNorms(InnerRecipe):
    """Layer norms without weights whose results are modulated at once. The module of the inside is the norm.

    Attributes:
        stock_forward: The forward of the class, decorators and all.
        pattern: Its source, the modulated norms taken out.
        norms: Names of the norms.
        wide: Whether all is computed in float32, and the result cast back to the dtype of ``x``.
        exact: Whether the norm stays torch's own, whose sums no other kernel adds in that order.
    """

    stock_forward: Callable[..., Any]
    pattern: Pattern = field(compare=False)
    norms: tuple[str, ...]
    wide: bool = False
    exact: bool = False
    op = "norm_modulate"

    @override
    def exactly(self) -> ModulatedNorms:
        return replace(self, exact=True)

    @override
    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        code = self.pattern.function.__code__
        x = args[0] if args else kwargs.get(code.co_varnames[1])
        return x, args, dict(kwargs)

    @override
    def declines(self, module: nn.Module, call: tuple[Any, ...]) -> str | None:
        if type(module).forward is not self.stock_forward:
            return "what its class computes was replaced after the injection"
        for name in self.norms:
            norm = module._modules.get(name)
            if not _is_weightless(norm) or not untouched(norm, type(norm)):  # type: ignore[arg-type]
                return f"{name} has a hook, or is another module than it was"
        return unfit(call[0])

    @override
    def concerns(self, module: nn.Module) -> bool:
        return all(_is_weightless(module._modules.get(name)) for name in self.norms)

    @override
    def forward(self, inside: Inside) -> Callable[..., Any]:
        def modulated(norm: nn.Module, x: Tensor, scale: Tensor, shift: Tensor) -> Any:
            return inside(norm, (x, scale, shift))

        woven = self.pattern.weave(modulated)

        def forward(module: Any, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return woven(module, *args, **kwargs)

        return forward

    @property
    @override
    def children(self) -> tuple[str, ...]:
        return self.norms

    @override
    def part(self, module: nn.Module) -> nn.Module:
        return module._modules.get(self.norms[0]) or module

    @override
    def stock(self, module: nn.Module | None, inputs: tuple[Tensor, ...]) -> Tensor:
        assert module is not None
        x, scale, shift = inputs
        if self.wide:
            y: Tensor = (module(x.float()) * (1 + scale) + shift).type_as(x)
        else:
            y = module(x) * (1 + scale) + shift
        return y

    @override
    def reference(self, module: nn.Module | None, inputs: tuple[Tensor, ...]) -> Tensor:
        norm: Any = module
        x, scale, shift = inputs
        # Not by the norm, which may compute in float32.
        return F.layer_norm(x, norm.normalized_shape, eps=norm.eps) * (1 + scale) + shift

    @override
    def fused(self, module: nn.Module | None, inputs: tuple[Tensor, ...], provider: str | None) -> Tensor:
        norm: Any = module
        x, scale, shift = inputs
        dtype = torch.float32 if self.wide else x.dtype
        plain = type(x) is Tensor and all(type(one) is Tensor and one.dtype == dtype for one in (scale, shift))
        if not plain or x.dtype not in KERNEL_DTYPES or norm.normalized_shape != x.shape[-1:]:
            return self.stock(module, inputs)  # of layers that answer in another dtype or class than was asked
        if self.exact:
            y = norm(x.to(dtype))
            return norm_modulate(y, scale, shift, norm=None, rounding="each", out_dtype=x.dtype, provider=provider)
        return norm_modulate(x, scale, shift, eps=norm.eps, norm="layer", out_dtype=x.dtype, provider=provider)

    @override
    def samples(self, module: nn.Module, rows: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        (size,) = module.normalized_shape  # type: ignore[misc]
        generator = torch.Generator("cpu").manual_seed(6)
        x = 2 * torch.randn(2, rows // 2, size, generator=generator, device="cpu") + 0.3
        # Side by side, as one table gives them.
        table = torch.randn(2, 1, 2, size, generator=generator, device="cpu")
        shift, scale = table.to(device, torch.float32 if self.wide else dtype).unbind(2)
        return x.to(device, dtype), scale, shift

    @override
    def kind(self, module: nn.Module) -> Hashable:
        norm: Any = self.part(module)
        return self.op, self.wide, self.exact, norm.normalized_shape, norm.eps


def _is_weightless(norm: nn.Module | None) -> bool:
    cls = type(norm)
    # Diffusers' own computes in float32 whatever its input is.
    if cls is not nn.LayerNorm and (cls.__module__, cls.__name__) != (
        "diffusers.models.normalization",
        "FP32LayerNorm",
    ):
        return False
    return all(parameter is None for parameter in norm._parameters.values())  # type: ignore[union-attr]


@cache
def modulated_norms(forward: Callable[..., Any]) -> ModulatedNorms | None:
    """Returns what to fuse in a forward, decorated or not, outside of its branches and loops; None for nothing."""
    pattern = Pattern.of(forward)
    if pattern is None or len(pattern.function.__code__.co_varnames) < 2:
        return None
    rewriter = _Rewriter()
    pattern.tree.body = rewriter.rewritten(pattern.tree.body)
    if len(set(rewriter.wide)) != 1:
        return None
    return ModulatedNorms(forward, pattern, tuple(dict.fromkeys(rewriter.norms)), *set(rewriter.wide))


class _Modulation(NamedTuple):
    """``base * (1 + scale) + shift``."""

    base: ast.expr
    scale: ast.expr
    shift: ast.expr


class _Rewriter(ast.NodeTransformer):
    """Puts calls of :data:`INSIDE` in the place of modulated norms.

    Attributes:
        norms: The names of the norms.
        wide: Of each, whether it is computed in float32 and cast back.
    """

    def __init__(self) -> None:
        self.norms: list[str] = []
        self.wide: list[bool] = []

    def rewritten(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """The same statements but for what is fused; branches and loops, whose insides may not run, as they are."""
        done: list[ast.stmt] = []
        for statement in statements:
            joined = self._joined(done[-1], statement) if done else None
            if joined is not None:
                done[-1] = joined
            elif isinstance(statement, (ast.Assign, ast.Return)):
                done.append(self.visit(statement))
            else:
                done.append(statement)
        return done

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """An expression that is cast back."""
        found = _modulation(node.func.value) if _is_method(node, "type_as") else None  # type: ignore[attr-defined]
        normed = None if found is None else _normed(found.base)
        if found is not None and normed is not None and len(node.args) == 1 and not node.keywords:
            norm, x = normed
            if _is_method(x, "float") and not x.args and isinstance(x.func.value, ast.Name):  # type: ignore[attr-defined]
                like = x.func.value  # type: ignore[attr-defined]
                if _is_name(node.args[0], like.id):
                    return self._call(norm, like, found, node, wide=True)
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """An expression that is all of it."""
        self.generic_visit(node)
        found = _modulation(node)
        normed = None if found is None else _normed(found.base)
        if found is None or normed is None:
            return node
        return self._call(*normed, found, node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        """Nothing in it: what is in there may not run."""
        return node

    visit_Lambda = visit_BoolOp = visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_IfExp  # type: ignore[assignment]

    def _joined(self, first: ast.stmt, second: ast.stmt) -> ast.stmt | None:
        """``y = norm(x)`` and ``y = y * (1 + scale) + shift`` as one statement, or None if they are not that."""
        name = _target(first)
        if name is None or name != _target(second):
            return None
        assert isinstance(first, ast.Assign) and isinstance(second, ast.Assign)
        normed, found = _normed(first.value), _modulation(second.value)
        if normed is None or found is None or not _is_name(found.base, name):
            return None
        if any(_is_name(node, name) for part in (found.scale, found.shift) for node in ast.walk(part)):
            return None
        return ast.copy_location(ast.Assign(second.targets, self._call(*normed, found, second.value)), second)

    def _call(
        self, norm: ast.Attribute, x: ast.expr, found: _Modulation, place: ast.AST, wide: bool = False
    ) -> ast.Call:
        self.norms.append(norm.attr)
        self.wide.append(wide)
        call = ast.Call(ast.Name(INSIDE, ast.Load()), [norm, x, found.scale, found.shift], [])
        return ast.copy_location(call, place)


def _modulation(node: ast.expr) -> _Modulation | None:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
        return None
    product = node.left
    if not isinstance(product, ast.BinOp) or not isinstance(product.op, ast.Mult):
        return None
    for base, factor in ((product.left, product.right), (product.right, product.left)):
        scale = _more_than_one(factor)
        if scale is not None and _is_quiet(scale) and _is_quiet(node.right):
            return _Modulation(base, scale, node.right)
    return None


def _more_than_one(factor: ast.expr) -> ast.expr | None:
    """The scale of ``1 + scale``, or of parts and views of that."""
    if isinstance(factor, ast.Subscript):
        scale = _more_than_one(factor.value)
        return None if scale is None else ast.copy_location(ast.Subscript(scale, factor.slice, ast.Load()), factor)
    if isinstance(factor, ast.BinOp) and isinstance(factor.op, ast.Add):
        one = factor.left
        if isinstance(one, ast.Constant) and type(one.value) is int and one.value == 1:
            return factor.right
    return None


def _is_quiet(node: ast.expr) -> bool:
    """Whether an expression may be evaluated before the norm instead of after it: it calls nothing but views."""
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and not (isinstance(part.func, ast.Attribute) and part.func.attr in _VIEWS):
            return False
        if isinstance(part, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)):
            return False
    return True


def _normed(node: ast.expr) -> tuple[ast.Attribute, ast.expr] | None:
    """The norm, and what it is called with, if that is ``self.norm(x)``."""
    if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
        return None
    norm = node.func
    return (norm, node.args[0]) if isinstance(norm, ast.Attribute) and _is_name(norm.value, "self") else None


def _target(statement: ast.stmt) -> str | None:
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target = statement.targets[0]
    return target.id if isinstance(target, ast.Name) else None


def _is_method(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
