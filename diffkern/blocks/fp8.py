"""Linear layers of a block in 8 bits, and the copies of their weights.

A copy is made at first use and kept beside the block. It is made anew when the weight is another one, or has changed
(:mod:`diffkern.blocks.watch` says how that is known). Layers that read the same rows share one copy, and are one
product.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from diffkern.blocks.memory import memory, version
from diffkern.blocks.pieces import plain_linear, run_layer
from diffkern.blocks.watch import Source, Store, are_still
from diffkern.ops import activation_fp8
from diffkern.providers.cublaslt import layers

#: Tensor cores take sides that are multiples of this.
MULTIPLE = 16


class Rows(NamedTuple):
    """Hidden states in rows of 8 bits."""

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """The shape of the hidden states."""
        return self.values.shape


def fits(layer: nn.Module | None, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a linear layer can be computed in 8 bits: torch's own, with sides that tensor cores take."""
    if layer is None or not plain_linear(layer, device, dtype):
        return False
    weight: Any = layer._parameters["weight"]
    rows, columns = weight.shape
    if rows % MULTIPLE or columns % MULTIPLE:
        return False
    # Without a count of its writes a copy could not be kept; in a graph there is none.
    return torch.compiler.is_compiling() or version(weight) is not None


def as_rows(x: Tensor | Rows, provider: str | None) -> Rows:
    """The hidden states in rows of 8 bits."""
    return x if isinstance(x, Rows) else Rows(*activation_fp8(x, provider=provider))


@dataclass(frozen=True)
class _Copy:
    """Weights in 8 bits, one below the other, and what they were made of.

    Attributes:
        made_of: The weights, and the biases where several of them are put together.
        values: ``[N, K]``.
        scales: Of the rows, ``[N, 1]``.
        bias: The biases of several layers, put together.
    """

    made_of: tuple[Source, ...]
    values: Tensor
    scales: Tensor
    bias: Tensor | None


class Weights(Store):
    """The weights of one block in 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[str, _Copy] = {}
        self._made = 0

    @override
    def sources(self) -> Iterable[Source]:
        return [source for copy in tuple(self._copies.values()) for source in copy.made_of]

    def run(self, name: str, layer: nn.Module, x: Tensor | Rows) -> Tensor:
        """Calls a layer, which goes by ``name`` in this block, on hidden states in whatever form they have."""
        if not isinstance(x, Rows):
            return run_layer(layer, x)
        parameters: Any = layer._parameters
        weight = parameters["weight"]
        copy = self._copy(name, [weight], [])
        # Not the op, whose checks take half as long as the rest: nothing here has a gradient or is traced.
        return layers.linear_rows(x.values, x.scales, copy.values, copy.scales, parameters["bias"], weight.dtype)

    def project(self, children: Mapping[str, Any], x: Rows, context: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of self-attention, whose context is ``x``: parts of the rows of one product."""
        parameters = [children[name]._parameters for name in ("to_q", "to_k", "to_v")]
        weights, biases = [layer["weight"] for layer in parameters], [layer["bias"] for layer in parameters]
        given = [bias for bias in biases if bias is not None]
        if 0 < len(given) < len(biases):
            return (
                self.run("to_q", children["to_q"], x),
                self.run("to_k", children["to_k"], x),
                self.run("to_v", children["to_v"], x),
            )
        copy = self._copy("to_q, to_k, to_v", weights, given)
        y = layers.linear_rows(x.values, x.scales, copy.values, copy.scales, copy.bias, weights[0].dtype)
        query, key, value = y.split([weight.shape[0] for weight in weights], -1)
        return query, key, value

    def _copy(self, name: str, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> _Copy:
        copy = self._copies.get(name)
        if copy is None or not are_still(copy.made_of, [*weights, *biases]):
            copy = self._copies[name] = _copied(weights, biases)
            self._made += 1
        return copy

    def drop(self, prefix: str) -> None:
        """Forgets the copies of layers that are not as they were, whose adapters may be merged when they go."""
        for name in tuple(self._copies):
            if name.startswith(prefix):
                self._copies.pop(name, None)

    def copies(self) -> list[object]:
        """All that there are now."""
        return list(self._copies.values())

    def state(self) -> Hashable:
        """Is another one as soon as a copy is made, or is out of date by the version of what it was made of."""
        tensors = [source.tensor() for source in self.sources()]
        return self._made, tuple([None if tensor is None else version(tensor) for tensor in tensors])


def weights_of(block: nn.Module) -> Weights:
    """The weights of a block in 8 bits, made as they are needed. Now and then they are compared."""
    known = memory(block)
    if "fp8" not in known:
        known["fp8"] = Weights()
    weights: Weights = known["fp8"]
    weights.tick()
    return weights


def state_of(block: nn.Module) -> Hashable:
    """What a recording of a block depends on: which copies it read, and that they are up to date."""
    weights: Weights | None = memory(block).get("fp8")
    return None if weights is None else weights.state()


def copies_of(block: nn.Module) -> list[object]:
    """The copies there are now, for whoever reads them later."""
    weights: Weights | None = memory(block).get("fp8")
    return [] if weights is None else weights.copies()


@torch.no_grad()
def _copied(weights: Sequence[Tensor], biases: Sequence[Tensor]) -> _Copy:
    made_of = tuple(map(Source.of, (*weights, *biases)))
    whole = weights[0].detach() if len(weights) == 1 else torch.cat([weight.detach() for weight in weights])
    values, scales = activation_fp8(whole)
    return _Copy(made_of, values, scales, torch.cat(list(biases)) if biases else None)


def gelu_feed_forward(weights: Weights, feed_forward: nn.Module, rows: Rows, provider: str | None) -> Tensor:
    """Diffusers' ``FeedForward`` with a tanh GELU and silent dropouts, both products in 8 bits."""
    net: Any = feed_forward._modules["net"]
    first, *rest = net._modules.values()
    x = weights.run("ff.0", first._modules["proj"], rows)
    (last,) = (layer for layer in rest if type(layer) is nn.Linear)
    return weights.run("ff.1", last, Rows(*activation_fp8(x, "gelu_tanh", provider=provider)))
