"""Norms over rows, modulated norms and gated residuals by Triton: outputs, geometry and launch of ``norm_kernels``."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from diffkern.providers.eager.modulate import (
    LAYER,
    NO_ACTIVATION,
    NO_NORM,
    RMS,
    gated_shape,
    modulated_shape,
    promoted_dtype,
)
from diffkern.providers.eager.precision import empty_output
from diffkern.providers.triton.fp8 import empty, quantize_rows, rows_of_8_bits
from diffkern.providers.triton.launching import Plan, device_guard, for_rows, launch
from diffkern.providers.triton.norm_kernels import norm_kernel
from diffkern.providers.triton.rows import broadcast_strides, merge_loops, stride_of
from diffkern.providers.triton.tiles import LONGEST_TILE, choose_tile

# Rounding to float32 or more changes nothing, since that is what the kernel computes in.
_ROUND_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float32,
}
_NO_ROUNDINGS = (None,) * 7


def rms_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, weight_offset: float,
    round_dtype: torch.dtype | None, out_dtype: torch.dtype | None, clamp_eps: bool, preserve_strides: bool,
) -> Tensor:  # fmt: skip
    """Computes :func:`diffkern.ops.rms_norm` over the last dimension.

    Raises:
        TypeError: ``round_dtype`` is none of float16, bfloat16, float32 and float64.
    """
    y = empty_output(x, out_dtype, preserve_strides)
    norm = _Modulation(None, None, weight, bias, eps, RMS, 0.0, weight_offset, round_dtype, clamp_eps)
    _launch(None, x, None, NO_ACTIVATION, norm, False, None, y)
    return y


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out_dtype: torch.dtype | None,
    preserve_strides: bool,
) -> Tensor:  # fmt: skip
    """Computes :func:`diffkern.ops.layer_norm` over the last dimension."""
    y = empty_output(x, out_dtype, preserve_strides)
    _launch(None, x, None, NO_ACTIVATION, _Modulation(None, None, weight, bias, eps, LAYER), False, None, y)
    return y


def channel_rms_norm_silu(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, scale: Tensor | None, shift: Tensor | None, eps: float,
    clamp_eps: bool, silu: bool, round_dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """Computes :func:`diffkern.ops.channel_rms_norm_silu`: the channels of a position are a row.

    Raises:
        TypeError: as :func:`rms_norm`.
    """
    y = torch.empty_like(x)
    rows, out = x.movedim(1, -1), y.movedim(1, -1)
    scale, shift = (None if m is None else m.view(len(m), *(1,) * (x.ndim - 2), -1) for m in (scale, shift))
    norm = _Modulation(scale, shift, weight, bias, eps, RMS, 1.0, 0.0, round_dtype, clamp_eps, silu)
    _launch(None, rows, None, NO_ACTIVATION, norm, False, None, out)
    return y


def norm_modulate(
    x: Tensor, scale: Tensor | None, shift: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float,
    norm: int, scale_offset: float, round_each: bool, out_dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """Computes :func:`diffkern.ops.norm_modulate`."""
    shape = modulated_shape(x.shape, scale, shift, norm)
    y = empty(x, shape, out_dtype or promoted_dtype(x.dtype, scale, shift))
    modulation = _Modulation(scale, shift, weight, bias, eps, norm, scale_offset)
    _launch(None, x, None, NO_ACTIVATION, modulation, round_each, None, y)
    return y


def gate_residual(
    residual: Tensor, x: Tensor, gate: Tensor | None, gate_activation: int, round_each: bool,
    out_dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """Computes :func:`diffkern.ops.gate_residual`."""
    dtype = out_dtype or promoted_dtype(residual.dtype, x, gate)
    new = empty(residual, gated_shape(residual, x, gate), dtype)
    _launch(residual, x, gate, gate_activation, _Modulation(), round_each, new, None)
    return new


def gate_residual_norm_modulate(
    residual: Tensor, x: Tensor, gate: Tensor | None, scale: Tensor | None, shift: Tensor | None, weight: Tensor | None,
    bias: Tensor | None, eps: float, norm: int, gate_activation: int, scale_offset: float, round_each: bool,
    residual_dtype: torch.dtype | None, out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes :func:`diffkern.ops.gate_residual_norm_modulate`."""
    shape = gated_shape(residual, x, gate, scale, shift)
    new = empty(residual, shape, residual_dtype or promoted_dtype(residual.dtype, x, gate))
    y = empty(residual, shape, out_dtype or promoted_dtype(new.dtype, scale, shift))
    modulation = _Modulation(scale, shift, weight, bias, eps, norm, scale_offset)
    _launch(residual, x, gate, gate_activation, modulation, round_each, new, y)
    return new, y


