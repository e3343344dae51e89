"""What a denoiser computes from its text: the same at every step of a run, so computed once.

The projection of the caption, and in each block the keys and values of the attention to it, depend on the text and on
weights alone. They are kept as long as both are valid (:mod:`diffkern.cache.derived`). To check a weight at every step
costs about as much as its product with a text, so ``exact``, which must find every write in time, keeps none of this.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from diffusers.models.activations import FP32SiLU
from diffusers.models.embeddings import PixArtAlphaTextProjection
from torch import Tensor, nn
from typing_extensions import override

from diffkern.blocks.pieces import plain_linear, unfit_surroundings, untouched
from diffkern.blocks.recipe import BlockRecipe
from diffkern.cache import DerivedCache, TensorFingerprint, match_all, memory, version
from diffkern.providers import KERNEL_DTYPES
from diffkern.providers.dispatch_modes import modes_active, transforms_active

#: Texts that are kept: guidance may call a model with two in turn.
MAX_TEXTS = 2

#: Activations that compute nothing but what their class and ``approximate`` say.
_ACTIVATIONS = (nn.GELU, nn.SiLU, FP32SiLU)

Pair = tuple[Tensor, Tensor]


def is_cacheable(tensor: Tensor) -> bool:
    """Whether what is computed from ``tensor`` may be kept: PyTorch counts writes, and nothing traces the call."""
    return (
        not torch.compiler.is_compiling()
        and not torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and version(tensor) is not None
        and not transforms_active()
        and not modes_active()
    )


@dataclass(frozen=True, eq=False)
class _Projected:
    """A caption that was projected.

    Attributes:
        caption: The caption.
        weights: The weights of both layers.
        result: The result, which others are given.
        activation: What is between the two layers.
        states: The result itself. It is kept, so that no other tensor can have its address.
    """

    caption: TensorFingerprint
    weights: tuple[TensorFingerprint, ...]
    result: TensorFingerprint
    activation: Hashable
    states: Tensor

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


#: Results that are kept, by their addresses.
_projected: WeakValueDictionary[int, _Projected] = WeakValueDictionary()


class _Caption(DerivedCache):
    """The projections of the captions that a module was called with last."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[_Projected] = []

    @override
    def fingerprints(self) -> Iterable[TensorFingerprint]:
        return [one for kept in self._kept for one in (kept.caption, *kept.weights, kept.result)]

    @override
    def results(self) -> Iterable[TensorFingerprint]:
        return [kept.result for kept in self._kept]

    @override
    def entries(self) -> list[object]:
        return list(self._kept)

    def projected(self, module: Any, caption: Tensor) -> Tensor:
        """Returns the projection of a caption, the kept one if it is valid."""
        layers = module.linear_1._parameters, module.linear_2._parameters
        weights = [layer[name] for layer in layers for name in ("weight", "bias") if layer[name] is not None]
        activation = type(module.act_1), getattr(module.act_1, "approximate", None)
        valid = [kept for kept in self._kept if kept.holds(activation, weights)]
        for kept in valid:
            if kept.caption.matches(caption):
                return kept.states.detach()  # a view: each has requires_grad and grad of its own
        if caption.is_cuda and torch.cuda.is_current_stream_capturing():
            return _project(module, caption)  # into memory of the graph, which each replay writes again
        sources = TensorFingerprint.of(caption), tuple(map(_of_weight, weights))
        y = _project(module, caption).detach()
        kept = _Projected(*sources, TensorFingerprint.of(y), activation, y)
        others = [other for other in valid if other.caption.tensor() is not None]
        self._kept = [*others[1 - MAX_TEXTS :], kept]
        _projected[y.data_ptr()] = kept
        return y.detach()


def _of_weight(weight: Tensor) -> TensorFingerprint:
    return TensorFingerprint.of(weight, rotates=True)


def _project(module: Any, caption: Tensor) -> Tensor:
    result: Tensor = PixArtAlphaTextProjection.forward(module, caption)
    return result


@dataclass(frozen=True)
class _Text:
    """A text that an attention was called with.

    Attributes:
        text: The projection of its caption.
        eps: Of the norm of the keys.
        signs: What could be seen of the weights.
        sources: The weights, where something is kept.
        pair: Keys, normalised, and values; None until the text comes a second time.
        versions: Of the pair. Attention backends get it, and may write into it.
    """

    text: weakref.ref[_Projected]
    eps: float
    signs: Hashable
    sources: tuple[TensorFingerprint, ...] = ()
    pair: Pair | None = None
    versions: tuple[int | None, ...] = ()


class TextAttention(DerivedCache):
    """The keys and values of the texts that one attention was called with last."""

    def __init__(self) -> None:
        super().__init__()
        self._texts: list[_Text] = []

    @override
    def fingerprints(self) -> Iterable[TensorFingerprint]:
        return [source for text in self._texts for source in text.sources]

    @override
    def entries(self) -> list[object]:
        return list(self._texts)

    def keys_and_values(self, children: Mapping[str, Any], states: Tensor, compute: Callable[[], Pair]) -> Pair:
        """Returns those of a text: the kept ones, or what ``compute`` returns.

        Args:
            children: Of the attention: plain layers and norms.
            states: The hidden states of the text.
            compute: Computes keys, normalised, and values.
        """
        projected = _projected.get(states.data_ptr())
        if projected is None or not projected.produced(states):
            return compute()  # of a text that is no kept projection
        texts, weights, eps = self._texts, _weights(children), children["norm_k"].eps
        known = next((text for text in texts if text.text() is projected), None)
        if known is not None and known.pair is not None and known.eps == eps and match_all(known.sources, weights):
            if known.versions == tuple(map(version, known.pair)):
                return known.pair
            self.is_disabled = True
        if self.is_disabled:
            return compute()
        signs = tuple([(id(weight), version(weight), weight.data_ptr()) for weight in weights])
        again = known is not None and known.eps == eps and known.signs == signs
        if states.is_cuda and torch.cuda.is_current_stream_capturing():
            return compute()
        # Kept at the second time only: texts that are others at every call, and weights that come and go, are not.
        sources = tuple(map(_of_weight, weights)) if again else ()
        pair = compute()
        kept = (pair, tuple(map(version, pair))) if again else ()
        text = _Text(weakref.ref(projected), eps, signs, sources, *kept)
        others = [other for other in texts if other is not known and other.text() is not None]
        self._texts = [*others[1 - MAX_TEXTS :], text]
        return pair


