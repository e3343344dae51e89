"""What the ops with a rotation share: the checks of their tables, and the gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from diffkern.ops.registration import Op, R
from diffkern.providers.eager import compute_dtype
from diffkern.providers.eager import rope as reference
from diffkern.providers.eager.rope import ARITHMETICS, FLOAT32, INPUT

PAIRINGS = ("interleaved", "half")
ORDERS = ("blocked", "alternating")
MAX_AXES = 4


# Shapes, and not tensors: heads that are not split yet are checked as if they were, for which a view would cost more.


def check_choices(
    shape: Sequence[int], dtype: torch.dtype, pairing: str, arithmetic: str, rotary_dim: int | None
) -> int:
    """Checks what does not depend on the tables; returns the number of elements to rotate."""
    if not dtype.is_floating_point:
        raise TypeError(f"rotary embedding needs a floating point input, got {dtype}")
    if not len(shape):
        raise ValueError("rotary embedding needs an input of at least one dimension, got a scalar")
    if pairing not in PAIRINGS:
        raise ValueError(f"unknown pairing {pairing!r}: choose one of {', '.join(PAIRINGS)}")
    if arithmetic not in ARITHMETICS:
        raise ValueError(f"unknown arithmetic {arithmetic!r}: choose one of {', '.join(ARITHMETICS)}")
    size = shape[-1]
    rotary = size if rotary_dim is None else rotary_dim
    if rotary % 2 or rotary > size or (rotary_dim is not None and rotary <= 0):
        raise ValueError(f"{rotary} elements cannot be rotated in pairs in a row of {size}: give an even rotary_dim")
    return rotary


def resolve_tokens(
    shape: Sequence[int], tokens: tuple[int, int] | None, seq_dim: int, *, needed: bool = False
) -> tuple[int, int, int]:
    """Returns start, length and the dimension counted from the front; length -1 stands for all tokens."""
    if tokens is None and not needed:
        return 0, -1, 0
    dim = seq_dim + len(shape) if seq_dim < 0 else seq_dim
    if not 0 <= dim < len(shape) - 1:
        raise ValueError(f"seq_dim {seq_dim} is no leading dimension of an input of {len(shape)} dimensions")
    if tokens is None:
        return 0, -1, dim
    start, length = tokens
    if start < 0 or length < 0 or start + length > shape[dim]:
        raise ValueError(f"tokens {start} to {start + length} are not all among the {shape[dim]} of the input")
    return start, length, dim


def from_complex(freqs: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of a complex table."""
    if not freqs.is_complex():
        raise TypeError(f"with sin=None the table must be complex, got {freqs.dtype}: pass sin as well")
    cos, sin = torch.view_as_real(freqs.resolve_conj()).unbind(-1)
    return cos, sin


