"""Lays a build out as a Hub kernel: ``build/<variant>/`` with metadata, the library and its Python face."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from diffkern.build.installed import METADATA_FILE, Build, Library, damage, read_build, sha256
from diffkern.build.variant import Variant

#: The name of the kernel on the Hub, and the version of its interface there: to be raised with every change of it.
KERNEL_NAME = "diffkern"
KERNEL_VERSION = 1

_OPS = Path(__file__).with_name("ops.py.template")


def library_name(namespace: str) -> str:
    """The file name of a build's shared library."""
    return f"{namespace}.abi3.so"


def copy_face(directory: Path, sources: Path) -> None:
    """Copies the Python face that all builds have into ``directory``."""
    for path in (sources / "torch-ext" / KERNEL_NAME).glob("*.py"):
        shutil.copyfile(path, directory / path.name)


def write_python(directory: Path, sources: Path, namespace: str) -> None:
    """Writes the Python face of a build with a library into ``directory``."""
    copy_face(directory, sources)
    ops = _OPS.read_text(encoding="utf-8").replace("@namespace@", namespace)
    (directory / "_ops.py").write_text(ops, encoding="utf-8")


def write_metadata(directory: Path, namespace: str, variant: Variant, archs: Sequence[str], torch_version: str) -> None:
    """Writes what the Hub wants to know of a build, and what its library is, which must be there."""
    backend: dict[str, object] = {"type": variant.backend}
    if archs:
        backend["archs"] = list(archs)
    path = directory / library_name(namespace)
    library = Library(path.name, path.stat().st_size, sha256(path), torch_version)
    metadata = {**metadata_of(namespace, backend), "library": asdict(library)}
    (directory / METADATA_FILE).write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")


def metadata_of(namespace: str, backend: Mapping[str, object]) -> dict[str, object]:
    """What the Hub wants to know of every build."""
    return {
        "name": KERNEL_NAME,
        "id": namespace,
        "version": KERNEL_VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": dict(backend),
    }


def up_to_date(directory: Path, namespace: str, archs: Sequence[str]) -> Build | None:
    """Returns the build in ``directory`` if it is the very one that would be built, and whole."""
    build = read_build(directory)
    if build is None or build.namespace != namespace or build.archs != tuple(archs):
        return None
    return None if build.library is None or damage(build) else build


@contextlib.contextmanager
def exclusively(root: Path) -> Iterator[None]:
    """Keeps other processes from building below ``root`` meanwhile."""
    root.mkdir(parents=True, exist_ok=True)
    directory = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Gives an empty directory to fill, and renames it to ``target`` if all went well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".staging-", dir=target.parent) as holder:
        stage = Path(holder) / "new"
        stage.mkdir()
        yield stage
        if target.exists():
            os.rename(target, Path(holder) / "old")
        os.rename(stage, target)
