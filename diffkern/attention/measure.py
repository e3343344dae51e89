"""What an attention takes: time, and memory where torch counts it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from diffkern.attention.call import AttentionCall
from diffkern.providers.foreign import copy_of
from diffkern.verify.gain import costs
from diffkern.verify.gradients import unobserved


def seconds(compute: Callable[[AttentionCall], Tensor], call: AttentionCall) -> float:
    """Returns the time of a call on its device in seconds, with its backward if gradients are wanted.

    The first run, which loads and compiles, is not counted; of the others the fastest.
    """
    (cost,) = costs((runner(compute, call),), call.query.device)
    return cost.device / 1e6


def peak_bytes(compute: Callable[[AttentionCall], Tensor], call: AttentionCall) -> int | None:
    """Returns the bytes that a call has allocated at its peak, besides its arguments; None if not counted."""
    device = call.query.device
    if device.type != "cuda":
        return None
    run = runner(compute, call)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def runner(compute: Callable[[AttentionCall], Tensor], call: AttentionCall) -> Callable[[], None]:
    """Returns a function that runs a copy of a call, with its backward if gradients are wanted."""
    gradients = call.signature().gradients
    leaves = [copy_of(x) for x in (call.query, call.key, call.value)]

    def run() -> None:
        with torch.set_grad_enabled(gradients), unobserved():
            tensors = [leaf.detach().requires_grad_() for leaf in leaves] if gradients else leaves
            y = compute(replace(call, query=tensors[0], key=tensors[1], value=tensors[2]))
            if gradients:
                torch.autograd.grad(y, tensors, torch.ones_like(y))

    return run