def check_table(name: str, table: Tensor, shape: Sequence[int], rotary: int) -> None:
    """Checks that a full table broadcasts to what is rotated, of ``shape``."""
    if not table.is_floating_point():
        raise TypeError(f"{name} is {table.dtype}: it must be floating point, or complex with sin=None")
    own = table.shape
    fits = len(own) >= 1 and own[-1] in (rotary, rotary // 2) and len(own) <= len(shape)
    if fits:
        skipped = len(shape) - len(own)
        for i in range(len(own) - 1):
            if own[i] != 1 and own[i] != shape[skipped + i]:
                fits = False
    if not fits:
        raise ValueError(
            f"{name} of shape {tuple(own)} does not broadcast to tokens of shape {tuple(shape)}, of which "
            f"{rotary} elements are rotated: its last dimension must be {rotary} or {rotary // 2}, "
            "and the others 1 or those of the input"
        )


def check_axes(
    shape: Sequence[int], cos: Sequence[Tensor], sin: Sequence[Tensor], grid: Sequence[int] | None,
    coords: Tensor | None, order: str, front_pad: int, rotary: int, heads: int, seq_dim: int, length: int,
) -> None:  # fmt: skip
    """Checks tables of axes against what is rotated, of ``shape``."""
    axes = len(cos)
    if not 1 <= axes <= MAX_AXES or len(sin) != axes:
        raise ValueError(f"got {axes} tables of cosines and {len(sin)} of sines: give as many of both, 1 to {MAX_AXES}")
    if order not in ORDERS:
        raise ValueError(f"unknown order {order!r}: choose one of {', '.join(ORDERS)}")
    if (grid is None) == (coords is None):
        raise ValueError("give either the grid or the coordinates of the tokens")
    for i in range(axes):
        for name, table in (("cos", cos[i]), ("sin", sin[i])):
            if not table.is_floating_point():
                raise TypeError(f"the {name} table of axis {i} is {table.dtype}: it must be floating point")
        if cos[i].ndim != 2 or cos[i].shape != sin[i].shape:
            raise ValueError(
                f"the tables of axis {i} have shapes {tuple(cos[i].shape)} and {tuple(sin[i].shape)}: "
                "both must be [positions, pairs]"
            )
        if cos[i].dtype != cos[0].dtype or sin[i].dtype != cos[0].dtype:
            raise TypeError("the tables of all axes must have one dtype")
        if order == "alternating" and cos[i].shape[1] != cos[0].shape[1]:
            raise ValueError("axes can alternate only if their tables have as many columns")
    pairs = front_pad + sum(table.shape[1] for table in cos)
    if front_pad < 0 or (2 * pairs != rotary and not (heads and rotary == shape[-1] and 2 * pairs == heads * rotary)):
        raise ValueError(
            f"the axes have {pairs} pairs, {front_pad} of them padding: {rotary // 2} are rotated"
            + (f", or {heads * rotary // 2} in all heads" if heads else "")
        )
    count = shape[seq_dim] if length < 0 else length
    if coords is not None:
        if coords.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"coordinates are int32 or int64, got {coords.dtype}")
        lead = (shape[0], 1) if seq_dim else ()
        fits = coords.ndim in (2, 3) and coords.shape[-2:] == (count, axes)
        if not fits or (coords.ndim == 3 and coords.shape[0] not in lead):
            raise ValueError(
                f"coordinates of shape {tuple(coords.shape)} do not fit {count} tokens and {axes} axes: "
                "give [tokens, axes] or [batch, tokens, axes]"
            )
        return
    assert grid is not None
    tokens = 1
    for i, size in enumerate(grid):
        tokens *= size
        if i < axes and size > cos[i].shape[0]:
            raise ValueError(f"the grid has {size} positions along axis {i}, its table {cos[i].shape[0]}")
    if len(grid) != axes or tokens != count:
        raise ValueError(f"a grid of {tuple(grid)} is not one of {count} tokens and {axes} axes")


def dispatch_fn(op: Op[R], coords: Tensor | None) -> Callable[..., R]:
    """How to call an op: past the dispatch cache where :func:`check_coords` has something to check."""
    return op.call if coords is None or coords.device.type != "cpu" else op.dispatch_slow


def check_coords(coords: Tensor | None, axes: Sequence[Tensor]) -> None:
    """Raises IndexError if a coordinate on the CPU is outside its table. On a GPU that would cost a wait."""
    if torch.compiler.is_compiling() or type(coords) is not Tensor or coords.device.type != "cpu":
        return
    if coords.numel() == 0:
        return
    low, high = torch.aminmax(coords.flatten(0, -2), dim=0)
    for i, table in enumerate(axes):
        if int(low[i]) < 0 or int(high[i]) >= table.shape[0]:
            raise IndexError(f"a coordinate of axis {i} is outside its table of {table.shape[0]} positions")


# --- gradients -----------------------------------------------------------------------------------------


def rotation_gradients(
    x: Tensor | None, grad: Tensor, cos: list[Tensor], sin: list[Tensor], coords: Tensor | None, grid: Sequence[int],
    alternating: bool, front_pad: int, half: bool, arithmetic: int, rotary: int, seq_dim: int, start: int, length: int,
) -> tuple[Tensor, list[Tensor | None], list[Tensor | None]]:  # fmt: skip
    """The gradients of what is rotated, and of its tables unless ``x``, which is rotated, is None.

    The tables are full ones, or those of axes if there is a grid or are coordinates. The transpose of the rotation is a
    rotation: by the negative angles, exchanged within each pair.
    """
    arithmetic = FLOAT32 if arithmetic == INPUT else arithmetic  # gradients are not rounded in between
    turn, place = (half, arithmetic, rotary, seq_dim, start, length), (half, rotary, seq_dim, start, length)
    grad_cos: list[Tensor | None] = [None] * len(cos)
    grad_sin: list[Tensor | None] = [None] * len(sin)
    if len(grid) > 0 or coords is not None:
        back = [-table for table in sin]
        grad_x = torch.ops.diffkern.rope_3d.default(grad, cos, back, coords, grid, alternating, front_pad, *turn, None)
        if x is not None:
            grad_cos[:], grad_sin[:] = _rope_3d_gradients(
                x, grad, cos, sin, coords, grid, alternating, front_pad, *place
            )
    else:
        grad_x = torch.ops.diffkern.rope.default(grad, cos[0], -_swap_pairs(sin[0], half, rotary), *turn)
        if x is not None:
            grad_cos[0], grad_sin[0] = _table_gradients(x, grad, cos[0], sin[0], *place)
    return grad_x, grad_cos, grad_sin


