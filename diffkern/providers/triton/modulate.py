"""Modulated norms and gated residuals by Triton: outputs, geometry and launch of ``modulate_kernels``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton.language as tl
from torch import Tensor

from diffkern.providers.eager.modulate import NO_ACTIVATION, NO_NORM, gated_shape, modulated_shape, promoted_dtype
from diffkern.providers.triton.fp8 import quantize_rows, rows_of_8_bits
from diffkern.providers.triton.launching import device_guard, for_rows
from diffkern.providers.triton.modulate_kernels import modulate_kernel
from diffkern.providers.triton.rows import broadcast_strides, merge_loops
from diffkern.providers.triton.tiles import LONGEST_TILE, Tile, choose_tile

# Rounding to float32 changes nothing, since that is what the kernel computes in.
_ROUND_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: None}


def norm_modulate(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm: int,
    scale_offset: float,
    round_each: bool,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """Computes :func:`diffkern.ops.norm_modulate`."""
    shape = modulated_shape(x.shape, scale, shift, norm)
    y = x.new_empty(shape, dtype=out_dtype or promoted_dtype(x.dtype, scale, shift))
    modulation = _Modulation(scale, shift, weight, bias, eps, norm, scale_offset)
    _launch(None, x, None, NO_ACTIVATION, modulation, round_each, None, y)
    return y


def gate_residual(
    residual: Tensor,
    x: Tensor,
    gate: Tensor | None,
    gate_activation: int,
    round_each: bool,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """Computes :func:`diffkern.ops.gate_residual`."""
    dtype = out_dtype or promoted_dtype(residual.dtype, x, gate)
    new = residual.new_empty(gated_shape(residual, x, gate), dtype=dtype)
    _launch(residual, x, gate, gate_activation, _Modulation(), round_each, new, None)
    return new


def gate_residual_norm_modulate(
    residual: Tensor,
    x: Tensor,
    gate: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm: int,
    gate_activation: int,
    scale_offset: float,
    round_each: bool,
    residual_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Computes :func:`diffkern.ops.gate_residual_norm_modulate`."""
    shape = gated_shape(residual, x, gate, scale, shift)
    new = residual.new_empty(shape, dtype=residual_dtype or promoted_dtype(residual.dtype, x, gate))
    y = residual.new_empty(shape, dtype=out_dtype or promoted_dtype(new.dtype, scale, shift))
    modulation = _Modulation(scale, shift, weight, bias, eps, norm, scale_offset)
    _launch(residual, x, gate, gate_activation, modulation, round_each, new, y)
    return new, y


