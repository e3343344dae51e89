"""Liger's kernels as the injection sees them: instead of ours wherever gradients are wanted."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from diffkern.blocks.causal_loss import CausalLoss
from diffkern.blocks.gated_mlp import GatedMLP
from diffkern.blocks.inner import Inside
from diffkern.blocks.rotary import Rotary
from diffkern.injection.fusion import Fusion
from diffkern.injection.inner_fusion import InnerFusion, Sample
from diffkern.injection.norm_fusion import NormFusion
from diffkern.injection.report import InjectionReport, Site
from diffkern.providers import Choice, liger
from diffkern.verify import gradients

OP = "liger"


def usable(flags: liger.Flags | None, modules: Mapping[str, nn.Module], report: InjectionReport) -> liger.Flags | None:
    """Returns the flags if Liger runs where the models are; otherwise the report gets the reason, and None is said."""
    if flags is None:
        return None
    tensors = (tensor for root in modules.values() for tensor in root.parameters())
    home = next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))
    accelerator = torch.accelerator.current_accelerator(check_available=True) if home.type == "cpu" else None
    reason = liger.unavailable_reason(accelerator or home)
    if reason is not None:
        report._rejected.append(Site("", report.target, OP, reason=reason))
        return None
    if any(
        isinstance(loss_fusion(module, flags), LigerLossFusion)
        for root in modules.values()
        for module in (root.modules() if flags.fused_linear_cross_entropy else ())
    ):
        report.notes.append(
            "fused_linear_cross_entropy: in training with labels, the output has no logits; in half precision, its "
            f"gradients may have {liger.LINEAR_LOSS_GRADIENT_RATIO} times the error of stock's"
        )
    return flags


def with_liger(fusion: Fusion, flags: liger.Flags | None) -> Fusion:
    """Returns the fusion that computes with Liger what the flags name, where gradients are wanted."""
    if flags is None:
        return fusion
    if isinstance(fusion, NormFusion) and flags.rms_norm and LigerNormFusion.casting(fusion) is not None:
        return LigerNormFusion(fusion.semantics)
    if isinstance(fusion, InnerFusion):
        inside = _inside(fusion, flags)
        return fusion if inside is None else LigerInnerFusion(fusion.recipe, inside, fusion.sources)
    return fusion


@dataclass(frozen=True)
class LigerNormFusion(NormFusion):
    """An RMS norm that Liger computes where gradients are wanted."""

    @staticmethod
    def casting(fusion: NormFusion) -> str | None:
        """Liger's name for where a norm rounds, or None for a norm that it does not have."""
        semantics = fusion.semantics
        plain = semantics.weight is not None and semantics.bias is None and not semantics.clamp_eps
        if semantics.op != "rms_norm" or not plain or semantics.dim not in (-1, "normalized_shape"):
            return None
        return "gemma" if semantics.rounding == "once" else "llama"

    @override
    def compute(self, module: nn.Module, call: Tensor, provider: str | None, stock: tuple[str, ...]) -> Tensor:
        semantics = self.semantics
        weight = None if semantics.weight is None else module._parameters.get(semantics.weight)
        eps = getattr(module, semantics.eps) if isinstance(semantics.eps, str) else semantics.eps
        fits = weight is not None and weight.ndim == 1 and weight.dtype == call.dtype and eps is not None
        if not fits or not gradients.wanted(module, call):
            return super().compute(module, call, provider, stock)
        assert weight is not None
        return liger.rms_norm(call, weight, eps, semantics.weight_offset, self.casting(self) or "llama")

    @override
    def kind(self, module: nn.Module) -> Hashable:
        return OP, super().kind(module)

    @override
    def choose(
        self, module: nn.Module, provider: str | None, device: torch.device, dtypes: tuple[torch.dtype, ...]
    ) -> Choice:
        return _named(super().choose(module, provider, device, dtypes))


@dataclass(frozen=True)
class LigerInnerFusion(InnerFusion):
    """A forward whose inside Liger computes where gradients are wanted."""

    @override
    def choose(
        self, module: nn.Module, provider: str | None, device: torch.device, dtypes: tuple[torch.dtype, ...]
    ) -> Choice:
        return _named(super().choose(module, provider, device, dtypes))


