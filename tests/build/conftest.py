"""The CPU kernels, compiled once for all tests; required and fake compilers; fresh interpreters."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diffkern.build import Build, ToolchainError, build_kernels
from diffkern.build.installed import read_build
from diffkern.build.toolchain import Tool
from diffkern.providers import get_provider, registry
from diffkern.providers.compiled import PROVIDER

REPOSITORY = Path(__file__).resolve().parents[2]

RunPython = Callable[..., subprocess.CompletedProcess[str]]


def require_tool(name: str, find: Callable[[], Tool]) -> Tool:
    """The compiler; without it the test is skipped, or fails if ``DIFFKERN_REQUIRE_TOOLCHAINS`` names it."""
    try:
        return find()
    except ToolchainError as error:
        if name in os.environ.get("DIFFKERN_REQUIRE_TOOLCHAINS", "").split(","):
            pytest.fail(f"DIFFKERN_REQUIRE_TOOLCHAINS names {name}: {error}")
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def kernels_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a build of the CPU kernels, shared by all workers: builds are parallel-safe."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no C++ compiler to build the CPU kernels with")
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernels"
    build_kernels("cpu", output=root)
    return root


@pytest.fixture(scope="session")
def cpu_build(kernels_root: Path) -> Build:
    (directory,) = (kernels_root / "build").iterdir()
    build = read_build(directory)
    assert build is not None
    return build


@pytest.fixture
def searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory in which alone the provider looks for builds."""
    monkeypatch.setenv("DIFFKERN_KERNELS", str(tmp_path))
    get_provider("compiled")
    PROVIDER.reset()
    registry.reset()
    yield tmp_path
    monkeypatch.undo()
    PROVIDER.reset()
    registry.reset()


@pytest.fixture
def run_python() -> RunPython:
    """Runs code in a fresh interpreter that imports diffkern from ``root``, the checkout by default."""

    def run(code: str, root: Path = REPOSITORY, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code],
            cwd=root,
            env=os.environ | {"PYTHONPATH": str(root)} | environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    return run


@pytest.fixture
def fake_tool(tmp_path: Path) -> Callable[[str, str], Path]:
    """Writes an executable of the given name and shell script; returns its path."""

    def write(name: str, script: str) -> Path:
        path = tmp_path / "toolkit" / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        path.chmod(0o755)
        return path

    return write
