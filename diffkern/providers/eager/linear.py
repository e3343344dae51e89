"""linear_gelu by what torch has: on CUDA the epilogue of cublasLt, elsewhere the chain of two ops."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from diffkern.providers.eager.activation import apply

#: A float32 LTX block, which has this epilogue in it, lost its proof on an H100. That the epilogue is to blame is a
#: guess that no run has confirmed yet; float32 takes the chain until one has.
_HALF = (torch.float16, torch.bfloat16)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, function: str) -> Tensor:
    """Computes :func:`diffkern.ops.linear_gelu`."""
    if bias is not None and function == "gelu_tanh" and _has_epilogue(x, weight, bias):
        y = torch._addmm_activation(bias, x.reshape(-1, x.shape[-1]), weight.t(), use_gelu=True)
        return y.view(*x.shape[:-1], weight.shape[0])
    return apply(F.linear(x, weight, bias), function).contiguous()


def _has_epilogue(x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Whether the fused product takes these; whatever it does not, F.linear computes or complains about."""
    return (
        x.device.type == "cuda"
        and x.dtype in _HALF
        and x.dtype == weight.dtype == bias.dtype
        and x.device == weight.device == bias.device
        and all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in (x, weight, bias))
        and weight.ndim == 2
        and weight.shape[1] == x.shape[-1]
        and bias.shape == weight.shape[:1]
        and x.numel() > 0
    )
