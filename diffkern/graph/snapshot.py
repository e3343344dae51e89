"""What a replay depends on besides the contents of tensors: modules, their attributes, their classes.

A forward decides what it launches from its arguments, from the attributes of modules, processors and whatever hangs off
them, from the functions it calls, and from settings of torch. It cannot decide from the contents of tensors on the GPU:
reading one would end the capture. So as long as all of that is as it was, a replay computes what the forward would.
"""

from __future__ import annotations

import enum
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import attrgetter, is_, itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from diffkern.blocks.fp8 import home_of

#: Values that never change: one is as good as another that is equal.
_CONSTANTS = frozenset(
    map(type, (None, True, 0, 0j, "", b"", ..., range(0), torch.float32, torch.device("cpu"), torch.strided))
) | {torch.memory_format, torch.finfo, torch.iinfo, torch.Size}
#: Compared by how they are written: -0.0 is not 0.0, and NaN is NaN.
_NUMBERS = frozenset((float, complex))
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
#: Objects of these libraries are taken as they are: their attributes decide nothing, or count calls.
_OPAQUE = ("torch.", "diffkern.", "accelerate.", "diffusers.hooks.", "weakref", "threading", "_thread", "logging")
#: Containers with more entries are too much to compare before every step.
MAX_ENTRIES = 10_000
#: Tensors on the CPU that are plain attributes become constants of a graph; of so many elements they are compared.
_MAX_ELEMENTS = 4096

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_MODULES = ("_modules", "_parameters", "_buffers")
#: What torch keeps in every module for itself.
_OF_TORCH = frozenset(nn.Module().__dict__) - {"training"}
_PATHS_INSIDE = tuple(f".{name}" for name in _OF_MODULES)
_END = object()
_dtype_of = attrgetter("dtype")


