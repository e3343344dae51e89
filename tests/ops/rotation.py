"""Rotary embedding as the models write it, and in float64 with the error that a right result may have."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.ops.reference import FLOAT32_SLACK, half_unit


def spread(table: Tensor, pairing: str, rotary: int) -> Tensor:
    """One angle per element, from one per element or one per pair."""
    if table.shape[-1] == rotary:
        return table
    return table.repeat_interleave(2, -1) if pairing == "interleaved" else torch.cat((table, table), -1)


def turned(x: Tensor, pairing: str) -> Tensor:
    """Every element's partner, the first ones' with a minus sign."""
    if pairing == "interleaved":
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((-second, first), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def chain(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    pairing: str = "interleaved",
    arithmetic: str = "float32",
    rotary: int | None = None,
) -> Tensor:
    """The chain of torch ops whose result rope has to equal bit for bit."""
    rotary = x.shape[-1] if rotary is None else rotary
    part, rest = x[..., :rotary], x[..., rotary:]
    cos, sin = (spread(table, pairing, rotary) for table in (cos, sin))
    if arithmetic == "input":
        result = part * cos.to(x.dtype) + turned(part, pairing) * sin.to(x.dtype)
    else:
        dtype = torch.float64 if arithmetic == "float64" or x.dtype == torch.float64 else torch.float32
        result = (part.to(dtype) * cos.to(dtype) + turned(part, pairing).to(dtype) * sin.to(dtype)).to(x.dtype)
    return torch.cat((result, rest), -1)


def truth(normed: Tensor, cos: Tensor, sin: Tensor, pairing: str, rotary: int) -> Tensor:
    """The rotation in float64."""
    return chain(normed.double(), cos.double(), sin.double(), pairing, "float64", rotary)


def norm_truth(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: str | None, eps: float, offset: float = 0.0
) -> Tensor:
    """The norm in float64."""
    wide = x.double()
    if norm is None:
        return wide
    if norm == "layer":
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        wide = wide * (weight.double() + offset)
    return wide if bias is None else wide + bias.double()


def bound(result: Tensor, scale: float, dtype: torch.dtype, roundings: int = 1) -> Tensor:
    """The admissible error of elements that come from sums of terms up to about ``scale``."""
    return (half_unit(dtype) * roundings + 4 * FLOAT32_SLACK) * (result.abs() + scale) + torch.finfo(
        dtype
    ).smallest_normal


def angles(
    *shape: int, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of unrelated angles: a table of nothing that could be mistaken for another."""
    values = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.cos().to(device, dtype), values.sin().to(device, dtype)


def axis_tables(
    sizes: tuple[int, ...], widths: tuple[int, ...], device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], list[Tensor]]:
    """One table of cosines and one of sines per axis."""
    pairs = [
        angles(size, width, seed=10 + i, device=device, dtype=dtype)
        for i, (size, width) in enumerate(zip(sizes, widths, strict=True))
    ]
    return [cos for cos, _ in pairs], [sin for _, sin in pairs]


def random(*shape: int, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """A reproducible normal tensor, made on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)
