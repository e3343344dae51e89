"""What a library needs of the system is read from it, and stands in what is packaged."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from diffkern.build.installed import Build
from diffkern.build.platform_tag import HUB_TAG, PlatformTag, platform_tag, widest
from diffkern.build.toolchain import find_cxx
from diffkern.hub.package import package
from tests.build.conftest import require_tool

_SOURCE = {
    "old": "int answer() { return 42; }",
    # new in GCC 9
    "new": "#include <memory_resource>\nvoid* answer() { return std::pmr::new_delete_resource(); }",
}


def _compiled(name: str, directory: Path) -> Path:
    cxx = require_tool("g++", find_cxx)
    source, library = directory / "answer.cpp", directory / "answer.so"
    source.write_text(_SOURCE[name])
    subprocess.run([*cxx.command, "-std=c++17", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return library


def _needs_by_objdump(library: Path) -> dict[str, tuple[int, ...]]:
    listed = subprocess.run(["objdump", "-T", str(library)], capture_output=True, text=True, check=True).stdout
    found: dict[str, tuple[int, ...]] = {}
    for kind, digits in re.findall(r"\((GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)\)", listed):
        version = tuple(map(int, digits.split(".")))
        found[kind] = max(found.get(kind, ()), version)
    return found


@pytest.mark.parametrize("name", _SOURCE)
def test_the_tag_is_that_of_the_symbols_the_library_needs(name: str, tmp_path: Path) -> None:
    library = _compiled(name, tmp_path)
    tag = platform_tag(library, "x86_64")
    assert tag.needs == _needs_by_objdump(library)
    if name == "old":
        assert tag.name == f"{HUB_TAG}_x86_64" and tag.describe() == tag.name
    else:
        assert tag.needs["GLIBCXX"] >= (3, 4, 26)
        assert "needs GLIBCXX 3.4.2" in tag.describe() and HUB_TAG in tag.describe()


def test_what_no_system_has_is_no_manylinux(tmp_path: Path) -> None:
    library = tmp_path / "future.so"
    library.write_bytes(b"\0GLIBC_2.17\0GLIBC_9.1\0")
    assert platform_tag(library, "aarch64").name == "linux_aarch64"


def test_a_wheel_has_the_tag_of_the_library_that_needs_most() -> None:
    def tags(*names: str) -> list[PlatformTag]:
        return [PlatformTag(f"{name}_aarch64", {}) for name in names]

    assert widest(tags("manylinux_2_28", "manylinux_2_34", "manylinux_2_31")) == "manylinux_2_34_aarch64"
    assert widest(tags("manylinux_2_39", "linux")) == "linux_aarch64"


def test_our_own_build_and_its_package_run_on_the_systems_of_the_hub(cpu_build: Build, tmp_path: Path) -> None:
    assert cpu_build.library is not None
    tag = platform_tag(cpu_build.directory / cpu_build.library.file)
    assert tag.name.startswith(HUB_TAG), tag.describe()
    written = package(tmp_path / "kernel", "me/diffkern", builds=[cpu_build])
    name = cpu_build.directory.name
    assert written.platforms == {name: tag}
    metadata = json.loads((written.directory / "build" / name / "metadata.json").read_text(encoding="utf-8"))
    assert metadata["platform"] == tag.name
