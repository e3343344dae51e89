"""What a denoiser computes from its text: the same at every step of a run, so computed once.

The projection of the caption, and in each block the keys and values of the attention to it, depend on the text and on
weights alone. They are kept while both stay what they were (:mod:`diffkern.blocks.watch` says how that is known).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.embeddings import PixArtAlphaTextProjection
from torch import Tensor, nn
from typing_extensions import override

from diffkern.blocks.memory import memory, version
from diffkern.blocks.pieces import calls_are_watched, plain_linear, untouched
from diffkern.blocks.recipe import BlockRecipe
from diffkern.blocks.watch import Source, Store
from diffkern.providers import KERNEL_DTYPES

#: Calls of an attention, and of a projection, between two comparisons: a model has many of the ones, few of the others.
EVERY, EVERY_PROJECTION = 24, 4
#: Texts of which a block keeps keys and values: guidance may call it with two in turn.
MAX_TEXTS = 2

Pair = tuple[Tensor, Tensor]


def counts(tensor: Tensor) -> bool:
    """Whether torch counts the writes into a tensor, and nobody wants a gradient: what is kept then can be trusted."""
    return not (torch.compiler.is_compiling() or torch.is_grad_enabled()) and version(tensor) is not None


@dataclass(frozen=True)
class _Text:
    """A text that an attention was called with.

    Attributes:
        states: Its hidden states. They are kept, so that no other tensor can have their address.
        written: How often they had been written.
        signs: What could be seen of the weights.
        made_of: The weights, where something is kept.
        pair: Keys, normalised, and values; None until the text comes a second time.
    """

    states: Tensor
    written: int
    signs: Hashable
    made_of: tuple[Source, ...] = ()
    pair: Pair | None = None

    def is_of(self, states: Tensor) -> bool:
        """Whether these are the same states, maybe by another view."""
        own = self.states
        return (
            own.data_ptr() == states.data_ptr()
            and own.shape == states.shape
            and own.stride() == states.stride()
            and own.dtype == states.dtype
            and self.written == own._version == states._version
        )

    def holds(self, weights: tuple[Tensor, ...]) -> bool:
        """Whether keys and values are kept, and the weights they were made with are what they were."""
        return len(self.made_of) == len(weights) and all(
            [source.is_still(weight) for source, weight in zip(self.made_of, weights, strict=True)]
        )


class TextAttention(Store):
    """The keys and values of the texts that one attention was called with last."""

    def __init__(self) -> None:
        super().__init__()
        self._texts: list[_Text] = []

    @override
    def sources(self) -> Iterable[Source]:
        return [source for text in self._texts for source in text.made_of]

    def keys_and_values(self, children: Mapping[str, Any], states: Tensor, compute: Callable[[], Pair]) -> Pair:
        """Returns those of a text: the kept ones, or what ``compute`` gives.

        Args:
            children: Of the attention: plain layers and norms.
            states: The hidden states of the text.
            compute: Computes keys, normalised, and values.
        """
        texts, weights = self._texts, _weights(children)
        known = next((text for text in texts if text.is_of(states)), None)
        if known is not None and known.pair is not None and known.holds(weights):
            return known.pair
        if states.is_cuda and torch.cuda.is_current_stream_capturing():
            return compute()  # into memory of the graph, which each replay writes again
        # Kept at the second time only: texts that are others at every call, and weights that come and go, are not.
        signs = tuple([(id(weight), version(weight), weight.data_ptr()) for weight in weights])
        again = known is not None and known.signs == signs
        made_of = tuple(map(Source.of, weights)) if again else ()
        pair = compute()
        text = _Text(states, states._version, signs, made_of, pair if again else None)
        self._texts = [*[other for other in texts if other is not known][1 - MAX_TEXTS :], text]
        return pair


def text_attention(block: nn.Module, name: str, states: Tensor) -> TextAttention | None:
    """What is kept for an attention of a block to the text; None where nothing may be.

    Args:
        block: The block.
        name: The name of the attention in it, whose processor is the stock one, and whose norms are plain.
        states: The hidden states of the text.
    """
    if not counts(states):
        return None
    children: Any = block._modules[name]._modules  # type: ignore[union-attr]
    device, dtype = states.device, states.dtype
    if not (plain_linear(children["to_k"], device, dtype) and plain_linear(children["to_v"], device, dtype)):
        return None
    stores = memory(block).setdefault("texts", {})
    if name not in stores:
        stores[name] = TextAttention()
    store: TextAttention = stores[name]
    store.tick(EVERY)
    return store


def _weights(children: Mapping[str, Any]) -> tuple[Tensor, ...]:
    key, value = children["to_k"]._parameters, children["to_v"]._parameters
    given = key["weight"], key["bias"], value["weight"], value["bias"], children["norm_k"]._parameters["weight"]
    return tuple([weight for weight in given if weight is not None])


class _Caption(Store):
    """The projection of the caption that a module was called with last."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: tuple[tuple[Source, ...], Tensor, int | None] | None = None

    @override
    def sources(self) -> Iterable[Source]:
        kept = self._kept
        return () if kept is None else kept[0]

    def projected(self, module: nn.Module, caption: Tensor) -> Tensor:
        tensors = caption, *module.parameters()
        kept = self._kept
        if kept is not None:
            sources, y, written = kept
            if (
                len(sources) == len(tensors)
                and written == version(y)
                and all([source.is_still(tensor) for source, tensor in zip(sources, tensors, strict=True)])
            ):
                return y
        if caption.is_cuda and torch.cuda.is_current_stream_capturing():
            return PixArtAlphaTextProjection.forward(module, caption)  # type: ignore[no-any-return]
        # All of the caption is compared: graphs that others captured write without a sign as well.
        noted = Source.of(caption, step=1), *map(Source.of, tensors[1:])
        result: Tensor = PixArtAlphaTextProjection.forward(module, caption)
        self._kept = noted, result, version(result)
        return result


