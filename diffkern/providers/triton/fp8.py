"""Activations into rows of 8 bits, by Triton: outputs, geometry and launch of ``fp8_kernels``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diffkern.providers.eager.fp8 import E4M3
from diffkern.providers.triton.fp8_kernels import activation_fp8_kernel
from diffkern.providers.triton.launching import device_guard
from diffkern.providers.triton.tiles import choose_tile


def activation_fp8(x: Tensor, function: str) -> tuple[Tensor, Tensor]:
    """Computes :func:`diffkern.ops.activation_fp8`."""
    values, scales = rows_of_8_bits(x.shape, x.device)
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x
    if x.numel():
        length = rows.shape[1]
        tile = choose_tile(length, rows_are_neighbours=False)
        with device_guard(x.device):
            activation_fp8_kernel[(-(-rows.shape[0] // tile.rows),)](
                rows, values, scales, rows.shape[0], length, *rows.stride(),
                function, tile.rows, tile.cols, -(-length // tile.cols), num_warps=tile.num_warps,
            )  # fmt: skip
    return values, scales


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Brings each row into 8 bits as it is."""
    return activation_fp8(x, "identity")


def rows_of_8_bits(shape: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Uninitialised values in e4m3, and the scale of each row."""
    scales = torch.empty((*shape[:-1], 1), dtype=torch.float32, device=device)
    return torch.empty(tuple(shape), dtype=E4M3, device=device), scales
