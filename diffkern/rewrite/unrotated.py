"""Queries and keys that go into an attention in fp8 and nowhere else: it reads them before their norm and rotation.

So nothing is written and read again in between. Whether a call of attention is computed so, its backend says at every
call; one that steps aside gets queries and keys as the source has them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from diffkern.providers.dispatch_modes import modes_active, transforms_active
from diffkern.providers.eager.attention_fp8 import Unrotated
from diffkern.rewrite.rotation import call_qk_norm_rope
from diffkern.rewrite.site import FusedSite


@dataclass(frozen=True, eq=False)
class Deferred:
    """Queries or keys that a site has not computed, on their way to a site of attention.

    Attributes:
        shape: What it will be.
        dtype: Likewise.
        device: Likewise.
        unrotated: What both are computed from.
        serve: The attention of the call, unless it steps aside: returns None then.
        run: Computes both as the site does.
        served: Counts a call of the site.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    unrotated: Unrotated
    serve: Callable[..., Tensor | None]
    run: Callable[[], tuple[Tensor, Tensor]]
    served: Callable[[], None]

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)


class UnrotatedSite(FusedSite):
    """Queries and keys of a processor, which the call of attention behind it alone reads.

    The first call of a kind and size computes them, with all that is proven and measured then.
    """

    not_quick = "getattr(module.__dict__.get('processor'), '_attention_backend', None) is not None"

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        #: Whether calls of a kind and size can be deferred, of those that the op has served.
        self._deferred: dict[Any, bool] = {}

    @override
    def __call__(self, module: nn.Module, *leaves: Any) -> Any:
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or self.provider is not None:
            return super().__call__(module, *leaves)
        backend = getattr(module.__dict__.get("processor"), "_attention_backend", None)
        serve = getattr(backend, "attend_unrotated", None)
        if serve is None or modes_active() or transforms_active():
            return super().__call__(module, *leaves)
        signature, before = self.signature(module, leaves), self.fused_calls
        kind = signature, *[leaf.numel().bit_length() for leaf in leaves if isinstance(leaf, Tensor)]
        way = self.ways.get(signature) if self._deferred.get(kind) else None
        unrotated = None if way is None or way.calls_norm is not None else self._unrotated(module, leaves, way)
        if unrotated is None:
            result = super().__call__(module, *leaves)
            if self.fused_calls > before:
                self._deferred[kind] = kind not in self._deferred
            return result

        def run() -> tuple[Tensor, Tensor]:
            result: tuple[Tensor, Tensor] = super(UnrotatedSite, self).__call__(module, *leaves)
            return result

        x, served = unrotated.queries[0], partial(self.count_fused, module)
        return tuple([Deferred(s, x.dtype, x.device, unrotated, serve, run, served) for s in unrotated.shapes])

    def _unrotated(self, module: nn.Module, leaves: tuple[Any, ...], way: Any) -> Unrotated | None:
        """What the op would be called with, where attention can begin there."""
        calls = _Calls()
        try:
            call_qk_norm_rope(self, module, self.operands(module, leaves), way, None, calls)
        except (RuntimeError, ValueError, TypeError):  # which the site itself answers for
            return None
        return calls.unrotated()


class _Calls:
    """Stands in for :mod:`diffkern.ops`, and keeps what its functions are called with."""

    def __init__(self) -> None:
        self._given: list[dict[str, Any]] = []

    def joint_qk_norm_rope(
        self, queries: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor], **options: Any
    ) -> tuple[Tensor, Tensor]:
        self._given.append({"queries": queries, "keys": keys, **options})
        return queries[0], keys[0]

    def qk_norm_rope(self, q: Tensor, k: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        one = {name: (options.pop(name, None),) for name in ("cos", "sin")}
        for side in "qk":
            for name, plural in (("weight", "weights"), ("bias", "biases")):
                one[f"{side}_{plural}"] = (options.pop(f"{side}_{name}", None),)
        self._given.append({"queries": (q,), "keys": (k,), "dim": 1, **one, **options})
        return q, k

    def unrotated(self) -> Unrotated | None:
        """The one call in the form that attention reads, if it has that."""
        if len(self._given) != 1:
            return None
        given = {name: value for name, value in self._given[0].items() if value is not None}
        biases = [*given.pop("q_biases", ()), *given.pop("k_biases", ())]
        expected = {"dim": 1, "norm": "rms", "pairing": "interleaved", "arithmetic": "float32"}
        operands = [given.pop(name, ()) for name in ("queries", "keys", "q_weights", "k_weights", "cos", "sin")]
        eps = given.pop("eps", None)
        if given != expected or eps is None or any([bias is not None for bias in biases]):
            return None
        queries, keys, q_weights, k_weights, *tables = operands
        weights = {None if weight is None else weight.dtype for weight in (*q_weights, *k_weights)}
        if None in weights or len(weights) != 1 or any([x.ndim != 4 for x in (*queries, *keys)]):
            return None
        if any([q.shape[:2] != k.shape[:2] for q, k in zip(queries, keys, strict=True)]):
            return None
        for side in (q_weights, k_weights):
            if any([w.shape != x.shape[3:] or not w.is_contiguous() for w, x in zip(side, queries, strict=True)]):
                return None
        flat = []
        for side in tables:
            for table, x in zip(side, queries, strict=True):
                length, width = x.shape[1], x.shape[3]
                full = table is not None and table.shape[-3:] == (length, 1, width) and table.numel() == length * width
                if not full or table.dtype is not torch.float32 or not table.is_contiguous():
                    return None
                flat.append(table.view(length, width))
        cos, sin = tuple(flat[: len(queries)]), tuple(flat[len(queries) :])
        return Unrotated(queries, keys, q_weights, k_weights, cos, sin, eps)