class _Same:
    """Equal to another one of the same object, as long as that exists."""

    __slots__ = ("ref",)

    def __init__(self, value: Any) -> None:
        self.ref = _reference(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return False
        value = self.ref()
        return value is not None and value is other.ref()

    __hash__ = None  # type: ignore[assignment]


class ModuleSnapshot:
    """The state of a module and everything in it at one moment, apart from the contents of its tensors on GPUs.

    Two of them are equal if a forward that ran at one moment launches the same kernels on the same addresses at the
    other. :meth:`holds` says the same of a snapshot and this very moment, much faster. Neither keeps tensors, modules
    or functions alive.

    Attributes:
        modules: The module itself and all those inside of it, each once. They are not kept alive.
        hooked: Paths of modules inside of it that have a hook or a forward of their own, and references to them.
        tensors: Every tensor that was found, with its address; not kept alive either.
        opaque: What cannot be looked at, as scripted modules cannot, or "".
    """

    def __init__(self, module: nn.Module, patches: Iterable[object] = ()) -> None:
        """Walks through ``module``; ``patches`` are what else its forward goes through."""
        self.opaque = ""
        self.modules: list[weakref.ref[nn.Module]] = []
        self.hooked: list[tuple[str, weakref.ref[nn.Module]]] = []
        self.tensors: list[tuple[weakref.ref[Tensor], int]] = []
        self._elsewhere: list[tuple[str, torch.device]] = []
        self._devices: set[torch.device] = set()
        self._owners: list[Callable[[], Any]] = []
        self._getters: list[Callable[[Any], tuple[Any, ...]]] = []
        self._containers: list[Any] = []
        self._inner: list[tuple[int, str]] = []
        self._slots: list[tuple[Callable[[], Any], str]] = []
        self._empty: list[Any] = []
        self._on_cpu: list[tuple[weakref.ref[Tensor], Tensor]] = []
        self._arrays: list[tuple[Any, bytes]] = []
        self._facts: list[tuple[Any, ...]] = []
        self._patches = [*patches]
        self._walk(module)
        self._dicts = [container for container in self._containers if isinstance(container, dict)]
        self._layout = [list(column) for column in self._lie([tensor() for tensor, _ in self.tensors])]
        self._classes = sorted(self._seen_classes, key=lambda cls: (cls.__module__, cls.__qualname__, id(cls)))
        self._globals = [pair for cls in self._classes for pair in _globals_read(cls)]
        self._code = [*self._look_at_code()]
        self._filtered_code = [*_methods(self._classes), *_values(self._globals)]
        self._ambient = _ambient()
        self._expected: list[Any] = []
        self._weak: list[tuple[int, Callable[[], Any]]] = []
        for i, value in enumerate(self._look()):
            strong = type(value) in _CONSTANTS or isinstance(value, (*_CONTAINERS, type, enum.Enum)) or value is _END
            self._expected.append(value if strong else None)
            if not strong:
                self._weak.append((i, _reference(value)))

    # --- comparing ----------------------------------------------------------------------------------------

    def holds(self) -> bool:
        """Whether everything is still as it was, by identity; what was replaced by its like says False here."""
        try:
            tensors = [tensor() for tensor, _ in self.tensors]
            if any(self._empty) or any(tensor is None for tensor in tensors) or self._ambient != _ambient():
                return False
            expected = self._expected.copy()
            for i, reference in self._weak:
                value = expected[i] = reference()
                if value is None:
                    return False
            return (
                all(map(is_, expected, self._look()))
                and all(map(is_, self._code, self._look_at_code()))
                and all(map(list.__eq__, self._layout, map(list, self._lie(tensors))))
                and all(torch.equal(tensor(), was) for tensor, was in self._on_cpu)  # type: ignore[arg-type]
                and all(array.tobytes() == was for array, was in self._arrays)
            )
        except (AttributeError, KeyError, RuntimeError, TypeError):  # gone, or changed by another thread meanwhile
            return False

    def is_there(self) -> bool:
        """Whether all the tensors lie where they did, so that reading that memory does no harm."""
        try:
            return all(tensor().data_ptr() == address for tensor, address in self.tensors if address)  # type: ignore[union-attr]
        except AttributeError:  # of None: one is gone
            return False

    def is_of(self, patches: list[object]) -> bool:
        """Whether these were the patches."""
        return _identical(self._patches, patches)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModuleSnapshot) and self.difference(other) is None

    __hash__ = None  # type: ignore[assignment]

    def difference(self, other: ModuleSnapshot) -> str | None:
        """The path of something that was another one at the moment of ``other``, or None."""
        if self._facts != other._facts:
            for mine, others in zip(self._facts, other._facts, strict=False):
                if mine != others:
                    return _name_difference(mine, others)
            return _shown(max(self._facts, other._facts, key=len)[min(len(self._facts), len(other._facts))][0])
        if not _identical(self._patches, other._patches):
            return "the patches of diffkern"
        if not _identical(self._filtered_code, other._filtered_code):
            return "the code of its classes"
        if self._ambient != other._ambient:
            return "the settings of torch or diffusers"
        return None

    # --- why not ------------------------------------------------------------------------------------------

    def unfit(self) -> str | None:
        """Why steps of the module cannot be replayed as it is now, whatever its forward does; or None."""
        if self.opaque:
            return self.opaque
        if len(self._devices) > 1 or any(device.type != "cuda" for device in self._devices):
            first = self._elsewhere[0][1]
            path = next(path for path, device in self._elsewhere if device.type != "cuda" or device != first)
            return f"{path} is not on the GPU with the rest: offloaded weights come and go between replays"
        return None

    # --- looking ------------------------------------------------------------------------------------------

    def _look(self) -> Iterator[Any]:
        """Everything that is compared by identity, in one order."""
        states = [owner().__dict__ for owner in self._owners]
        # Not kept: through its children almost everything can be reached, the module itself as well.
        inner = [states[i][name] for i, name in self._inner]
        return chain(
            map(len, states),  # small numbers are one object each
            chain.from_iterable([values_of(state) for values_of, state in zip(self._getters, states, strict=True)]),
            chain.from_iterable(inner),
            chain.from_iterable(map(dict.values, inner)),
            chain.from_iterable(self._containers),
            chain.from_iterable(map(dict.values, self._dicts)),
            [getattr(owner(), name, _END) for owner, name in self._slots],
            [getattr(patch, "below", None) for patch in self._patches],
            (_END,),
        )

    @staticmethod
    def _lie(tensors: list[Any]) -> Iterator[Iterator[Any]]:
        """Where tensors lie, and what is read there."""
        plain = [tensor for tensor in tensors if type(tensor) in (Tensor, nn.Parameter)]
        for what in (Tensor.data_ptr, Tensor.size, Tensor.stride, _dtype_of):
            yield map(what, plain)
        if len(plain) < len(tensors):
            yield (_place(tensor) for tensor in tensors if type(tensor) not in (Tensor, nn.Parameter))

    def _look_at_code(self) -> Iterator[Any]:
        return chain(chain.from_iterable(vars(cls).values() for cls in self._classes), _values(self._globals), (_END,))

    def _walk(self, module: nn.Module) -> None:
        self._seen_classes: set[type] = set()
        self._queue: list[tuple[str, Any]] = [("", module)]
        self._index = {id(module): 0}
        self._root = module
        for path, thing in self._queue:  # which grows meanwhile
            if isinstance(thing, dict):
                items: Iterable[tuple[Any, Any]] = list(thing.items())
            elif isinstance(thing, _CONTAINERS):
                items = enumerate(list(thing))
            else:
                self._facts.append(self._look_into(path, thing))
                continue
            if not thing:
                self._empty.append(thing)
            elif not path.endswith(_PATHS_INSIDE):
                self._containers.append(thing)
            if len(thing) > MAX_ENTRIES:
                self.opaque = self.opaque or f"{path} has {len(thing)} entries, too many to compare at every step"
                items = ()
            weights = path.endswith(("._parameters", "._buffers"))
            keys, values = [], []
            for key, value in items:
                keys.append(key if type(key) in _CONSTANTS else _Same(key))
                if value is module:
                    self.opaque = self.opaque or f"{_shown(path)} holds the model itself"
                values.append(self._fact(f"{path}.{key}", value, weights))
            self._facts.append((path, type(thing), keys, values))
        del self._queue, self._index, self._root

    def _look_into(self, path: str, thing: Any) -> tuple[Any, ...]:
        """The facts of an object with attributes."""
        reference = _reference(thing)
        self._seen_classes.update(type(thing).__mro__[:-1])
        slots = [name for cls in type(thing).__mro__ for name in _slots(cls)]
        self._slots += [(reference, name) for name in slots]
        values = [self._fact(f"{path}.{name}", getattr(thing, name, _END)) for name in slots]
        if not hasattr(thing, "__dict__"):
            return path, _Same(thing), slots, values
        state = thing.__dict__
        own = state
        if isinstance(thing, nn.Module):
            self.modules.append(weakref.ref(thing))
            own = {key: value for key, value in state.items() if key not in _OF_TORCH}
            if "_modules" not in state or "training" not in state:
                name = type(thing).__name__
                self.opaque = self.opaque or f"there is a {name} in it, whose state cannot be looked at"
            else:
                self._inner += [(len(self._owners), name) for name in _OF_MODULES if state[name]]
                values += [self._fact(f"{path}.{name}", state[name]) for name in _OF_MODULES]
                hooks = [state[name] for name in _HOOKS]
                if thing is not self._root:
                    self._empty += [hook for hook in hooks if not hook]
                    if "forward" in state or any(hooks):
                        self.hooked.append((_shown(path), weakref.ref(thing)))
        # Two keys at least: with one there is no tuple. A key that is gone raises, one that is new changes the size.
        keys = [*own] if len(own) > 1 else [*own, *own] if own else []
        self._owners.append(reference)
        self._getters.append(itemgetter(*keys) if keys else tuple)
        inside = _OF_MODULES if len(values) > len(slots) else ()
        values += [self._fact(f"{path}.{key}", value) for key, value in own.items()]
        return path, _Same(thing), [*slots, *inside, *own], values

    def _fact(self, path: str, value: Any, weight: bool = False) -> Any:
        cls = type(value)
        if cls in _NUMBERS:
            return cls, repr(value)
        if cls in _CONSTANTS:
            return cls, value
        if isinstance(value, Tensor):
            return self._tensor(path, value, weight)
        if isinstance(value, (type, enum.Enum, FunctionType, BuiltinFunctionType, MethodType, ModuleType)):
            return _Same(value)
        if cls.__module__ == "numpy" and hasattr(value, "tobytes"):
            if isinstance(getattr(value, "base", value), cls) or cls.__name__ == "ndarray":
                self._arrays.append((value, value.tobytes()))
            return cls, value.dtype.str, value.tobytes()
        descend = isinstance(value, (*_CONTAINERS, nn.Module)) or (
            (hasattr(value, "__dict__") or hasattr(cls, "__slots__"))
            and not cls.__module__.startswith(_OPAQUE)
            and cls.__module__ != "builtins"
        )
        if not descend:
            return _Same(value)
        if id(value) not in self._index:
            self._index[id(value)] = len(self._queue)
            self._queue.append((path, value))
        return self._index[id(value)]

    def _tensor(self, path: str, tensor: Tensor, weight: bool) -> tuple[Any, ...]:
        place = _place(tensor)
        self.tensors.append((weakref.ref(tensor), place[0]))
        if weight and home_of(tensor) is None:
            self._devices.add(tensor.device)
            self._elsewhere.append((_shown(path), tensor.device))
        if type(tensor) not in (Tensor, nn.Parameter) and tensor.__dict__ and id(tensor) not in self._index:
            # A quantised one, whose parts are attributes.
            self._index[id(tensor)] = len(self._queue)
            self._queue.append((path, tensor))
        if weight or tensor.device.type != "cpu" or type(tensor) is not Tensor:
            return place
        if tensor.numel() > _MAX_ELEMENTS:
            return *place, tensor._version
        self._on_cpu.append((weakref.ref(tensor), tensor.detach().clone()))
        return *place, tensor.flatten().tolist()


