r"""Forwards that modulate what a layer norm gives: there, the norm and the modulation are one op.

.. math:: \mathrm{norm}(x) \cdot (1 + \mathrm{scale}) + \mathrm{shift}

So do the blocks of many diffusion transformers, and nearly all of the models behind their last block; some in float32,
and back: ``(norm(x.float()) * (1 + scale) + shift).type_as(x)``. The place is found in the source of the forward,
whoever's that is, and all around it is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from diffkern.blocks.inner import InnerRecipe, Inside, unfit
from diffkern.blocks.modulated_source import take_out
from diffkern.blocks.pieces import untouched
from diffkern.blocks.weave import Pattern
from diffkern.ops import norm_modulate
from diffkern.providers import KERNEL_DTYPES


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
    def for_numerics(self, numerics: str) -> ModulatedNorms:
        return replace(self, exact=numerics == "exact")

    @override
    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        code = self.pattern.function.__code__
        x = args[0] if args else kwargs.get(code.co_varnames[1])
        return x, args, dict(kwargs)

    @override
    def declines(self, module: nn.Module, call: tuple[Any, ...]) -> str | None:
        for name in self.norms:
            norm = module._modules.get(name)
            if not _is_weightless(norm) or not untouched(norm, type(norm)):  # type: ignore[arg-type]
                return f"{name} has a hook, or is another module than it was"
        return unfit(call[0])

    @override
    def sources(self, module: nn.Module) -> tuple[Callable[..., Any], ...]:
        return tuple([type(module._modules[name]).forward for name in self.norms])  # type: ignore[union-attr]

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
        plain = all([type(one) is Tensor and one.dtype in KERNEL_DTYPES for one in inputs])
        if not plain or norm.normalized_shape != x.shape[-1:]:
            return self.stock(module, inputs)  # of layers that answer in another dtype or class than was asked
        out_dtype = x.dtype if self.wide else None  # which is what torch promotes to
        if self.exact:
            y = norm(x.float()) if self.wide else norm(x)
            return norm_modulate(y, scale, shift, norm=None, rounding="each", out_dtype=out_dtype, provider=provider)
        return norm_modulate(x, scale, shift, eps=norm.eps, norm="layer", out_dtype=out_dtype, provider=provider)

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
        return self.op, self.wide, self.exact, type(norm), norm.normalized_shape, norm.eps


def _is_weightless(norm: nn.Module | None) -> bool:
    cls = type(norm)
    # Diffusers' own computes in float32 whatever its input is.
    if cls is not nn.LayerNorm and (cls.__module__, cls.__name__) != (
        "diffusers.models.normalization",
        "FP32LayerNorm",
    ):
        return False
    state = norm.__dict__
    return all(parameter is None for parameter in state["_parameters"].values()) and not (
        "weight" in state or "bias" in state  # as plain attributes
    )


@cache
def modulated_norms(forward: Callable[..., Any]) -> ModulatedNorms | None:
    """Returns what to fuse in a forward, decorated or not, outside of its branches and loops; None for nothing."""
    pattern = Pattern.of(forward)
    if pattern is None or len(pattern.function.__code__.co_varnames) < 2:
        return None
    found = take_out(pattern.tree)
    return None if found is None else ModulatedNorms(forward, pattern, found.norms, found.wide)
