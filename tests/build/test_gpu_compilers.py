"""nvcc and hipcc compile the GPU kernels; no GPU is needed for that."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from diffkern.build import build_kernels
from diffkern.build.toolchain import find_hipcc, find_nvcc
from tests.build.conftest import require_tool


def needed_libraries(library: Path) -> set[str]:
    run = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True)
    return set(re.findall(r"NEEDED.*\[(.*?)\]", run.stdout))


@pytest.mark.slow
def test_nvcc_builds_for_turing_ampere_and_hopper(tmp_path: Path) -> None:
    require_tool("nvcc", find_nvcc)
    (result,) = build_kernels("cuda", ["sm_75", "sm_80", "sm_90"], tmp_path)
    assert result.archs == ("7.5", "8.0", "9.0+PTX")
    assert result.directory is not None
    (library,) = result.directory.glob("*.so")
    needed = needed_libraries(library)
    assert {"libtorch.so", "libtorch_cpu.so"} <= needed
    assert not any(name.startswith(("libcudart", "libcuda", "libpython", "libtorch_cuda")) for name in needed)
    assert library.stat().st_size < 30 * 2**20


@pytest.mark.slow
def test_dk70_hipcc_builds_for_waves_of_64_and_of_32(tmp_path: Path) -> None:
    require_tool("hipcc", find_hipcc)
    (result,) = build_kernels("rocm", ["gfx90a", "gfx1030"], tmp_path)
    assert result.archs == ("gfx90a", "gfx1030")
    assert result.directory is not None
    (library,) = result.directory.glob("*.so")
    assert any(name.startswith("libamdhip64") for name in needed_libraries(library))
    content = library.read_bytes()
    assert b"gfx90a" in content and b"gfx1030" in content