def _swap_pairs(table: Tensor, half: bool, rotary: int) -> Tensor:
    """Exchanges the two angles of each pair; a table with one angle per pair stays as it is."""
    if table.shape[-1] != rotary:
        return table
    if half:
        return table.roll(rotary // 2, -1)
    return table.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)  # type: ignore[no-any-return]


def _table_gradients(
    x: Tensor, grad: Tensor, cos: Tensor, sin: Tensor, half: bool, rotary: int, seq_dim: int, start: int, length: int
) -> tuple[Tensor, Tensor]:
    """The gradients of two full tables, from the input of the rotation and the gradient of its result."""
    if length >= 0:
        x, grad = x.narrow(seq_dim, start, length), grad.narrow(seq_dim, start, length)
    dtype = compute_dtype(x, cos)
    (a, b), (grad_a, grad_b) = (reference.split_pairs(t.to(dtype), half, rotary) for t in (x, grad))
    return (
        _fold(grad_a * a, grad_b * b, cos, half, rotary),
        _fold(-grad_a * b, grad_b * a, sin, half, rotary),
    )


def _fold(first: Tensor, second: Tensor, table: Tensor, half: bool, rotary: int) -> Tensor:
    if table.shape[-1] != rotary:
        full = first + second
    elif half:
        full = torch.cat((first, second), -1)
    else:
        full = torch.stack((first, second), -1).flatten(-2)
    summed: Tensor = full.sum_to_size(table.shape).to(table.dtype)
    return summed


def _axes_gradients(
    full: Tensor, axes: Sequence[Tensor], coords: Tensor | None, grid: Sequence[int], alternating: bool, front_pad: int
) -> list[Tensor]:
    """The adjoint of the reference's ``expand_axes``: sums a full gradient into the tables."""
    full = full[..., front_pad:]
    if alternating:
        parts = list(full.unflatten(-1, (-1, len(axes))).unbind(-1))
    else:
        parts = list(full.split([table.shape[1] for table in axes], -1))
    gradients = []
    for i, (part, table) in enumerate(zip(parts, axes, strict=True)):
        if coords is None:
            part = part.reshape(*grid, table.shape[1])
            others = [dim for dim in range(len(grid)) if dim != i]
            part = part.sum(others) if others else part
            part = torch.nn.functional.pad(part, (0, 0, 0, table.shape[0] - grid[i]))
        else:
            index = coords[..., i].reshape(-1).long()
            part = part.new_zeros(table.shape).index_add(0, index, part.reshape(-1, table.shape[1]))
        gradients.append(part.to(table.dtype))
    return gradients


def _rope_3d_gradients(
    x: Tensor, grad: Tensor, cos: Sequence[Tensor], sin: Sequence[Tensor], coords: Tensor | None, grid: Sequence[int],
    alternating: bool, front_pad: int, half: bool, rotary: int, seq_dim: int, start: int, length: int,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """The gradients of the tables of all axes."""
    # Not rounded to the dtype of the tables before the tokens are summed.
    dtype = compute_dtype(x, *cos)
    compact = [
        reference.expand_axes([table.to(dtype) for table in axes], coords, grid, alternating, front_pad, 0.0)
        for axes in (cos, sin)
    ]
    fitted = [reference.fit_table(table, x, seq_dim, rotary) for table in compact]
    full = _table_gradients(x, grad, fitted[0], fitted[1], half, rotary, seq_dim, start, length)
    grads = []
    for gradient, table, fit, axes in zip(full, compact, fitted, (cos, sin), strict=True):
        if fit.ndim > 2 and 2 * table.shape[-1] != rotary and seq_dim == x.ndim - 2:
            gradient = gradient.transpose(-3, -2)
        grads.append(_axes_gradients(gradient.reshape(table.shape), axes, coords, grid, alternating, front_pad))
    return grads[0], grads[1]


def no_gradient_of(numbers: Sequence[int]) -> list[None] | None:
    """What a backward returns for a list of numbers; torch takes an empty one for a list of tensors."""
    return None if numbers else []