def _place(tensor: Tensor | None) -> tuple[Any, ...]:
    """Where a tensor lies, and what is read there."""
    assert tensor is not None
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # a subclass without memory of its own: its parts have it
        address = 0
    return address, tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _slots(cls: type) -> Iterable[str]:
    slots = vars(cls).get("__slots__", ())
    named = (slots,) if isinstance(slots, str) else slots
    return [name for name in named if name not in ("__dict__", "__weakref__")]


def _reference(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _identical(values: list[Any], others: list[Any]) -> bool:
    return len(values) == len(others) and all(map(is_, values, others))


def _shown(path: str) -> str:
    """A path as users write it."""
    for name in _OF_MODULES:
        path = path.replace(f".{name}", "")
    return path.lstrip(".")


def _name_difference(mine: tuple[Any, ...], others: tuple[Any, ...]) -> str:
    path, kind, keys, values = mine
    if others[:3] != (path, kind, keys):
        added = [key for key in [*keys, *others[2]] if (key in keys) != (key in others[2])] if others[0] == path else []
        return _shown(f"{path}.{added[0]}" if added else path) or "the model"
    place = next(i for i, (value, other) in enumerate(zip(values, others[3], strict=False)) if value != other)
    return _shown(f"{path}.{keys[place]}")


# --- code, and settings around it -------------------------------------------------------------------------

_read: weakref.WeakKeyDictionary[type, tuple[tuple[dict[str, Any], str], ...]] = weakref.WeakKeyDictionary()


def _globals_read(cls: type) -> tuple[tuple[dict[str, Any], str], ...]:
    """The globals that the methods of a class may read, such as the functions they call."""
    if cls not in _read:
        pairs: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        for method in vars(cls).values():
            for function in (method, getattr(method, "__func__", None), getattr(method, "__wrapped__", None)):
                if isinstance(function, FunctionType):
                    space = function.__globals__
                    pairs |= {(id(space), name): (space, name) for name in function.__code__.co_names if name in space}
        _read[cls] = tuple(pairs.values())
    return _read[cls]


def _values(pairs: list[tuple[dict[str, Any], str]]) -> list[Any]:
    return [space.get(name, _END) for space, name in pairs]


def _methods(classes: list[type]) -> Iterator[Any]:
    """What classes define, apart from what Python puts there by the way."""
    special = ("__call__", "__getattr__", "__getattribute__")
    for cls in classes:
        yield cls
        for name, value in vars(cls).items():
            if name in special or not name.startswith(("__", "_abc_")):
                yield value


def _ambient() -> tuple[Any, ...]:
    """Settings that decide which kernels are launched."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    registry = getattr(dispatch, "_AttentionBackendRegistry", None)
    return (
        torch.get_default_dtype(),
        torch._C._get_cublas_allow_tf32(),
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        cudnn.enabled,
        torch._C._get_cudnn_allow_tf32(),
        cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        torch.is_inference_mode_enabled(),
        getattr(registry, "_active_backend", None),
    )
