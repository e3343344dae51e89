"""Attention on e4m3 in plain PyTorch: how queries, keys and values come into fp8, and what cuDNN makes of them.

Scores do not change if one vector is taken from all keys, and the output moves by what is taken from all values:
both lose a mean of each channel, which would use up the four digits of e4m3 where it is large. Any vector serves for
keys. That of values is exact: the output is rounded, too, and near their mean where weights are smooth.

e4m3 keeps its digits over 2 ** 15, so that scales of queries and keys need not be tight: a sample of tokens will do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffkern.providers.eager.fp8 import E4M3, LARGEST, SMALLEST_PEAK

#: What attention weights, at most 1, are multiplied by before they become e4m3, whose least number is 2 ** -9.
WEIGHT_SCALE = 256.0

#: Tokens of each head, at most, that say the range of queries and keys, and the mean of keys; a power of two.
SAMPLE = 128
#: What the largest magnitude in a sample becomes: 28 times as much fits above, digits are kept down to 1/1024 of it.
SAMPLE_PEAK = 16.0


@dataclass(frozen=True)
class Quantized:
    r"""Queries, keys and values in e4m3: :math:`q = s_q\,q_8`, :math:`k = s_k\,k_8 + m_k`, :math:`v = s_v v_8 + m_v`.

    Attributes:
        query: ``[B, S, H, D]``, contiguous, as the other two.
        key: ``[B, T, G, D]``.
        value: ``[B, T, G, D]``.
        scalars: ``[6]`` in float32, as cuDNN reads them: :math:`s_q`, :math:`s_k`, 1 for the values, whose scales
            :math:`s_v` wait for the output, the inverse of :data:`WEIGHT_SCALE`, it, and 1 for the output.
        value_scale: :math:`s_v` in float32, ``[B, G, D]``.
        value_mean: :math:`m_v` in float32, ``[B, G, D]``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scalars: Tensor
    value_scale: Tensor
    value_mean: Tensor


def quantize(query: Tensor, key: Tensor, value: Tensor) -> Quantized:
    """Brings queries, keys and values ``[B, length, heads, D]`` into e4m3; what is not finite becomes NaN.

    The largest magnitude among some queries, and some keys without their mean, becomes :data:`SAMPLE_PEAK`; a number
    more than 28 times as large becomes 448. The scale of values comes from the largest magnitude of a channel and its
    mean, and may be larger than what is left without the mean asks for.
    """
    query, key, value = (x.float() for x in (query, key, value))
    some_queries, some_keys = _finite(_sample(query)), _finite(_sample(key))
    (key_mean, key_bound), (value_mean, value_bound) = _mean_and_bound(some_keys), _mean_and_bound(_finite(value))
    peaks = torch.stack([some_queries.abs().amax(), key_bound.amax()])
    # A sample of zeros says nothing of the others.
    scales = torch.where(peaks > 0, peaks.clamp_min(SMALLEST_PEAK), SAMPLE_PEAK) / SAMPLE_PEAK
    value_scale = value_bound.clamp_min(SMALLEST_PEAK) / LARGEST
    rest = torch.tensor([1.0, 1 / WEIGHT_SCALE, WEIGHT_SCALE, 1.0], device=query.device)
    return Quantized(
        _round(query * (1 / scales[0])),
        _round((key - key_mean[:, None]) * (1 / scales[1])),
        _round((value - value_mean[:, None]) * (1 / value_scale)[:, None]),
        torch.cat([scales, rest]),
        value_scale,
        value_mean,
    )


@dataclass(frozen=True)
class Unrotated:
    r"""Queries and keys before their RMS norm over each head and their rotation, of one stream of tokens or of two.

    Streams follow each other in the result. Neighbours in a head are a pair, as in :func:`diffkern.ops.qk_norm_rope`
    with one table for queries and keys.

    Attributes:
        queries: ``[B, S, H, D]`` of each stream.
        keys: ``[B, S, G, D]`` of each.
        q_weights: Weight of the norm, ``[D]``, of each.
        k_weights: The same of the keys.
        cos: Cosines ``[S, D]`` of each, contiguous, in float32.
        sin: Sines.
        eps: :math:`\varepsilon` of the norms.
    """

    queries: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]
    q_weights: tuple[Tensor, ...]
    k_weights: tuple[Tensor, ...]
    cos: tuple[Tensor, ...]
    sin: tuple[Tensor, ...]
    eps: float

    @property
    def shapes(self) -> list[torch.Size]:
        """The shapes of all queries and of all keys."""
        lengths = sum([x.shape[1] for x in self.queries])
        return [torch.Size((x.shape[0], lengths, *x.shape[2:])) for x in (self.queries[0], self.keys[0])]

    def rotated(self) -> tuple[Tensor, Tensor]:
        """Queries and keys as attention reads them, in float32."""
        tables = self.cos, self.sin
        sides = (self.queries, self.q_weights), (self.keys, self.k_weights)
        q, k = (torch.cat([_rotate(*one, self.eps) for one in zip(*side, *tables, strict=True)], 1) for side in sides)
        return q, k


def _rotate(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    x = x.float()
    x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return x * cos[:, None] + torch.stack([-b, a], -1).flatten(-2) * sin[:, None]


def quantize_unrotated(x: Unrotated, value: Tensor) -> Quantized:
    """:func:`quantize` of what :meth:`Unrotated.rotated` returns, without a rounding in between."""
    return quantize(*x.rotated(), value)


def attend(x: Quantized, scale: float) -> Tensor:
    """Computes what cuDNN computes of it, ``[B, S, H, D]`` in e4m3: weights are rounded before they are normalised."""
    groups = x.query.shape[2] // x.key.shape[2]
    query, key, value = (t.float().transpose(1, 2) for t in (x.query, x.key, x.value))
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    scores = (query @ key.mT) * (scale * x.scalars[0] * x.scalars[1])
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    rounded = _round(weights * x.scalars[4]).float() * x.scalars[3]
    return _round((rounded @ value) / weights.sum(-1, keepdim=True)).transpose(1, 2).contiguous()


def dequantize(y: Tensor, x: Quantized, dtype: torch.dtype) -> Tensor:
    """Takes the output of :func:`attend` back: the scale of each channel of the values, and their mean."""
    groups = y.shape[2] // x.value_scale.shape[1]
    scale, mean = (t.repeat_interleave(groups, 1)[:, None] for t in (x.value_scale, x.value_mean))
    return torch.addcmul(mean, y.float(), scale).to(dtype)


def _sample(x: Tensor) -> Tensor:
    """Up to :data:`SAMPLE` of the tokens of ``[B, T, G, D]``, spread over all of them without a period."""
    length, i = x.shape[1], torch.arange(min(x.shape[1], SAMPLE), device=x.device)
    return x if length <= SAMPLE else x[:, (i * SAMPLE + i * 79 % SAMPLE) * length // SAMPLE**2]


def _mean_and_bound(x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of each channel over the tokens of ``[B, T, G, D]``, and a bound of what is left without it."""
    mean = x.mean(1)
    return mean, x.abs().amax(1) + mean.abs()


def _finite(x: Tensor) -> Tensor:
    return torch.where(x.abs() < torch.inf, x, 0.0)


def _round(x: Tensor) -> Tensor:
    """Rounds to e4m3: beyond the largest number to that, and to NaN where it is not finite."""
    return torch.where(x.abs() < torch.inf, x.clamp(-LARGEST, LARGEST), torch.nan).to(E4M3)