def text_attention(block: nn.Module, name: str, states: Tensor) -> TextAttention | None:
    """What is kept for an attention of a block to the text; None where nothing may be.

    Args:
        block: The block.
        name: The name of the attention in it, whose processor is the stock one, and whose norms are plain.
        states: The hidden states of the text.
    """
    if torch.compiler.is_compiling():
        return None
    children: Any = block._modules[name]._modules  # type: ignore[union-attr]
    device, dtype = states.device, states.dtype
    if not (plain_linear(children["to_k"], device, dtype) and plain_linear(children["to_v"], device, dtype)):
        # An adapter, say: what it leaves behind when it goes may be merged.
        memory(block).get("texts", {}).pop(name, None)
        return None
    if not is_cacheable(states):
        return None
    caches = memory(block).setdefault("texts", {})
    if name not in caches:
        caches[name] = TextAttention()
    cache: TextAttention = caches[name]
    cache.on_call(device)
    return cache


def _weights(children: Mapping[str, Any]) -> tuple[Tensor, ...]:
    key, value = children["to_k"]._parameters, children["to_v"]._parameters
    given = key["weight"], key["bias"], value["weight"], value["bias"], children["norm_k"]._parameters["weight"]
    return tuple([weight for weight in given if weight is not None])


#: Rows of a caption below which projecting it takes no longer than reading the weights alone.
_LEAST_ROWS = 4


class TextProjection(BlockRecipe):
    """``PixArtAlphaTextProjection``."""

    op = "caption"
    ops = ()
    fingerprints = frozenset({"35e6748325cb9cda"})
    versions = "diffusers 0.42"

    @override
    def for_numerics(self, numerics: str) -> BlockRecipe | None:
        return None if numerics == "exact" else self

    @staticmethod
    @override
    def arguments(caption: Tensor) -> tuple[Any, ...]:
        return (caption,)

    @override
    def declines(self, module: nn.Module, call: tuple[Any, ...]) -> str | None:
        (caption,) = call
        if type(caption) is not Tensor or caption.is_meta or caption.ndim < 1 or caption.is_nested:
            return "the caption is not a plain tensor with data"
        if caption.dtype not in KERNEL_DTYPES:
            return f"the caption is {str(caption.dtype).removeprefix('torch.')}"
        if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(caption.device.type):
            return f"autocast is on for {caption.device.type}, and the stock forward follows its rules"
        reason = unfit_surroundings()
        if reason is not None:
            return reason
        if caption.numel() < _LEAST_ROWS * caption.shape[-1]:
            return f"it has fewer than {_LEAST_ROWS} rows: to see that no weight has changed takes as long"
        first = module._modules["linear_1"]
        weight = first._parameters.get("weight") if untouched(first, nn.Linear) else None  # type: ignore[union-attr]
        if weight is not None and weight.dtype != caption.dtype:
            return "its layers are of another dtype than the caption"
        return None

    @override
    def stock_pieces(self, module: nn.Module, call: tuple[Any, ...]) -> tuple[str, ...]:
        """The layers with hooks or changes: they are called every time, and so is what follows."""
        (caption,) = call
        children: Any = module._modules
        # A hook on the module could write into the result.
        stock: tuple[str, ...] = () if untouched(module, PixArtAlphaTextProjection) else ("what is kept",)
        for name in ("linear_1", "linear_2"):
            if not plain_linear(children[name], caption.device, caption.dtype):
                stock += (name,)
        activation = children["act_1"]
        return (
            stock if type(activation) in _ACTIVATIONS and untouched(activation, type(activation)) else (*stock, "act_1")
        )

    @override
    def compute(self, module: nn.Module, call: tuple[Any, ...], provider: str | None, stock: tuple[str, ...]) -> Tensor:
        (caption,) = call
        if stock or not is_cacheable(caption):
            if not torch.compiler.is_compiling():
                memory(module).pop("caption", None)
            return _project(module, caption)
        known = memory(module)
        if "caption" not in known:
            known["caption"] = _Caption()
        cache: _Caption = known["caption"]
        cache.on_call(caption.device)
        return _project(module, caption) if cache.is_disabled else cache.projected(module, caption)

    @override
    def sources(self) -> tuple[Callable[..., Any], ...]:
        return (PixArtAlphaTextProjection.forward,)

    @override
    def samples(
        self, module: nn.Module, tokens: int, device: torch.device, dtype: torch.dtype
    ) -> list[tuple[Any, ...]]:
        owner: Any = module
        generator = torch.Generator("cpu").manual_seed(22)
        caption = torch.randn(2, 7, owner.linear_1.in_features, generator=generator, device="cpu")
        return [(caption.to(device=device, dtype=dtype),)]

    @override
    def make_plain(self, module: nn.Module) -> None:
        """Nothing: it has no processors."""


RECIPE = TextProjection()
