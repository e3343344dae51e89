r"""Linear attention, whose weights are products of queries and keys that are not negative.

Numerical contract (``docs/numerics.md`` has the table):

* queries, keys and values in float32, float16 or bfloat16, in any mix; float64 by the eager provider;
* all arithmetic in float32, the matrix products included, which are torch's;
* rounds once, to the dtype of the values.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from diffkern.ops.contract import ContractRow
from diffkern.ops.registration import Op

CONTRACT = tuple(
    ContractRow(
        "linear_attention", case, arithmetic="float32, the products too", rounds="once, to the dtype of the values"
    )
    for case in ("relu", "rotated")
)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_rotated: Tensor | None = None,
    k_rotated: Tensor | None = None,
    eps: float = 1e-15,
    *,
    relu: bool = True,
    provider: str | None = None,
) -> Tensor:
    r"""Attention without a softmax: the keys and values of all tokens are one matrix for each head.

    .. math:: y_n = \frac{\left(\sum_m v_m \tilde k_m^\top\right) \tilde q_n}{\sum_m k_m^\top q_n + \epsilon}

    Args:
        q: Queries ``[B, N, H, D]``, any strides; float32, float16, bfloat16 or float64.
        k: Keys ``[B, M, H, D]``.
        v: Values ``[B, M, H, D]``.
        q_rotated: The queries of the numerator, of the shape of ``q``; None if they are the same.
        k_rotated: The keys of the numerator, likewise.
        eps: ``ε``.
        relu: Takes the positive part of ``q`` and ``k``, but not of those that are rotated.
        provider: ``"triton"`` or ``"eager"``; None chooses the first that can.

    Returns:
        A new contiguous tensor ``[B, N, H, D]`` of the dtype of ``v``. Differentiable in all five.

    Raises:
        TypeError: an operand is not floating point.
        ValueError: shapes or devices do not fit together.
        diffkern.providers.NoProviderError: the provider that was asked for cannot serve the call.

    Source: Katharopoulos et al., "Transformers are RNNs", 2020; with rotations Su et al., "RoFormer", 2021.
    """
    return _linear_attention.call((q, k, v, q_rotated, k_rotated), (eps, relu), provider)


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, q_rotated: Tensor | None, k_rotated: Tensor | None, eps: float, relu: bool
) -> tuple[Any, ...]:
    given = {"q": q, "k": k, "v": v, "q_rotated": q_rotated, "k_rotated": k_rotated}
    expected = q.shape if q.ndim != 4 else (q.shape[0], *k.shape[1:2], *q.shape[2:])
    if q.ndim != 4:
        raise ValueError(f"queries have the shape [B, N, H, D], got {tuple(q.shape)}")
    for name, x in given.items():
        if x is None:
            continue
        if not x.is_floating_point():
            raise TypeError(f"attention needs floating point operands, and {name} is {x.dtype}")
        if x.shape != (q.shape if name.startswith("q") else expected):
            raise ValueError(f"{name} of shape {tuple(x.shape)} does not fit to queries of shape {tuple(q.shape)}")
    if (q_rotated is None) != (k_rotated is None):
        raise ValueError("queries and keys are rotated both, or none of them")
    return q, k, v, q_rotated, k_rotated, eps, relu


_linear_attention: Op[Tensor] = Op("linear_attention", _prepare, lambda q, v, **_: v.new_empty(q.shape))
