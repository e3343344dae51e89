"""What the blocks of a model compute alike in one call, such as rotary tables and masks, is computed once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

from diffkern.cache.derived import version

_T = TypeVar("_T")

#: Results of the call of a model that runs in this context, by the function and the identity of what it was given. An
#: entry dies with any tensor that was given, and is valid as long as PyTorch counts no write into them.
_Kept = dict[tuple[Any, ...], tuple[tuple[weakref.ref[Tensor], ...], object, Any]]
_kept_in_call: ContextVar[_Kept | None] = ContextVar("_kept_in_call", default=None)
#: Called in the place of :func:`once_in_call` while a call of a site is recorded.
_recorder: ContextVar[Callable[..., Any] | None] = ContextVar("_recorder", default=None)


@contextmanager
def recorded_by(recorder: Callable[..., Any] | None) -> Iterator[None]:
    """Has another function called with what :func:`once_in_call` is given, or none any longer."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


@contextmanager
def one_model_call() -> Iterator[None]:
    """Keeps results until the call of a model that runs inside is over."""
    kept: _Kept = {}
    token = _kept_in_call.set(kept)
    try:
        yield
    finally:
        _kept_in_call.reset(token)
        kept.clear()


def current_call() -> object:
    """The call of a model that runs in this context; None outside of one."""
    return _kept_in_call.get()


def within_one_call(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the forward of a model, each call of which is one of :func:`one_model_call`."""

    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        with one_model_call():
            return forward(module, *args, **kwargs)

    return run


def once_in_call(compute: Callable[..., _T], *given: Any) -> _T:
    """Returns ``compute(*given)``, which other blocks may have computed already.

    Results are kept inside of :func:`one_model_call`, and no longer: between two calls a tensor may be written in a way
    that PyTorch does not count, and a mask may be large. It counts no writes into inference tensors at all. A CUDA
    graph computes its own.

    Args:
        compute: A function without effects, the same object at each call.
        given: Tensors, and values that have a hash; a device where that of the result is another than the first one's.
    """
    recorder = None if torch.compiler.is_compiling() else _recorder.get()
    if recorder is not None:
        return recorder(compute, *given)  # type: ignore[no-any-return]
    # A graph of the compiler computes it once anyway.
    kept = None if torch.compiler.is_compiling() else _kept_in_call.get()
    tensors = [value for value in given if isinstance(value, Tensor)]
    # What is computed again for a backward is computed outside of the call, and has to save the same tensors.
    if kept is None or not tensors or (torch.is_grad_enabled() and any([x.requires_grad for x in tensors])):
        return compute(*given)
    device = next((value for value in given if isinstance(value, torch.device)), tensors[0].device)
    state = [version(x) for x in tensors], torch.is_grad_enabled(), _is_capturing(device)
    key = (compute, *[id(value) if isinstance(value, Tensor) else value for value in given])
    known = kept.get(key)
    if known is not None and known[1] == state and all(one() is x for one, x in zip(known[0], tensors, strict=True)):
        return known[2]  # type: ignore[no-any-return]
    result = compute(*given)

    def drop(_: weakref.ref[Tensor]) -> None:
        kept.pop(key, None)  # the references die with their entry: none is left that could drop another one

    kept[key] = tuple([weakref.ref(tensor, drop) for tensor in tensors]), state, result
    return result


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
