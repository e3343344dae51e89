"""The GPU architectures that binaries are built for."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diffkern.build.toolchain import HIP_ENVIRONMENT, Tool, ToolchainError

#: Compute capabilities of a full CUDA build; the newest one is also kept as PTX, for newer GPUs.
CUDA_ARCHS = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
#: Targets of a full ROCm build: MI200, MI300, MI350, and Radeon RX 7000 and 9000.
ROCM_ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")

_PTX = "+PTX"


class ArchError(ToolchainError):
    """An architecture that was named is none, or the compiler or this machine does not have it."""


@dataclass(frozen=True)
class Archs:
    """What a build is for.

    Attributes:
        names: For CUDA compute capabilities, ascending, the last one marked ``+PTX``; for ROCm targets.
        flags: Compiler options.
        notes: A sentence for each architecture that was left out.
    """

    names: tuple[str, ...]
    flags: tuple[str, ...]
    notes: tuple[str, ...] = ()


def cuda_archs(nvcc: Tool, requested: Sequence[str] | None) -> Archs:
    """Resolves CUDA architectures.

    Args:
        nvcc: The compiler; of :data:`CUDA_ARCHS`, those it does not know are left out.
        requested: Names such as ``"sm_90"``, ``"90"`` or ``"9.0"``; None, or ``"all"`` among them, means
            :data:`CUDA_ARCHS`.

    Raises:
        ArchError: a name is no architecture, or one that ``nvcc`` does not know; or none is left.
    """
    named = requested is not None and "all" not in requested
    wanted = tuple(map(_capability, requested)) if requested is not None and named else CUDA_ARCHS
    wanted = tuple(sorted(set(wanted), key=_order))
    run = subprocess.run([*nvcc.command, "--list-gpu-code"], capture_output=True, text=True, check=False)
    known = {_capability(name) for name in re.findall(r"^sm_(\d{2,3})$", run.stdout, re.MULTILINE)}
    names = tuple(name for name in wanted if name in known)
    notes = _notes(nvcc, names, [f"sm_{_number(name)}" for name in wanted if name not in known], named)
    flags = [f"-gencode=arch=compute_{_number(name)},code=sm_{_number(name)}" for name in names]
    newest = _number(names[-1])
    flags.append(f"-gencode=arch=compute_{newest},code=compute_{newest}")
    return Archs((*names[:-1], names[-1] + _PTX), tuple(flags), notes)


def rocm_archs(hipcc: Tool, requested: Sequence[str] | None) -> Archs:
    """Resolves ROCm targets; like :func:`cuda_archs`, with names such as ``"gfx942"``.

    Raises:
        ArchError: a name is no target, or one that ``hipcc`` does not know; or none is left.
    """
    named = requested is not None and "all" not in requested
    wanted = tuple(dict.fromkeys(requested)) if requested is not None and named else ROCM_ARCHS
    for name in wanted:
        if re.fullmatch(r"gfx[0-9a-f]{3,4}", name) is None:
            raise ArchError(f"{name!r} is no ROCm target: they look like gfx942")
    names = tuple(name for name in wanted if _hipcc_knows(hipcc, name))
    notes = _notes(hipcc, names, [name for name in wanted if name not in names], named)
    return Archs(names, tuple(f"--offload-arch={name}" for name in names), notes)


def cuda_covers(archs: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether a binary with ``archs`` runs on a GPU of ``capability``.

    Machine code runs on its own generation, from its own minor version up; PTX on anything newer.
    """
    for name in archs:
        built = _order(name.removesuffix(_PTX))
        if built[0] == capability[0] and built[1] <= capability[1]:
            return True
        if name.endswith(_PTX) and built <= capability:
            return True
    return False


def _notes(tool: Tool, known: Sequence[str], unknown: Sequence[str], named: bool) -> tuple[str, ...]:
    """What to say of the unknown ones: of the full list some may be missing; of those the user named, none."""
    compiler = f"{tool.name} {tool.version[0]}.{tool.version[1]}"
    if named and unknown:
        raise ArchError(f"{compiler} does not know {', '.join(unknown)}: name others, or install another toolkit")
    if not known:
        raise ArchError(f"{compiler} knows none of {', '.join(unknown)}: install a newer toolkit")
    return tuple(f"{name} is left out: {compiler} does not know it" for name in unknown)


def _capability(name: str) -> str:
    match = re.fullmatch(r"(?:sm_|compute_)?(\d{1,2})\.?(\d)(?:\+PTX)?", name)
    if match is None:
        other = ", or build for ROCm alone (--rocm)" if name.startswith("gfx") else ""
        raise ArchError(f"{name!r} is no CUDA architecture: write sm_90, 90 or 9.0{other}")
    return f"{match[1]}.{match[2]}"


def _order(name: str) -> tuple[int, int]:
    major, minor = name.split(".")
    return int(major), int(minor)


def _number(name: str) -> str:
    return name.replace(".", "")


def _hipcc_knows(hipcc: Tool, name: str) -> bool:
    """Asks the compiler itself, with an empty source: there is no list to read."""
    with tempfile.TemporaryDirectory() as work:
        source = Path(work) / "empty.hip"
        source.touch()
        command = [*hipcc.command, "-x", "hip", f"--offload-arch={name}", "-c", str(source), "-o", os.devnull]
        environment = os.environ | HIP_ENVIRONMENT
        return subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0
