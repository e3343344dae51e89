"""Tensors in every layout that models hand to a norm, inside buffers of NaN that nobody may read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

#: From (batch, rows, row length) to the shape of a buffer, and from the buffer to the view under test.
BufferShape = Callable[[int, int, int], tuple[int, ...]]
View = Callable[[Tensor, int, int, int], Tensor]


@dataclass(frozen=True)
class Layout:
    """A way in which a ``[..., D]`` view lies inside a larger buffer."""

    name: str
    buffer: BufferShape
    view: View


_HEADS = 3

LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("contiguous", lambda b, s, d: (b, s, d), lambda t, b, s, d: t),
        Layout("vector", lambda b, s, d: (d,), lambda t, b, s, d: t),
        Layout("matrix", lambda b, s, d: (b * s, d), lambda t, b, s, d: t),
        Layout("transposed", lambda b, s, d: (b, d, s), lambda t, b, s, d: t.transpose(1, 2)),
        Layout("batch_transposed", lambda b, s, d: (s, b, d), lambda t, b, s, d: t.transpose(0, 1)),
        Layout("every_second_row", lambda b, s, d: (b, 2 * s, d), lambda t, b, s, d: t[:, ::2]),
        Layout("every_second_column", lambda b, s, d: (b, s, 2 * d), lambda t, b, s, d: t[..., ::2]),
        Layout("qkv_chunk", lambda b, s, d: (b, s, 3 * d), lambda t, b, s, d: t.chunk(3, -1)[1] if d else t),
        Layout(
            "heads_of_qkv",
            lambda b, s, d: (b, s, 3 * _HEADS * d),
            lambda t, b, s, d: t[..., : _HEADS * d].unflatten(-1, (_HEADS, d)),
        ),
        Layout(
            "heads_first",
            lambda b, s, d: (b, s, 3 * _HEADS * d),
            lambda t, b, s, d: t[..., _HEADS * d : 2 * _HEADS * d].unflatten(-1, (_HEADS, d)).transpose(1, 2),
        ),
        Layout("expanded", lambda b, s, d: (b, 1, d), lambda t, b, s, d: t.expand(b, s, d)),
        Layout("offset_by_one", lambda b, s, d: (1 + b * s * d,), lambda t, b, s, d: t[1:].view(b, s, d)),
        Layout("channel_first", lambda b, s, d: (b, d, s, 2, 3), lambda t, b, s, d: t.movedim(1, -1)),
        Layout("three_loops", lambda b, s, d: (b, 3, s, 3, 2 * d), lambda t, b, s, d: t[:, :2, :, :2, :d]),
        Layout("four_loops", lambda b, s, d: (b, 3, s + 1, 3, d), lambda t, b, s, d: t[:, :2, :s, :2]),
    )
}


def make(
    layout: str,
    batch: int,
    rows: int,
    length: int,
    dtype: torch.dtype,
    device: str,
    *,
    seed: int = 0,
    scale: float = 1.0,
    shift: float = 0.0,
) -> Tensor:
    """Returns ``scale * randn + shift`` as a view of the named layout; all else in its buffer is NaN."""
    chosen = LAYOUTS[layout]
    buffer = torch.full(chosen.buffer(batch, rows, length), torch.nan, dtype=dtype, device=device)
    x = chosen.view(buffer, batch, rows, length)
    target = buffer if layout == "expanded" else x
    values = torch.randn(target.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    target.copy_((scale * values + shift).to(dtype))
    return x


def make_parameter(kind: str, length: int, dtype: torch.dtype, device: str, *, seed: int = 1) -> Tensor | None:
    """A weight or bias around 1: ``"none"``, ``"plain"``, ``"strided"`` (in steps of 2) or ``"offset"``."""
    if kind == "none":
        return None
    values = 1 + 0.5 * torch.randn(length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    stride, offset = (2, 0) if kind == "strided" else (1, 1) if kind == "offset" else (1, 0)
    buffer = torch.full((offset + stride * length,), torch.nan, dtype=dtype, device=device)
    return buffer[offset::stride].copy_(values.to(dtype))


def storage_of(x: Tensor) -> Tensor:
    """A copy of all bytes of the buffer behind ``x``."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage()).clone()
