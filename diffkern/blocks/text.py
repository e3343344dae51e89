"""The projection of a caption, computed once for each text; see :mod:`diffkern.cache.text`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from diffusers.models.activations import FP32SiLU
from diffusers.models.embeddings import PixArtAlphaTextProjection
from torch import Tensor, nn
from typing_extensions import override

from diffkern.blocks.pieces import plain_linear, unfit_surroundings, untouched
from diffkern.blocks.recipe import BlockRecipe
from diffkern.cache import DerivedCache, TensorFingerprint, kept_of, memory
from diffkern.cache.derived import version
from diffkern.cache.text import CAPTIONS, MAX_TEXTS, Caption, is_cacheable, of_weight
from diffkern.matching.forward import autocast_on
from diffkern.providers import KERNEL_DTYPES
from diffkern.verify.samples import Draws

#: Activations that compute nothing but what their class and ``approximate`` say.
_ACTIVATIONS = (nn.GELU, nn.SiLU, FP32SiLU)


class _Caption(DerivedCache):
    """The projections of the captions that a module was called with last."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Caption] = []
        #: Whether what was kept last has been of use: what is another one at every call is no caption of a run.
        self._was_useful = True
        #: The captions of the last calls, with how often they had been written.
        self._seen: list[tuple[weakref.ref[Tensor], int | None]] = []

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
                self._was_useful = True
                return kept.states.detach()  # a view: each has requires_grad and grad of its own
        if caption.is_cuda and torch.cuda.is_current_stream_capturing():
            return _project(module, caption)  # into memory of the graph, which each replay writes again
        written = version(caption)
        again = any([one() is caption and before == written for one, before in self._seen])
        self._seen = [*self._seen[1 - MAX_TEXTS :], (weakref.ref(caption), written)]
        if not (self._was_useful or again):  # to keep it takes sums of all weights
            self._kept = [kept for kept in valid if kept.caption.tensor() is not None]
            return _project(module, caption)
        self._was_useful = False
        sources = TensorFingerprint.of(caption), tuple(map(of_weight, weights))
        y = _project(module, caption).detach()
        kept = Caption(*sources, TensorFingerprint.of(y), activation, y)
        others = [other for other in valid if other.caption.tensor() is not None]
        self._kept = [*others[1 - MAX_TEXTS :], kept]
        CAPTIONS[y.data_ptr()] = kept
        return y.detach()


def _project(module: Any, caption: Tensor) -> Tensor:
    result: Tensor = PixArtAlphaTextProjection.forward(module, caption)
    return result


#: Rows of a caption below which projecting it takes no longer than reading the weights alone.
_LEAST_ROWS = 4


def _is_short(caption: Tensor) -> bool:
    return caption.numel() < _LEAST_ROWS * caption.shape[-1]


class TextProjection(BlockRecipe):
    """``PixArtAlphaTextProjection``."""

    op = "caption"
    fingerprints = frozenset({"35e6748325cb9cda"})
    versions = "diffusers 0.42"
    is_timed_on_cpu = True  # to see that nothing was written reads the caption and all weights

    @staticmethod
    @override
    def arguments(caption: Tensor) -> tuple[Any, ...]:
        return (caption,)

    @override
    def unfit(self, module: nn.Module, call: tuple[Any, ...]) -> str | None:
        (caption,) = call
        if type(caption) is not Tensor or caption.is_meta or caption.ndim < 1 or caption.is_nested:
            return "the caption is not a plain tensor with data"
        if caption.dtype not in KERNEL_DTYPES:
            return f"the caption is {str(caption.dtype).removeprefix('torch.')}"
        reason = autocast_on(caption.device) or unfit_surroundings()
        if reason is not None:
            return reason
        if _is_short(caption):
            return f"it has fewer than {_LEAST_ROWS} rows: to see that no weight has changed takes as long"
        first = module._modules["linear_1"]
        weight = first._parameters.get("weight") if untouched(first, nn.Linear) else None  # type: ignore[union-attr]
        if weight is not None and weight.dtype != caption.dtype:
            return "its layers are of another dtype than the caption"
        return None

    @override
    def allowed_in_strict(self, module: nn.Module, call: tuple[Any, ...]) -> bool:
        (caption,) = call
        return type(caption) is Tensor and caption.ndim > 0 and _is_short(caption)

    @override
    def stock_pieces(self, module: nn.Module, call: tuple[Any, ...]) -> tuple[str, ...]:
        """The layers with hooks or changes: they are called every time, and so is what follows."""
        (caption,) = call
        children: Any = module._modules
        activation = children["act_1"]
        own = {
            "what is kept": untouched(module, PixArtAlphaTextProjection),  # a hook could write into the result
            "linear_1": plain_linear(children["linear_1"], caption.device, caption.dtype),
            "linear_2": plain_linear(children["linear_2"], caption.device, caption.dtype),
            "act_1": type(activation) in _ACTIVATIONS and untouched(activation, type(activation)),
        }
        return tuple([name for name, is_own in own.items() if not is_own])

    @override
    def compute(self, module: nn.Module, call: tuple[Any, ...], provider: str | None, stock: tuple[str, ...]) -> Tensor:
        (caption,) = call
        if stock or not is_cacheable(caption):
            if not torch.compiler.is_compiling():
                memory(module).pop("caption", None)
            return _project(module, caption)
        cache = kept_of(module, "caption", _Caption)
        cache.on_call(caption.device)
        return _project(module, caption) if cache.is_disabled else cache.projected(module, caption)

    @override
    def sources(self) -> tuple[Callable[..., Any], ...]:
        return (PixArtAlphaTextProjection.forward,)

    @override
    def sample_calls(self, module: nn.Module, tokens: int, draw: Draws) -> list[tuple[Any, ...]]:
        owner: Any = module
        return [(draw(2, 7, owner.linear_1.in_features),)]


RECIPE = TextProjection()
