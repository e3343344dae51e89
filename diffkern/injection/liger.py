"""Liger's kernels as the injection sees them: instead of ours wherever gradients are wanted."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from diffkern.injection.causal_loss import LossFusion
from diffkern.injection.norm_fusion import NormFusion
from diffkern.injection.report import InjectionReport, Site
from diffkern.providers import Choice, liger
from diffkern.rewrite import FusedSite, Trained, Way
from diffkern.verify import gradients


@dataclass(frozen=True)
class Liger:
    """What Liger computes in an injection.

    Attributes:
        flags: What it shall compute.
    """

    flags: liger.Flags

    @classmethod
    def asked_for(cls, wish: Any, modules: Mapping[str, nn.Module], report: InjectionReport) -> Liger | None:
        """What a user asked for, if Liger runs where the models are; otherwise the report gets the reason.

        Raises:
            ValueError: as :meth:`diffkern.providers.liger.Flags.of`.
        """
        flags = liger.Flags.of(wish)
        if flags is None:
            return None
        tensors = (tensor for root in modules.values() for tensor in root.parameters())
        home = next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))
        accelerator = torch.accelerator.current_accelerator(check_available=True) if home.type == "cpu" else None
        reason = liger.unavailable_reason(accelerator or home)
        if reason is not None:
            report._rejected.append(Site("", report.target, liger.NAME, reason=reason))
            return None
        found = cls(flags)
        roots = modules.values() if flags.fused_linear_cross_entropy else ()
        if any(isinstance(found.loss(module), LossFusion) for root in roots for module in root.modules()):
            report.notes.append(
                "fused_linear_cross_entropy: in training with labels, the output has no logits; in half precision, its "
                f"gradients may have {liger.LINEAR_LOSS_GRADIENT_RATIO} times the error of stock's"
            )
        return found

    def norm(self, fusion: NormFusion) -> NormFusion:
        """How a norm is computed, with Liger's kernel where gradients are wanted if it has one for it."""
        if self.flags.rms_norm and LigerNormFusion.casting(fusion) is not None:
            return LigerNormFusion(fusion.semantics, fusion.replayed)
        return fusion

    def loss(self, module: nn.Module) -> LossFusion | str | None:
        """How the loss of a model of transformers is computed, or why not; None if it has no such loss."""
        flags = self.flags
        if not (flags.cross_entropy or flags.fused_linear_cross_entropy) or "transformers" not in sys.modules:
            return None
        cls = type(module)
        named = cls.__module__.startswith("transformers.models.") and cls.__name__.endswith("ForCausalLM")
        if not named or module._modules.get("lm_head") is None:
            return None
        fusion = LossFusion(linear=flags.fused_linear_cross_entropy)
        return fusion.lacks(module) or fusion

    def trained_sites(self) -> dict[str, Trained]:
        """What computes the sites of rewritten forwards where gradients are wanted, by the name of the op."""
        sites: dict[str, tuple[bool, Trained]] = {
            "glu": (self.flags.swiglu, _gated),
            "rope": (self.flags.rope, _rotated),
            "gate_residual_norm_modulate": (self.flags.rms_norm, _normalised),
        }
        return {op: compute for op, (wanted, compute) in sites.items() if wanted}


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
        return liger.NAME, super().kind(module)

    @override
    def choose(
        self, module: nn.Module, provider: str | None, device: torch.device, dtypes: tuple[torch.dtype, ...]
    ) -> Choice:
        return liger.named(super().choose(module, provider, device, dtypes))


def _gated(site: FusedSite, module: nn.Module, operands: dict[str, Any], way: Way) -> Any:
    """Liger's gated units."""
    gate, value, activation = operands["gate"], operands["value"], way.options["activation"]
    return liger.glu(gate, value, activation) if activation in liger.GATED and gate.dtype == value.dtype else None


def _rotated(site: FusedSite, module: nn.Module, operands: dict[str, Any], way: Way) -> Any:
    """Liger's rotation of halves of whole heads ``[B, H, S, D]``."""
    q, k, cos, sin = (operands[name] for name in ("q", "k", "cos", "sin"))
    halves = way.options["pairing"] == "half" and way.options["unsqueeze_dim"] == 1
    whole = cos.shape[-1] == q.shape[-1] and q.ndim == 4 and cos.ndim == 3
    if not halves or not whole or not q.dtype == k.dtype == cos.dtype or cos.requires_grad or sin.requires_grad:
        return None
    return liger.rope(q, k, cos, sin)


def _normalised(site: FusedSite, module: nn.Module, operands: dict[str, Any], way: Way) -> Any:
    """The norm called as the module that it is, with Liger's patch on it."""
    return site.call_op(module, operands, replace(way, calls_norm="same"), site.provider)
