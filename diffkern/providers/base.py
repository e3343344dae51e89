"""What a provider is: a named set of kernels, with its limits as data and its refusals as sentences.

A provider never decides on behalf of the caller and never falls back by itself. It answers two
questions, both with a reason that a user can act on, and hands out callables:

* is it there at all on this device (:meth:`Provider.unavailable_reason`), and
* does it serve this op for these dtypes (:meth:`Provider.refusal`).

:mod:`diffkern.providers.registry` asks them in order and remembers the answer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

import torch

Kernel = Callable[..., Any]
_P = ParamSpec("_P")
_R = TypeVar("_R")

#: The dtypes that every fused kernel of diffkern reads and writes. float64 is the reference's alone.
KERNEL_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})

#: Those of rope and rope_3d, whose tables and arithmetic are float64 in some models.
ROPE_DTYPES = KERNEL_DTYPES | {torch.float64}


class KernelFileError(OSError):
    """A kernel that is compiled at its first use could not be written to its cache, or read from there."""


def mark_file_errors(kernel: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wraps a kernel that compiles itself, so that its file errors are told from those of hooks that load weights."""

    @functools.wraps(kernel)
    def marked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return kernel(*args, **kwargs)
        except OSError as error:
            raise KernelFileError(str(error)) from error

    return marked


@dataclass(frozen=True)
class Request:
    """What a call needs, as far as it can change the choice of provider.

    Attributes:
        op: Name of the op in :mod:`diffkern.ops`, for example ``"rms_norm"``.
        device: Device of the input.
        dtypes: Every floating dtype that the call reads or writes (input, parameters, output).
    """

    op: str
    device: torch.device
    dtypes: frozenset[torch.dtype]


@dataclass(frozen=True)
class Support:
    """What one provider can do for one op, as data.

    Attributes:
        device_types: The kinds of devices that it serves; None for all.
        dtypes: The dtypes that it serves.
        further: Returns what else keeps it from serving a request of these, or None.
    """

    device_types: frozenset[str] | None
    dtypes: frozenset[torch.dtype] = KERNEL_DTYPES
    further: Callable[[Request], str | None] = lambda request: None

    def refusal(self, request: Request) -> str | None:
        """Returns why ``request`` is not served, or None when it is."""
        if self.device_types is not None and request.device.type not in self.device_types:
            served = ", ".join(sorted(self.device_types))
            return f"no {request.op} for {request.device.type} (serves {served})"
        names = sorted(str(dtype).removeprefix("torch.") for dtype in request.dtypes - self.dtypes)
        return f"no {request.op} for {', '.join(names)}" if names else self.further(request)


@runtime_checkable
class Provider(Protocol):
    """One implementation family: ``compiled``, ``triton``, ``eager``."""

    name: str
    support: Mapping[str, Support]

    def unavailable_reason(self, device: torch.device) -> str | None:
        """Returns why nothing of this provider runs on ``device`` (and what to do), or None.

        May load a library the first time it is asked; must not raise and must not touch the network.
        """

    def kernel(self, op: str, device: torch.device) -> Kernel:
        """Returns the callable for ``op`` on ``device``; it takes the arguments of the op's schema, in order."""
