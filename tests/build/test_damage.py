"""A build that is broken, of another torch or of an older diffkern: what is refused, when, and in which words."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from diffkern.build import Build, Variant
from diffkern.build.installed import damage, read_build
from diffkern.build.layout import library_name, up_to_date, write_metadata, write_python
from diffkern.build.sources import source_directory
from diffkern.build.toolchain import find_cxx
from diffkern.providers import compiled
from diffkern.providers.base import Request
from diffkern.providers.compiled import PROVIDER, CompiledProvider
from diffkern.providers.signatures import schema
from tests.build.conftest import require_tool

CPU = torch.device("cpu")


@pytest.fixture
def copied(cpu_build: Build, searched: Path) -> Build:
    """A build of one's own to damage."""
    directory = searched / "build" / cpu_build.directory.name
    shutil.copytree(cpu_build.directory, directory, ignore=shutil.ignore_patterns("__pycache__"))
    build = read_build(directory)
    assert build is not None and build.library is not None
    return build


def _library(build: Build) -> Path:
    return build.directory / library_name(build.namespace)


def test_an_undefined_symbol_is_named_with_both_versions_of_torch(searched: Path) -> None:
    cxx = require_tool("g++", find_cxx)
    variant, namespace = Variant("cpu", None, platform.machine()), "_diffkern_cpu_0fed0001"
    directory = searched / "build" / variant.name
    directory.mkdir(parents=True)
    write_python(directory, source_directory(), namespace)
    source = searched / "gone.cpp"
    source.write_text("namespace c10 { void gone(int); void present() { gone(1); } }\n", encoding="utf-8")
    command = [*cxx.command, "-shared", "-fPIC", "-Wl,-z,now", str(source), "-o"]
    subprocess.run([*command, str(directory / library_name(namespace))], check=True)
    write_metadata(directory, namespace, variant, (), "2.11.7+other")
    reason = PROVIDER.unavailable_reason(CPU)
    assert reason is not None and os.linesep not in reason
    assert "undefined symbol: _ZN3c104goneEi" in reason
    assert "built for torch 2.11 or newer, with torch 2.11.7+other" in reason
    assert f"this is torch {torch.__version__}" in reason
    assert "run `diffkern build --cpu --force`" in reason


def test_a_library_that_was_cut_short_is_refused_before_it_is_opened(copied: Build) -> None:
    assert damage(copied) is None
    size = _library(copied).stat().st_size
    os.truncate(_library(copied), size // 2)
    reason = PROVIDER.unavailable_reason(CPU)
    assert reason is not None
    assert f"has {size // 2} bytes, and had {size} when it was built: run `diffkern build --cpu`" in reason
    assert up_to_date(copied.directory, copied.namespace, copied.archs) is None  # so that this builds it again


def test_a_library_with_a_changed_byte_is_refused_before_it_is_opened(copied: Build) -> None:
    with _library(copied).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    reason = PROVIDER.unavailable_reason(CPU)
    assert reason is not None and "is not what was built: its SHA-256 is another" in reason
    assert up_to_date(copied.directory, copied.namespace, copied.archs) is None


def test_a_library_that_is_not_there_is_named(copied: Build) -> None:
    _library(copied).unlink()
    reason = PROVIDER.unavailable_reason(CPU)
    assert reason is not None and f"{library_name(copied.namespace)} cannot be read (No such file" in reason


def test_a_build_of_an_older_diffkern_serves_the_ops_it_has(
    kernels_root: Path, searched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIFFKERN_KERNELS", str(kernels_root))
    monkeypatch.setattr(compiled, "_OPS", (*compiled._OPS, "newer_op"))
    newer = torch._C.parse_schema("layer_norm(Tensor x, float another_argument) -> Tensor")
    monkeypatch.setattr(compiled, "schema", lambda op: newer if op == "layer_norm" else schema(op))
    provider = CompiledProvider()

    def refusal(op: str) -> str | None:
        return provider.support[op].refusal(Request(op, CPU, frozenset({torch.float32})))

    assert provider.unavailable_reason(CPU) is None
    assert refusal("newer_op") == "this build has no newer_op: run `diffkern build --cpu`"
    assert refusal("layer_norm") == (
        "the layer_norm of this build takes other arguments than this diffkern gives: run `diffkern build --cpu`"
    )
    with pytest.raises(RuntimeError, match="the compiled newer_op does not run on cpu: this build has no newer_op"):
        provider.kernel("newer_op", CPU)
    assert refusal("rms_norm") is None
    y = provider.kernel("rms_norm", CPU)(torch.full((2, 8), 3.0), None, None, 0.0, 0.0, None, None, False, False)
    assert torch.equal(y, torch.ones(2, 8))
