r"""Normalisation of queries and keys followed by rotary position embedding, in one pass over both.

Numerical contract (``docs/numerics.md`` has the table): the norm as in :mod:`diffkern.ops.norm`, the rotation as in
:mod:`diffkern.ops.rope`, float32 all the way and rounded once; with ``round_norm`` the result of the norm is rounded
to the dtype of the input before it is rotated, as a chain of modules does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from diffkern.ops import norm as norms
from diffkern.ops.contract import ContractRow
from diffkern.ops.registration import needs_dispatcher, register
from diffkern.ops.rope import (
    Rotated,
    check_axes,
    check_choices,
    check_coords,
    check_table,
    gradient_arithmetic,
    no_gradient_of,
    resolve_tokens,
    rope_3d_gradients,
    swap_pairs,
    table_gradients,
)
from diffkern.providers.eager import compute_dtype
from diffkern.providers.eager.modulate import LAYER, NO_NORM, NORMS
from diffkern.providers.eager.rope import ARITHMETICS
from diffkern.providers.eager.rope_qk_norm import normalise
from diffkern.providers.registry import kernel_for

_MIX = "q, k, parameters and tables in any mix"

CONTRACT = (
    ContractRow(
        "qk_norm_rope",
        "plain",
        _MIX,
        "float32, the rotation without fused multiply-add",
        "once, to the dtype of q and k",
    ),
    ContractRow(
        "qk_norm_rope",
        "round_norm",
        _MIX,
        "float32",
        "the result of the norm to the dtype of q and k, then the result",
    ),
    ContractRow("qk_norm_rope", "no norm", _MIX, "as rope", "as rope", "rope of q and of k"),
)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    cos: Tensor | Sequence[Tensor] | None = None,
    sin: Tensor | Sequence[Tensor] | None = None,
    eps: float | None = 1e-6,
    *,
    norm: str | None = "rms",
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    across_heads: int | None = None,
    weight_offset: float = 0.0,
    round_dtype: torch.dtype | None = None,
    round_norm: bool = False,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
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
) -> tuple[Tensor, Tensor]:
    r"""Normalises ``q`` and ``k`` and rotates them: ``rope(norm(q))``, ``rope(norm(k))``.

    Args:
        q: Queries ``[..., D]``, normalised over each head of ``D`` elements; with ``across_heads`` ``[..., H·D]``,
            normalised over all heads together. Any strides: the chunks of a packed projection are read in place.
            float32, float16, bfloat16 or float64.
        k: Keys, likewise; the number of heads and of tokens may differ from those of ``q``.
        q_weight: Weight of the norm of ``q``, of shape ``[D]`` or ``[H·D]``, or None.
        k_weight: Weight of the norm of ``k``, or None.
        cos: Cosines: a full table as in :func:`diffkern.ops.rope`, which broadcasts against ``[..., D]`` (with
            ``across_heads`` against ``[..., H, D]``); or, with ``grid`` or ``coords``, one table per axis as in
            :func:`diffkern.ops.rope_3d`; or a complex full table with ``sin=None``; None only normalises.
        sin: Sines, in the same form.
        eps: ``ε`` of the norms; None means the machine epsilon of the precision computed in.
        norm: ``"rms"``, ``"layer"`` or None.
        q_bias: Bias of the norm of ``q``, or None.
        k_bias: Bias of the norm of ``k``, or None.
        across_heads: The number of heads that are normalised together (that of ``q``; ``k`` has heads of the same
            size); None normalises each alone.
        weight_offset: Added to the weights of an RMS norm in float32.
        round_dtype: As in :func:`diffkern.ops.rms_norm`.
        round_norm: Rounds the result of the norm to the dtype of ``q`` and ``k`` before the rotation. Implied by
            ``arithmetic="input"``.
        cos_k: A full table for ``k``, where that of ``q`` does not serve both.
        sin_k: Its sines.
        grid: As in :func:`diffkern.ops.rope_3d`.
        coords: As in :func:`diffkern.ops.rope_3d`.
        order: As in :func:`diffkern.ops.rope_3d`.
        front_pad: As in :func:`diffkern.ops.rope_3d`.
        pairing: As in :func:`diffkern.ops.rope`.
        arithmetic: As in :func:`diffkern.ops.rope`.
        rotary_dim: As in :func:`diffkern.ops.rope`, of each head.
        tokens: ``(start, length)`` of the tokens to rotate along ``seq_dim``; the others are only normalised.
        seq_dim: The dimension of ``q`` and ``k`` with the tokens.
        provider: ``"compiled"``, ``"triton"`` or ``"eager"``; None chooses the first that can.

    Returns:
        New tensors of the shapes and dtypes of ``q`` and ``k``, each laid out densely in the order of its input.
        Differentiable in ``q``, ``k``, the weights and biases and the tables.

    Raises:
        TypeError: a tensor has a dtype that does not fit.
        ValueError: shapes, devices or other arguments do not fit together; the message says which.
        IndexError: a coordinate on the CPU is outside its table.
        diffkern.providers.NoProviderError: the provider that was asked for cannot serve the call.
    """
    if norm not in NORMS:
        raise ValueError(f"unknown norm {norm!r}: choose 'rms', 'layer' or None")
    if q.dtype != k.dtype or q.device != k.device:
        raise ValueError(f"q is {q.dtype} on {q.device}, k is {k.dtype} on {k.device}: they must be alike")
    heads = across_heads or 0
    if heads:
        size = q.shape[-1] // heads
        if q.shape[-1] % heads or k.shape[-1] % max(size, 1):
            raise ValueError(f"rows of {q.shape[-1]} and {k.shape[-1]} elements are not those of {heads} equal heads")
    _check_parameters("q", q, q_weight, q_bias)
    _check_parameters("k", k, k_weight, k_bias)
    if eps is None:
        eps = torch.finfo(torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype).eps
    lists, grid, layout = _rotation(
        q, k, cos, sin, cos_k, sin_k, grid, coords, order, front_pad, heads, pairing, arithmetic, rotary_dim, tokens,
        seq_dim,
    )  # fmt: skip
    parameters = (q_weight, k_weight, q_bias, k_bias)
    # Those of the axes serve q and k alike.
    tables = [table for tables in (lists[:2] if grid or coords is not None else lists) for table in tables]
    others = [tensor for tensor in (k, *parameters, *tables) if tensor is not None]
    plain = not (needs_dispatcher(q, *others) or any(tensor.is_neg() for tensor in others))
    call: Callable[..., tuple[Tensor, Tensor]] = _qk_norm_rope if plain else _qk_norm_rope_op
    return call(
        q, k, *parameters, *lists, coords, grid, order == "alternating", front_pad, NORMS[norm], eps, heads,
        weight_offset, round_dtype, round_norm, pairing == "half", ARITHMETICS[arithmetic], rotary_dim or 0, *layout,
        provider,
    )  # fmt: skip


def _check_parameters(name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    for kind, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        if parameter.ndim != 1 or parameter.shape[0] != x.shape[-1]:
            raise ValueError(
                f"the {kind} of {name} has shape {tuple(parameter.shape)}, "
                f"but {x.shape[-1]} elements are normalised together"
            )
        if parameter.device != x.device:
            raise ValueError(f"the {kind} of {name} is on {parameter.device}, {name} on {x.device}: move one of them")


@dataclass(frozen=True)
class _Heads:
    """A tensor as the checks see it, with its heads split: a view would cost more."""

    shape: Sequence[int]
    x: Tensor

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        return self.x.device

    def is_floating_point(self) -> bool:
        return self.x.is_floating_point()


def _rotation(
    q: Tensor,
    k: Tensor,
    cos: Tensor | Sequence[Tensor] | None,
    sin: Tensor | Sequence[Tensor] | None,
    cos_k: Tensor | None,
    sin_k: Tensor | None,
    grid: Sequence[int] | None,
    coords: Tensor | None,
    order: str,
    front_pad: int,
    heads: int,
    pairing: str,
    arithmetic: str,
    rotary_dim: int | None,
    tokens: tuple[int, int] | None,
    seq_dim: int,
) -> tuple[tuple[list[Tensor], ...], list[int], tuple[int, int, int]]:
    """Checks the tables; returns those of q and k as lists, the grid, and seq_dim, start and length."""
    if cos is None:
        if sin is not None or cos_k is not None or sin_k is not None or grid is not None or coords is not None:
            raise ValueError("there are tables or positions, but no cos")
        check_choices(q, pairing, arithmetic, None if heads else rotary_dim)
        return ([], [], [], []), [], (0, 0, -1)
    heads_k = k.shape[-1] * heads // q.shape[-1] if heads else 0
    rotated: list[Rotated] = [q, k]
    if heads:
        rotated = [_Heads((*x.shape[:-1], n, x.shape[-1] // n), x) for x, n in ((q, heads), (k, max(heads_k, 1)))]
    axes = grid is not None or coords is not None
    places = {resolve_tokens(x, tokens, seq_dim, needed=axes) for x in (q, k)}
    if len(places) != 1:
        raise ValueError(f"seq_dim {seq_dim} is not the same dimension of q and k: count it from the front")
    start, length, dim = places.pop()
    if axes:
        if isinstance(cos, Tensor) or isinstance(sin, Tensor) or sin is None or cos_k is not None or sin_k is not None:
            raise ValueError(
                "with a grid or coordinates cos and sin are sequences, one table per axis, for q and k alike"
            )
        found: list[int] = []
        for x in rotated[:1] if q.shape == k.shape else rotated:
            rotary = check_choices(x, pairing, arithmetic, rotary_dim)
            count = x.shape[3 - dim] if x.ndim == 4 and dim in (1, 2) else 0
            found = check_axes(x, cos, sin, grid, coords, order, front_pad, rotary, count, dim, length)
        return (list(cos), list(sin), list(cos), list(sin)), found, (dim, start, length)
    pairs = []
    for x, x_cos, x_sin in (
        (rotated[0], cos, sin),
        (rotated[1], cos if cos_k is None else cos_k, sin if cos_k is None else sin_k),
    ):
        if not isinstance(x_cos, Tensor) or not (x_sin is None or isinstance(x_sin, Tensor)):
            raise ValueError("several tables are those of axes: give the grid or the coordinates as well")
        if x_sin is None:
            if not x_cos.is_complex():
                raise TypeError(f"without sines the table must be complex, got {x_cos.dtype}")
            x_cos, x_sin = torch.view_as_real(x_cos.resolve_conj()).unbind(-1)
        rotary = check_choices(x, pairing, arithmetic, rotary_dim)
        lead = x.shape[:-1] if length < 0 else (*x.shape[:dim], length, *x.shape[dim + 1 : -1])
        check_table("cos", x_cos, x, lead, rotary)
        check_table("sin", x_sin, x, lead, rotary)
        pairs.append((x_cos, x_sin))
    (q_cos, q_sin), (k_cos, k_sin) = pairs
    return ([q_cos], [q_sin], [k_cos], [k_sin]), [], (dim, start, length)


# --- the torch op --------------------------------------------------------------------------------------


def _qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    q_bias: Tensor | None,
    k_bias: Tensor | None,
    cos: list[Tensor],
    sin: list[Tensor],
    cos_k: list[Tensor],
    sin_k: list[Tensor],
    coords: Tensor | None,
    grid: list[int],
    alternating: bool,
    front_pad: int,
    norm: int,
    eps: float,
    heads: int,
    weight_offset: float,
    round_dtype: torch.dtype | None,
    round_norm: bool,
    half: bool,
    arithmetic: int,
    rotary_dim: int,
    seq_dim: int,
    start: int,
    length: int,
    provider: str | None,
) -> tuple[Tensor, Tensor]:
    check_coords(coords, cos)
    dtypes = [None if t is None else t.dtype for t in (q, q_weight, k_weight, q_bias, k_bias)]
    dtypes += [tables[0].dtype for tables in (cos, sin, cos_k, sin_k) if tables]
    kernel: Any = kernel_for("qk_norm_rope", q.device, provider, *dtypes)
    return kernel(  # type: ignore[no-any-return]
        q, k, q_weight, k_weight, q_bias, k_bias, cos, sin, cos_k, sin_k, coords, grid, alternating, front_pad,
        norm, eps, heads, weight_offset, round_dtype, round_norm, half, arithmetic, rotary_dim, seq_dim, start, length,
    )  # fmt: skip


def _qk_norm_rope_fake(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k)


def _qk_norm_rope_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, q_weight, k_weight, q_bias, k_bias, *lists, coords, ctx.grid = inputs[:12]
    ctx.options = inputs[12:-1]
    ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in (q_bias, k_bias)]
    ctx.axes = len(lists[0])
    ctx.row_of_q = q.shape[-1]
    ctx.table_grads = [any(table.requires_grad for table in (*lists[i], *lists[i + 1])) for i in (0, 2)]
    # Without a bias the norm can be computed again from what is kept anyway; a bias is kept for the tables' sake.
    biases = [bias if wanted else None for bias, wanted in zip((q_bias, k_bias), ctx.table_grads, strict=True)]
    ctx.save_for_backward(q, k, q_weight, k_weight, *biases, coords, *(table for tables in lists for table in tables))


def _qk_norm_rope_backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    """Turns the gradients back, which is a rotation by the negative angles, and sends them through the norms."""
    q, k, q_weight, k_weight, q_bias, k_bias, coords, *tables = ctx.saved_tensors
    axes = ctx.axes
    lists = [tables[i * axes : (i + 1) * axes] for i in range(4)]
    results = [
        _one_backward(ctx, x, weight, bias, grad, lists[i], lists[i + 1], coords, i // 2)
        for x, weight, bias, grad, i in ((q, q_weight, q_bias, grads[0], 0), (k, k_weight, k_bias, grads[1], 2))
    ]
    by_argument = [grad for pair in zip(*(result[:3] for result in results), strict=True) for grad in pair]
    by_list = [grad for result in results for grad in result[3:]]
    return (*by_argument, *by_list, None, no_gradient_of(ctx.grid), *(None,) * 15)


def _one_backward(
    ctx: Any,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    grad: Tensor,
    cos: list[Tensor],
    sin: list[Tensor],
    coords: Tensor | None,
    which: int,
) -> tuple[Any, ...]:
    """The gradients of one of q and k, its weight and bias, and its tables."""
    (
        alternating, front_pad, norm, eps, heads, weight_offset, _, _,
        half, arithmetic, rotary_dim, seq_dim, start, length,
    ) = ctx.options  # fmt: skip
    dtype = compute_dtype(x)
    grad = grad.to(dtype)
    grad_cos: list[Any] = [None] * len(cos)
    grad_sin: list[Any] = [None] * len(sin)
    if heads and cos:
        # Heads of k are as wide as those of q.
        count = x.shape[-1] // (ctx.row_of_q // heads)
        grad = grad.unflatten(-1, (count, -1))
    rotary = rotary_dim or grad.shape[-1]
    if ctx.table_grads[which]:
        normed = normalise(x, weight, bias, norm, eps, weight_offset, None, False)
        place = (half, rotary, seq_dim, start, length)
        if ctx.grid or coords is not None:
            grad_cos, grad_sin = rope_3d_gradients(
                normed.view_as(grad), grad, cos, sin, coords, ctx.grid, alternating, front_pad, *place
            )
        else:
            grad_cos[0], grad_sin[0] = table_gradients(normed.view_as(grad), grad, cos[0], sin[0], *place)
    if cos:
        turn = (half, gradient_arithmetic(arithmetic), rotary, seq_dim, start, length)
        if ctx.grid or coords is not None:
            negative = [-table for table in sin]
            grad = torch.ops.diffkern.rope_3d.default(
                grad, cos, negative, coords, ctx.grid, alternating, front_pad, *turn, None
            )
        else:
            grad = torch.ops.diffkern.rope.default(grad, cos[0], -swap_pairs(sin[0], half, rotary), *turn)
    if heads and cos:
        grad = grad.flatten(-2)
    if norm == NO_NORM:
        return grad.to(x.dtype), None, None, grad_cos, grad_sin
    backward = norms._layer_norm_backward if norm == LAYER else norms._rms_norm_backward
    context = SimpleNamespace(
        saved_tensors=(x, weight), eps=eps, weight_offset=weight_offset, clamp_eps=False,
        bias_dtype=ctx.bias_dtypes[which],
        needs_input_grad=(True, weight is not None, ctx.bias_dtypes[which] is not None),
    )  # fmt: skip
    return (*backward(context, grad)[:3], grad_cos, grad_sin)


# No defaults: torch wants the gradients of an op with lists in exactly the structure of its arguments.
_qk_norm_rope_op = register(
    "qk_norm_rope(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor? q_bias, Tensor? k_bias, "
    "Tensor[] cos, Tensor[] sin, Tensor[] cos_k, Tensor[] sin_k, Tensor? coords, SymInt[] grid, "
    "bool alternating, int front_pad, int norm, float eps, int heads, float weight_offset, "
    "ScalarType? round_dtype, bool round_norm, bool half, int arithmetic, int rotary_dim, "
    "int seq_dim, SymInt start, SymInt length, str? provider) -> (Tensor, Tensor)",
    _qk_norm_rope,
    _qk_norm_rope_fake,
    _qk_norm_rope_setup_context,
    _qk_norm_rope_backward,
)
