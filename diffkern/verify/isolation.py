"""What keeps a proof apart from everything around it: copies of inputs and weights, and calls without a count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from diffkern.providers.foreign import MisconductError, preserved
from diffkern.verify.measures import relative_error

#: Threads in which a proof or a clock calls modules just now: such calls are none of the user's.
MEASURING: set[int] = set()


@contextmanager
def uncounted() -> Iterator[None]:
    """Within, reports count no calls of this thread."""
    thread = get_ident()
    outermost = thread not in MEASURING
    MEASURING.add(thread)
    try:
        yield
    finally:
        if outermost:
            MEASURING.discard(thread)


class Copy:
    """A call whose tensors share no memory with the original, at the same strides and offsets.

    Tensors that share a storage in the original share one in the copy, ``call``.
    """

    def __init__(self, call: Any) -> None:
        self._storages: dict[int, tuple[Tensor, Tensor]] = {}
        self._tensors: list[Tensor] = []
        self._index: list[int] = []
        self.call = map_tensors(self._copied, call)

    def _copied(self, tensor: Tensor) -> Tensor:
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested
        if not plain or tensor.is_meta or tensor.is_neg() or tensor.is_conj():
            return tensor.detach().clone()
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            original = _bytes(tensor)
            self._storages[storage._cdata] = original, original.clone()
        copy = self._storages[storage._cdata][1].untyped_storage()
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._tensors.append(empty.set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride()))
        self._index.append(list(self._storages).index(storage._cdata))
        return self._tensors[-1]

    def written(self) -> list[bool]:
        """Whether each of the copied storages differs from the original by now; also beside the tensors in it."""
        return [not torch.equal(original, copy) for original, copy in self._storages.values()]

    def difference(self, other: Copy) -> float:
        """The largest relative difference between what two runs wrote into the same place; 0 if both wrote nothing."""
        changed = [index for index, written in enumerate(self.written()) if written]
        pairs = zip(self._tensors, other._tensors, self._index, strict=True)
        return max((relative_error(y, x.double()) for x, y, index in pairs if index in changed), default=0.0)

    def shared_with(self, result: Any) -> set[int]:
        """Which of the copied storages the tensors of a result lie in."""
        places = {copy.untyped_storage().data_ptr(): i for i, (_, copy) in enumerate(self._storages.values())}
        return {places[address] for address in _addresses(result) if address in places}


def _bytes(tensor: Tensor) -> Tensor:
    """All of the memory that a tensor lies in: bytes, so that NaN is equal to itself."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def call_twice(function: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """Calls a function twice on copies of its arguments, and returns both results.

    Raises:
        MisconductError: it changed an argument or a setting of the process, or its result shares memory with an
            argument or with its other result.
        Exception: whatever ``function`` raises.
    """
    results: list[Any] = []
    with preserved(next((x.device for x in tensors_of(args)), None)) as changed:
        for _ in range(2):
            copy = Copy(args)
            result = function(*copy.call)
            if any(copy.written()):
                raise MisconductError("it changed its input")
            if settings := changed():
                raise MisconductError(f"it changed {settings}")
            if copy.shared_with(result):
                raise MisconductError("its result shares memory with its input")
            if results and _addresses(result) & _addresses(results[0]):
                raise MisconductError("it returns the same memory at every call")
            results.append(result)
    return results[0], results[1]


def _addresses(value: Any) -> set[int]:
    dense = (x for x in tensors_of(value) if x.numel() and x.layout is torch.strided)
    return {x.untyped_storage().data_ptr() for x in dense}


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """The same value with every tensor in it changed, in tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(change, item) for item in value))
    if type(value) in (tuple, list):
        return type(value)(map_tensors(change, item) for item in value)
    if type(value) is dict:
        return {key: map_tensors(change, item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: map_tensors(change, getattr(value, f.name)) for f in fields(value) if f.init})
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a value, as :func:`map_tensors` finds them."""
    found: list[Tensor] = []
    map_tensors(found.append, value)
    return found


def snapshot(module: nn.Module) -> Copy:
    """Returns a copy of the parameters and buffers of a module, to say later whether they were written."""
    return Copy((*module.parameters(), *module.buffers()))
