"""Modules of ComfyUI as the proofs see them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from diffkern.comfyui.recipe import ComfyRecipe, plain_arithmetic
from diffkern.comfyui.verification_clone import is_state_of_comfy, shell
from diffkern.injection.block_fusion import BlockFusion, settings
from diffkern.matching import full_name
from diffkern.providers import Choice
from diffkern.verify.measures import Measurement
from diffkern.verify.proof import Verifier
from diffkern.verify.samples import clone_tree


@dataclass(frozen=True)
class ComfyFusion(BlockFusion):
    """A module with a recipe, in a model that computes in ``dtype``.

    The proof runs on a copy without the large weights, see :mod:`diffkern.comfyui.verification_clone`; its reference is
    the stock forward in float64, in the plain torch ops that ComfyUI has for training.
    """

    recipe: ComfyRecipe
    dtype: torch.dtype

    @override
    def primary_input(self, call: tuple[Any, ...]) -> Tensor:
        return self.recipe.primary_input(call)

    @override
    def declines(self, module: nn.Module, call: tuple[Any, ...] | None) -> str | None:
        reason = super().declines(module, call)
        if reason is None and call is not None and self.primary_input(call).dtype != self.dtype:
            dtypes = self.primary_input(call).dtype, self.dtype
            given, prepared = (str(dtype).removeprefix("torch.") for dtype in dtypes)
            reason = f"it runs in {given} and was proven in {prepared}: optimize after the node that changes the dtype"
        return reason

    @override
    def likely_dtypes(self, module: nn.Module, whole: torch.dtype) -> tuple[torch.dtype, ...]:
        return (self.dtype,)

    @override
    def kind(self, module: nn.Module) -> Hashable:
        layers = tuple(
            (
                name, full_name(type(child)),
                tuple(setting for setting in settings(child) if not is_state_of_comfy(setting[0])),
            )
            for name, child in module.named_modules()
        )  # fmt: skip
        shapes = tuple(
            (name, tuple(parameter.shape)) for name, parameter in module._parameters.items() if parameter is not None
        )
        return self.recipe, type(self.recipe), layers, shapes

    @override
    def choose(
        self, module: nn.Module, provider: str | None, device: torch.device, dtypes: tuple[torch.dtype, ...]
    ) -> Choice:
        return super().choose(module, provider, device, (self.dtype,))

    @override
    def clone_for_verification(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
        return shell(module, device, self.dtype)

    @override
    def stock(self, module: nn.Module, call: tuple[Any, ...]) -> Tensor:
        return _as_one(type(module).forward(module, *call))

    @override
    def reference(self, module: nn.Module, call: tuple[Any, ...]) -> Any:
        wide = clone_tree(module, self.primary_input(call).device, lambda tensor: torch.float64, torch.float64)
        with plain_arithmetic():
            return self.stock(wide, _mapped(_doubled, call))


class _Proven(ComfyFusion):
    """The same, with one tensor for a result: streams of a block may differ in every size."""

    @override
    def compute(self, module: nn.Module, call: tuple[Any, ...], provider: str | None, stock: tuple[str, ...]) -> Tensor:
        return _as_one(super().compute(module, call, provider, stock))


def prove(
    verifier: Verifier, module: nn.Module, fusion: ComfyFusion, provider: str | None, device: torch.device
) -> list[Measurement]:
    """Proves a fusion in the dtype of the model; for bit identity in float32, too.

    Kernels and torch compute half dtypes in float32 and round at the end, which hides most of what distinguishes two
    orders of the same sums, but not all. In float32 nothing is hidden.
    """
    dtypes = [fusion.dtype]
    if verifier.exact and fusion.dtype != torch.float32:
        dtypes.append(torch.float32)
    fusions = [_Proven(fusion.recipe, dtype) for dtype in dtypes]
    proofs = [verifier.prove(module, each, provider, device, each.dtype) for each in fusions]
    if None in proofs:
        raise RuntimeError(f"{type(fusion.recipe).__name__} declines its own samples")
    return [proof for proof in proofs if proof is not None]


def _as_one(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return result if isinstance(result, Tensor) else torch.cat([part.flatten() for part in result]).unsqueeze(-1)


def _mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A call with a function applied to its tensors, those inside tuples and modulation per frame included."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) is tuple:
        return tuple(_mapped(function, item) for item in value)
    if isinstance(getattr(value, "data", None), Tensor):
        value = copy.copy(value)
        value.data = function(value.data)
    return value


def _doubled(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
