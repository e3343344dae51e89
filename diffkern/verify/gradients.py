"""Calls that a backward may follow, proven like the others: their result, and the gradients of inputs and weights.

The yardstick is float64 again. A fusion differentiates it in a way of its own, past the backward formulas of
:mod:`diffkern.ops`, so that a wrong formula cannot agree with itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from diffkern.verify.contract import ENOUGH, RATIO, SANE, SLACK
from diffkern.verify.isolation import Copy, snapshot
from diffkern.verify.measures import Measurement, as_one, error_beside, relative_error
from diffkern.verify.samples import Draws

if TYPE_CHECKING:
    from diffkern.verify.fusion import Fusion


def wanted(module: nn.Module, x: Tensor) -> bool:
    """Whether a backward may follow a call with input ``x``."""
    if not torch.is_grad_enabled():
        return False
    return x.requires_grad or any(parameter.requires_grad for parameter in module.parameters())


def measure(fusion: Fusion, module: nn.Module, provider: str | None, call: Any, exact: bool) -> Measurement | None:
    """Compares a call on a stand-in, and its gradients; None for a fusion whose gradients are not proven apart.

    Room is ``ratio * stock - fused``, and one rounding more where few numbers are compared; ``ratio`` is that of every
    proof, or of gradients the fusion's own. The errors that are returned are those where there is none left, or else
    where the fused forward is furthest above stock; with ``exact`` all must be equal bit for bit.
    """
    x = fusion.primary_input(call)
    chosen = fusion.choose(module, provider, x.device, x.dtype).provider
    truth = fusion.exact_training(module, call)
    if truth is None:
        return None
    pieces = fusion.stock_pieces(module, call)
    before, weights = Copy(call), snapshot(module)
    grad_inputs = (*fusion.grad_inputs(call), *module.parameters())
    stock = with_gradients(lambda: fusion.stock(module, call), grad_inputs)
    fused = with_gradients(lambda: fusion.compute(module, call, provider, pieces), grad_inputs)
    errors = [(error_beside(f, s, t), relative_error(s, t)) for f, s, t in zip(fused, stock, truth, strict=True)]
    ratios = (RATIO, *(fusion.gradient_ratio(gradient.dtype) or RATIO for gradient in fused[1:]))
    # The error of few numbers may be larger by chance, by one rounding: the gradient of a weight has few.
    luck = [torch.finfo(y.dtype).eps if y.numel() < ENOUGH else 0.0 for y in fused]
    rooms = [own * s + more - f for own, (f, s), more in zip(ratios, errors, luck, strict=True)]
    _, worst = min(zip(rooms, errors, strict=True), key=lambda place: (place[0] >= 0, place[1][1] - place[1][0]))
    # The gradient of a float32 tensor may come of work in half precision.
    sane = max(SANE.get(tensor.dtype, 1e-3) for tensor in (*stock, *grad_inputs))
    identical = all(map(torch.equal, fused, stock))
    reason = ""
    if any(before.written()) or any(weights.written()):
        reason = "with gradients it writes into its inputs or weights"
    elif exact and not identical:
        reason = "with its gradients it is not bit-identical to stock"
    elif not identical and any(stock_error > sane for _, stock_error in errors):
        reason = f"the stock gradients are {worst[1]:.1e} away from those of what its class is known to compute"
    elif not identical and not min(rooms) >= -SLACK:
        reason = f"with its gradients it has an error of {worst[0]:.2e} against stock's {worst[1]:.2e}"
    return Measurement.of(x, chosen, *worst, identical, reason, gradients=True)


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


def unobserved() -> AbstractContextManager[Any]:
    """Keeps what is saved for a backward of ours from hooks around the user's call, as checkpointing has them."""
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


def cotangent(y: Tensor) -> Tensor:
    """What is sent backwards: the same numbers for every run, of both signs."""
    return Draws(y.device, y.dtype, seed=7)(*y.shape)
