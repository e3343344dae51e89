"""What this machine found out from the Hub, so that one process asks and the others know."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diffkern.build.installed import cache_directory
from diffkern.build.layout import exclusively
from diffkern.hub.lock import LockedKernel, write_json

#: Seconds for which an answer of the Hub is taken for the truth. Afterwards it is asked again, if it can be.
LIFETIME = 3600.0


def directory() -> Path:
    """Where the record is kept: in the user's cache, besides kernels built on this machine."""
    return cache_directory() / "hub"


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Lets one process of this machine in at a time; where no lock can be taken, everybody."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(exclusively(directory()))
        yield


def recall(endpoint: str, repository: str, revision: str) -> tuple[LockedKernel, float] | None:
    """Returns what was found out for a repository and revision, and how many seconds ago."""
    try:
        entry = _read()[_key(endpoint, repository, revision)]
        return LockedKernel.from_dict(entry["kernel"]), time.time() - float(entry["time"])
    except (KeyError, TypeError, ValueError):
        return None


def note(endpoint: str, kernel: LockedKernel) -> None:
    """Notes what was found out; in a cache that cannot be written to, nothing is noted."""
    entries = _read()
    entries[_key(endpoint, kernel.repository, kernel.revision)] = {"time": time.time(), "kernel": vars(kernel)}
    with contextlib.suppress(OSError):
        write_json(_path(), entries)


def _path() -> Path:
    return directory() / "resolved.json"


def _key(endpoint: str, repository: str, revision: str) -> str:
    return f"{endpoint} {repository} {revision}"


def _read() -> dict[str, dict[str, Any]]:
    try:
        entries = json.loads(_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}
