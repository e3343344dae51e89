"""Runs the compilers: all object files side by side, then the link."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from diffkern.build.archs import Archs
from diffkern.build.sources import COMMON_FLAGS, TORCH_FLAGS, Unit
from diffkern.build.toolchain import HIP_ENVIRONMENT, Tool


class BuildError(RuntimeError):
    """The kernels could not be built. The message holds the reason, down to the compiler's own words."""


class OutputError(BuildError):
    """The folder that was named cannot be written to."""


def compile_library(
    units: Sequence[Unit],
    directory: Path,
    work: Path,
    library: Path,
    namespace: str,
    cxx: Tool,
    device: Tool | None = None,
    archs: Archs | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Compiles ``units`` in the folder ``work`` and links them, by ``cxx``, into ``library``.

    The compilers run in ``directory``, where the sources are, so that no absolute path gets in. ``device`` is nvcc or
    hipcc, for units of kind ``"device"``; ``say`` receives every command line.

    Raises:
        BuildError: a compiler failed.
    """
    import torch.utils.cpp_extension  # only for the places of torch's headers and libraries

    headers = torch.utils.cpp_extension.include_paths()
    includes = [f"-isystem{path}" for path in headers]
    # The headers' error messages name their files; the paths of the build machine stay out of them.
    includes += [f"-ffile-prefix-map={path}/=" for path in headers]
    jobs = int(os.environ.get("MAX_JOBS") or min(os.cpu_count() or 1, 8))

    def command(unit: Unit) -> list[str]:
        output = ["-c", unit.source, "-o", str(work / unit.object_name)]
        if unit.kind == "device":
            assert device is not None and archs is not None
            return [*device.command, *_device_flags(device, jobs), *archs.flags, *unit.flags, *output]
        own = [*TORCH_FLAGS, f"-DDIFFKERN_OPS={namespace}", *includes] if unit.kind == "torch" else []
        return [*cxx.command, *COMMON_FLAGS, *unit.flags, *own, *output]

    # The slow ones first: nvcc and hipcc take far longer than the rest together.
    ordered = sorted(units, key=lambda unit: unit.kind != "device")
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda unit: _run(command(unit), directory, say), ordered))

    objects = [str(work / unit.object_name) for unit in units]
    # Named though nothing seems to need them at link time: they must be there when this is loaded.
    of_torch = ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-Wl,--as-needed"]
    libraries = [*(f"-L{path}" for path in torch.utils.cpp_extension.library_paths()), *of_torch]
    libraries += [*_runtime_libraries(device), *_cxx_runtime(cxx)]
    _run([*cxx.command, "-shared", *objects, *libraries, "-Wl,-s", "-o", str(library)], directory, say)


def _device_flags(device: Tool, jobs: int) -> list[str]:
    if device.name == "nvcc":
        host = "-fPIC,-fvisibility=hidden"
        return ["-O3", "-std=c++17", f"-Xcompiler={host}", "-Xfatbin=-compress-all", f"--threads={jobs}"]
    return [*COMMON_FLAGS, "-x", "hip"]


def _runtime_libraries(device: Tool | None) -> list[str]:
    if device is None:
        return []
    if device.name == "nvcc":
        # Linked in, so that the library asks nothing of the machine but its driver. nvcc itself is asked
        # where it is, since toolkits are laid out in many ways and nvcc may be a wrapper script.
        plan = subprocess.run([*device.command, "--dryrun", "-c", "x.cu"], capture_output=True, text=True, check=False)
        line = re.search(r"LIBRARIES=(.*)", plan.stdout + plan.stderr)
        search = [] if line is None else shlex.split(line[1])
        return [*search, "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    return [f"-L{device.path.parents[1] / 'lib'}", "-lamdhip64"]


def _cxx_runtime(cxx: Tool) -> list[str]:
    """The C++ runtime that torch has loaded, for compilers that would link one of their own into the library.

    An error must be thrown and caught by one runtime: with two in a process, one that leaves the library ends it.
    """
    found = subprocess.run([*cxx.command, "-print-file-name=libstdc++.so"], capture_output=True, text=True, check=False)
    if Path(found.stdout.strip()).is_absolute():
        return []
    loaded = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    return sorted(path for path in loaded if re.search(r"/(libstdc\+\+\.so\.6|libgcc_s\.so\.1)[.0-9]*$", path))


def _run(command: list[str], directory: Path, say: Callable[[str], None]) -> None:
    say(shlex.join(command))
    environment = os.environ | HIP_ENVIRONMENT if "-x" in command else None
    try:
        run = subprocess.run(
            command,
            cwd=directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if run.returncode != 0:
        tail = "\n".join(run.stdout.strip().splitlines()[-30:])
        failed = f"{Path(command[0]).name} failed with exit status {run.returncode}"
        raise BuildError(f"{failed}:\n{shlex.join(command)}\n{tail}")
    if run.stdout.strip():
        say(run.stdout.strip())
