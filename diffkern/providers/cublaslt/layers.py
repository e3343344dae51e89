"""Linear layers by the library that torch multiplies with: its algorithm, or a faster one that gives the same bits.

The activation is in the epilogue of cublasLt, where that is the library; elsewhere a layer is the chain of two ops.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from diffkern.providers.cublaslt.choice import multiply
from diffkern.providers.cublaslt.product import Scales
from diffkern.providers.eager.activation import apply
from diffkern.providers.eager.fp8 import multiply_rows

#: A float32 LTX block, which has this epilogue in it, lost its proof on an H100. That the epilogue is to blame is a
#: guess that no run has confirmed yet; float32 takes the chain until one has.
_HALF = (torch.float16, torch.bfloat16)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, function: str) -> Tensor:
    """Computes :func:`diffkern.ops.linear_gelu`."""
    if bias is not None and function == "gelu_tanh" and _has_epilogue(x, weight, bias):
        if torch.compiler.is_compiling():
            return _gelu_of_linear(x, weight, bias, None, None)
        return multiply(x, weight, bias, None, None, True, _gelu_of_linear)
    return apply(F.linear(x, weight, bias), function).contiguous()


def linear_gelu_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, function: str) -> Tensor:
    """Computes :func:`linear_gelu` into ``out``, whose rows are dense; returns it."""
    if bias is not None and function == "gelu_tanh" and _has_epilogue(x, weight, bias):
        multiply(as_matrix(x), weight, bias, as_matrix(out), None, True, _gelu_of_linear)
        return out
    return out.copy_(apply(F.linear(x, weight, bias), function))


def as_matrix(x: Tensor) -> Tensor:
    """The rows of ``x``, one below the other; also of rows without elements, which ``reshape(-1, 0)`` cannot count."""
    return x.flatten(0, -2) if x.ndim > 1 else x[None]


def linear_rows(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Computes :func:`diffkern.ops.linear_fp8`, of a matrix maybe into ``out``, which is contiguous."""
    if out_dtype is torch.bfloat16:
        return multiply(x, weight, bias, out, (x_scale, weight_scale), False, _linear_rows)
    return multiply_rows(x, x_scale, weight, weight_scale, bias, out_dtype, out)


def _gelu_of_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None, scales: Scales | None
) -> Tensor:
    assert bias is not None
    y = torch._addmm_activation(bias, as_matrix(x), weight.t(), use_gelu=True)
    if out is not None:
        return out.copy_(y)
    return y.view(*x.shape[:-1], weight.shape[0])


def _linear_rows(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None, scales: Scales | None) -> Tensor:
    assert scales is not None
    return multiply_rows(x, scales[0], weight, scales[1], bias, torch.bfloat16, out)


def may_have_epilogue(device_type: str, *dtypes: torch.dtype) -> bool:
    """Whether GELU can be computed in the product itself for operands of these dtypes."""
    return device_type == "cuda" and all(dtype in _HALF for dtype in dtypes)


def _has_epilogue(x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Whether the fused product takes these; whatever it does not, F.linear computes or complains about."""
    return (
        may_have_epilogue(x.device.type, x.dtype)
        and x.dtype == weight.dtype == bias.dtype
        and x.device == weight.device == bias.device
        and all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in (x, weight, bias))
        and weight.ndim == 2
        and weight.shape[1] == x.shape[-1]
        and bias.shape == weight.shape[:1]
        and x.numel() > 0
        # Rows that do not begin at 16 bytes go to kernels that round the product before the activation.
        and weight.shape[0] % 8 == weight.shape[1] % 8 == 0
    )
