"""Finds the builds on this machine, and what is known about builds that failed."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from diffkern.build.variant import Variant

#: Environment variable: the one directory to look in, in place of the usual ones.
KERNELS_VARIABLE = "DIFFKERN_KERNELS"
METADATA_FILE = "metadata.json"
LOG_FILE = "build_log.json"


@dataclass(frozen=True)
class Library:
    """The shared library of a build, as it was written: file name, bytes, hexadecimal digest.

    ``torch`` is the ``torch.__version__`` of the headers that it was compiled with.
    """

    file: str
    size: int
    sha256: str
    torch: str


@dataclass(frozen=True)
class Build:
    """A build in the Hub's layout.

    Attributes:
        directory: Its variant directory.
        variant: What it needs, from the name of the directory.
        namespace: Its op namespace, the ``id`` of its metadata.
        archs: GPU architectures it has code for; empty for the CPU.
        library: What its library must be; None for a build of another builder, which does not note it.
    """

    directory: Path
    variant: Variant
    namespace: str
    archs: tuple[str, ...]
    library: Library | None = None


def package_directory() -> Path:
    """Where a build goes unless told otherwise: inside the installed package."""
    return Path(__file__).resolve().parents[1] / "_kernels"


def cache_directory() -> Path:
    """Where a build goes when the package cannot be written to: the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "diffkern"


def search_directories() -> tuple[Path, ...]:
    """The directories where builds are looked for, in order."""
    if chosen := os.environ.get(KERNELS_VARIABLE):
        return (Path(chosen),)
    return (package_directory(), cache_directory())


def find_builds(backend: str | None = None) -> tuple[Build, ...]:
    """Lists the builds, of one backend or of all, in the order of :func:`search_directories`."""
    found = []
    for root in search_directories():
        for parent in (root, root / "build"):
            paths = sorted(parent.glob("torch-*"), reverse=True) if parent.is_dir() else []
            found += [build for path in paths if (build := read_build(path)) is not None]
        if (build := read_build(root)) is not None:
            found.append(build)
    return tuple(build for build in found if backend in (None, build.variant.backend))


def read_build(directory: Path) -> Build | None:
    """Reads the build in a variant directory; None if there is none."""
    variant = Variant.parse(directory.name)
    if variant is None:
        return None
    try:
        metadata = json.loads((directory / METADATA_FILE).read_text(encoding="utf-8"))
        namespace, archs = str(metadata["id"]), tuple(metadata["backend"].get("archs", ()))
        library = Library(**metadata["library"]) if "library" in metadata else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return Build(directory, variant, namespace, archs, library)


def damage(build: Build) -> str | None:
    """Returns what is wrong with the library of ``build``, or None. Reads it; does not open it as a library.

    The loader maps a library that was cut short as if it were whole, and the process dies at the first page
    that is missing.
    """
    expected = build.library
    if expected is None:
        return None
    path = build.directory / expected.file
    try:
        size = path.stat().st_size
        if size != expected.size:
            return f"{path.name} has {size} bytes, and had {expected.size} when it was built"
        if sha256(path) != expected.sha256:
            return f"{path.name} is not what was built: its SHA-256 is another"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    return None


def failure_reason(backend: str) -> str | None:
    """Returns why the last attempt to build ``backend`` failed; None if there was none or it succeeded."""
    for root in search_directories():
        reason = _read_log(root).get(backend)
        if reason:
            return reason
    return None


def record(root: Path, reasons: dict[str, str | None]) -> None:
    """Notes, per backend, why it was not built; None clears an earlier note."""
    log = {**_read_log(root), **reasons}
    root.mkdir(parents=True, exist_ok=True)
    text = json.dumps({backend: reason for backend, reason in sorted(log.items()) if reason}, indent=2)
    temporary = root / f".{LOG_FILE}.{os.getpid()}"
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, root / LOG_FILE)


def sha256(path: Path) -> str:
    """The hexadecimal digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _read_log(root: Path) -> dict[str, str | None]:
    try:
        log = json.loads((root / LOG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return log if isinstance(log, dict) else {}
