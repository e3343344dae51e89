"""The precision that the reference computes in, and how its results lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Returns float64 if one of the tensors is float64, and float32 otherwise."""
    wide = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


def empty_output(x: Tensor, dtype: torch.dtype | None, preserve_strides: bool) -> Tensor:
    """A tensor for the result of a norm: in the strides of a pointwise op, or contiguous."""
    memory_format = torch.preserve_format if preserve_strides else torch.contiguous_format
    return torch.empty_like(x, dtype=dtype, memory_format=memory_format)


def finish(y: Tensor, x: Tensor, dtype: torch.dtype, preserve_strides: bool) -> Tensor:
    """Returns ``y`` in a dtype and laid out as :func:`empty_output`."""
    if not preserve_strides:
        return y.to(dtype, memory_format=torch.contiguous_format).contiguous()
    return laid_out_like(x, y.to(dtype))


def laid_out_like(x: Tensor, y: Tensor) -> Tensor:
    """Returns ``y`` in the strides of ``torch.empty_like(x)``."""
    if x.is_contiguous() and y.stride() == x.stride():
        return y
    out = torch.empty_like(x, dtype=y.dtype)
    return y if y.stride() == out.stride() else out.copy_(y)
