"""The sources: what is compiled, and what must not be in them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from diffkern.build.archs import CUDA_ARCHS, ROCM_ARCHS
from diffkern.build.sources import source_directory, source_hash, units

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="reading TOML needs Python 3.11 or tomli")

CSRC = source_directory()
FILES = sorted(path for path in CSRC.rglob("*") if path.suffix in {".h", ".cpp", ".cu", ".cuh"})
GPU_FILES = [path for path in FILES if path.suffix in {".cu", ".cuh"} or path.name.startswith("gpu")]


@pytest.fixture(scope="module")
def manifest() -> dict:
    return tomllib.loads((CSRC / "build.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("backend", ["cpu", "cuda", "rocm"])
def test_build_toml_compiles_what_diffkern_build_compiles(manifest: dict, backend: str) -> None:
    ours = {
        (unit.source, tuple(f for f in unit.flags if f.startswith("-m"))) for unit in units(backend, "x86_64")
    }
    sections = [section for section in manifest["kernel"].values() if section["backend"] == backend]
    theirs = {
        (source, tuple(f for f in section.get("cxx-flags", ()) if f.startswith("-m")))
        for section in sections
        for source in section["src"]
        if not source.endswith(".h")
    }
    theirs |= {
        (source, ())
        for source in manifest["torch"]["src"]
        if source.endswith(".cpp") and "extension" not in source
    }
    assert ours == theirs
    for section in sections:
        assert section.get("cuda-capabilities", list(CUDA_ARCHS)) == list(CUDA_ARCHS)
        assert section.get("rocm-archs", list(ROCM_ARCHS)) == list(ROCM_ARCHS)


def test_build_toml_lists_the_headers_of_every_source(manifest: dict) -> None:
    def includes(path: Path, seen: set[Path]) -> set[Path]:
        for name in re.findall(r'#include "(.*)"', path.read_text(encoding="utf-8")):
            header = (path.parent / name).resolve()
            if header.is_file() and header not in seen:
                seen.add(header)
                includes(header, seen)
        return seen

    for section in [manifest["torch"], *manifest["kernel"].values()]:
        listed = {(CSRC / name).resolve() for name in section["src"]}
        assert all(path.is_file() for path in listed)
        needed = set().union(*(includes(path, set()) for path in listed))
        assert needed <= listed, f"not listed: {sorted(path.name for path in needed - listed)}"


@pytest.mark.parametrize("path", GPU_FILES, ids=lambda path: path.name)
def test_dk70_no_wave_width_is_written_into_reductions(path: Path) -> None:
    code = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
    for pattern in (r"0x[fF]{8}\b", r">>\s*5\b", r"&\s*31\b", r"%\s*32\b", r"/\s*32\b", r"\bwarpSize\b"):
        assert re.search(pattern, code) is None, f"{path.name} assumes a wave width: {pattern}"
    shuffles = re.findall(r"\b__shfl\w*", code)
    assert not shuffles or path.name == "gpu.h", (
        "shuffles go through common/gpu.h, which knows both wave widths"
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(CSRC).as_posix())
def test_only_bindings_include_torch(path: Path) -> None:
    includes = re.findall(r"#include <(torch|ATen|c10|Python)\b", path.read_text(encoding="utf-8"))
    assert not includes or path.name.endswith(("_binding.cpp", "torch_binding.h"))


def test_the_hash_follows_the_sources(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text("1", encoding="utf-8")
    before = source_hash(tmp_path, "cuda")
    assert source_hash(tmp_path, "cuda") == before
    assert source_hash(tmp_path, "cpu") != before
    (tmp_path / "a.cu").write_text("2", encoding="utf-8")
    assert source_hash(tmp_path, "cuda") != before
