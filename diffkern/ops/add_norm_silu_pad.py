r"""What stands between the convolutions of a video autoencoder, in one pass: sum, norm, SiLU, padding in time.

Numerical contract (``docs/numerics.md`` has the table):

* input, bias, residual and modulation in float32, float16 or bfloat16, in any mix; float64 by the eager provider;
* all arithmetic in float32, the sum included;
* rounds once, to the dtype of the input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffkern.ops.contract import TO_INPUT, ContractRow
from diffkern.ops.group_norm import is_channels_last
from diffkern.ops.registration import Op

CONTRACT = (
    ContractRow("add_norm_silu_pad", "norm", rounds=TO_INPUT),
    ContractRow("add_norm_silu_pad", "bias, scale and shift", arithmetic="float32, the sum too", rounds=TO_INPUT),
    ContractRow("add_norm_silu_pad", "bias and residual alone", rounds=TO_INPUT),
)


def add_norm_silu_pad(
    x: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 1e-8,
    *,
    norm: str | None = "rms",
    activation: str | None = "silu",
    pad: tuple[int, int] = (0, 0),
    memory_format: torch.memory_format | None = None,
    provider: str | None = None,
) -> Tensor:
    r"""Adds, normalises over the channels of every position, modulates, activates, and repeats the outer frames.

    .. math:: y = \operatorname{silu}\left(n \cdot (1 + s_{bc}) + t_{bc}\right), \quad
        n = h \cdot \left(\tfrac1C \sum_c h_c^2 + \epsilon\right)^{-1/2}, \quad
        h = x + b_c + r

    The result is what a convolution reads that pads with copies of the first and the last frame, and ``b`` is the
    bias of the convolution before.

    Args:
        x: Input of shape ``[B, C, T, H, W]``, any strides; float32, float16, bfloat16 or float64.
        bias: ``b`` of shape ``[C]``, or None.
        residual: ``r``, of a shape that broadcasts to that of ``x``, or None.
        scale: ``s`` of shape ``[B, C]``, or None.
        shift: ``t`` of shape ``[B, C]``, or None.
        eps: ``ε``.
        norm: ``"rms"``, or None for ``n = h``.
        activation: ``"silu"``, or None.
        pad: How many copies of the first frame come before it, and of the last one after it.
        memory_format: ``torch.contiguous_format`` or ``torch.channels_last_3d``, of the result; None for that of ``x``.
        provider: ``"compiled"``, ``"triton"`` or ``"eager"``; None chooses the first that can.

    Returns:
        A new tensor ``[B, C, pad[0] + T + pad[1], H, W]`` of the dtype of ``x``. Differentiable in the five tensors.

    Raises:
        TypeError: ``x`` is not floating point.
        ValueError: shapes or devices do not fit together, or an option is unknown.
        diffkern.providers.NoProviderError: the provider that was asked for cannot serve the call.
    """
    if residual is not None and residual.shape != x.shape:
        residual = residual.expand(x.shape)
    if memory_format is None:
        last = not x.is_contiguous() and is_channels_last(x)
        memory_format = torch.channels_last_3d if last else torch.contiguous_format
    options = eps, norm, activation, *pad, memory_format
    return _add_norm_silu_pad.call((x, bias, residual, scale, shift), options, provider)


def _check(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    if tensor is not None and tensor.shape != shape:
        raise ValueError(f"the {name} has shape {tuple(tensor.shape)}, and must have {shape}")


def _prepare(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, scale: Tensor | None, shift: Tensor | None, eps: float,
    norm: str | None, activation: str | None, front: int, back: int, memory_format: torch.memory_format,
) -> tuple[Any, ...]:  # fmt: skip
    if not x.is_floating_point():
        raise TypeError(f"a norm needs a floating point input, got {x.dtype}")
    if x.ndim != 5:
        raise ValueError(f"the input must have shape [B, C, T, H, W], got {tuple(x.shape)}")
    if norm not in ("rms", None):
        raise ValueError(f"unknown norm {norm!r}: choose 'rms' or None")
    if activation not in ("silu", None):
        raise ValueError(f"unknown activation {activation!r}: choose 'silu' or None")
    if memory_format not in (torch.contiguous_format, torch.channels_last_3d):
        raise ValueError(f"unknown memory format {memory_format}: choose contiguous_format or channels_last_3d")
    if front < 0 or back < 0 or (front + back and not x.shape[2]):
        raise ValueError(f"{x.shape[2]} frames cannot be padded by {(front, back)}")
    batch, channels = x.shape[:2]
    _check("bias", bias, (channels,))
    _check("residual", residual, x.shape)
    _check("scale", scale, (batch, channels))
    _check("shift", shift, (batch, channels))
    channels_last = memory_format is torch.channels_last_3d
    return x, bias, residual, scale, shift, eps, norm is not None, activation is not None, front, back, channels_last


def _fake(x: Tensor, front: int, back: int, channels_last: bool, **options: Any) -> Tensor:
    batch, channels, frames, height, width = x.shape
    return torch.empty(
        (batch, channels, front + frames + back, height, width),
        dtype=x.dtype,
        device=x.device,
        memory_format=torch.channels_last_3d if channels_last else torch.contiguous_format,
    )


_add_norm_silu_pad = Op("add_norm_silu_pad", _prepare, _fake)