class TextProjection(BlockRecipe):
    """``PixArtAlphaTextProjection``."""

    op = "caption"
    ops = ()
    fingerprints = frozenset({"35e6748325cb9cda"})
    versions = "diffusers 0.42"

    @staticmethod
    @override
    def arguments(caption: Tensor) -> tuple[Any, ...]:
        return (caption,)

    @override
    def declines(self, module: nn.Module, call: tuple[Any, ...]) -> str | None:
        (caption,) = call
        if type(caption) is not Tensor or caption.is_meta or caption.ndim < 1:
            return "the caption is not a plain tensor with data"
        if caption.dtype not in KERNEL_DTYPES:
            return f"the caption is {str(caption.dtype).removeprefix('torch.')}"
        if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(caption.device.type):
            return f"autocast is on for {caption.device.type}, and the stock forward follows its rules"
        if calls_are_watched():
            return "global hooks watch the calls of all modules"
        first = module._modules["linear_1"]
        if untouched(first, nn.Linear) and first._parameters["weight"].dtype != caption.dtype:  # type: ignore[union-attr]
            return "its layers are of another dtype than the caption"
        return None

    @override
    def stock_pieces(self, module: nn.Module, call: tuple[Any, ...]) -> tuple[str, ...]:
        """The layers that somebody watches or has changed: they are called every time, and so is what follows."""
        (caption,) = call
        children: Any = module._modules
        stock: tuple[str, ...] = ()
        for name in ("linear_1", "linear_2"):
            if not plain_linear(children[name], caption.device, caption.dtype):
                stock += (name,)
        return stock if untouched(children["act_1"], type(children["act_1"])) else (*stock, "act_1")

    @override
    def compute(self, module: nn.Module, call: tuple[Any, ...], provider: str | None, stock: tuple[str, ...]) -> Tensor:
        (caption,) = call
        if stock or not counts(caption):
            return PixArtAlphaTextProjection.forward(module, caption)  # type: ignore[no-any-return]
        known = memory(module)
        if "caption" not in known:
            known["caption"] = _Caption()
        store: _Caption = known["caption"]
        store.tick(EVERY_PROJECTION)
        return store.projected(module, caption)

    @override
    def sources(self) -> tuple[Callable[..., Any], ...]:
        return (PixArtAlphaTextProjection.forward,)

    @override
    def samples(
        self, module: nn.Module, tokens: int, device: torch.device, dtype: torch.dtype
    ) -> list[tuple[Any, ...]]:
        owner: Any = module
        generator = torch.Generator("cpu").manual_seed(22)
        return [(torch.randn(2, 7, owner.linear_1.in_features, generator=generator).to(device=device, dtype=dtype),)]

    @override
    def make_plain(self, module: nn.Module) -> None:
        """Nothing: it has no processors."""


RECIPE = TextProjection()
