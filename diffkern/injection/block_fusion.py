"""Transformer blocks as the injection sees them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from diffkern.blocks import BlockRecipe
from diffkern.injection import patching
from diffkern.injection.fusion import Fusion
from diffkern.matching import full_name
from diffkern.providers import KERNEL_DTYPES, Choice, select
from diffkern.verify.contract import FEW_TOKENS, TOKENS
from diffkern.verify.gain import kept_costs, reason_without_gain
from diffkern.verify.gradients import with_gradients
from diffkern.verify.samples import clone_tree


@dataclass(frozen=True)
class BlockFusion(Fusion):
    """A block with a recipe. A call is the tuple of its arguments.

    Its proof compares the fused forward with the stock one, and both with the stock forward of a copy in float64,
    so that nothing but the stock forward itself says what the block computes.
    """

    recipe: BlockRecipe
    #: As in :class:`~diffkern.injection.norm_fusion.NormFusion`.
    replayed: bool | None = None
    #: What the recipe stands for, as it was when the block was matched.
    sources: tuple[Callable[..., Any], ...] = field(init=False, repr=False, compare=False)

    is_block = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", self.recipe.sources())

    @property
    @override
    def op(self) -> str:
        return self.recipe.op

    @property
    @override
    def kernel_ops(self) -> tuple[str, ...]:
        return self.recipe.ops

    @property
    @override
    def allowance(self) -> float:
        return self.recipe.allowance

    @property
    @override
    def lays_out(self) -> bool:
        return self.recipe.lays_out

    @property
    @override
    def covers(self) -> frozenset[str]:
        return self.recipe.covers

    @override
    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        try:
            return self.recipe.arguments(*args, **kwargs)
        except TypeError:
            return None

    @override
    def primary_input(self, call: tuple[Any, ...]) -> Tensor:
        x: Tensor = call[0]
        return x

    @override
    def declines(self, module: nn.Module, call: tuple[Any, ...] | None) -> str | None:
        if call is None:
            return "it is called with other arguments than the recipe knows"
        if self.recipe.sources() != self.sources:
            return "what its class computes was replaced after the injection"
        return self.recipe.declines(module, call)

    @property
    @override
    def is_timed(self) -> bool:
        return self.replayed is not None and self.recipe.is_timed

    @override
    def weigh(self, module: nn.Module, call: tuple[Any, ...]) -> str | None:
        x = self.primary_input(call)
        if x.is_cuda:
            return ""  # where what is kept is checked once in each step, whatever is called how often
        key = "call of a block", self.op, str(x.dtype), x.shape[-1], x.numel().bit_length()
        both = lambda: patching.forward(module, *call), lambda: self.stock(module, call)
        with torch.no_grad():
            found = kept_costs(both, x.device, *key)
        return reason_without_gain(found[0], found[1], bool(self.replayed))

    @override
    def allowed_in_strict(self, module: nn.Module, call: tuple[Any, ...] | None) -> bool:
        return call is not None and self.recipe.allowed_in_strict(module, call)

    @override
    def stock_pieces(self, module: nn.Module, call: tuple[Any, ...]) -> tuple[str, ...]:
        return self.recipe.stock_pieces(module, call)

    @override
    def compute(self, module: nn.Module, call: tuple[Any, ...], provider: str | None, stock: tuple[str, ...]) -> Any:
        return self.recipe.compute(module, call, provider, stock)

    @property
    @override
    def is_one_op(self) -> bool:
        return self.recipe.is_one_op

    @override
    def operands(self, call: tuple[Any, ...]) -> list[Tensor | None]:
        return self.recipe.operands(call)

    @override
    def call_of(self, operands: Sequence[Tensor | None]) -> tuple[Any, ...]:
        return self.recipe.call_of(operands)

    @override
    def kind(self, module: nn.Module) -> Hashable:
        children = tuple((full_name(type(child)), settings(child)) for child in module.modules())
        parameters = tuple((name, p.shape, p.dtype) for name, p in module.named_parameters())
        return self.op, children, parameters

    @override
    def choose(
        self, module: nn.Module, provider: str | None, device: torch.device, dtypes: tuple[torch.dtype, ...]
    ) -> Choice:
        """The least preferred of the choices for its ops speaks for the block, if it has ops."""
        if not self.recipe.ops:
            return Choice(self.recipe.served_by, self.recipe.compute, ())
        choices = [select(op, device, dtypes[:1], provider) for op in self.recipe.ops]
        return max(choices, key=lambda choice: len(choice.declined))

    @override
    def likely_dtypes(self, module: nn.Module, whole: torch.dtype) -> tuple[torch.dtype, ...]:
        """Its own: a block casts nothing. Those of a quantised or layerwise cast one are the model's."""
        own = next((p.dtype for p in module.parameters() if p.dtype in KERNEL_DTYPES), whole)
        return (own,)

    @override
    def clone_for_verification(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
        dtype = dtype if dtype in KERNEL_DTYPES else torch.float32
        copy = clone_tree(
            module, device, lambda tensor: tensor.dtype if tensor.dtype in KERNEL_DTYPES else dtype, dtype
        )
        self.recipe.make_plain(copy)
        return copy

    @override
    def samples(
        self, module: nn.Module, device: torch.device, dtype: torch.dtype, exact: bool
    ) -> Sequence[tuple[Any, ...]]:
        return self.recipe.samples(module, TOKENS, device, dtype)

    @override
    def short_samples(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> Sequence[tuple[Any, ...]]:
        return self.recipe.samples(module, FEW_TOKENS, device, dtype)[:1]

    @override
    def stock(self, module: nn.Module, call: tuple[Any, ...]) -> Any:
        return type(module).forward(module, *call)

    @override
    def reference(self, module: nn.Module, call: tuple[Any, ...]) -> Any:
        return self.stock(self._in_float64(module, call), _doubled(call))

    @override
    def exact_training(self, module: nn.Module, call: tuple[Any, ...]) -> tuple[Tensor, ...] | None:
        """By autograd through the stock forward; None for what computes nothing that gradients go through."""
        if not self.recipe.ops:
            return None
        wide, exact = self._in_float64(module, call), _doubled(call)
        return with_gradients(lambda: self.stock(wide, exact), (self.primary_input(exact), *wide.parameters()))

    def _in_float64(self, module: nn.Module, call: tuple[Any, ...]) -> nn.Module:
        copy = clone_tree(module, self.primary_input(call).device, lambda tensor: torch.float64, torch.float64)
        self.recipe.make_plain(copy)
        return copy


def settings(module: nn.Module) -> tuple[tuple[str, Hashable], ...]:
    """The plain attributes of a module itself, which may decide what it computes: strides, say, or a mode."""
    return tuple((name, value) for name, value in vars(module).items() if _is_plain(value))


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _doubled(value: Any) -> Any:
    """A call with every floating point tensor in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    return tuple(_doubled(item) for item in value) if isinstance(value, tuple) else value
