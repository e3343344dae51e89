"""Calls that a backward may follow, proven like the others: their result, and the gradients of inputs and weights.

The yardstick is float64 again. A fusion differentiates it in a way of its own, past the backward formulas of
:mod:`diffkern.ops`, so that a wrong formula cannot agree with itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from diffkern.attention.measure import unobserved
from diffkern.verify.contract import ENOUGH, RATIO, SANE
from diffkern.verify.isolation import Copy, snapshot
from diffkern.verify.measures import as_one, error_beside, relative_error

if TYPE_CHECKING:
    from diffkern.injection.fusion import Fusion


@dataclass(frozen=True)
class TrainingErrors:
    """Relative errors of a result and its gradients.

    Attributes:
        fused: Error of the fused forward where it has no room left, or else where it is furthest above stock's.
        stock: The stock forward's in the same place.
        margin: How much room it has where it has least: ``ratio * stock - fused``, and one rounding more where few
            numbers are compared; ``ratio`` is that of every proof, or of gradients the fusion's own.
        identical: Whether all are equal bit for bit.
        alien: Whether not even the stock ones are near the exact ones.
        wrote: Whether the fused forward wrote into its inputs or weights.
    """

    fused: float
    stock: float
    margin: float
    identical: bool
    alien: bool
    wrote: bool


def wanted(module: nn.Module, x: Tensor) -> bool:
    """Whether a backward may follow a call with input ``x``."""
    if not torch.is_grad_enabled():
        return False
    return x.requires_grad or any(parameter.requires_grad for parameter in module.parameters())


def measure(fusion: Fusion, module: nn.Module, provider: str | None, call: Any) -> TrainingErrors | None:
    """Compares a call on a stand-in, and its gradients; None for a fusion whose gradients are not proven apart.

    Args:
        fusion: What the module computes.
        module: A stand-in, whose parameters may be made to require gradients.
        provider: Who computes it.
        call: A sample.
    """
    exact = fusion.exact_training(module, call)
    if exact is None:
        return None
    with torch.enable_grad():  # what has no gradient runs stock in such a call
        pieces = fusion.stock_pieces(module, call)
    before, weights = Copy(call), snapshot(module)
    grad_inputs = (*fusion.grad_inputs(call), *module.parameters())
    stock = with_gradients(lambda: fusion.stock(module, call), grad_inputs)
    fused = with_gradients(lambda: fusion.compute(module, call, provider, pieces), grad_inputs)
    triples = list(zip(fused, stock, exact, strict=True))
    errors = [(error_beside(f, s, e), relative_error(s, e)) for f, s, e in triples]
    ratios = (RATIO, *(fusion.gradient_ratio(gradient.dtype) or RATIO for gradient in fused[1:]))
    margins = [own * s + _luck(y) - f for own, (f, s), y in zip(ratios, errors, fused, strict=True)]
    _, worst = min(zip(margins, errors, strict=True), key=lambda place: (place[0] >= 0, place[1][1] - place[1][0]))
    # The gradient of a float32 tensor may come of work in half precision.
    sane = max(SANE.get(tensor.dtype, 1e-3) for tensor in (*stock, *grad_inputs))
    return TrainingErrors(
        *worst,
        min(margins),
        all(torch.equal(f, s) for f, s, _ in triples),
        any(stock_error > sane for _, stock_error in errors),
        any(before.written()) or any(weights.written()),
    )


def _luck(y: Tensor) -> float:
    """How much the error of few numbers may be larger by chance: one rounding. The gradient of a weight has few."""
    return torch.finfo(y.dtype).eps if y.numel() < ENOUGH else 0.0


def with_gradients(run: Callable[[], Any], grad_inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Runs, and returns the result and the gradients of ``grad_inputs``."""
    try:
        for leaf in grad_inputs:
            leaf.requires_grad_()
        with torch.enable_grad(), unobserved():
            y = as_one(run())
            gradients = torch.autograd.grad(y, grad_inputs, cotangent(y), materialize_grads=True)
            return (y.detach(), *gradients)
    finally:
        for leaf in grad_inputs:
            leaf.requires_grad_(False)


def cotangent(y: Tensor) -> Tensor:
    """What is sent backwards: the same numbers for every run, of both signs."""
    generator = torch.Generator("cpu").manual_seed(7)
    return torch.randn(y.shape, generator=generator, device="cpu").to(device=y.device, dtype=y.dtype)