@dataclass(frozen=True)
class LigerLossFusion(InnerFusion):
    """A model whose loss Liger computes in training."""

    @property
    @override
    def kernel_ops(self) -> tuple[str, ...]:
        return ()

    @override
    def allowed_in_strict(self, module: nn.Module, call: Any) -> bool:
        """Calls that have no loss, or want no gradients of it."""
        return not module.training or not torch.is_grad_enabled() or call is None or call[-1].get("labels") is None

    @override
    def likely_dtypes(self, module: nn.Module, whole: torch.dtype) -> tuple[torch.dtype, ...]:
        """That of token ids, which such models are called with."""
        return (torch.int64,)

    @override
    def weight_dtype(self, module: nn.Module) -> torch.dtype | None:
        """That of the head decides, and not the primary input's: what such models are called with are integers."""
        head: Any = module._modules.get("lm_head")
        weight = getattr(head, "weight", None)
        return weight.dtype if isinstance(weight, Tensor) else None

    @override
    def choose(
        self, module: nn.Module, provider: str | None, device: torch.device, dtypes: tuple[torch.dtype, ...]
    ) -> Choice:
        return Choice(OP, self.recipe.fused, ())

    @override
    def clone_for_verification(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
        copy = super().clone_for_verification(module, device, dtype)
        copy.__dict__["_sampled"] = self.weight_dtype(module)
        return copy

    @override
    def kind(self, module: nn.Module) -> Hashable:
        return self.recipe, self.weight_dtype(module)

    @override
    def gradient_ratio(self, dtype: torch.dtype) -> float | None:
        linear = isinstance(self.recipe, CausalLoss) and self.recipe.linear
        return liger.LINEAR_LOSS_GRADIENT_RATIO if linear and dtype in (torch.float16, torch.bfloat16) else None

    @override
    def samples(self, module: nn.Module, device: torch.device, dtype: torch.dtype, exact: bool) -> Sequence[Sample]:
        dtype = module.__dict__["_sampled"] or dtype
        return super().samples(module, device, dtype, exact)


def loss_fusion(module: nn.Module, flags: liger.Flags) -> LigerLossFusion | str | None:
    """Returns how Liger computes the loss of a model of transformers, or why not; None if it has no such loss."""
    if not (flags.cross_entropy or flags.fused_linear_cross_entropy) or "transformers" not in sys.modules:
        return None
    cls = type(module)
    named = cls.__module__.startswith("transformers.models.") and cls.__name__.endswith("ForCausalLM")
    if not named or module._modules.get("lm_head") is None:
        return None
    recipe = CausalLoss(linear=flags.fused_linear_cross_entropy)
    return recipe.lacks(module) or LigerLossFusion(recipe, recipe.trained)


def _inside(fusion: InnerFusion, flags: liger.Flags) -> Inside | None:
    """Liger's kernel for the inside of a forward, if it has one and the flags name it."""
    recipe = fusion.recipe
    if isinstance(recipe, Rotary):
        return _Rotated(recipe) if flags.rope else None
    return _Gated(recipe) if isinstance(recipe, GatedMLP) and flags.swiglu else None


@dataclass(frozen=True)
class _Gated:
    """Liger's gated units; it has none with the GELU of the error function."""

    recipe: GatedMLP

    def __call__(self, module: nn.Module | None, inputs: tuple[Tensor, ...]) -> Any:
        assert module is not None
        kernel = {"silu": liger.swiglu, "gelu_tanh": liger.geglu}.get(self.recipe.function(module) or "")
        gate, up = inputs
        if kernel is None or type(gate) is not Tensor or gate.dtype != up.dtype:
            return self.recipe.fused(module, inputs, None)
        return kernel(gate, up)


@dataclass(frozen=True)
class _Rotated:
    """Liger's rotation of whole heads."""

    recipe: Rotary

    def __call__(self, module: nn.Module | None, inputs: tuple[Tensor, ...]) -> Any:
        q, k, cos, sin = inputs
        whole = cos.shape[-1] == q.shape[-1] and cos.ndim == 4 and cos.shape[1] == 1
        if not whole or type(q) is not Tensor or not q.dtype == k.dtype == cos.dtype:
            return self.recipe.fused(module, inputs, None)
        return liger.rope(q, k, cos[:, 0], sin[:, 0])


def _named(choice: Choice) -> Choice:
    return replace(choice, provider=f"{choice.provider}+{OP}")
