"""What the files of a kernel must be, and whether they are.

A digest is ``"sha256:<hex>"`` or, for a file that the Hub knows by its git object only, ``"git:<hex>"``.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

#: What the digest in the metadata does not speak of: the metadata, and its signature.
_UNLISTED = frozenset({"metadata.json", "metadata.json.sigstore"})


def sha256(path: Path) -> str:
    """The digest of a file."""
    return f"sha256:{_hash(path, hashlib.sha256())}"


def files_of(directory: Path) -> dict[str, str]:
    """The digests of all files of a build, by their path below ``directory``."""
    return {path.relative_to(directory).as_posix(): sha256(path) for path in _files(directory)}


def damage(directory: Path, expected: Mapping[str, str]) -> str | None:
    """Returns how the files of ``directory`` differ from the expected ones, or None."""
    for name, digest in sorted(expected.items()):
        path = directory / name
        try:
            if _digest_like(digest, path) != digest:
                return f"{name} is not the file that was published: its digest is another"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    known = {*expected, *_UNLISTED}
    for path in _files(directory):
        name = path.relative_to(directory).as_posix()
        if name not in known:
            return f"{name} is none of the files that were published"
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


def _files(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.suffix != ".pyc" and "__pycache__" not in path.parts:
            yield path


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
