r"""Rotary position embedding, from full tables and from one table per axis.

Numerical contract (``docs/numerics.md`` has the table):

* ``"float32"`` arithmetic: float32 products and sums without fused multiply-add, rounded once: bit-equal to the
  chains of plain PyTorch ops that the models run, real or complex;
* ``"float64"``: the same in float64, as a complex128 table makes it;
* ``"input"``: everything in the dtype of the input, rounded after every op, as models do that rotate in bfloat16.

float64 inputs are computed in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from diffkern.ops.contract import ContractRow
from diffkern.ops.registration import Op, check_device
from diffkern.providers.eager import compute_dtype
from diffkern.providers.eager import rope as reference
from diffkern.providers.eager.rope import ARITHMETICS, FLOAT32, INPUT

PAIRINGS = ("interleaved", "half")
ORDERS = ("blocked", "alternating")
MAX_AXES = 4

_MIX = "x, cos and sin in any mix"
_CHAIN = "x[a]*cos[a] - x[b]*sin[a], x[b]*cos[b] + x[a]*sin[b]"

CONTRACT = (
    ContractRow(
        "rope",
        "float32",
        _MIX,
        "float32, no fused multiply-add",
        "once, to the dtype of x",
        f"{_CHAIN} in float32",
    ),
    ContractRow("rope", "float64", _MIX, "float64", "to float32, then to the dtype of x", f"{_CHAIN} in float64"),
    ContractRow(
        "rope",
        "input",
        _MIX,
        "each product and sum in float32",
        "the tables, then each product and sum, to the dtype of x",
        f"{_CHAIN} in the dtype of x",
    ),
    ContractRow("rope_3d", "as rope", _MIX, "as rope", "as rope", "rope with the table of expand_axes"),
)


class Rotated(Protocol):
    """What the checks ask of the tensor that is rotated, or of one whose heads are not split yet."""

    @property
    def shape(self) -> Sequence[int]:
        """Size of each dimension."""

    @property
    def ndim(self) -> int:
        """Number of dimensions."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements."""

    def is_floating_point(self) -> bool:
        """Whether they are floating point numbers."""


def rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor | None = None,
    *,
    pairing: str = "interleaved",
    arithmetic: str = "float32",
    rotary_dim: int | None = None,
    tokens: tuple[int, int] | None = None,
    seq_dim: int = 1,
    provider: str | None = None,
) -> Tensor:
    r"""Rotary position embedding from full tables.

    .. math::
        y_a = x_a \cos_a - x_b \sin_a, \qquad y_b = x_b \cos_b + x_a \sin_b

    for the pairs :math:`(a, b) = (2i, 2i+1)` (interleaved) or :math:`(i, i + R/2)` (half), ``R = rotary_dim``.
    The two elements of a pair may have different angles, in which case this is no rotation and is computed as
    written.

    Args:
        x: Input ``[..., D]`` of any strides; float32, float16, bfloat16 or float64. A head per row, or a flat row of
            all heads.
        cos: Cosines, in any float dtype. The last dimension has ``R`` elements (one angle per element) or ``R/2``
            (one per pair); the others broadcast against those of ``x``, as in ``x * cos``: ``[S, 1, R]`` is shared by
            the heads of ``[B, S, H, D]``, ``[S, R]`` by those of ``[B, H, S, D]``. With ``sin=None`` a complex tensor
            ``[..., R/2]``.
        sin: Sines; the shape may differ from that of ``cos`` as far as both broadcast.
        pairing: ``"interleaved"`` or ``"half"``.
        arithmetic: ``"float32"``, ``"float64"``, or ``"input"`` for the dtype of ``x`` with a rounding after every op.
        rotary_dim: ``R``, even; None means ``D``. The elements past it are copied.
        tokens: ``(start, length)`` of the tokens to rotate, along ``seq_dim``; the tables then belong to those
            tokens, and the others are copied. None means all.
        seq_dim: The dimension of ``x`` that ``tokens`` counts along.
        provider: ``"compiled"``, ``"triton"`` or ``"eager"``; None chooses the first that can.

    Returns:
        A new tensor of the shape and dtype of ``x``, laid out densely in the order of ``x``. Differentiable in
        ``x``, ``cos`` and ``sin``. There is no in-place form.

    Raises:
        TypeError: a tensor has a dtype that does not fit.
        ValueError: a table does not broadcast to ``x`` (a table is never what ``x`` is broadcast to), is on another
            device, or another argument does not fit; the message says which.
        diffkern.providers.NoProviderError: the provider that was asked for cannot serve the call.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """
    if sin is None:
        cos, sin = _from_complex(cos)
    if tokens is not None and seq_dim < 0:
        seq_dim += x.ndim
    y: Tensor = _rope.call((x, cos, sin), (pairing, arithmetic, rotary_dim, tokens, seq_dim), provider)
    return y


