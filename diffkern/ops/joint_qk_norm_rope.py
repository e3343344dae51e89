r"""Queries and keys of two streams of tokens, text and image, normalised, rotated and joined in one pass.

Numerical contract (``docs/numerics.md`` has the table): that of :mod:`diffkern.ops.qk_norm_rope` for each stream. The
kernels write each stream into its part of the result, so that nothing is left to concatenate.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from diffkern.ops.contract import ContractRow
from diffkern.ops.qk_norm_rope import (
    _full,
    _qk_norm_rope_backward,
    _qk_norm_rope_prepare,
    _qk_norm_rope_setup_context,
)
from diffkern.ops.registration import Op

_AS = "as qk_norm_rope"
CONTRACT = (
    ContractRow(
        "joint_qk_norm_rope", "any", f"{_AS}, two streams", _AS, _AS, "torch.cat of qk_norm_rope of each stream"
    ),
)

Parameters = tuple[Tensor | None, Tensor | None]
_NONE: Parameters = (None, None)


def joint_qk_norm_rope(
    queries: tuple[Tensor, Tensor],
    keys: tuple[Tensor, Tensor],
    q_weights: Parameters = _NONE,
    k_weights: Parameters = _NONE,
    cos: Parameters = _NONE,
    sin: Parameters = _NONE,
    eps: float | None = 1e-6,
    *,
    dim: int = 1,
    norm: str | None = "rms",
    q_biases: Parameters = _NONE,
    k_biases: Parameters = _NONE,
    round_norm: bool = False,
    pairing: str = "interleaved",
    arithmetic: str = "float32",
    provider: str | None = None,
) -> tuple[Tensor, Tensor]:
    r"""``torch.cat`` of :func:`diffkern.ops.qk_norm_rope` of two streams, queries and keys each, without the copies.

    Args:
        queries: Of both streams, ``[..., D]`` each, alike in dtype and in all dimensions but ``dim``; their order is
            that in the result. Any strides. float32, float16, bfloat16 or float64.
        keys: Likewise; the number of heads may differ from that of the queries.
        q_weights: Weight of the norm of the queries of each stream, of shape ``[D]``, or None.
        k_weights: The same of the keys.
        cos: The full table of each stream, as in :func:`diffkern.ops.qk_norm_rope`; None for a stream that is only
            normalised.
        sin: Sines, in the same form.
        eps: ``ε`` of all norms, as in :func:`diffkern.ops.qk_norm_rope`.
        dim: The dimension of the tokens, not the last one.
        norm: ``"rms"``, ``"layer"`` or None, over each head.
        q_biases: Bias of the norm of the queries of each stream, or None.
        k_biases: The same of the keys.
        round_norm: As in :func:`diffkern.ops.qk_norm_rope`.
        pairing: As in :func:`diffkern.ops.rope`.
        arithmetic: As in :func:`diffkern.ops.rope`.
        provider: ``"compiled"``, ``"triton"`` or ``"eager"``; None chooses the first that can.

    Returns:
        Queries and keys, new contiguous tensors. Differentiable in all tensors.

    Raises:
        TypeError: a tensor has a dtype that does not fit.
        ValueError: shapes, devices or other arguments do not fit together; the message says which.
        diffkern.providers.NoProviderError: the provider that was asked for cannot serve the call.
    """
    if len(queries) != 2 or len(keys) != 2:
        raise ValueError(f"two streams are joined, got {len(queries)} of queries and {len(keys)} of keys")
    tables = [([], []) if c is None else _full(c, s) for c, s in zip(cos, sin, strict=True)]
    parameters = zip(q_weights, k_weights, strict=True), zip(q_biases, k_biases, strict=True)
    operands = (
        *chain.from_iterable(zip(queries, keys, strict=True)),
        *[one for pairs in parameters for pair in pairs for one in pair], *tables[0], *tables[1],
    )  # fmt: skip
    dim = dim + queries[0].ndim if dim < 0 else dim
    form = len(tables[0][0]), len(tables[1][0])
    options = dim, eps, norm, round_norm, pairing, arithmetic, form
    return _joint_qk_norm_rope.call(operands, options, provider)


def _streams(operands: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The first operands of ``qk_norm_rope`` for each stream, the tables of the queries serving the keys."""
    q, k, q_2, k_2, qw, kw, qw_2, kw_2, qb, kb, qb_2, kb_2, cos, sin, cos_2, sin_2 = operands
    return [
        (q, k, qw, kw, qb, kb, cos, sin, cos, sin, None, []),
        (q_2, k_2, qw_2, kw_2, qb_2, kb_2, cos_2, sin_2, cos_2, sin_2, None, []),
    ]


