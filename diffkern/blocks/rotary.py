"""Attention of language models whose queries and keys are rotated by one function of their module.

The function stands in the globals of the file that defines the class. It is not replaced there, where all models
would see it: a patched module runs the same code, with another name in the place of this one.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from diffkern.blocks.inner import InnerRecipe, Inside, unfit
from diffkern.ops import rope
from diffkern.rewrite.source import Source, recompile

#: Name of the function that rotates.
ROTATE = "apply_rotary_pos_emb"
#: The name by which a rewritten forward calls what runs instead.
INSIDE = "_inside"


@cache
def rotating(function: FunctionType) -> CodeType | None:
    """Returns the code of a forward that calls :data:`INSIDE` instead of :data:`ROTATE`; None without a source."""
    source = Source.of(function)
    if isinstance(source, str):
        return None
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Name) and node.id == ROTATE:
            node.id = INSIDE
    return source.code(source.tree, [INSIDE])


@dataclass(frozen=True)
class Rotary(InnerRecipe):
    """Attention in whose forward :data:`ROTATE` turns halves of queries and keys, or of a part, in their dtype.

    Attributes:
        function: The forward as it was written, without decorators.
        renamed: Old names of arguments, which decorators translate.
    """

    function: FunctionType
    renamed: frozenset[str]
    op = "rope"

    @override
    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        if not self.renamed.isdisjoint(kwargs):
            return None
        names = self.function.__code__.co_varnames[1 : self.function.__code__.co_argcount]
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        return given.get("hidden_states"), given.get("position_embeddings"), args, dict(kwargs)

    @override
    def declines(self, module: nn.Module, call: tuple[Any, ...]) -> str | None:
        x, tables = call[:2]
        reason = unfit(x)
        if reason is not None:
            return reason
        if type(tables) is not tuple or len(tables) != 2 or any(type(table) is not Tensor for table in tables):
            return "its rotary tables are not a pair of plain tensors"
        if any(table.dtype != x.dtype or table.device != x.device for table in tables):
            return "its rotary tables have another dtype than the hidden states, or are elsewhere"
        return None

    @override
    def sources(self, module: nn.Module) -> tuple[Callable[..., Any], ...]:
        scope = self.function.__globals__
        return scope[ROTATE], scope["rotate_half"]

    @override
    def forward(self, inside: Inside) -> Callable[..., Any]:
        def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
            return inside(None, (q, k, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)))

        code = rotating(self.function)
        assert code is not None
        rewritten = recompile(self.function, code, {INSIDE: rotate})

        def forward(module: Any, x: Tensor, tables: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return rewritten(module, *args, **kwargs)

        return forward

    @override
    def stock(self, module: nn.Module | None, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        q, k, cos, sin = inputs
        return _rotated(q, cos, sin), _rotated(k, cos, sin)

    @override
    def fused(
        self, module: nn.Module | None, inputs: tuple[Tensor, ...], provider: str | None
    ) -> tuple[Tensor, Tensor]:
        q, k, cos, sin = inputs
        if type(q) is not Tensor or type(k) is not Tensor or not q.dtype == k.dtype == cos.dtype:
            return self.stock(module, inputs)  # of a layer that answers in another dtype or class than it was asked

        def turned(x: Tensor) -> Tensor:
            return rope(x, cos, sin, pairing="half", arithmetic="input", rotary_dim=cos.shape[-1], provider=provider)

        return turned(q), turned(k)

    @override
    def samples(self, module: nn.Module, rows: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        head_dim = getattr(module, "head_dim", 64)
        generator = torch.Generator("cpu").manual_seed(4)
        rows = rows // 2  # of each sample
        shape = 2, rows, 3, head_dim
        q, k = (torch.randn(shape, generator=generator, device="cpu").transpose(1, 2) for _ in range(2))
        share = getattr(getattr(module, "config", None), "partial_rotary_factor", None) or 1.0
        angles = torch.rand(2, 1, rows, int(head_dim * share) // 2, generator=generator, device="cpu") * 100
        angles = torch.cat([angles, angles], dim=-1)
        return tuple(x.to(device, dtype) for x in (q, k, angles.cos(), angles.sin()))

    @override
    def kind(self, module: nn.Module) -> Hashable:
        return self.op, getattr(module, "head_dim", None)

    @override
    def differentiable(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return inputs[:2]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns as much of each head as there are angles, in the dtype of ``x``."""
    turned, kept = x.tensor_split([cos.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned, kept], dim=-1) if kept.shape[-1] else turned