def rope_3d(
    x: Tensor,
    cos_axes: Sequence[Tensor],
    sin_axes: Sequence[Tensor],
    *,
    grid: Sequence[int] | None = None,
    coords: Tensor | None = None,
    order: str = "blocked",
    front_pad: int = 0,
    pairing: str = "interleaved",
    arithmetic: str = "float32",
    rotary_dim: int | None = None,
    tokens: tuple[int, int] | None = None,
    seq_dim: int = 1,
    provider: str | None = None,
) -> Tensor:
    r""":func:`rope` from one small table per axis, for tokens that lie on a grid: no full table is read.

    A token at ``(t, h, w)`` takes row ``t`` of the first table, row ``h`` of the second and row ``w`` of the third;
    :func:`expand_axes` makes the table that :func:`rope` would need for the same result.

    Args:
        x: Input ``[..., D]``, as in :func:`rope`, with the tokens along ``seq_dim``.
        cos_axes: For each of one to four axes a table ``[N, n]``: ``N`` positions, ``n`` pairs.
        sin_axes: The sines, in the same shapes.
        grid: Number of positions along each axis; the tokens are the grid in row-major order.
        coords: Instead of ``grid``: int32 or int64 indices ``[S, axes]``, or ``[B, S, axes]`` where the samples
            (dimension 0 of ``x``) differ. An index outside its table raises on the CPU and gives NaN on a GPU.
        order: How the pairs of the axes are laid out: ``"blocked"``, all of the first axis, then all of the second
            and so on (Wan, HunyuanVideo, CogVideoX); or ``"alternating"``, one of each axis in turn (LTX).
        front_pad: Pairs in front of them with ``cos = 1`` and ``sin = 0``.
        pairing: As in :func:`rope`.
        arithmetic: As in :func:`rope`.
        rotary_dim: As in :func:`rope`. ``front_pad`` and the pairs of all axes add up to ``R/2``, or, for ``x``
            of four dimensions, to ``H·R/2``: then each of the ``H`` heads has its own share, in order.
        tokens: As in :func:`rope`; the grid or the coordinates belong to those tokens.
        seq_dim: The dimension of ``x`` with the tokens.
        provider: As in :func:`rope`.

    Returns:
        As :func:`rope`. Differentiable in ``x`` and in the tables.

    Raises:
        TypeError: a tensor has a dtype that does not fit.
        ValueError: shapes, devices or other arguments do not fit together.
        IndexError: a coordinate on the CPU is outside its table.
        diffkern.providers.NoProviderError: the provider that was asked for cannot serve the call.
    """
    if seq_dim < 0:
        seq_dim += x.ndim
    options = order, front_pad, pairing, arithmetic, rotary_dim, tokens, seq_dim
    operands = x, list(cos_axes), list(sin_axes), coords, [] if grid is None else list(grid)
    y: Tensor = dispatch_fn(_rope_3d, coords)(operands, options, provider)
    return y


def expand_axes(
    cos_axes: Sequence[Tensor],
    sin_axes: Sequence[Tensor],
    *,
    grid: Sequence[int] | None = None,
    coords: Tensor | None = None,
    order: str = "blocked",
    front_pad: int = 0,
) -> tuple[Tensor, Tensor]:
    """The tables of all tokens that :func:`rope_3d` does without: ``[S, P]``, or ``[B, S, P]`` for ``[B, S, axes]``.

    ``P`` is the number of pairs, ``front_pad`` included. The arguments are those of :func:`rope_3d`.

    Raises:
        ValueError: neither or both of ``grid`` and ``coords`` are given, the order is unknown, or devices differ.
    """
    if (grid is None) == (coords is None):
        raise ValueError("give either the grid or the coordinates of the tokens")
    if order not in ORDERS:
        raise ValueError(f"unknown order {order!r}: choose one of {', '.join(ORDERS)}")
    for name, tables in (("cos", cos_axes), ("sin", sin_axes), ("coords", [] if coords is None else [coords])):
        for axis, table in enumerate(tables):
            check_device(f"{name}[{axis}]", table, "cos[0]", cos_axes[0].device)
    alternating = order == "alternating"
    cos = reference.expand_axes(cos_axes, coords, grid or (), alternating, front_pad, 1.0)
    return cos, reference.expand_axes(sin_axes, coords, grid or (), alternating, front_pad, 0.0)


