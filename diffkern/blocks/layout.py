"""Channels last inside of a convolutional model: its weights are laid out so, and activations follow them.

A convolution of torch computes in channels last if its input or its weight lies so, and gives its result in that order.
So nothing but the weights is converted, with the parameters staying the objects that they are. Results leave the model
laid out as those of stock. Before a state dict is made, and with the patch, every weight gets the strides that it had.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from diffkern.blocks.pieces import calls_are_watched
from diffkern.cache import UNDO, memory
from diffkern.providers import KERNEL_DTYPES
from diffkern.verify.isolation import map_tensors, tensors_of
from diffkern.verify.samples import HOOKS

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
#: What memory knows of a module: its weights, also while they are as they were; and the hook before they are saved.
_KNOWN, _HOOK = f"{UNDO}: layout", f"{UNDO}: hook for saving its layout"
#: Convolutions over several places that a model has at least, whose layout is worth a question.
_FEWEST = 4


@dataclass(frozen=True)
class _Weight:
    """The weight of a convolution, and where it is held; a parameter by its identity, which a conversion keeps."""

    parent: weakref.ref[nn.Module]
    name: str
    convolution: weakref.ref[nn.Module]
    parameter: weakref.ref[Tensor]
    strides: tuple[int, ...]

    def is_in_place(self) -> bool:
        """Whether the convolution stands where it did, and has the parameter that it had."""
        parent, convolution = self.parent(), self.convolution()
        if parent is None or convolution is None or parent._modules.get(self.name) is not convolution:
            return False
        return convolution._parameters.get("weight") is self.parameter()


@dataclass(frozen=True)
class _Known:
    """What is known of a module that was converted: its weights, and all modules that lead to a convolution."""

    weights: list[_Weight]
    around: list[weakref.ref[nn.Module]]


def convolutions(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """The convolutions over images and videos inside of a module, each with what holds it and its name there."""
    for parent in module.modules():
        for name, child in parent._modules.items():
            if isinstance(child, _CONVOLUTIONS):
                yield parent, name, child


def is_convolutional(module: nn.Module) -> bool:
    """Whether a module has so many convolutions over several places that their layout may matter."""
    wide = [child for _, _, child in convolutions(module) if max(child.kernel_size) > 1]  # type: ignore[arg-type]
    return len(wide) >= _FEWEST


def unfit(module: nn.Module) -> str | None:
    """Why the weights of a module stay as they are laid out, or None."""
    seen: set[int] = set()
    if (reason := _hooks_on(module, module.modules())) is not None:
        return reason
    for _, name, child in convolutions(module):
        weight = child._parameters.get("weight")
        if name == "base_layer":
            return "an adapter sits on a convolution"
        if weight is None:
            continue  # computed from others at each call
        if type(weight) not in (nn.Parameter, Tensor) or weight.dtype not in KERNEL_DTYPES:
            return f"the weight of {name} is quantised or no plain tensor"
        if id(weight) in seen or weight.untyped_storage().nbytes() > weight.numel() * weight.element_size():
            return f"the weight of {name} shares its memory"
        if weight.is_inference():
            return f"the weight of {name} was made in inference mode, where none can be laid out otherwise and back"
        if weight.is_meta or not weight.is_contiguous():
            return f"the weight of {name} is not contiguous"
        seen.add(id(weight))
    return None


@torch.inference_mode(False)
@torch.no_grad()
def convert(module: nn.Module) -> None:
    """Lays the weights of all convolutions out in channels last; those that are so already stay."""
    known = memory(module)
    if _KNOWN not in known:
        weights = [
            _Weight(weakref.ref(parent), name, weakref.ref(child), weakref.ref(weight), weight.stride())
            for parent, name, child in convolutions(module)
            if (weight := child._parameters.get("weight")) is not None
        ]
        around = [part for part in module.modules() if any(isinstance(one, _CONVOLUTIONS) for one in part.modules())]
        known[_KNOWN] = _Known(weights, list(map(weakref.ref, around)))
        known.setdefault(UNDO, set()).add(_take_back)
        known[_HOOK] = module.register_state_dict_pre_hook(_before_saving)
    for held in known[_KNOWN].weights:
        weight = held.parameter()
        if weight is not None and not weight.is_contiguous(memory_format=_FORMATS[weight.ndim]):
            weight.data = weight.data.contiguous(memory_format=_FORMATS[weight.ndim])


@torch.inference_mode(False)
@torch.no_grad()
def give_back(module: nn.Module) -> None:
    """Gives every weight the strides that it had."""
    for held in memory(module)[_KNOWN].weights if _KNOWN in memory(module) else ():
        weight = held.parameter()
        if weight is not None and weight.stride() != held.strides:
            as_it_was = torch.empty_strided(weight.shape, held.strides, dtype=weight.dtype, device=weight.device)
            weight.data = as_it_was.copy_(weight)


def changed(module: nn.Module) -> str | None:
    """What was done to a convolution, or around one, since the weights were converted; or None."""
    known: _Known = memory(module).get(_KNOWN, _Known([], []))
    around = (part for reference in known.around if (part := reference()) is not None)
    if (reason := _hooks_on(module, around)) is not None:
        return reason
    moved = (held for held in known.weights if not held.is_in_place())
    return next((f"the convolution {held.name} was wrapped, or has another weight" for held in moved), None)


def layouts(result: Any) -> str:
    """For each tensor of a result a letter: l where it is an image or video in channels last, else c."""
    return "".join("l" if is_last(x) else "c" for x in tensors_of(result))


def laid_out(result: Any, wanted: str) -> Any:
    """A result with its images and videos laid out as :func:`layouts` said of another one; contiguous beyond that."""
    letters = iter(wanted)

    def converted(x: Tensor) -> Tensor:
        last = next(letters, "c") == "l"
        if last == is_last(x) or not (x.is_contiguous() if last else is_last(x)):
            return x
        return x.contiguous(memory_format=_FORMATS[x.ndim] if last else torch.contiguous_format)

    return map_tensors(converted, result)


def is_last(x: Tensor) -> bool:
    """Whether an image or a video lies in channels last, and not also in row-major order."""
    return x.ndim in _FORMATS and not x.is_contiguous() and x.is_contiguous(memory_format=_FORMATS[x.ndim])


def _hooks_on(module: nn.Module, parts: Iterable[nn.Module]) -> str | None:
    """Which hooks see the calls of parts of a module, or move their weights; or None. Its own run around it."""
    if calls_are_watched():
        return "global hooks watch the calls of all modules"
    for part in parts:
        # Those of accelerate and diffusers, by which they offload a module, or cast it at each call.
        moves_weights = "_hf_hook" in part.__dict__ or "_diffusers_hook" in part.__dict__
        if moves_weights or (part is not module and any([part.__dict__[name] for name in HOOKS])):
            return "hooks sit inside of it, or move its weights"
    return None


def _before_saving(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    give_back(module)  # the next call converts again


def _take_back(module: nn.Module) -> None:
    give_back(module)
    memory(module).pop(_KNOWN, None)
    hook = memory(module).pop(_HOOK, None)
    if hook is not None:
        hook.remove()
