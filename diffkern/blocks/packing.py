"""Projections that read the same rows, their weights moved together in memory so that they are one product.

Nothing is kept twice: the parameters stay the same objects with the same values, as parts of one storage. Whatever
moves them, as offloading and casting do, parts them again, and a call finds that out by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diffkern.blocks.pieces import plain_linear, untouched
from diffkern.blocks.rms_pieces import Project
from diffkern.cache import UNDO, memory
from diffkern.ops import packed_linear
from diffkern.providers.cublaslt import serves
from diffkern.providers.cublaslt.layers import linear, together
from diffkern.providers.dispatch_modes import modes_active, transforms_active

#: How reports name what was done to weights.
NOTE = "weights of q, k and v moved to lie together in memory, for one product"

#: The projections of self-attention.
NAMES = ("to_q", "to_k", "to_v")

#: What memory knows of each attention: where the weights lay at the last call; what was moved, and where to.
_ADDRESSES, _MOVED = "addresses of projections", f"{UNDO}: packed"
#: ... and the hook that parts them before they are saved.
_HOOK = f"{UNDO}: hook for saving"


def projection(block: Any, attention: str, x: Tensor) -> Project | None:
    """How the projections of a self-attention are one product in this call; None if they are not.

    Weights that were at the same addresses at the last call, too, are moved together if they are not: those that come
    and go (group offloading, for one) are not worth it.

    Args:
        block: The block.
        attention: The name of the self-attention in it.
        x: Hidden states like those that the projections read.
    """
    if torch.is_grad_enabled():
        return None
    layers, device, dtype = _layers(block, attention), x.device, x.dtype
    if layers is None or not all([plain_linear(layer, device, dtype) for layer in layers]):
        return None
    weights, biases = _of(layers, "weight"), _of(layers, "bias")
    if len(biases) not in (0, len(weights)):
        return None
    if torch.compiler.is_compiling():
        # A graph cannot ask where weights lie. The op does, and computes each by itself if need be.
        return _project_by_the_op if _packs_in_graphs(x.device.type, x.dtype) else None
    if transforms_active() or modes_active():
        return None
    weight = together(weights)
    if weight is not None:
        bias = together(biases) if biases else None
        if bias is None and biases:
            return None
        return partial(_project, weight, bias, [weight.shape[0] for weight in weights])
    # A hook on the block may bring its weights every time.
    may_move = x.is_cuda and untouched(block, type(block)) and not torch.cuda.is_current_stream_capturing()
    if may_move and _stay(block, attention, weights):
        torch.cuda.synchronize(x.device)  # another stream may still be reading what is freed
        if pack(block, attention):
            return projection(block, attention, x)
    return None


def _stay(block: Any, attention: str, weights: Sequence[Tensor]) -> bool:
    """Whether weights lie for the second time where they lay; and not for the third, where they could not be moved."""
    known = memory(block).setdefault(_ADDRESSES, {})
    addresses = tuple([weight.data_ptr() for weight in weights])
    before, times = known.get(attention, (None, 0))
    times = times + 1 if before == addresses else 1
    known[attention] = addresses, times
    return bool(times == 2)


def pack_before_first_call(block: Any, attention: str) -> bool:
    """Moves the weights of a self-attention on a GPU together before its first call, which may be traced.

    Returns:
        Whether they lie so now.
    """
    layers = _layers(block, attention)
    weight = None if layers is None else layers[0]._parameters.get("weight")
    if layers is None or weight is None or not weight.is_cuda:
        return False
    plain = all(plain_linear(layer, weight.device, weight.dtype) for layer in layers)
    return plain and pack(block, attention)


@torch.inference_mode(False)  # a parameter with the memory of an inference tensor would become one
@torch.no_grad()
def pack(block: Any, attention: str) -> bool:
    """Moves the weights and biases of plain layers together. Returns whether they lie so now.

    They stay where they are if anybody else holds their memory, who would have other weights from then on, and where
    there is no room for one more copy of them.
    """
    layers = _layers(block, attention)
    if layers is None:
        return False
    weights, biases = _of(layers, "weight"), _of(layers, "bias")
    if len(biases) not in (0, len(weights)) or not all(map(_is_alone, (*weights, *biases))):
        return False
    if len({(weight.dtype, weight.shape[1]) for weight in weights}) > 1:
        return False
    groups = [group for group in (weights, biases) if group]
    try:
        wholes = [torch.cat([parameter.detach() for parameter in group]) for group in groups]
    except torch.OutOfMemoryError:
        return False
    for group, whole in zip(groups, wholes, strict=True):
        for parameter, place in zip(group, whole.split([len(one) for one in group]), strict=True):
            parameter.data = place
    known = memory(block)
    # The parameters, not the layers: an adapter, say, takes the place of a layer and keeps its weight.
    moved = [weakref.ref(parameter) for group in groups for parameter in group]
    known.setdefault(_MOVED, {})[attention] = moved, [whole.data_ptr() for whole in wholes]
    known.setdefault(UNDO, set()).add(_take_back)
    if _HOOK not in known:
        known[_HOOK] = block.register_state_dict_pre_hook(_before_saving)
    return True


@torch.inference_mode(False)
@torch.no_grad()
def part(block: Any) -> None:
    """Gives every weight that was moved together a memory of its own again."""
    for moved, addresses in memory(block).pop(_MOVED, {}).values():
        for reference in moved:
            parameter = reference()
            if parameter is None:
                continue
            storage = parameter.untyped_storage()
            # Elsewhere, another library has put it there.
            if storage.data_ptr() in addresses and storage.nbytes() > parameter.nbytes:
                if parameter.is_cuda:
                    torch.cuda.synchronize(parameter.device)  # another stream may still be reading what is freed
                parameter.data = parameter.detach().clone()


def _before_saving(block: Any, prefix: str, keep_vars: bool) -> None:
    """Parts the weights: accelerate takes parameters of one storage for tied ones, and saves the first of them only.

    A copy of a block has this hook and weights that lie together, and remembers nothing.
    """
    if _MOVED not in memory(block):
        for attention in block._modules:
            _remember_move(block, attention)
    part(block)


def _remember_move(block: Any, attention: str) -> None:
    """Notes weights that lie together in one memory of their size as moved there."""
    layers = _layers(block, attention)
    for name in ("weight", "bias"):
        group = [layer._parameters.get(name) for layer in layers or ()]
        parameters = [parameter for parameter in group if parameter is not None]
        whole = together(parameters) if len(parameters) == len(NAMES) else None
        if whole is not None and whole.untyped_storage().nbytes() == whole.nbytes:
            moved, addresses = memory(block).setdefault(_MOVED, {}).setdefault(attention, ([], []))
            moved += map(weakref.ref, parameters)
            addresses.append(whole.data_ptr())


def _take_back(block: Any) -> None:
    memory(block).pop(_HOOK).remove()
    part(block)


def _project(
    weight: Tensor, bias: Tensor | None, sizes: list[int], children: Mapping[str, Any], x: Tensor, context: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of self-attention, whose context is ``x``: parts of the rows of one product."""
    query, key, value = linear(x, weight, bias).split_with_sizes(sizes, -1)
    return query, key, value