# --- checks, shared with qk_norm_rope ------------------------------------------------------------------


def check_choices(x: Rotated, pairing: str, arithmetic: str, rotary_dim: int | None) -> int:
    """Checks what does not depend on the tables; returns the number of elements to rotate."""
    if not x.is_floating_point():
        raise TypeError(f"rotary embedding needs a floating point input, got {x.dtype}")
    if x.ndim == 0:
        raise ValueError("rotary embedding needs an input of at least one dimension, got a scalar")
    if pairing not in PAIRINGS:
        raise ValueError(f"unknown pairing {pairing!r}: choose one of {', '.join(PAIRINGS)}")
    if arithmetic not in ARITHMETICS:
        raise ValueError(f"unknown arithmetic {arithmetic!r}: choose one of {', '.join(ARITHMETICS)}")
    size = x.shape[-1]
    rotary = size if rotary_dim is None else rotary_dim
    if rotary % 2 or rotary > size or (rotary_dim is not None and rotary <= 0):
        raise ValueError(f"{rotary} elements cannot be rotated in pairs in a row of {size}: give an even rotary_dim")
    return rotary


def resolve_tokens(
    x: Rotated, tokens: tuple[int, int] | None, seq_dim: int, *, needed: bool = False
) -> tuple[int, int, int]:
    """Returns start, length and the dimension counted from the front; length -1 stands for all tokens."""
    if tokens is None and not needed:
        return 0, -1, 0
    dim = seq_dim + x.ndim if seq_dim < 0 else seq_dim
    if not 0 <= dim < x.ndim - 1:
        raise ValueError(f"seq_dim {seq_dim} is no leading dimension of an input of {x.ndim} dimensions")
    if tokens is None:
        return 0, -1, dim
    start, length = tokens
    if start < 0 or length < 0 or start + length > x.shape[dim]:
        raise ValueError(f"tokens {start} to {start + length} are not all among the {x.shape[dim]} of the input")
    return start, length, dim


def check_table(name: str, table: Tensor, x: Rotated, shape: Sequence[int], rotary: int) -> None:
    """Checks that a full table broadcasts to the leading dimensions ``shape`` of what is rotated."""
    if not table.is_floating_point():
        raise TypeError(f"{name} is {table.dtype}: it must be floating point, or complex with sin=None")
    own = table.shape
    fits = len(own) >= 1 and own[-1] in (rotary, rotary // 2) and len(own) - 1 <= len(shape)
    if fits:
        skipped = len(shape) - len(own) + 1
        for i in range(len(own) - 1):
            if own[i] != 1 and own[i] != shape[skipped + i]:
                fits = False
    if not fits:
        raise ValueError(
            f"{name} of shape {tuple(own)} does not broadcast to tokens of shape {(*shape, x.shape[-1])}, of which "
            f"{rotary} elements are rotated: its last dimension must be {rotary} or {rotary // 2}, "
            "and the others 1 or those of the input"
        )


def check_axes(
    x: Rotated,
    cos: Sequence[Tensor],
    sin: Sequence[Tensor],
    grid: Sequence[int] | None,
    coords: Tensor | None,
    order: str,
    front_pad: int,
    rotary: int,
    heads: int,
    seq_dim: int,
    length: int,
) -> list[int]:
    """Checks tables of axes against ``x`` and returns the grid, which is empty where there are coordinates."""
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
    if front_pad < 0 or (2 * pairs != rotary and not (heads and rotary == x.shape[-1] and 2 * pairs == heads * rotary)):
        raise ValueError(
            f"the axes have {pairs} pairs, {front_pad} of them padding: {rotary // 2} are rotated"
            + (f", or {heads * rotary // 2} in all heads" if heads else "")
        )
    count = x.shape[seq_dim] if length < 0 else length
    if coords is not None:
        if coords.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"coordinates are int32 or int64, got {coords.dtype}")
        lead = (x.shape[0], 1) if seq_dim else ()
        fits = coords.ndim in (2, 3) and coords.shape[-2:] == (count, axes)
        if not fits or (coords.ndim == 3 and coords.shape[0] not in lead):
            raise ValueError(
                f"coordinates of shape {tuple(coords.shape)} do not fit {count} tokens and {axes} axes: "
                "give [tokens, axes] or [batch, tokens, axes]"
            )
        return []
    assert grid is not None
    tokens = 1
    for i, size in enumerate(grid):
        tokens *= size
        if i < axes and size > cos[i].shape[0]:
            raise ValueError(f"the grid has {size} positions along axis {i}, its table {cos[i].shape[0]}")
    if len(grid) != axes or tokens != count:
        raise ValueError(f"a grid of {tuple(grid)} is not one of {count} tokens and {axes} axes")
    return list(grid)


