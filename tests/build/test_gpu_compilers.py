"""nvcc and hipcc compile the GPU kernels of every family; no GPU is needed for that.

Optimised little: what is asked is whether the sources are right for each compiler and architecture, and that takes
minutes as it is.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from diffkern.build.archs import Archs, cuda_archs, rocm_archs
from diffkern.build.compiling import compile_library
from diffkern.build.sources import source_directory, units
from diffkern.build.toolchain import Tool, find_cxx, find_hipcc, find_nvcc
from tests.build.conftest import require_tool

pytestmark = pytest.mark.slow


def compile_quickly(
    backend: str, device: Tool, archs: Archs, directory: Path, device_flags: Sequence[str]
) -> tuple[Path, set[str]]:
    """Compiles and links all families; returns the library and the libraries that it needs."""
    cxx = require_tool("g++", find_cxx)
    quick = [
        replace(unit, flags=(*unit.flags, *(device_flags if unit.kind == "device" else ("-O0",))))
        for unit in units(backend)
    ]
    work, library = directory / "objects", directory / "library.so"
    work.mkdir()
    compile_library(quick, source_directory(), work, library, f"_diffkern_{backend}_0test", cxx, device, archs)
    run = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True)
    return library, set(re.findall(r"NEEDED.*\[(.*?)\]", run.stdout))


def test_nvcc_compiles_for_turing_ampere_and_hopper(tmp_path: Path) -> None:
    nvcc = require_tool("nvcc", find_nvcc)
    archs = cuda_archs(nvcc, ["sm_75", "sm_80", "sm_90"])
    assert archs.names == ("7.5", "8.0", "9.0+PTX")
    library, needed = compile_quickly("cuda", nvcc, archs, tmp_path, ("-O1", "-Xptxas=-O0"))
    assert {"libtorch.so", "libtorch_cpu.so"} <= needed
    assert not any(name.startswith(("libcudart", "libcuda", "libpython", "libtorch_cuda")) for name in needed)
    assert library.stat().st_size < 60 * 2**20


def test_hipcc_compiles_for_waves_of_64_and_of_32(tmp_path: Path) -> None:
    hipcc = require_tool("hipcc", find_hipcc)
    archs = rocm_archs(hipcc, ["gfx90a", "gfx1030"])
    assert archs.names == ("gfx90a", "gfx1030")
    library, needed = compile_quickly("rocm", hipcc, archs, tmp_path, ("-O1",))
    assert any(name.startswith("libamdhip64") for name in needed)
    content = library.read_bytes()
    assert b"gfx90a" in content and b"gfx1030" in content
