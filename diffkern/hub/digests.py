"""What the files of a kernel must be, and whether they are.

A digest is ``"sha256:<hex>"`` or, for a file that the Hub knows by its git object only, ``"git:<hex>"``.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath

#: Files for which metadata gives no digest: the metadata itself, and its signature.
_UNLISTED = frozenset({"metadata.json", "metadata.json.sigstore"})


def sha256(path: Path) -> str:
    """The digest of a file."""
    return f"sha256:{_hash(path, hashlib.sha256())}"


def files_of(directory: Path) -> dict[str, str]:
    """The digests of all files of a build except bytecode, by their path below ``directory``."""
    entries = ((name, entry) for name, entry in _entries(directory) if "__pycache__" not in PurePath(name).parts)
    return {name: sha256(Path(entry.path)) for name, entry in entries if entry.is_file()}


def damage(directory: Path, expected: Mapping[str, str]) -> str | None:
    """Returns how ``directory`` differs from a folder with exactly the expected files, or None.

    Besides these it may hold the folders they are in, as folders and not as links to others, and the bytecode that
    Python writes beside a source in ``__pycache__``, which :mod:`diffkern.hub.loader` does not use.
    """
    for name, digest in sorted(expected.items()):
        path = directory / name
        try:
            if _digest_like(digest, path) != digest:
                return f"{name} is not the file that was published: its digest is another"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    files = set(expected) if "metadata.json" in expected else {*expected, *_UNLISTED}
    folders = {parent.as_posix() for name in files for parent in PurePath(name).parents}
    try:
        for name, entry in _entries(directory):
            if entry.is_dir(follow_symlinks=False):
                bytecode = entry.name == "__pycache__" and PurePath(name).parent.as_posix() in folders
                known = bytecode or name in folders
            elif entry.is_dir():
                return f"{name} is a link to another folder, and none of the files that were published"
            else:
                known = name in files or (not entry.is_symlink() and _source(name) in files)
            if not known:
                return f"{name} is none of the files that were published"
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    return None


def declared(directory: Path) -> dict[str, str]:
    """The digests that the metadata of a build gives for its files; empty if it gives none."""
    try:
        digest = json.loads((directory / "metadata.json").read_text(encoding="utf-8"))["digest"]
        if digest["algorithm"] != "sha256":
            return {}
        return {name: f"sha256:{base64.b64decode(value).hex()}" for name, value in digest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def of_cache(directory: Path) -> dict[str, str]:
    """The digests of a build in the cache of huggingface_hub: those of the Hub, by which it names what it downloads.

    Its metadata adds the digests of files that are missing, or no links, as on systems that have none.
    """
    found = {}
    for name, entry in _entries(directory):
        digest = os.path.basename(os.readlink(entry.path)) if entry.is_symlink() else ""
        kind = {40: "git", 64: "sha256"}.get(len(digest))
        if kind is not None:
            found[name] = f"{kind}:{digest}"
    return {**declared(directory), **found}


def _entries(directory: Path, below: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Everything in a folder and in the folders inside of it, by path; links are not followed."""
    with os.scandir(directory / below) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            name = f"{below}/{entry.name}" if below else entry.name
            yield name, entry
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(directory, name)


def _source(name: str) -> str:
    """The source that a file in ``__pycache__`` would be the bytecode of, or ""."""
    try:
        return PurePath(importlib.util.source_from_cache(name)).as_posix()
    except (ValueError, NotImplementedError):
        return ""


def _digest_like(digest: str, path: Path) -> str:
    kind = digest.partition(":")[0]
    if kind == "git":
        return f"git:{_hash(path, hashlib.sha1(f'blob {path.stat().st_size}'.encode() + bytes(1)))}"
    return sha256(path)


def _hash(path: Path, digest: hashlib._Hash) -> str:
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