def _project_by_the_op(children: Mapping[str, Any], x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    layers = [children[name] for name in NAMES]
    weights, biases = _of(layers, "weight"), _of(layers, "bias")
    query, key, value = packed_linear(x, weights, biases).split([weight.shape[0] for weight in weights], -1)
    return query, key, value


def _layers(block: Any, attention: str) -> list[Any] | None:
    children = getattr(block._modules[attention], "_modules", {})
    layers = [children.get(name) for name in NAMES]
    return None if None in layers else layers


def _of(layers: Sequence[Any], name: str) -> list[Tensor]:
    given = [layer._parameters[name] for layer in layers]
    return [parameter for parameter in given if parameter is not None]


def _is_alone(parameter: Tensor) -> bool:
    """Whether a parameter is all of its memory, and no other tensor is a view of it."""
    if parameter.is_inference() or not parameter.is_contiguous():
        return False
    storage = parameter.untyped_storage()
    # Two know of it: the parameter, and the object that asks. Memory that is not torch's own cannot be resized.
    mine = storage.nbytes() == parameter.nbytes and storage.resizable()
    return mine and torch._C._storage_Use_Count(storage._cdata) == 2


def _packs_in_graphs(device_type: str, dtype: torch.dtype) -> bool:
    """Whether a graph shall hold the op for all three: ``torch.compile`` takes the answer for a constant."""
    return not torch.compiler.is_exporting() and serves(device_type, dtype)


# What torch.compiler.assume_constant_result does, which imports all of torch._dynamo.
_packs_in_graphs._dynamo_marked_constant = True  # type: ignore[attr-defined]