def dispatch_fn(op: Op, coords: Tensor | None) -> Callable[..., Any]:
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


def _from_complex(freqs: Tensor) -> tuple[Tensor, Tensor]:
    if not freqs.is_complex():
        raise TypeError(f"with sin=None the table must be complex, got {freqs.dtype}: pass sin as well")
    cos, sin = torch.view_as_real(freqs.resolve_conj()).unbind(-1)
    return cos, sin


# --- gradients, shared with qk_norm_rope ---------------------------------------------------------------


def swap_pairs(table: Tensor, half: bool, rotary: int) -> Tensor:
    """Exchanges the two angles of each pair; a table with one angle per pair stays as it is."""
    if table.shape[-1] != rotary:
        return table
    if half:
        return table.roll(rotary // 2, -1)
    return table.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)  # type: ignore[no-any-return]


def gradient_arithmetic(arithmetic: int) -> int:
    """Gradients are not rounded in between."""
    return FLOAT32 if arithmetic == INPUT else arithmetic


def table_gradients(
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


def axes_gradients(
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


def rope_3d_gradients(
    x: Tensor,
    grad: Tensor,
    cos: Sequence[Tensor],
    sin: Sequence[Tensor],
    coords: Tensor | None,
    grid: Sequence[int],
    alternating: bool,
    front_pad: int,
    half: bool,
    rotary: int,
    seq_dim: int,
    start: int,
    length: int,
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of the tables of all axes."""
    # Not rounded to the dtype of the tables before the tokens are summed.
    dtype = compute_dtype(x, *cos)
    compact = [
        reference.expand_axes([table.to(dtype) for table in axes], coords, grid, alternating, front_pad, 0.0)
        for axes in (cos, sin)
    ]
    fitted = [reference.fit_table(table, x, seq_dim, rotary) for table in compact]
    full = table_gradients(x, grad, fitted[0], fitted[1], half, rotary, seq_dim, start, length)
    grads = []
    for gradient, table, fit, axes in zip(full, compact, fitted, (cos, sin), strict=True):
        if fit.ndim > 2 and 2 * table.shape[-1] != rotary and seq_dim == x.ndim - 2:
            gradient = gradient.transpose(-3, -2)
        grads.append(axes_gradients(gradient.reshape(table.shape), axes, coords, grid, alternating, front_pad))
    return grads[0], grads[1]


def no_gradient_of(numbers: Sequence[int]) -> list[None] | None:
    """What a backward returns for a list of numbers; torch takes an empty one for a list of tensors."""
    return None if numbers else []


# --- rope as a torch op --------------------------------------------------------------------------------


def _rope_prepare(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    pairing: str,
    arithmetic: str,
    rotary_dim: int | None,
    tokens: tuple[int, int] | None,
    seq_dim: int,
) -> tuple[Any, ...]:
    rotary = check_choices(x, pairing, arithmetic, rotary_dim)
    start, length, dim = resolve_tokens(x, tokens, seq_dim)
    shape = x.shape[:-1] if length < 0 else (*x.shape[:dim], length, *x.shape[dim + 1 : -1])
    check_table("cos", cos, x, shape, rotary)
    check_table("sin", sin, x, shape, rotary)
    return x, cos, sin, pairing == "half", ARITHMETICS[arithmetic], rotary_dim or 0, dim, start, length


def _rope_fake(x: Tensor, *options: Any) -> Tensor:
    return torch.empty_like(x)


def _rope_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cos, sin, ctx.half, ctx.arithmetic, rotary_dim, ctx.seq_dim, ctx.start, ctx.length, _ = inputs
    ctx.rotary = rotary_dim or x.shape[-1]
    ctx.save_for_backward(x if cos.requires_grad or sin.requires_grad else None, cos, sin)


def _rope_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The transpose of the rotation is a rotation: by the negative angles, exchanged within each pair."""
    x, cos, sin = ctx.saved_tensors
    grad_x = grad_cos = grad_sin = None
    if ctx.needs_input_grad[0]:
        backwards = -swap_pairs(sin, ctx.half, ctx.rotary)
        arithmetic = gradient_arithmetic(ctx.arithmetic)
        grad_x = _rope.op(grad, cos, backwards, ctx.half, arithmetic, ctx.rotary, ctx.seq_dim, ctx.start, ctx.length)
    if x is not None:
        grad_cos, grad_sin = table_gradients(
            x, grad, cos, sin, ctx.half, ctx.rotary, ctx.seq_dim, ctx.start, ctx.length
        )
    return (grad_x, grad_cos, grad_sin, *(None,) * 7)


_rope = Op("rope", _rope_prepare, _rope_fake, _rope_setup_context, _rope_backward)


# --- rope_3d as a torch op -----------------------------------------------------------------------------


def _rope_3d_prepare(
    x: Tensor,
    cos: list[Tensor],
    sin: list[Tensor],
    coords: Tensor | None,
    grid: list[int],
    order: str,
    front_pad: int,
    pairing: str,
    arithmetic: str,
    rotary_dim: int | None,
    tokens: tuple[int, int] | None,
    seq_dim: int,
) -> tuple[Any, ...]:
    rotary = check_choices(x, pairing, arithmetic, rotary_dim)
    start, length, dim = resolve_tokens(x, tokens, seq_dim, needed=True)
    heads = x.shape[3 - dim] if x.ndim == 4 and dim in (1, 2) else 0
    check_axes(x, cos, sin, grid or None, coords, order, front_pad, rotary, heads, dim, length)
    check_coords(coords, cos)
    return (
        x, cos, sin, coords, grid, order == "alternating", front_pad, pairing == "half", ARITHMETICS[arithmetic],
        rotary_dim or 0, dim, start, length,
    )  # fmt: skip


def _rope_3d_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cos, sin, coords, ctx.grid, *ctx.layout, ctx.arithmetic, rotary_dim, ctx.seq_dim, ctx.start, ctx.length, _ = (
        inputs
    )
    ctx.rotary = rotary_dim or x.shape[-1]
    ctx.axes = len(cos)
    wanted = any(table.requires_grad for table in (*cos, *sin))
    ctx.save_for_backward(x if wanted else None, coords, *cos, *sin)


def _rope_3d_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, coords, *tables = ctx.saved_tensors
    cos, sin = tables[: ctx.axes], tables[ctx.axes :]
    alternating, front_pad, half = ctx.layout
    grad_x = _rope_3d.op(
        grad, cos, [-table for table in sin], coords, ctx.grid, alternating, front_pad, half,
        gradient_arithmetic(ctx.arithmetic), ctx.rotary, ctx.seq_dim, ctx.start, ctx.length, None,
    )  # fmt: skip
    grad_cos: list[Tensor | None]
    grad_sin: list[Tensor | None]
    grad_cos, grad_sin = [None] * ctx.axes, [None] * ctx.axes
    if x is not None:
        grad_cos[:], grad_sin[:] = rope_3d_gradients(
            x,
            grad,
            cos,
            sin,
            coords,
            ctx.grid,
            alternating,
            front_pad,
            half,
            ctx.rotary,
            ctx.seq_dim,
            ctx.start,
            ctx.length,
        )
    return (grad_x, grad_cos, grad_sin, None, no_gradient_of(ctx.grid), *(None,) * 9)


_rope_3d = Op("rope_3d", _rope_3d_prepare, _rope_fake, _rope_3d_setup_context, _rope_3d_backward)
