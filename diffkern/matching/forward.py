"""The forward of a norm module, computed from its semantics, and the guard that says when it may be.

Both read the module at every call and keep nothing, so one function serves all modules of all classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffkern.matching.genuine import functional_is_torchs
from diffkern.matching.semantics import NormSemantics
from diffkern.ops import layer_norm, rms_norm
from diffkern.providers import KERNEL_DTYPES

_HALF = (torch.float16, torch.bfloat16)
_MEMORY_FORMAT = {
    "contiguous": torch.contiguous_format,
    "preserve": torch.preserve_format,
    "channels_last": torch.contiguous_format,
}


def apply(semantics: NormSemantics, module: torch.nn.Module, x: Tensor, *, provider: str | None = None) -> Tensor:
    """Computes ``module.forward(x)`` with :mod:`diffkern.ops`, differentiably.

    Call :func:`declines` first: what that turns down may be computed wrongly here, or raise. The result is a new tensor
    with the shape, dtype and strides of stock's. Weight, bias and eps are read from the module.
    """
    weight = parameter_of(module, semantics.weight)
    bias = parameter_of(module, semantics.bias)
    if not isinstance(bias, Tensor):
        bias = None
    eps = getattr(module, semantics.eps) if isinstance(semantics.eps, str) else semantics.eps
    dim = dim_of(semantics, module)
    shape = x.shape
    if semantics.layout == "channels_last":
        x = x.movedim(1, -1)
    elif isinstance(dim, tuple) and len(dim) > 1:
        # Without a weight the op cannot see how many dimensions belong together.
        x = x.flatten(-len(dim))
        weight = None if weight is None else weight.flatten()
        bias = None if bias is None else bias.flatten()
    axis = -1 if isinstance(dim, tuple) else dim
    memory_format = _MEMORY_FORMAT[semantics.layout]

    if semantics.op == "layer_norm":
        y = layer_norm(x, weight, bias, eps, dim=axis, memory_format=memory_format, provider=provider)
    else:
        y = rms_norm(
            x,
            weight,
            bias,
            eps,
            dim=axis,
            weight_offset=semantics.weight_offset,
            round_dtype=_round_dtype(semantics, x, weight),
            out_dtype=_out_dtype(semantics, x, weight),
            clamp_eps=semantics.clamp_eps,
            memory_format=memory_format,
            provider=provider,
        )
    if semantics.layout == "channels_last":
        return y.movedim(-1, 1)
    return y.view(shape) if isinstance(dim, tuple) and len(dim) > 1 else y


def declines(semantics: NormSemantics, module: torch.nn.Module, x: Any) -> str | None:
    """Says why :func:`apply` must not be used for this call, or None if it computes the same as the module.

    Looks at types, dtypes, devices and shapes, never at data: no synchronisation. Whatever the stock
    forward would raise for is declined, so that its own error is what the user sees.
    """
    reason = unfit_input("the input is", x)
    if reason is not None:
        return reason
    if x.is_meta:
        return "the input has no data (meta device)"
    if not functional_is_torchs():
        return "a function of torch.nn.functional was replaced"

    eps = getattr(module, semantics.eps, "missing") if isinstance(semantics.eps, str) else semantics.eps
    if type(eps) is not float and type(eps) is not int and not (eps is None and semantics.optional_eps):
        return f"its eps is {eps!r}, not a number"

    dim = dim_of(semantics, module)
    if isinstance(dim, tuple):
        expected = dim
        if semantics.layout == "channels_last":
            fits = x.ndim == 4 and (x.shape[1],) == dim
        else:
            fits = len(dim) <= x.ndim and x.shape[x.ndim - len(dim) :] == dim
        if not fits:
            return f"an input of shape {tuple(x.shape)} does not end in the normalised shape {dim}"
    else:
        trailing = -dim - 1 if dim < 0 else x.ndim - dim - 1
        if not 0 <= trailing < x.ndim:
            return f"an input of {x.ndim} dimensions has no dimension {dim}"
        expected = (x.shape[dim], *(1,) * trailing)
        if semantics.root is not None and getattr(module, semantics.root) != x.shape[dim] ** 0.5:
            return f"its {semantics.root} is not the root of {x.shape[dim]} channels"

    weight = parameter_of(module, semantics.weight)
    if weight is not None:
        reason = _unfit(semantics, semantics.weight, weight, x, expected)
        if reason is not None:
            return reason
    bias = parameter_of(module, semantics.bias)
    if bias is not None and not (type(bias) is float and bias == 0.0):
        reason = _unfit(semantics, semantics.bias, bias, x, expected)
        if reason is not None:
            return reason
        if semantics.output != "input" and (weight is None or weight.dtype != bias.dtype):
            return "its bias has another dtype than its weight"
    return None


def unfit_input(said: str, x: Any) -> str | None:
    """Why an input, which a sentence begins with, is not for kernels; or None."""
    if type(x) is not Tensor:
        return f"{said} a {type(x).__name__}, not a plain tensor"
    if x.dtype not in KERNEL_DTYPES:
        return f"{said} {_name(x.dtype)}; float32, float16 and bfloat16 are served"
    if x.layout is not torch.strided or x.is_nested:
        return f"{said} not an ordinary dense tensor"
    return autocast_on(x.device)


def autocast_on(device: torch.device) -> str | None:
    """Says that autocast is on for a device, or returns None."""
    # The first question is quick, and almost always enough: the name of a device takes long to form.
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(device.type):
        return f"autocast is on for {device.type}, and the stock forward follows its rules"
    return None


def _unfit(
    semantics: NormSemantics, name: str | None, parameter: Any, x: Tensor, expected: tuple[int, ...]
) -> str | None:
    """Why a parameter cannot be handed to a kernel, or None."""
    kind = type(parameter)
    if kind is not torch.nn.Parameter and kind is not Tensor:
        return f"its {name} is a {kind.__name__}, not a plain tensor"
    if parameter.dtype not in KERNEL_DTYPES:
        return f"its {name} is stored as {_name(parameter.dtype)}; float32, float16 and bfloat16 are served"
    if parameter.layout is not torch.strided:
        return f"its {name} is not an ordinary dense tensor"
    if parameter.device != x.device:
        return f"its {name} is on {parameter.device}, the input on {x.device}"
    if parameter.shape != expected:
        return f"its {name} has shape {tuple(parameter.shape)}, the input calls for {tuple(expected)}"
    if parameter.dtype != x.dtype and not semantics.mixed_dtypes:
        return f"its {name} is {_name(parameter.dtype)}, the input {_name(x.dtype)}, which its class need not accept"
    return None


def parameter_of(module: Any, name: str | None) -> Any:
    """What ``module.<name>`` is at this moment; None if there is no such attribute."""
    if name is None:
        return None
    # Parameters live here; nn.Module's own __getattr__ takes five times as long to find them.
    parameters = module._parameters
    return parameters[name] if name in parameters and name not in module.__dict__ else getattr(module, name, None)


def dim_of(semantics: NormSemantics, module: torch.nn.Module) -> int | tuple[int, ...]:
    """The dimension, or the sizes of the trailing dimensions, that the module normalises over."""
    if not isinstance(semantics.dim, str):
        return semantics.dim
    value = getattr(module, semantics.dim)
    if isinstance(value, bool):
        return 1 if value else -1
    return value  # type: ignore[no-any-return]


def _round_dtype(semantics: NormSemantics, x: Tensor, weight: Tensor | None) -> torch.dtype | None:
    """The half dtype that the normalised value is rounded to before it is multiplied, if any."""
    if weight is None or semantics.rounding == "once":
        return None
    dtype = weight.dtype if semantics.rounding == "weight" else x.dtype
    return dtype if dtype in _HALF else None


def _out_dtype(semantics: NormSemantics, x: Tensor, weight: Tensor | None) -> torch.dtype | None:
    """The dtype of the result where it may differ from that of the input."""
    if weight is None or semantics.output == "input":
        return None
    return weight.dtype if semantics.output == "weight" else torch.promote_types(x.dtype, weight.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
