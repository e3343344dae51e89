"""Runs code of other packages: what it raises is a reason, and what it changes besides its result is found out."""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_Setting = tuple[Callable[[], Any], Callable[[Any], Any]]

#: Integers of the same size, by which tensors are compared bit for bit.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class MisconductError(RuntimeError):
    """A function did something besides computing its result. The message says what."""


def is_of_user(error: BaseException) -> bool:
    """Whether an error that came out of foreign code is none of that code's: an interrupt, or from a signal handler.

    ``SystemExit`` and timeouts that a signal handler raises pass through diffkern; a module that calls ``sys.exit``
    is a module that cannot be loaded.
    """
    if isinstance(error, KeyboardInterrupt):
        return True
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()} - {None}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def summary(error: BaseException, longest: int | None = None) -> str:
    """The class of an error and the first line of what it says, of so many characters at most."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()[:longest]}" if lines else type(error).__name__


def with_causes(error: BaseException) -> str:
    """An error with its causes: torch says which file, and only the loader's own error says which symbol."""
    words = f"{type(error).__name__}: {error}"
    return words if error.__cause__ is None else f"{words}, because of {with_causes(error.__cause__)}"


@contextlib.contextmanager
def preserved(device: torch.device | None = None) -> Iterator[Callable[[], str]]:
    """Restores torch's settings of the process and every random generator at the end of the block.

    Args:
        device: Device whose random generator is restored besides that of the CPU.

    Yields:
        A function that names the settings that differ from those at the start; "" if none does.
    """
    before = {name: get() for name, (get, _) in _SETTINGS.items()}
    restore_generators = _generators(device)

    def changed() -> str:
        return " and ".join(name for name, (get, _) in _SETTINGS.items() if get() != before[name])

    try:
        yield changed
    finally:
        for name, (get, put) in _SETTINGS.items():
            if get() != before[name]:
                put(before[name])
        restore_generators()


def copy_of(x: Tensor) -> Tensor:
    """A copy in memory of its own with the strides of ``x``, expanded dimensions included."""
    x = x.detach()
    if x.layout is not torch.strided:
        return x.clone()
    if 0 in x.stride():
        dense = x[tuple(slice(1) if stride == 0 else slice(None) for stride in x.stride())]
        return copy_of(dense.as_strided(dense.shape, [stride or 1 for stride in dense.stride()])).expand(x.shape)
    try:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
    except RuntimeError:  # overlapping windows
        return x.clone()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits, NaN included."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    kind = _BITS.get(a.element_size()) if a.layout is torch.strided else None
    return torch.equal(a, b) if kind is None else torch.equal(a.detach().view(kind), b.detach().view(kind))


def identical(a: Tensor, b: Tensor) -> bool:
    """Whether two results are equal number by number, NaN being equal to NaN."""
    return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)


# --- what a process has besides its tensors ------------------------------------------------------------------


def _default_device() -> torch.device | None:
    """The device of ``torch.set_default_device``; None if it was not called, unlike ``torch.get_default_device``."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


_AUTOCAST = ("cpu", "cuda")


def _autocast() -> list[tuple[bool, torch.dtype]]:
    return [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST]


def _set_autocast(values: list[tuple[bool, torch.dtype]]) -> None:
    for kind, (enabled, dtype) in zip(_AUTOCAST, values, strict=True):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _on_cpu() -> Any:
    return torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def _precision() -> tuple[str | None, str, str]:
    """By the old way to set it, and by the new one for CUDA and for the CPU."""
    try:
        whole = torch.get_float32_matmul_precision()
    except RuntimeError:  # where both ways mix
        whole = None
    return whole, torch.backends.cuda.matmul.fp32_precision, _on_cpu().fp32_precision


def _set_precision(value: tuple[str | None, str, str]) -> None:
    if value[0] is not None:
        torch.set_float32_matmul_precision(value[0])
    torch.backends.cuda.matmul.fp32_precision = value[1]
    _on_cpu().fp32_precision = value[2]


_SETTINGS: Mapping[str, _Setting] = {
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the default device": (_default_device, torch.set_default_device),
    "whether gradients are enabled": (torch.is_grad_enabled, torch._C._set_grad_enabled),
    "autocast": (_autocast, _set_autocast),
    "the cache of autocast": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    "the precision of float32 products": (_precision, _set_precision),
    "whether algorithms are deterministic": (
        _deterministic,
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "cudnn.benchmark": (
        lambda: torch.backends.cudnn.benchmark,
        lambda value: setattr(torch.backends.cudnn, "benchmark", value),
    ),
}


def _generators(device: torch.device | None) -> Callable[[], None]:
    """Notes the state of every random generator; returns what restores them."""
    numpy = sys.modules.get("numpy")
    state, of_python = torch.random.get_rng_state(), random.getstate()
    of_numpy = None if numpy is None else numpy.random.get_state()
    module = None if device is None or device.type in ("cpu", "meta") else torch.get_device_module(device)
    if module is not None and not (hasattr(module, "get_rng_state") and module.is_initialized()):
        module = None  # there is no such state, or nothing was drawn there yet
    of_device = None if module is None else module.get_rng_state(device)

    def restore() -> None:
        torch.random.set_rng_state(state)
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
        if module is not None:
            module.set_rng_state(of_device, device)

    return restore
