"""Attention from a kernel of the Hub: which function of it, and what that can do, read off its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from diffkern.attention.backends import Backend, UnavailableError, backend_of
from diffkern.attention.call import AttentionCall
from diffkern.hub.policy import HubError, Policy
from diffkern.hub.reference import KernelReference, is_reference
from diffkern.providers.foreign import is_of_user, preserved, summary

#: Functions that are taken if the reference names none.
FUNCTIONS = ("flash_attn_func", "sageattn", "scaled_dot_product_attention", "attention")

#: What kernels call their parameters besides query, key and value.
_SCALE = ("softmax_scale", "sm_scale", "scale", "scaling")
_CAUSAL = ("causal", "is_causal")
_DROPOUT = ("dropout_p", "dropout")
_MASK = ("attn_mask", "attention_mask", "mask")


def find_backend(name: str, device: torch.device, policy: Policy | None = None) -> Backend:
    """Returns the backend of a name: one of diffusers, or a kernel ``"org/repo[@revision][:function]"``.

    A kernel is loaded here, for ``device`` and as far as ``policy`` allows.

    Raises:
        ValueError: the name is neither.
        UnavailableError: the kernel cannot be loaded, or has no such function.
    """
    if not is_reference(name):
        return backend_of(name)
    from diffkern.hub.loader import load

    reference = KernelReference.parse(name)
    try:
        kernel = load(reference, policy or Policy(), device)
    except HubError as error:
        raise UnavailableError(str(error)) from error
    return kernel_backend(name, _function(kernel.module, reference))


def kernel_backend(name: str, function: Callable[..., Any]) -> Backend:
    """Describes a kernel's function by its parameters.

    Its first three are queries, keys and values: ``[B, S, H, D]`` as flash attention has them, or ``[B, H, S, D]``
    if it has the parameters of PyTorch's ``scaled_dot_product_attention``. A parameter that it does not have is
    something that it cannot do. Whether all this is true is seen when it is tried against float64.

    Raises:
        UnavailableError: it does not take queries, keys and values first.
    """
    parameters: Mapping[str, inspect.Parameter] = {}
    with suppress(Exception):  # of a builtin, such as an op of an extension, or an object that claims to be a function
        parameters = inspect.signature(function).parameters
    first = next(iter(parameters), "")
    if first in ("module", "self"):
        raise UnavailableError(f"its function takes a {first} first, not queries, keys and values")
    heads_first = first == "query" and "attn_mask" in parameters
    scale, causal, dropout, mask = (
        next((known for known in names if known in parameters), None) for names in (_SCALE, _CAUSAL, _DROPOUT, _MASK)
    )
    fixed: dict[str, Any] = {"tensor_layout": "NHD"} if "tensor_layout" in parameters else {}

    def compute(call: AttentionCall) -> Tensor:
        tensors = [call.query, call.key, call.value]
        if heads_first:
            tensors = [x.transpose(1, 2) for x in tensors]
        given = {scale: call.scale, causal: call.causal, dropout: call.dropout, mask: call.mask}
        y = function(*tensors, **fixed, **{key: value for key, value in given.items() if key is not None})
        output: Tensor = y[0] if isinstance(y, tuple) else y
        return output.transpose(1, 2) if heads_first else output

    return Backend(
        name,
        lambda: compute,
        masks=frozenset({"none"}) if mask is None else frozenset({"none", "bool", "additive"}),
        causal=causal is not None,
        dropout=dropout is not None,
        scale=scale is not None,
    )


def _function(kernel: ModuleType, reference: KernelReference) -> Callable[..., Any]:
    names = (reference.name,) if reference.name else FUNCTIONS
    try:
        with preserved():
            function = next((f for name in names if callable(f := getattr(kernel, name, None))), None)
    except BaseException as error:  # a module may look its attributes up in any way
        if is_of_user(error):
            raise
        raise UnavailableError(f"looking for {' and '.join(names)} in the kernel raised {summary(error)}") from error
    if function is not None:
        return function  # type: ignore[no-any-return]
    there = ", ".join(sorted(name for name, value in vars(kernel).items() if callable(value) and name[0] != "_"))
    raise UnavailableError(
        f"the kernel has no {' and no '.join(names)}: name one of its functions ({there or 'it has none'})"
    )
