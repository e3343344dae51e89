"""Does an optimized model still say what the stock one says? On inputs of the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from diffkern.bench.measure import relative_error
from diffkern.comfyui import kitchen_backend
from diffkern.comfyui.optimize import without_diffkern
from diffkern.comfyui.patcher import patches_of
from diffkern.comfyui.sampling import denoise


@dataclass(frozen=True)
class Verdict:
    """How far the optimized model is from the stock one after some steps.

    Attributes:
        error: Relative L2 distance of the latents; NaN if either is not finite.
        identical: Whether they are equal bit for bit.
        finite: Whether all of the optimized latents are finite.
        stock_finite: Whether all of the stock latents are.
        tolerance: The error that is allowed.
        patched: Modules that are patched.
        fused: Calls of theirs that ran fused, those in compiled graphs aside.
        stock: Calls that did not.
        kitchen: Calls of comfy-kitchen that were served; None if it is not to be served.
    """

    error: float
    identical: bool
    finite: bool
    stock_finite: bool
    tolerance: float
    patched: int
    fused: int
    stock: int
    kitchen: int | None

    @property
    def passed(self) -> bool:
        """Whether the optimized model may stand in for the stock one."""
        return self.identical or (self.finite and self.error <= self.tolerance)

    def __str__(self) -> str:
        if not self.stock_finite:
            state = "the stock model itself gives NaN or infinity: nothing can be said"
        elif not self.finite:
            state = "the optimized model gives NaN or infinity"
        elif self.identical:
            state = "bit for bit the stock result"
        else:
            state = f"relative error {self.error:.1e}, allowed {self.tolerance:.1e}"
        return f"{'PASS' if self.passed else 'FAIL'}: {state}; {self._what_ran()}"

    def _what_ran(self) -> str:
        parts = []
        if self.fused or self.stock:
            parts.append(f"{self.fused} calls ran fused, {self.stock} stock")
        elif self.patched:
            parts.append(f"{self.patched} modules patched, whose calls in compiled graphs are not counted")
        if self.kitchen is not None:
            parts.append(f"{self.kitchen} calls of comfy-kitchen served")
        return ", ".join(parts)


def verify(model: Any, positive: Any, latent: Mapping[str, Any], *, steps: int, seed: int, tolerance: float) -> Verdict:
    """Denoises the same latent with the stock and with the optimized model.

    Args:
        model: An optimized model.
        positive: The conditioning.
        latent: A latent; what is in it takes part as in a sampler.
        steps: Number of steps; errors grow with them.
        seed: Of the noise.
        tolerance: The relative error that is allowed.
    """
    expected = denoise(without_diffkern(model), positive, latent, steps, seed)
    before = _calls(model)
    found = denoise(model, positive, latent, steps, seed)
    fused, stock, kitchen = (now - then for now, then in zip(_calls(model), before, strict=True))
    finite, stock_finite = (bool(torch.isfinite(result).all()) for result in (found, expected))
    error = relative_error(found, expected) if finite and stock_finite else float("nan")
    return Verdict(
        error, torch.equal(found, expected), finite, stock_finite, tolerance,
        len(patches_of(model)), fused, stock, None if kitchen_backend.service_of(model) is None else kitchen,
    )  # fmt: skip


def _calls(model: Any) -> tuple[int, int, int]:
    patches, service = patches_of(model).values(), kitchen_backend.service_of(model)
    fused, stock = sum(patch.fused_calls for patch in patches), sum(patch.stock_calls.total() for patch in patches)
    return fused, stock, 0 if service is None else service.counts.fused_calls