def norm_modulate_fp8(
    x: Tensor, scale: Tensor | None, shift: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float,
    norm: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes :func:`diffkern.ops.norm_modulate_fp8`."""
    if x.shape[-1] > LONGEST_TILE:  # no program holds such a row
        return quantize_rows(norm_modulate(x, scale, shift, weight, bias, eps, norm, 1.0, False, torch.float32))
    values, scales = rows_of_8_bits(modulated_shape(x.shape, scale, shift, norm), x.device)
    modulation = _Modulation(scale, shift, weight, bias, eps, norm, 1.0)
    _launch(None, x, None, NO_ACTIVATION, modulation, False, None, values, scales)
    return values, scales


def gate_residual_norm_modulate_fp8(
    residual: Tensor, x: Tensor, gate: Tensor | None, scale: Tensor | None, shift: Tensor | None,
    weight: Tensor | None, bias: Tensor | None, eps: float, norm: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes :func:`diffkern.ops.gate_residual_norm_modulate_fp8`."""
    if x.shape[-1] > LONGEST_TILE:
        new, y = gate_residual_norm_modulate(
            residual, x, gate, scale, shift, weight, bias, eps, norm, NO_ACTIVATION, 1.0, False, None, torch.float32
        )
        return (new, *quantize_rows(y))
    shape = gated_shape(residual, x, gate, scale, shift)
    new = residual.new_empty(shape, dtype=promoted_dtype(residual.dtype, x, gate))
    values, scales = rows_of_8_bits(shape, x.device)
    modulation = _Modulation(scale, shift, weight, bias, eps, norm, 1.0)
    _launch(residual, x, gate, NO_ACTIVATION, modulation, False, new, values, scales)
    return new, values, scales


@dataclass(frozen=True)
class _Modulation:
    """What happens to a row after it was read, or summed."""

    scale: Tensor | None = None
    shift: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 0.0
    norm: int = NO_NORM
    scale_offset: float = 0.0


@dataclass(frozen=True)
class _Plan:
    """What a launch needs beyond the tensors and the numbers of the op.

    Attributes:
        grid: Number of programs.
        geometry: The kernel's arguments from ``row_length`` to ``h_stride``.
        nested: Whether the rows need more than one loop.
        tile: The share of one program.
        steps: Blocks of ``tile.cols`` columns in a row.
    """

    grid: tuple[int]
    geometry: tuple[int, ...]
    nested: bool
    tile: Tile
    steps: int


def _launch(
    residual: Tensor | None,
    x: Tensor,
    gate: Tensor | None,
    activation: int,
    modulation: _Modulation,
    round_each: bool,
    new: Tensor | None,
    y: Tensor | None,
    y_scale: Tensor | None = None,
) -> None:
    out = y if new is None else new
    assert out is not None
    if out.numel() == 0:
        return
    operands = [residual, x, gate, modulation.scale, modulation.shift]
    plan = _plan(tuple(out.shape), *(None if t is None else (tuple(t.shape), t.stride()) for t in operands))
    if plan is None:
        # More loops than the kernel has: by way of operands that are laid out like the output.
        operands = [None if t is None else t.expand(out.shape).contiguous() for t in operands]
        plan = _plan(tuple(out.shape), *(None if t is None else (tuple(t.shape), t.stride()) for t in operands))
        assert plan is not None
    with device_guard(x.device):
        for_rows(modulate_kernel, out.shape[-1])[plan.grid](
            *operands, modulation.weight, modulation.bias, new, y, y_scale,
            *plan.geometry, _stride(modulation.weight), _stride(modulation.bias),
            modulation.eps, modulation.scale_offset, modulation.norm, activation,
            *(_roundings(residual, x, gate, modulation, new) if round_each else (None,) * 7),
            plan.nested, plan.tile.rows, plan.tile.cols, plan.steps,
            num_warps=plan.tile.num_warps, enable_fp_fusion=False,
        )  # fmt: skip


def _roundings(
    residual: Tensor | None, x: Tensor, gate: Tensor | None, modulation: _Modulation, new: Tensor | None
) -> tuple[tl.dtype | None, ...]:
    """Where a chain of torch ops rounds, in the order of the kernel's parameters."""
    gated = x.dtype if gate is None else promoted_dtype(x.dtype, gate)
    summed = x.dtype if residual is None else torch.promote_types(residual.dtype, gated)
    normed = x.dtype if new is None else new.dtype
    product = promoted_dtype(normed, modulation.scale)
    dtypes = (
        None if gate is None else gate.dtype,
        gated,
        summed,
        normed,
        None if modulation.scale is None else modulation.scale.dtype,
        product,
        promoted_dtype(product, modulation.shift),
    )
    return tuple(None if dtype is None else _ROUND_DTYPES[dtype] for dtype in dtypes)


_Layout = tuple[tuple[int, ...], tuple[int, ...]]


@lru_cache(maxsize=4096)
def _plan(shape: tuple[int, ...], *operands: _Layout | None) -> _Plan | None:
    """Plans the launch for a non-empty output; None if the rows need more than three loops."""
    row_length = shape[-1]
    out_strides = torch.empty(shape, device="meta").stride()
    strides = [(0,) * len(shape) if layout is None else broadcast_strides(*layout, shape) for layout in operands]
    loops = merge_loops(shape[:-1], [out_strides[:-1], *(own[:-1] for own in strides)])
    if loops is None:
        return None
    # A single element may carry any stride; 1 spares a variant of the kernel.
    columns = [own[-1] if row_length > 1 else 1 for own in strides]
    size0, size1, size2 = loops.sizes
    x_index = 1
    neighbours = size0 > 1 and 0 < loops.strides[1 + x_index][0] < columns[x_index]
    tile = choose_tile(row_length, rows_are_neighbours=neighbours)
    tiles = -(-size0 // tile.rows)
    geometry = (row_length, size0, size1, tiles, *(stride for triple in loops.strides for stride in triple), *columns)
    return _Plan((tiles * size1 * size2,), geometry, loops.nested, tile, -(-row_length // tile.cols))


def _stride(parameter: Tensor | None) -> int:
    return 1 if parameter is None else parameter.stride(0)
