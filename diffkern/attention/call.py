"""One call of attention, however the model's library spells it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

MaskKind = Literal["none", "bool", "additive"]


@dataclass(frozen=True)
class Signature:
    """What of a call decides whether a backend can serve it, apart from how long the sequences are."""

    device: torch.device
    dtype: torch.dtype  # dtype of queries, keys and values
    heads: int  # heads of the queries
    kv_heads: int  # heads of keys and values; fewer than ``heads`` for grouped queries
    head_dim: int  # size of a head of queries and keys
    value_dim: int  # size of a head of the values
    mask: MaskKind
    causal: bool  # whether a query sees only the keys up to its own position, counted from the first key
    #: Whether there are as many keys as queries, as far as ``causal`` makes it matter: implementations count positions
    #: from different ends otherwise. False without ``causal``.
    square: bool
    dropout: bool  # whether attention weights are dropped
    scaled: bool  # whether scores have another scale than ``head_dim ** -0.5``
    gradients: bool  # whether a backward will follow

    def describe(self) -> str:
        """Says the same in words."""
        heads = f"{self.heads} heads" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads} heads"
        parts = [f"{heads} of {self.head_dim} in {str(self.dtype).removeprefix('torch.')} on {self.device.type}"]
        if self.mask != "none":
            parts.append("boolean mask" if self.mask == "bool" else "additive mask")
        parts += [name for name in ("causal", "dropout", "gradients") if getattr(self, name)]
        return ", ".join(parts)


@dataclass(frozen=True)
class AttentionCall:
    r"""The arguments of :math:`\operatorname{softmax}(s\,QK^\top + M)\,V`, head by head."""

    query: Tensor  # ``[B, S, H, D]``, any strides
    key: Tensor  # ``[B, T, G, D]``; ``G`` divides ``H``, and each key head serves ``H / G`` consecutive query heads
    value: Tensor  # ``[B, T, G, E]``
    #: None, or something that broadcasts to ``[B, H, S, T]``: bool, where True is seen, or float, which is added to the
    #: scores.
    mask: Tensor | None = None
    dropout: float = 0.0  # probability with which an attention weight is dropped
    causal: bool = False  # whether query ``i`` sees the keys up to ``i`` only
    scale: float | None = None  # ``s``; None is ``D ** -0.5``

    def signature(self) -> Signature:
        """What backends are chosen by."""
        query, key, value, mask = self.query, self.key, self.value, self.mask
        head_dim = query.shape[3]
        return Signature(
            query.device,
            query.dtype,
            query.shape[2],
            key.shape[2],
            head_dim,
            value.shape[3],
            "none" if mask is None else "bool" if mask.dtype == torch.bool else "additive",
            self.causal,
            self.causal and query.shape[1] == key.shape[1],
            self.dropout > 0,
            self.scale is not None and abs(self.scale * head_dim**0.5 - 1) > 1e-6,
            torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad),
        )

    def unfit(self) -> str | None:
        """Says why no backend but the stock one can be trusted with this call, or None."""
        tensors = (self.query, self.key, self.value)
        if any(type(x) is not Tensor for x in tensors) or not (self.mask is None or type(self.mask) is Tensor):
            return "a tensor is of a class of its own"
        if any(x.ndim != 4 or x.is_meta or x.is_nested for x in tensors):
            return "queries, keys and values are not ordinary tensors of four dimensions"
        if any(x.shape[0] != self.query.shape[0] or self.query.shape[2] % x.shape[2] for x in tensors):
            return "batch or heads of queries and keys do not belong together"
        if not self.query.device == self.key.device == self.value.device:
            return "queries, keys and values are on different devices"
        if not self.query.dtype == self.key.dtype == self.value.dtype:
            return "queries, keys and values have different dtypes"
        if self.mask is not None and self.mask.requires_grad and torch.is_grad_enabled():
            return "its mask is learned"
        return None

    def repeated(self) -> AttentionCall:
        """The same with one key head for each query head, for backends that do not group queries."""
        groups = self.query.shape[2] // self.key.shape[2]
        if groups == 1:
            return self
        key, value = (x.repeat_interleave(groups, dim=2) for x in (self.key, self.value))
        return replace(self, key=key, value=value)


#: Computes the attention of a call, ``[B, S, H, E]``.
Compute = Callable[[AttentionCall], Tensor]
