"""What a denoiser computes from its text: the same at every step of a run, so kept from one to the next.

The projection of a caption, and what linear layers of the attention to it make of that, depend on the text and on
weights alone. They are kept as long as both are valid (:mod:`diffkern.cache.derived`). To check a weight at every step
costs about as much as its product with a text, so ``exact``, which must find every write in time, keeps none of this.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from typing_extensions import override

from diffkern.cache.derived import DerivedCache, TensorFingerprint, match_all, version
from diffkern.cache.memory import memory
from diffkern.providers.dispatch_modes import functions_intercepted, modes_active, transforms_active

#: Texts that are kept: guidance may call a model with two in turn.
MAX_TEXTS = 2


def is_cacheable(tensor: Tensor) -> bool:
    """Whether what is computed from ``tensor`` may be kept: PyTorch counts writes, and nothing traces the call."""
    return (
        not torch.compiler.is_compiling()
        and not torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and version(tensor) is not None
        and not transforms_active()
        and not modes_active()
        and not functions_intercepted()
    )


@dataclass(frozen=True, eq=False)
class Caption:
    """A caption that was projected."""

    caption: TensorFingerprint
    weights: tuple[TensorFingerprint, ...]  # the weights of both layers
    result: TensorFingerprint  # the result, which others are given
    activation: Hashable  # what is between the two layers
    states: Tensor  # The result itself. It is kept, so that no other tensor can have its address.

    def holds(self, activation: Hashable, weights: Sequence[Tensor]) -> bool:
        """Whether it is valid, for its own caption."""
        return self.activation == activation and self.result.matches(self.states) and match_all(self.weights, weights)

    def produced(self, states: Tensor) -> bool:
        """Whether these states are the result, unchanged, maybe another view of the same shape."""
        own = self.states
        return (
            own.data_ptr() == states.data_ptr()
            and own.shape == states.shape
            and own.stride() == states.stride()
            and own.dtype == states.dtype
            and not states.is_neg()
            and self.result.version == version(own) == version(states)
        )


#: Projections that are kept, by their addresses.
CAPTIONS: WeakValueDictionary[int, Caption] = WeakValueDictionary()


def caption_of(states: Tensor) -> Caption | None:
    """The caption whose kept projection these hidden states are; None for all others."""
    caption = CAPTIONS.get(states.data_ptr())
    return caption if caption is not None and caption.produced(states) else None


def of_weight(weight: Tensor) -> TensorFingerprint:
    """The fingerprint of a weight that rounds take turns with."""
    return TensorFingerprint.of(weight, rotates=True)


@dataclass(frozen=True)
class _Text:
    """A text that a layer was called with."""

    caption: weakref.ref[Caption]
    signs: Hashable  # what could be seen of the weights
    sources: tuple[TensorFingerprint, ...] = ()  # the weights, where something is kept
    result: Tensor | None = None  # what the layer made of it; None until the text comes a second time
    version: int | None = None  # Of the result. Attention backends get it, and may write into it.


class _LayerOfText(DerivedCache):
    """The results of one linear layer for the texts that it was called with last."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[_Text] = []

    @override
    def fingerprints(self) -> Iterable[TensorFingerprint]:
        return [source for text in self.texts for source in text.sources]

    @override
    def entries(self) -> list[object]:
        return list(self.texts)

    def result(self, caption: Caption, weights: Sequence[Tensor], compute: Callable[[], Tensor]) -> Tensor:
        """Returns the result for a caption: the kept one, or what ``compute`` returns."""
        texts = self.texts
        known = next((text for text in texts if text.caption() is caption), None)
        if known is not None and known.result is not None and match_all(known.sources, weights):
            if known.version == version(known.result):
                return known.result
            self.is_disabled = True
        if self.is_disabled or (weights[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            return compute()
        signs = tuple([(id(weight), version(weight), weight.data_ptr()) for weight in weights])
        # Kept at the second time only: texts that are others at every call, and weights that come and go, are not.
        again = known is not None and known.signs == signs
        sources = tuple(map(of_weight, weights)) if again else ()
        result = compute()
        kept = (result, version(result)) if again else ()
        others = [other for other in texts if other is not known and other.caption() is not None]
        self.texts = [*others[1 - MAX_TEXTS :], _Text(weakref.ref(caption), signs, sources, *kept)]
        return result


def layer_of_text(
    owner: nn.Module, name: str, layer: nn.Module, states: Tensor, compute: Callable[[], Tensor]
) -> Tensor | None:
    """Returns what ``compute`` makes of the hidden states of a text; None if they are those of no kept caption.

    The result of the plain linear layer ``layer`` is kept beside ``owner``, the patched module that it is in.
    """
    caption = caption_of(states) if is_cacheable(states) else None  # which has memory of its own
    if caption is None:
        return None
    layers = memory(owner).setdefault("texts", {})
    if name not in layers:
        layers[name] = _LayerOfText()
    kept: _LayerOfText = layers[name]
    kept.on_call(states.device)
    return kept.result(caption, [weight for weight in layer._parameters.values() if weight is not None], compute)


def drop_layer_of_text(owner: nn.Module, name: str) -> None:
    """Drops what is kept of a layer: an adapter stands there, say, and what it leaves when it goes may be merged."""
    memory(owner).get("texts", {}).pop(name, None)
