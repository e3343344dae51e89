"""How an op enters torch: one registration for schema, fake and autograd, whoever computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "diffkern"


def register(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
) -> torch._ops.OpOverload:
    """Registers ``torch.ops.diffkern.<name>`` and returns its overload.

    The op is opaque to ``torch.compile``: the graph does not depend on who will compute it. When another copy
    of diffkern in the process has registered the same signature before, its op is used.

    Args:
        schema: Name and signature, for example ``"rms_norm(Tensor x, float eps=1e-6) -> Tensor"``.
        implementation: Computes it; chooses the provider at run time.
        fake: Gives shape, dtype and strides of the result, without data.
        setup_context: Saves for the backward pass; called only when a gradient is needed.
        backward: One gradient per argument of the schema, None where there is none.

    Raises:
        RuntimeError: another copy of diffkern has registered the name with another signature.
    """
    name, _, signature = schema.partition("(")
    qualified = f"{NAMESPACE}::{name}"
    packet = getattr(getattr(torch.ops, NAMESPACE), name, None)
    if packet is None:
        # Not torch.library.custom_op: its first call imports all of torch._dynamo, which takes a second.
        torch.library.define(qualified, f"({signature}", tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(qualified, "default", implementation)
        torch.library.register_fake(qualified, fake)
        torch.library.register_autograd(qualified, backward, setup_context=setup_context)
        packet = getattr(getattr(torch.ops, NAMESPACE), name)
    elif str(packet.default._schema) != str(torch._C.parse_schema(f"{qualified}({signature}")):
        raise RuntimeError(
            f"torch.ops.{NAMESPACE}.{name} was registered by another version of diffkern in this process: "
            "import only one of them"
        )
    return packet.default  # type: ignore[no-any-return]


def needs_dispatcher(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether a call must go through the registered op and not straight to the provider's kernel.

    It must where somebody looks at the call instead of running it (tracing, fake tensors, functorch), where
    a gradient is wanted, and where the memory does not hold the values themselves. The direct way saves about
    half of the host time of a call.
    """
    if torch.compiler.is_compiling() or (type(x) is not Tensor and type(x) is not torch.nn.Parameter):
        return True
    if x.is_neg():  # a lazy sign, which the dispatcher resolves and a raw pointer does not show
        return True
    if torch.is_grad_enabled():
        if x.requires_grad:
            return True
        for parameter in parameters:
            if parameter is not None and parameter.requires_grad:
                return True
    return torch._C._are_functorch_transforms_active()
