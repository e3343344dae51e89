"""The kernels of ``csrc``, compiled ahead of time: for the CPU, for CUDA and for ROCm.

A build is checked against this machine before it is loaded: torch version, CPU architecture, CUDA or ROCm
version and GPU architecture. What does not fit is said in terms of both sides, in place of the loader's
"undefined symbol" or a crash at the first launch.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from diffkern.build.archs import cuda_covers
from diffkern.build.installed import (
    KERNELS_VARIABLE,
    Build,
    damage,
    failure_reason,
    find_builds,
    search_directories,
)
from diffkern.providers.base import KERNEL_DTYPES, ROPE_DTYPES, Kernel, Request, Support
from diffkern.providers.foreign import with_causes
from diffkern.providers.signatures import SIGNATURES, arguments, schema

#: What a linear layer has to fuse, torch itself fuses; and rows of fp8 are for NVIDIA's GPUs alone.
_OF_TORCH, _OF_NVIDIA = "linear_", "_fp8"
#: What Triton alone has a kernel for.
_OF_TRITON = frozenset({"channel_glu", "linear_attention"})
#: The ops of a build.
_OPS = tuple(
    op
    for op in SIGNATURES
    if op not in _OF_TRITON
    and not op.startswith(_OF_TORCH)
    and not (op.endswith(_OF_NVIDIA) and torch.version.hip is not None)
)


@dataclass(frozen=True)
class _Loaded:
    """A build that is in this process, and why it does not serve some of the ops."""

    build: Build
    refusals: Mapping[str, str]


class CompiledProvider:
    """Finds, checks and loads the builds, each once per process and only when asked."""

    name = "compiled"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcomes: dict[torch.device, _Loaded | str] = {}
        self.support: Mapping[str, Support] = {
            op: Support(
                frozenset({"cuda"} if op.endswith(_OF_NVIDIA) else {"cpu", "cuda"}),
                ROPE_DTYPES if op in ("rope", "rope_3d") else KERNEL_DTYPES,
                self._refusal_of_build,
            )
            for op in _OPS
        }

    def unavailable_reason(self, device: torch.device) -> str | None:
        """Returns why no build serves ``device``, or None; loads the library the first time."""
        outcome = self._outcome(device)
        return outcome if isinstance(outcome, str) else None

    def build(self, device: torch.device) -> Build | None:
        """Returns the build that serves ``device``, or None; for reports."""
        outcome = self._outcome(device)
        return None if isinstance(outcome, str) else outcome.build

    def kernel(self, op: str, device: torch.device) -> Kernel:
        """Returns the torch op itself, which has the lowest host cost.

        Raises:
            RuntimeError: nothing serves ``device``, or the build lacks the op; the message says why.
        """
        outcome = self._outcome(device)
        reason = outcome if isinstance(outcome, str) else outcome.refusals.get(op)
        if isinstance(outcome, str) or reason is not None:
            raise RuntimeError(f"the compiled {op} does not run on {device}: {reason}")
        return _overload(outcome.build, op)  # type: ignore[no-any-return]

    def reset(self) -> None:
        """Forgets what was found, so that a build made in the meantime is seen. Nothing is unloaded."""
        with self._lock:
            self._outcomes.clear()

    def _refusal_of_build(self, request: Request) -> str | None:
        """The limits of the build that is there, which may be older than this diffkern."""
        outcome = self._outcome(request.device)
        return None if isinstance(outcome, str) else outcome.refusals.get(request.op)

    def _outcome(self, device: torch.device) -> _Loaded | str:
        outcome = self._outcomes.get(device)
        if outcome is None:
            with self._lock:
                outcome = self._outcomes.get(device)
                if outcome is None:
                    outcome = self._outcomes[device] = _find_and_load(device)
        return outcome


def refusal(build: Build, device: torch.device) -> str | None:
    """Returns why ``build`` cannot run on ``device`` of this machine, or None. Loads nothing."""
    variant = build.variant
    built_for = f"{variant.abi[0]}.{variant.abi[1]}"
    if _version(torch.__version__) < variant.abi:
        return f"built for torch {built_for} or newer, and this is torch {torch.__version__}"
    if variant.machine != platform.machine():
        return f"built for {variant.machine} processors, and this is {platform.machine()}"
    if variant.system != sys.platform:
        return f"built for {variant.system}, and this is {sys.platform}"
    if variant.toolkit is None:
        return None
    name, torch_toolkit = ("ROCm", torch.version.hip) if variant.backend == "rocm" else ("CUDA", torch.version.cuda)
    needed = ".".join(map(str, variant.toolkit))
    if torch_toolkit is None:
        return f"built for {name} {needed}, and torch {torch.__version__} has no {name}"
    # Within one major version of CUDA any minor one will do; ROCm makes no such promise.
    significant = 1 if name == "CUDA" else 2
    if _version(torch_toolkit)[:significant] != variant.toolkit[:significant]:
        return f"built for {name} {needed}, and torch {torch.__version__} uses {name} {torch_toolkit}"
    return _arch_refusal(build, device)


def _arch_refusal(build: Build, device: torch.device) -> str | None:
    if build.variant.backend == "rocm":
        arch = str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
        fits = arch in build.archs
    else:
        capability = torch.cuda.get_device_capability(device)
        arch = f"sm_{capability[0]}{capability[1]}"
        fits = cuda_covers(build.archs, capability)
    if fits:
        return None
    return (
        f"built for {', '.join(build.archs)}, and {torch.cuda.get_device_name(device)} is {arch}: "
        f"run `diffkern build --{build.variant.backend} --arch {arch}`"
    )


def _find_and_load(device: torch.device) -> _Loaded | str:
    if device.type not in ("cpu", "cuda"):
        return f"there are no compiled kernels for {device.type}"
    if device.type == "cuda" and not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU"
    backend = "cpu" if device.type == "cpu" else "cuda" if torch.version.hip is None else "rocm"
    reasons = []
    for build in find_builds(backend):
        outcome = refusal(build, device) or _load(build)
        if isinstance(outcome, _Loaded):
            return outcome
        reasons.append(f"{build.directory.name} does not fit: {outcome}")
    if reasons:
        return "; ".join(reasons)
    return _why_not_built(backend)


def _why_not_built(backend: str) -> str:
    directories = search_directories()
    if len(directories) == 1 and not directories[0].is_dir():
        return f"{KERNELS_VARIABLE} is {directories[0]}, which is no directory"
    remedy = f"not built for {backend}: run `diffkern build --{backend}`"
    failure = failure_reason(backend)
    return remedy if failure is None else f"{remedy}. Last time: {failure}"


def _load(build: Build) -> _Loaded | str:
    """Imports a build; returns why that did not work if it did not."""
    remedy = f"run `diffkern build --{build.variant.backend}`"
    wrong = damage(build)
    if wrong is not None:
        return f"{wrong}: {remedy}"
    try:
        _import(build.namespace, build.directory / "__init__.py")
    except Exception as error:  # whatever a foreign binary comes up with is a reason, not a crash
        return (
            f"loading it failed ({with_causes(error)}). It was built {_torch_of(build)}, and this is torch "
            f"{torch.__version__}: run `diffkern build --{build.variant.backend} --force`"
        )
    refusals = {op: reason for op in _OPS if (reason := _refusal_of_op(build, op)) is not None}
    if len(refusals) == len(_OPS):
        return next(iter(refusals.values()))
    return _Loaded(build, refusals)


def _refusal_of_op(build: Build, op: str) -> str | None:
    remedy = f"run `diffkern build --{build.variant.backend}`"
    if not hasattr(getattr(torch.ops, build.namespace), op):
        return f"this build has no {op}: {remedy}"
    if arguments(_overload(build, op)._schema) != arguments(schema(op)):
        return f"the {op} of this build takes other arguments than this diffkern gives: {remedy}"
    return None


def _torch_of(build: Build) -> str:
    oldest = f"for torch {build.variant.abi[0]}.{build.variant.abi[1]} or newer"
    return oldest if build.library is None else f"{oldest}, with torch {build.library.torch}"


def _import(name: str, path: Path) -> ModuleType:
    """Imports a package under the name that the ``kernels`` package would give it as well."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _overload(build: Build, op: str) -> Any:
    return getattr(getattr(torch.ops, build.namespace), op).default


def _version(text: str) -> tuple[int, ...]:
    return tuple([int(re.sub(r"\D.*", "", part) or 0) for part in text.split(".")[:2]])


PROVIDER = CompiledProvider()
