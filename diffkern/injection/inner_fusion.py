"""What is fused inside a forward, as the injection sees it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from diffkern.blocks.inner import InnerRecipe, Inside
from diffkern.injection.fusion import Fusion
from diffkern.providers import Choice, select
from diffkern.verify.contract import EXACT_ROWS, INNER_TOLERANCE, ROWS
from diffkern.verify.gradients import with_gradients
from diffkern.verify.measures import relative_error
from diffkern.verify.samples import bare


@dataclass(frozen=True)
class Sample:
    """Inputs of the inside alone: proofs need nothing of what stands around it."""

    inputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class InnerFusion(Fusion):
    """A module with an inner recipe. A call is what the recipe makes of its arguments, or a :class:`Sample`.

    Attributes:
        recipe: What is fused.
        training: Computes the inside instead where gradients are wanted; None if the same kernel does.
        sources: The forwards of children whose work the inside does, as they were when the module was matched.
    """

    recipe: InnerRecipe
    training: Inside | None = None
    sources: tuple[Callable[..., Any], ...] = field(default=(), compare=False)
    _forwards: dict[str | None, Callable[..., Any]] = field(default_factory=dict, repr=False, compare=False)

    @property
    @override
    def op(self) -> str:
        return self.recipe.op

    @property
    @override
    def kernel_ops(self) -> tuple[str, ...]:
        return (self.op,)

    @override
    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        return self.recipe.bind(args, kwargs)

    @override
    def prepare(self, module: nn.Module, providers: Iterable[str | None]) -> None:
        """Makes the forwards, which a graph of the compiler could not."""
        for provider in {None, *providers}:
            self._forward(provider)

    @override
    def primary_input(self, call: Any) -> Tensor:
        x: Tensor = call.inputs[0] if isinstance(call, Sample) else call[0]
        return x

    @override
    def weight_dtype(self, module: nn.Module) -> torch.dtype | None:
        """None, which decides nothing: the layers are called as they are."""
        return None

    @override
    def declines(self, module: nn.Module, call: Any) -> str | None:
        if isinstance(call, Sample):
            return None
        if call is None:
            return "it is called with other arguments than the recipe knows"
        reason = self.recipe.declines(module, call)
        if reason is None and self.recipe.sources(module) != self.sources:
            return "what a class inside of it computes was replaced after the injection"
        return reason

    @override
    def stock_pieces(self, module: nn.Module, call: Any) -> tuple[str, ...]:
        return ()

    @override
    def compute(self, module: nn.Module, call: Any, provider: str | None, stock: tuple[str, ...]) -> Any:
        if isinstance(call, Sample):
            return _as_one(self._inside(provider)(module, call.inputs))
        return self._forward(provider)(module, *call)

    @override
    def kind(self, module: nn.Module) -> Hashable:
        return self.recipe.kind(module), self.training, self.sources

    @override
    def choose(
        self, module: nn.Module, provider: str | None, device: torch.device, dtypes: tuple[torch.dtype, ...]
    ) -> Choice:
        return select(self.op, device, dtypes[:1], provider)

    @override
    def likely_dtypes(self, module: nn.Module, whole: torch.dtype) -> tuple[torch.dtype, ...]:
        """The model's: the layers, quantised ones above all, may store another."""
        return (whole,)

    @override
    def clone_for_verification(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """What the inside is given, without its layers, of which it needs only those that have no parameters."""
        module = self.recipe.part(module)
        copy = bare(module)
        children = module._modules.items()
        copy._modules = {name: m for name, m in children if m is not None and next(m.parameters(), None) is None}
        copy._parameters, copy._buffers = dict.fromkeys(module._parameters), {}
        return copy

    @override
    def cast(self, module: nn.Module, dtype: torch.dtype) -> nn.Module:
        return self.clone_for_verification(module, torch.device("cpu"), dtype)

    @override
    def samples(self, module: nn.Module, device: torch.device, dtype: torch.dtype, exact: bool) -> Sequence[Sample]:
        return [Sample(self.recipe.samples(module, EXACT_ROWS if exact else ROWS, device, dtype))]

    @override
    def short_samples(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> Sequence[Sample]:
        return [Sample(self.recipe.samples(module, 2, device, dtype))]

    @override
    def first_call_sample(self, call: Any) -> None:
        """Nothing: what reaches the inside is not known before the layers around it have run."""
        return None

    @override
    def check_semantics(self, module: nn.Module) -> str | None:
        """Compares the inside, as stock computes it, with what it is known to compute; the text says all the rest."""
        inputs = self.recipe.samples(module, ROWS, torch.device("cpu"), torch.float32)
        with torch.no_grad():
            stock = _as_one(self.recipe.stock(module, inputs))
            error = relative_error(stock, _as_one(self.recipe.reference(module, _doubled(inputs))))
        return (
            None
            if error <= INNER_TOLERANCE
            else f"the stock inside is {error:.1e} away from what it is known to compute"
        )

    @override
    def stock(self, module: nn.Module, call: Sample) -> Tensor:
        return _as_one(self.recipe.stock(module, call.inputs))

    @override
    def reference(self, module: nn.Module, call: Sample) -> Tensor:
        return _as_one(self.recipe.reference(module, _doubled(call.inputs)))

    @override
    def grad_inputs(self, call: Sample) -> tuple[Tensor, ...]:
        return self.recipe.differentiable(call.inputs)

    @override
    def exact_training(self, module: nn.Module, call: Sample) -> tuple[Tensor, ...]:
        inputs = _doubled(call.inputs)
        return with_gradients(
            lambda: _as_one(self.recipe.reference(module, inputs)), self.recipe.differentiable(inputs)
        )

    def _forward(self, provider: str | None) -> Callable[..., Any]:
        if provider not in self._forwards:
            self._forwards[provider] = self.recipe.forward(self._inside(provider))
        return self._forwards[provider]

    def _inside(self, provider: str | None) -> Inside:
        recipe, training = self.recipe, self.training

        def inside(module: nn.Module | None, inputs: tuple[Tensor, ...]) -> Any:
            if training is not None and torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
                return training(module, inputs)
            return recipe.fused(module, inputs, provider)

        return inside


def _doubled(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.detach().double() if x.is_floating_point() else x for x in inputs)


def _as_one(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return result if isinstance(result, Tensor) else torch.stack(result)
