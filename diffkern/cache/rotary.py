r"""Rotary embeddings that are no tables yet, as those of :func:`diffkern.ops.rope`, once in a call of the model.

They are angles, one 2x2 matrix per pair, rows of tables of axes, or tables in float64. Of full tables that are kept
from step to step the tables of each axis, which are small, may be known.

Matrices are not assumed to be rotations. With a cosine and a sine for each element of a pair the op computes
:math:`y_a = x_a c_a - x_b s_a,\ y_b = x_b c_b + x_a s_b`, which is any matrix for
:math:`c_a, s_a, c_b, s_b = m_{00}, -m_{01}, m_{11}, m_{10}`, and the products and sums are those of the matrix.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from diffkern.cache.derived import TensorFingerprint, match_all
from diffkern.cache.in_call import once_in_call
from diffkern.providers import KERNEL_DTYPES

Tables = tuple[Tensor, Tensor]

_FORMS = ("interleaved", "half")
#: In the place of a pairing: what is given are angles, not matrices.
ANGLES = "angles"


@dataclass(frozen=True)
class AxialTables:
    """Rotary tables by axis, as :func:`diffkern.ops.rope_3d` takes them; the pairs of a row go through them in turn."""

    cos: tuple[Tensor, ...]  # cosines of the frames ``[F, n]``, lines ``[H, n]`` and columns ``[W, n]``, float32
    sin: tuple[Tensor, ...]  # sines, likewise
    grid: tuple[int, int, int]  # ``(F, H, W)``
    front_pad: int  # pairs in front that are not rotated

    #: The order of the pairs of a row.
    order = "alternating"


@dataclass(frozen=True, eq=False)
class KeptTables:
    """Full tables that a model is given at every step of a run, and what kernels read in their place."""

    tables: Tables  # cosines and sines
    fingerprints: tuple[TensorFingerprint, ...]  # of both
    axes: AxialTables | None  # the same by axis; None if they are no products of a grid

    def is_valid(self) -> bool:
        """Whether nothing was written into the tables."""
        return match_all(self.fingerprints, self.tables)


#: Tables of cosines that are kept -> all that is kept with them, weakly.
_kept: Any = WeakIdKeyDictionary()


def keep_axes(kept: KeptTables) -> None:
    """Makes the axes of full tables known for as long as ``kept`` lives."""
    _kept[kept.tables[0]] = weakref.ref(kept)


def by_axis(tables: Sequence[Tensor], samples: int | None = None) -> Mapping[str, Any] | None:
    """Returns full tables ``[B, S, D]`` as the arguments of :func:`diffkern.ops.qk_norm_rope` for tables by axis.

    None for tables of which no axes are kept, for written ones, for tables of more ``samples`` than are rotated, or of
    too few, which axes know nothing of, and in a graph of the compiler.
    """
    if torch.compiler.is_compiling() or len(tables) != 2:
        return None
    axes = _axes_of(*tables)
    if axes is None or tables[0].shape[0] not in (1, samples or tables[0].shape[0]):
        return None
    # A recorded call asks again: for other tables it is another call.
    parts = once_in_call(_parts, *tables, axes.grid, axes.front_pad)
    rest = {"grid": axes.grid, "order": axes.order, "front_pad": axes.front_pad}
    return {"cos": parts[:3], "sin": parts[3:], **rest}


def _axes_of(cos: Tensor, sin: Tensor) -> AxialTables | None:
    reference = _kept.get(cos)
    kept: KeptTables | None = None if reference is None else reference()
    return kept.axes if kept is not None and kept.tables[1] is sin and kept.is_valid() else None


def _parts(cos: Tensor, sin: Tensor, grid: tuple[int, int, int], front_pad: int) -> tuple[Tensor, ...]:
    axes = _axes_of(cos, sin)
    if axes is None or axes.grid != grid or axes.front_pad != front_pad:
        raise RuntimeError("the tables are not those of a grid of this size")
    return (*axes.cos, *axes.sin)


def rotary_tables(matrices: Tensor, pairing: str) -> Tables:
    """Returns cosines and sines ``[..., D]`` for matrices ``[..., D/2, 2, 2]``, or for angles ``[..., D]``.

    They are made once in a call of the model, see :func:`diffkern.cache.in_call.once_in_call`. The pairing is that of
    :func:`diffkern.ops.rope`, or :data:`ANGLES`.
    """
    return once_in_call(_compute, matrices, pairing)


def axis_tables(given: Sequence[Tensor]) -> Tables:
    """Returns cosines and sines ``[..., N, D]`` of tokens, the rows that they have in the tables of N axes.

    Args:
        given: Cosines ``[rows, D]`` and sines of each axis in turn, and then ``[...]`` indices of each axis.

    Raises:
        ValueError: they are not three tensors for each axis.
    """
    if len(given) % 3:
        raise ValueError(f"cosines, sines and indices of axes are three tensors for each, got {len(given)}")
    return once_in_call(_rows, *given)


def in_float32(table: Tensor) -> Tensor:
    """Returns a table in float64 in float32, a complex one in complex64, and others as they are."""
    return once_in_call(_narrowed, table) if table.dtype in _NARROW else table


def unfit_matrices(matrices: Any, device: torch.device, *lead: int) -> str | None:
    """Why matrices cannot be turned into tables for inputs on ``device`` with leading dimensions ``lead``, or None."""
    if type(matrices) is not Tensor or matrices.layout is not torch.strided:
        return "its rotary matrices are not a plain tensor"
    if matrices.ndim != len(lead) + 3 or matrices.shape[-2:] != (2, 2):
        return "its rotary matrices are not one 2x2 matrix for each pair"
    if any(own not in (1, size) for own, size in zip(matrices.shape, lead, strict=False)):
        return "its rotary matrices are not those of its tokens"
    if matrices.dtype not in KERNEL_DTYPES or matrices.device != device:
        return "its rotary matrices are on another device, or of a dtype that kernels do not read"
    return None


def on_device(table: Tensor, device: torch.device) -> Tensor:
    """Returns a table on a device: some models make theirs on the CPU, and move them in each block."""
    return table if table.device == device else once_in_call(_moved, table, device)


def _moved(table: Tensor, device: torch.device) -> Tensor:
    return table.to(device)


_NARROW = {torch.float64: torch.float32, torch.complex128: torch.complex64}


def _narrowed(table: Tensor) -> Tensor:
    return table.to(_NARROW[table.dtype])


def _rows(*given: Tensor) -> Tables:
    tables, indices = given[: len(given) // 3 * 2], given[len(given) // 3 * 2 :]
    cos, sin = [
        torch.stack([F.embedding(index, table) for index, table in zip(indices, tables[side::2], strict=True)], dim=-2)
        for side in (0, 1)
    ]
    return cos, sin


def _compute(matrices: Tensor, pairing: str) -> Tables:
    if pairing == ANGLES:
        angles = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
        return angles.cos(), angles.sin()
    halves = pairing == _FORMS[1]
    pairs = matrices.diagonal(dim1=-2, dim2=-1), matrices.flatten(-2)[..., 1:3]  # (m00, m11), (m01, m10)
    cos, sin = [(pair.mT if halves else pair).clone(memory_format=torch.contiguous_format) for pair in pairs]
    sin.select(-2 if halves else -1, 0).neg_()
    return cos.flatten(-2), sin.flatten(-2)
