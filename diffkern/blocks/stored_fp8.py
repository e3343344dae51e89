"""Weights that another library holds in fp8 (e4m3): where their bytes and scales are, to be used as they are."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from diffkern.providers.eager.fp8 import E4M3


class StoredWeight(NamedTuple):
    """``[N, K]`` in e4m3, row-major, and a scale for each row, ``[N, 1]`` in float32."""

    values: Tensor
    scales: Tensor


def stored_weight(weight: Any) -> StoredWeight | None:
    """The parts of a weight of torchao's ``Float8Tensor``, whose configurations make one scale a row by default.

    None for any other weight, also for one of another fp8 format or with other blocks, which its library computes with.
    """
    kind = type(weight)
    if kind.__name__ != "Float8Tensor" or not kind.__module__.startswith("torchao."):
        return None
    values, scales = weight.qdata, weight.scale
    plain = type(values) is type(scales) is Tensor and values.ndim == 2 and values.is_contiguous()
    if not plain or values.dtype is not E4M3 or scales.dtype is not torch.float32:
        return None
    return StoredWeight(values, scales) if scales.shape == (values.shape[0], 1) and scales.is_contiguous() else None


def dequantized(layer: nn.Module, dtype: torch.dtype) -> nn.Linear | None:
    """A layer of torch that has the weight of ``layer`` as numbers of ``dtype``; None if it holds no such weight."""
    stored, bias = stored_weight(layer._parameters.get("weight")), layer._parameters.get("bias")
    if stored is None:
        return None
    rows, columns = stored.values.shape
    plain = nn.Linear(columns, rows, bias is not None, device="meta", dtype=dtype)
    plain.weight = nn.Parameter(stored.values.to(dtype) * stored.scales.to(dtype), requires_grad=False)
    if bias is not None:
        plain.bias = nn.Parameter(bias.detach().to(dtype), requires_grad=False)
    return plain