def _prepare(*given: Any) -> tuple[Any, ...]:
    operands, (dim, eps, norm, round_norm, pairing, arithmetic, _) = given[:16], given[16:]
    rest: tuple[Any, ...] = (eps, norm, None, 0.0, None, round_norm, "blocked", 0, pairing, arithmetic, None, None, 1)
    streams = _streams(operands)
    forms = [int(len(stream[6]) > 0) for stream in streams]
    args = [_qk_norm_rope_prepare(*(*stream, *rest, form)) for stream, form in zip(streams, forms, strict=True)]
    for name, one, other in (("queries", operands[0], operands[2]), ("keys", operands[1], operands[3])):
        if one.dtype != other.dtype:
            raise ValueError(f"the {name} of the streams are {one.dtype} and {other.dtype}: they must be alike")
        if not 0 <= dim < one.ndim - 1 or one.ndim != other.ndim:
            raise ValueError(f"the {name} of {one.ndim} and {other.ndim} dimensions cannot be joined along {dim}")
        if [*one.shape[:dim], *one.shape[dim + 1 :]] != [*other.shape[:dim], *other.shape[dim + 1 :]]:
            raise ValueError(
                f"the {name} have shapes {tuple(one.shape)} and {tuple(other.shape)}: only dimension {dim} may differ"
            )
    kind, epsilon = args[0][14:16]
    half, number = args[0][20:22]
    return (*operands, dim, kind, epsilon, round_norm, half, number)


def _fake(q: Tensor, k: Tensor, q_2: Tensor, k_2: Tensor, dim: int, **options: Any) -> tuple[Tensor, Tensor]:
    pairs = ((q, q_2), (k, k_2))
    one, other = [q.new_empty((*x.shape[:dim], x.shape[dim] + y.shape[dim], *x.shape[dim + 1 :])) for x, y in pairs]
    return one, other


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.tables = [len(tables) for tables in inputs[12:16]]
    ctx.options = inputs[16:-1]
    ctx.save_for_backward(*inputs[:12], *chain.from_iterable(inputs[12:16]))


class _StreamContext:
    """What the backward of ``qk_norm_rope`` reads, of one stream."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


def _backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    """That of ``qk_norm_rope`` for each stream, on its part of the gradients; keys share the tables of queries."""
    saved, lists = list(ctx.saved_tensors), []
    operands, rest = saved[:12], saved[12:]
    for count in ctx.tables:
        lists.append(rest[:count])
        rest = rest[count:]
    dim, norm, eps, round_norm, half, arithmetic = ctx.options
    results, starts = [], [0, 0]
    for stream in _streams([*operands, *lists]):
        context: Any = _StreamContext()
        options = (False, 0, norm, eps, 0, 0.0, None, round_norm, half, arithmetic, 0, 1, 0, -1, None)
        _qk_norm_rope_setup_context(context, (*stream, *options), None)
        sizes = [x.shape[dim] for x in stream[:2]]
        parts = [grad.narrow(dim, start, size) for grad, start, size in zip(grads, starts, sizes, strict=True)]
        found = _qk_norm_rope_backward(context, *parts)
        tables = [
            [None if own is None else own + of_keys for own, of_keys in zip(found[i], found[i + 2], strict=True)]
            for i in (6, 7)
        ]
        results.append((found[:2], found[2:4], found[4:6], tables))
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    by_kind = list(zip(*results, strict=True))
    return tuple(chain.from_iterable(chain.from_iterable(by_kind)))


_joint_qk_norm_rope = Op("joint_qk_norm_rope", _prepare, _fake, _backward, setup_context=_setup_context)
