"""Chooses who computes an op: once per (op, device, dtypes), visibly, and as the user overrides it.

The order is compiled, Triton, the Hub if asked for, eager. A provider that cannot serve gives its reason and the next
one is asked; every reason is kept in the :class:`Choice`, for reports and for ``diffkern doctor``.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch

from diffkern.providers import eager, hub
from diffkern.providers.base import Kernel, Provider, Request
from diffkern.providers.dispatch_modes import transforms_active
from diffkern.providers.signatures import SIGNATURES

#: Preference order. Each module of this package with such a name holds a ``PROVIDER``.
ORDER = ("compiled", "triton", hub.NAME, "eager")

#: Every op. The eager provider, being the reference, serves them all.
OPS = tuple(SIGNATURES)

#: Environment variable that names the one provider to use, like ``use_provider`` for a whole process.
ENVIRONMENT_VARIABLE = "DIFFKERN_PROVIDER"

_override: contextvars.ContextVar[str | None] = contextvars.ContextVar("diffkern_provider", default=None)

#: Returns the name that :func:`use_provider` set in this thread, or None.
override: Callable[[], str | None] = _override.get

#: The kernels of calls that were dispatched, see :mod:`diffkern.ops.registration`. :func:`reset` empties it, since it
#: depends on the choices made here.
dispatch_cache: dict[Hashable, Any] = {}

_kernels: dict[tuple[object, ...], Kernel] = {}

#: How often :func:`reset` was called: what keeps a kernel elsewhere asks again after it.
resets = 0


class NoProviderError(RuntimeError):
    """No provider, or not the one that was asked for, can serve a request. The message says why."""


@dataclass(frozen=True)
class Choice:
    """The provider that serves a request, and why those before it do not.

    Attributes:
        provider: Its name.
        kernel: The callable that computes the op.
        declined: The providers asked before it, with their reasons.
        gains: Whether it is more than PyTorch's own chain of ops.
    """

    provider: str
    kernel: Kernel
    declined: tuple[tuple[str, str], ...]
    gains: bool = True

    @property
    def is_fallback(self) -> bool:
        """Whether a provider earlier in the order declined."""
        return bool(self.declined)

    def describe(self) -> str:
        """Why it is not the first of the order, in one line; empty if it is."""
        return "; ".join(f"{name}: {reason}" for name, reason in self.declined)


@cache
def get_provider(name: str) -> Provider:
    """Returns the provider called ``name``: one of :data:`ORDER`, or a kernel such as ``"org/repo@v1:Layer"``.

    Raises:
        ValueError: ``name`` is neither, or ``"hub"``, which stands for another kernel for each device and op.
    """
    if hub.is_kernel(name):
        return hub.provider_for(name)
    if name not in ORDER:
        raise ValueError(f"unknown provider {name!r}: choose one of {', '.join(ORDER)} (or 'auto')")
    return import_module(f"diffkern.providers.{name}").PROVIDER  # type: ignore[no-any-return]


@contextlib.contextmanager
def use_provider(name: str | None) -> Iterator[None]:
    """Makes one provider serve every op inside the block, in this thread; None or ``"auto"`` lifts it.

    Raises:
        ValueError: ``name`` is no provider.
        NoProviderError: raised by the op, if the provider cannot serve the call.
    """
    name = _normalise(name)
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


def select(op: str, device: torch.device, dtypes: tuple[torch.dtype, ...], provider: str | None = None) -> Choice:
    """Chooses the provider for a call.

    Args:
        op: Name of the op.
        device: Device of the input.
        dtypes: Every floating dtype the call reads or writes.
        provider: Provider that must serve, or None (or ``"auto"``) for the first that can. A name given
            here wins over :func:`use_provider`, which wins over ``DIFFKERN_PROVIDER``.

    Raises:
        NoProviderError: the named provider declined, or all of them did.
        ValueError: the name is no provider.
    """
    return _select(op, device, dtypes, requested(provider))


def requested(provider: str | None) -> str | None:
    """The provider that must serve: ``provider``, else what :func:`use_provider` or the environment names, or None."""
    return _normalise(provider) or override() or _environment()


def kernel_for(op: str, device: torch.device, provider: str | None, *dtypes: torch.dtype | None) -> Kernel:
    """Returns the kernel that :func:`select` would choose: the way of the ops, at the cost of one look-up.

    Under ``torch.func`` transforms and forward-mode differentiation it is always plain PyTorch, which they can
    look into; a kernel would have no tangent there.

    Args:
        op: Name of the op.
        device: Device of the input.
        provider: As in :func:`select`.
        dtypes: Dtypes of the input, the parameters and the output, in any order; None for what is not given.

    Raises:
        TypeError: a dtype is not floating point.
        NoProviderError: as :func:`select`.
    """
    if transforms_active():
        provider = "eager"
    key = (op, device, provider, override(), dtypes)
    kernel = _kernels.get(key)
    if kernel is None:
        given = tuple(dict.fromkeys(dtype for dtype in dtypes if dtype is not None))
        for dtype in given:
            if not dtype.is_floating_point:
                raise TypeError(f"{op} needs floating point tensors, got {dtype}")
        kernel = _kernels[key] = select(op, device, given, provider).kernel
    return kernel


def reset() -> None:
    """Forgets all choices, so that a provider which became available is asked again."""
    global resets
    resets += 1
    _kernels.clear()
    dispatch_cache.clear()
    _select.cache_clear()
    _environment.cache_clear()


def explain(op: str, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> dict[str, str | None]:
    """Returns, for every provider, why it does not serve the request, or None if it does."""
    request = Request(op, device, frozenset(dtypes))
    return {name: _ask(name, request, False)[1] for name in ORDER}


def _normalise(name: str | None) -> str | None:
    if name is None or name == "auto":
        return None
    if not hub.is_ours_to_choose(name):
        get_provider(name)
    return name


@cache
def _environment() -> str | None:
    name = os.environ.get(ENVIRONMENT_VARIABLE) or None
    try:
        return _normalise(name)
    except ValueError as error:
        raise ValueError(f"the environment variable {ENVIRONMENT_VARIABLE} names an {error}") from None


@cache
def _select(op: str, device: torch.device, dtypes: tuple[torch.dtype, ...], forced: str | None) -> Choice:
    request = Request(op, device, frozenset(dtypes))
    declined: list[tuple[str, str]] = []
    for name in _order(forced):
        serving, reason = _ask(name, request, forced is not None)
        if reason is None:
            provider = get_provider(serving)
            gains = provider is not eager.PROVIDER or eager.PROVIDER.fuses(request)
            who = hub.public_name(serving)
            return Choice(who, provider.kernel(op, device), tuple(declined), gains=gains)
        declined.append((hub.public_name(name), reason))
    raise NoProviderError("; ".join(f"{name}: {reason}" for name, reason in declined))


def _order(forced: str | None) -> tuple[str, ...]:
    """The providers to ask, in order."""
    if forced is None:
        return ORDER
    if not forced.startswith(hub.WITH_HUB):
        return (forced,)
    tag = forced.removeprefix(hub.WITH_HUB)
    return tuple(f"{name}{tag}" if name == hub.NAME else name for name in ORDER)


def _ask(name: str, request: Request, named: bool) -> tuple[str, str | None]:
    """The provider that a name of the order means, and why it does not serve, or None."""
    if name == hub.NAME and not named:
        return name, hub.NOT_ASKED
    serving, reason = hub.listed(name, request.op, request.device)
    if reason is None:
        reason = _refusal(get_provider(serving), request)
        if reason is not None and serving != name:
            reason = f"{hub.public_name(serving)}: {reason}"
    return serving, reason


def _refusal(provider: Provider, request: Request) -> str | None:
    support = provider.support.get(request.op)
    if support is None:
        return f"has no {request.op}"
    return support.refusal(request) or provider.unavailable_reason(request.device)