def norm_modulate_fp8(
    x: Tensor, scale: Tensor | None, shift: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float,
    norm: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes :func:`diffkern.ops.norm_modulate_fp8`."""
    shape = modulated_shape(x.shape, scale, shift, norm)
    if shape[-1] > LONGEST_TILE:  # no program holds such a row
        return quantize_rows(norm_modulate(x, scale, shift, weight, bias, eps, norm, 1.0, False, torch.float32))
    values, scales = rows_of_8_bits(x, shape)
    modulation = _Modulation(scale, shift, weight, bias, eps, norm, 1.0)
    _launch(None, x, None, NO_ACTIVATION, modulation, False, None, None, values, scales)
    return values, scales


def gate_residual_norm_modulate_fp8(
    residual: Tensor, x: Tensor, gate: Tensor | None, scale: Tensor | None, shift: Tensor | None,
    weight: Tensor | None, bias: Tensor | None, eps: float, norm: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes :func:`diffkern.ops.gate_residual_norm_modulate_fp8`."""
    shape = gated_shape(residual, x, gate, scale, shift)
    if shape[-1] > LONGEST_TILE:
        new, y = gate_residual_norm_modulate(
            residual, x, gate, scale, shift, weight, bias, eps, norm, NO_ACTIVATION, 1.0, False, None, torch.float32
        )
        return (new, *quantize_rows(y))
    new = empty(residual, shape, promoted_dtype(residual.dtype, x, gate))
    values, scales = rows_of_8_bits(residual, shape)
    modulation = _Modulation(scale, shift, weight, bias, eps, norm, 1.0)
    _launch(residual, x, gate, NO_ACTIVATION, modulation, False, new, None, values, scales)
    return new, values, scales


class _Modulation(NamedTuple):
    """What happens to a row after it was read, or summed."""

    scale: Tensor | None = None
    shift: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 0.0
    norm: int = NO_NORM
    scale_offset: float = 0.0
    weight_offset: float = 0.0
    round_dtype: torch.dtype | None = None
    clamp_eps: bool = False
    silu: bool = False


def _launch(
    residual: Tensor | None, x: Tensor, gate: Tensor | None, activation: int, modulation: _Modulation, round_each: bool,
    new: Tensor | None, y: Tensor | None, rows: Tensor | None = None, row_scales: Tensor | None = None,
) -> None:  # fmt: skip
    out = new if new is not None else y if y is not None else rows
    assert out is not None
    if out.numel() == 0:
        return
    scale, shift, weight, bias, eps, norm, scale_offset, weight_offset, round_dtype, clamp_eps, silu = modulation
    if round_dtype is not None and round_dtype not in _ROUND_DTYPES:
        raise TypeError(f"the Triton norms cannot round to {round_dtype}: use the eager provider for it")
    operands: list[Tensor | None] = [residual, x, gate, scale, shift]
    options = (
        *(stride_of(weight), stride_of(bias), float(eps), float(scale_offset), float(weight_offset)),
        *(norm, clamp_eps, silu, activation),
        (round_dtype, *(_roundings(residual, x, gate, modulation, new) if round_each else _NO_ROUNDINGS)),
    )
    shape, dense_y = out.shape, y
    plan = _plan(shape, options, out.stride(), *[None if t is None else (t.shape, t.stride()) for t in operands])
    if plan is None:
        # More loops than the kernel has: by way of tensors that are laid out densely, as all results but y are.
        operands = [None if t is None else t.expand(shape).contiguous() for t in operands]
        dense_y = None if y is None else y.contiguous()
        strides = out.contiguous().stride()
        plan = _plan(shape, options, strides, *[None if t is None else (t.shape, t.stride()) for t in operands])
        assert plan is not None
    device, kernel = x.device, for_rows(norm_kernel, shape[-1])
    with device_guard(device):
        launch(plan, kernel, (*operands, weight, bias, new, dense_y, rows, row_scales), device)
    if y is not None and dense_y is not None and dense_y is not y:
        y.copy_(dense_y)


def _roundings(
    residual: Tensor | None, x: Tensor, gate: Tensor | None, modulation: _Modulation, new: Tensor | None
) -> tuple[torch.dtype | None, ...]:
    """Where a chain of torch ops rounds, in the order of the kernel's parameters."""
    gated = x.dtype if gate is None else promoted_dtype(x.dtype, gate)
    summed = x.dtype if residual is None else torch.promote_types(residual.dtype, gated)
    normed = x.dtype if new is None else new.dtype
    product = promoted_dtype(normed, modulation.scale)
    return (
        None if gate is None else gate.dtype,
        gated,
        summed,
        normed,
        None if modulation.scale is None else modulation.scale.dtype,
        product,
        promoted_dtype(product, modulation.shift),
    )


_Layout = tuple[tuple[int, ...], tuple[int, ...]]


@lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, ...], options: tuple[Any, ...], out_strides: tuple[int, ...], *operands: _Layout | None
) -> Plan | None:
    """Plans the launch for a non-empty output; None if the rows need more than three loops.

    Args:
        shape: The shape of the output.
        options: The kernel's arguments from ``w_stride`` to ``ACTIVATION``, and the dtypes to round to.
        out_strides: The strides of the output.
        operands: Shape and strides of residual, x, gate, scale and shift.
    """
    row_length = shape[-1]
    strides = [out_strides]
    strides += [(0,) * len(shape) if layout is None else broadcast_strides(*layout, shape) for layout in operands]
    loops = merge_loops(shape[:-1], [own[:-1] for own in strides])
    if loops is None:
        return None
    # A single element may carry any stride; 1 spares a variant of the kernel.
    columns = [own[-1] if row_length > 1 else 1 for own in strides]
    size0, size1, size2 = loops.sizes
    x_index = 2
    neighbours = size0 > 1 and 0 < loops.strides[x_index][0] < columns[x_index]
    tile = choose_tile(row_length, rows_are_neighbours=neighbours)
    tiles = -(-size0 // tile.rows)
    *numbers, roundings = options
    rest = (
        *(row_length, size0, size1, tiles, *(stride for triple in loops.strides for stride in triple), *columns),
        *(*numbers, *(None if dtype is None else _ROUND_DTYPES[dtype] for dtype in roundings)),
        *(loops.nested, tile.rows, tile.cols, -(-row_length // tile.cols)),
    )
    return Plan((tiles * size1 * size2,), rest, {"num_warps": tile.num_warps, "enable_fp_fusion": False})
