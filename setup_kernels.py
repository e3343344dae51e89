"""What an installation of the package builds: as much as the machine allows, unless told otherwise.

``DIFFKERN_BUILD``:

* unset or ``auto``: the CPU kernels if there is a C++ compiler, and those of a GPU if there are both its
  compiler and the GPU itself;
* ``cpu``, ``cuda``, ``rocm``, or several of them with commas: these;
* ``0``: nothing;
* with ``require`` added (``require``, or ``cuda,require``): a failure fails the installation. Without it the
  reason is kept, and the compiled provider gives it when asked.

``DIFFKERN_CUDA_ARCH`` and ``DIFFKERN_ROCM_ARCH`` name the architectures (``9.0``, ``sm_90,sm_100``,
``gfx942``, ``all``); naming any asks for that backend too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from diffkern.build import installed
from diffkern.build.compiling import BuildError
from diffkern.build.driver import BACKENDS, available_backends, build_kernels
from diffkern.build.toolchain import ToolchainError

BUILD_VARIABLE = "DIFFKERN_BUILD"
ARCH_VARIABLES = {"cuda": "DIFFKERN_CUDA_ARCH", "rocm": "DIFFKERN_ROCM_ARCH"}

_OFF = frozenset({"0", "no", "off", "false", "none"})


@dataclass(frozen=True)
class InstallationPlan:
    """What to build.

    Attributes:
        backends: In the order they are built.
        archs: GPU architectures per backend, where the user named them.
        required: Whether a failure fails the installation.
        left_out: Why the other backends are not built.
    """

    backends: tuple[str, ...]
    archs: Mapping[str, tuple[str, ...]]
    required: bool
    left_out: Mapping[str, str]


def plan_installation(environment: Mapping[str, str], available: tuple[str, ...], has_gpu: bool) -> InstallationPlan:
    """Reads the user's wishes.

    Args:
        environment: Environment variables.
        available: Backends for which there is a compiler.
        has_gpu: Whether torch sees a GPU.

    Raises:
        ValueError: a variable has a value that means nothing.
    """
    words = [word for word in re.split(r"[,;\s]+", environment.get(BUILD_VARIABLE, "").lower()) if word]
    required = "require" in words
    words = [word for word in words if word not in ("require", "auto", "1")]
    if any(word in _OFF for word in words):
        if len(words) > 1 or required:
            raise ValueError(f"{BUILD_VARIABLE}={environment[BUILD_VARIABLE]} says both to build and not to")
        reason = f"{BUILD_VARIABLE}={environment[BUILD_VARIABLE]} switched it off when diffkern was installed"
        return InstallationPlan((), {}, False, dict.fromkeys(BACKENDS, reason))
    unknown = set(words) - set(BACKENDS)
    if unknown:
        known = ", ".join((*BACKENDS, "auto", "require", "0"))
        raise ValueError(f"{BUILD_VARIABLE} has {', '.join(sorted(unknown))}, which is none of {known}")

    archs = {
        backend: names
        for backend, variable in ARCH_VARIABLES.items()
        if (names := tuple(name for name in re.split(r"[,;\s]+", environment.get(variable, "")) if name))
    }
    left_out = {}
    if words:
        backends = tuple(backend for backend in BACKENDS if backend in words or backend in archs)
    else:
        backends = tuple(
            backend
            for backend in BACKENDS
            if backend in archs or (backend in available and (backend == "cpu" or has_gpu))
        )
        for backend in set(available) - set(backends):
            left_out[backend] = (
                "its compiler was there when diffkern was installed, but no GPU; "
                f"{BUILD_VARIABLE}={backend} builds it all the same"
            )
    return InstallationPlan(backends, archs, required, left_out)


def build_for_installation(
    output: Path, environment: Mapping[str, str] = os.environ, say: Callable[[str], None] = print
) -> None:
    """Builds into ``output`` and notes there what was not built, and why.

    Raises:
        SystemExit: a build failed that the user requires, or a variable has a value that means nothing.
    """
    import torch

    try:
        plan = plan_installation(environment, available_backends(), torch.cuda.is_available())
    except ValueError as error:
        raise SystemExit(f"diffkern: {error}") from None
    # What an earlier installation from the same checkout noted, of whatever backend, is over.
    installed.record(output, {**dict.fromkeys(BACKENDS), **plan.left_out})
    for backend in plan.backends:
        try:
            (result,) = build_kernels((backend,), plan.archs.get(backend), output)
        except (BuildError, ToolchainError) as error:
            if plan.required:
                raise SystemExit(f"diffkern: the kernels for {backend} are required, but {error}") from None
            say(f"diffkern: no kernels for {backend}: {error}")
        else:
            archs = f" for {', '.join(result.archs)}" if result.archs else ""
            say(f"diffkern: built the kernels for {backend}{archs} in {result.seconds:.0f} s")
            for note in result.notes:
                say(f"diffkern: {note}")
    for backend, reason in plan.left_out.items():
        say(f"diffkern: no kernels for {backend}: {reason}")
