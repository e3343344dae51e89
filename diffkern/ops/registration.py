"""How an op enters torch: one registration for schema, fake and autograd, whoever computes it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from diffkern.providers.registry import transforms_active

NAMESPACE = "diffkern"


def register(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
) -> torch._ops.OpOverload:
    """Registers ``torch.ops.diffkern.<name>`` and returns its overload.

    The op is opaque to ``torch.compile``: the graph does not depend on who will compute it. Another copy of
    diffkern in the process may have taken the name: then this copy's op gets a number, so that each copy runs
    its own code.

    Args:
        schema: Name and signature, for example ``"rms_norm(Tensor x, float eps=1e-6) -> Tensor"``.
        implementation: Computes it; chooses the provider at run time.
        fake: Gives shape, dtype and strides of the result, without data.
        setup_context: Saves for the backward pass; called only when a gradient is needed.
        backward: One gradient per argument of the schema, None where there is none.
    """
    name, _, signature = schema.partition("(")
    space = getattr(torch.ops, NAMESPACE)
    names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    free = next(candidate for candidate in names if not hasattr(space, candidate))
    qualified = f"{NAMESPACE}::{free}"
    # Not torch.library.custom_op: its first call imports all of torch._dynamo, which takes a second.
    torch.library.define(qualified, f"({signature}", tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(qualified, "default", implementation)
    torch.library.register_fake(qualified, fake)
    torch.library.register_autograd(qualified, backward, setup_context=setup_context)
    return getattr(space, free).default  # type: ignore[no-any-return]


def needs_dispatcher(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether a call must go through the registered op and not straight to the provider's kernel.

    It must where somebody looks at the call instead of running it (tracing, fake tensors), where a gradient is
    wanted, and where the memory does not hold the values themselves. The direct way saves about half of the
    host time of a call. Under transforms that look into the formula, the direct way leads to plain PyTorch: see
    :func:`diffkern.providers.registry.kernel_for`.
    """
    if torch.compiler.is_compiling():
        return True
    if transforms_active():
        return False
    if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
        return True
    if x.is_neg():  # a lazy sign, which the dispatcher resolves and a raw pointer does not show
        return True
    if torch.is_grad_enabled():
        if x.requires_grad:
            return True
        for parameter in parameters:
            if parameter is not None and parameter.requires_grad:
                return True
    return False
