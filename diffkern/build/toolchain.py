"""Finds the compilers. Whatever is missing or does not fit is said in one sentence that names a remedy."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

#: hipcc drives nvcc on machines with a CUDA toolkit unless it is told otherwise.
HIP_ENVIRONMENT = {"HIP_PLATFORM": "amd"}


class ToolchainError(RuntimeError):
    """A compiler is missing, cannot be run, or does not fit the torch that is installed."""


@dataclass(frozen=True)
class Tool:
    """A compiler.

    Attributes:
        name: ``"g++"``, ``"nvcc"`` or ``"hipcc"``.
        command: How to call it; more than one word if the environment variable ``CXX`` has options.
        version: Its version (for nvcc and hipcc, that of the toolkit), major and minor.
    """

    name: str
    command: tuple[str, ...]
    version: tuple[int, int]

    @property
    def path(self) -> Path:
        """The resolved path of the executable."""
        return Path(self.command[0]).resolve()

    def describe(self) -> str:
        """Name, version and place, for people."""
        return f"{self.name} {self.version[0]}.{self.version[1]} ({self.command[0]})"


def find_cxx() -> Tool:
    """Finds the C++ compiler: ``$CXX``, or g++, c++ or clang++ on the path.

    Raises:
        ToolchainError: there is none, or this is not Linux.
    """
    if sys.platform != "linux":
        raise ToolchainError(
            f"the compiled kernels are built on Linux only, and this is {sys.platform}: the other providers serve here"
        )
    if chosen := os.environ.get("CXX"):
        command = tuple(shlex.split(chosen))
        found = shutil.which(command[0])
        if found is None:
            raise ToolchainError(f"CXX names {command[0]!r}, which is not an executable: correct or unset CXX")
        command = (found, *command[1:])
    else:
        found = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
        if found is None:
            raise ToolchainError(
                "no C++ compiler was found: install g++ (Debian and Ubuntu: apt install g++) or set CXX"
            )
        command = (found,)
    return Tool("g++", command, _version(command, "-dumpfullversion", r"^(\d+)(?:\.(\d+))?", "-dumpversion"))


def find_nvcc() -> Tool:
    """Finds nvcc: in ``$CUDA_HOME`` or ``$CUDA_PATH``, on the path, or in ``/usr/local/cuda``.

    Raises:
        ToolchainError: there is none.
    """
    variables, remedy = ("CUDA_HOME", "CUDA_PATH"), "install the CUDA toolkit, or set CUDA_HOME to where it is"
    return _of_toolkit("nvcc", variables, Path("/usr/local/cuda"), remedy, r"release (\d+)\.(\d+)")


def find_hipcc() -> Tool:
    """Finds hipcc: in ``$ROCM_HOME``, ``$ROCM_PATH`` or ``$HIP_PATH``, on the path, or in ``/opt/rocm``.

    Raises:
        ToolchainError: there is none.
    """
    variables = ("ROCM_HOME", "ROCM_PATH", "HIP_PATH")
    remedy = "install ROCm's HIP compiler, or set ROCM_HOME to where it is"
    return _of_toolkit("hipcc", variables, Path("/opt/rocm"), remedy, r"HIP version: (\d+)\.(\d+)")


def check_toolkit(tool: Tool, torch_version: str, torch_toolkit: str | None) -> None:
    """Checks that a GPU compiler fits the torch that is installed, which was built with ``torch_toolkit``.

    None, a torch without that backend, fits anything: the binary is then meant for another machine.

    Raises:
        ToolchainError: the major versions differ.
    """
    if torch_toolkit is None:
        return
    major = int(torch_toolkit.split(".", 1)[0])
    if tool.version[0] != major:
        toolkit, home = ("CUDA", "CUDA_HOME") if tool.name == "nvcc" else ("ROCm", "ROCM_HOME")
        have = ".".join(map(str, tool.version))
        need = ".".join(torch_toolkit.split(".")[:2])
        raise ToolchainError(
            f"{tool.command[0]} is of {toolkit} {have}, but torch {torch_version} was built for "
            f"{toolkit} {need}: install a {toolkit} {major} toolkit, or set {home} to one"
        )


def _of_toolkit(name: str, variables: Iterable[str], usual: Path, remedy: str, version: str) -> Tool:
    """A set variable is binding: a toolkit other than the one it names is not looked for."""
    for variable in variables:
        if home := os.environ.get(variable):
            found: str | None = str(Path(home) / "bin" / name)
            if not os.access(str(found), os.X_OK):
                raise ToolchainError(f"{variable} is {home}, but there is no {found}: correct or unset {variable}")
            break
    else:
        found = shutil.which(name) or shutil.which(usual / "bin" / name)
    if found is None:
        raise ToolchainError(f"{name} was not found: {remedy}")
    return Tool(name, (found,), _version((found,), "--version", version))


def _version(command: tuple[str, ...], option: str, pattern: str, *more: str) -> tuple[int, int]:
    for attempt in (option, *more):
        try:
            run = subprocess.run([*command, attempt], capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ToolchainError(f"{command[0]} cannot be run: {error}") from error
        match = re.search(pattern, run.stdout, re.MULTILINE)
        if match is not None:
            return int(match[1]), int(match[2] or 0)
    raise ToolchainError(f"{' '.join([*command, option])} does not tell a version; is it broken?")
