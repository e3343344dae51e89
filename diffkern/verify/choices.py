"""What times decided, kept on disk: a seed gives the same result tomorrow, and nothing is timed twice.

There is one file of JSON for each card, each version of torch and diffkern and each way of taking times, in the user's
cache. A key says what was timed, and what would have served; a value is the choice in words. What cannot be read or
written is timed again.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import platform
import re
import tempfile
import threading
from collections.abc import Hashable
from pathlib import Path

import torch

from diffkern import __version__

#: Environment variable that names the folder, in place of the user's cache; 0 keeps nothing.
VARIABLE = "DIFFKERN_CHOICES"

#: In the names of the files: raised when times are taken in another way, or of other kernels: no old choice is used.
_TIMING = 4

_log = logging.getLogger(__name__)
_lock = threading.Lock()
#: What the files hold, as far as this process knows.
_known: dict[Path, dict[str, str]] = {}


def recall(device: torch.device, *key: Hashable) -> str | None:
    """Returns what was chosen on such a device, or None."""
    path = _file(device)
    if path is None:
        return None
    with _lock:
        return _choices(path).get(_text(key))


def remember(device: torch.device, choice: str, *key: Hashable) -> None:
    """Keeps a choice for the next process. Of two processes that write at once, the choices of one may be lost."""
    path = _file(device)
    if path is None:
        return
    with _lock:
        choices = _choices(path)
        choices[_text(key)] = choice
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
                json.dump({**_read(path), **choices}, file, indent=1, sort_keys=True)
            os.replace(file.name, path)
        except OSError as error:
            _log.info("choices are not kept: %s", error)


def _choices(path: Path) -> dict[str, str]:
    if path not in _known:
        _known[path] = _read(path)
    return _known[path]


def _read(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    pairs = found.items() if isinstance(found, dict) else ()
    return {key: value for key, value in pairs if isinstance(value, str)}


def _text(key: tuple[Hashable, ...]) -> str:
    return " | ".join(map(str, key))


def _file(device: torch.device) -> Path | None:
    """The file of a device; None if nothing is to be kept."""
    named = os.environ.get(VARIABLE)
    if named == "0":
        return None
    cache = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(cache) if cache else Path.home() / ".cache") / "diffkern" / "choices"
    return (Path(named).expanduser() if named else folder) / f"{_machine(device, torch.get_num_threads())}.json"


@functools.cache
def _machine(device: torch.device, threads: int) -> str:
    if device.type == "cuda":
        card = torch.cuda.get_device_name(device)
    else:
        card = f"{device.type} {platform.processor() or platform.machine()} {threads} threads"
    return re.sub(r"[^\w.+-]+", "-", f"{card} torch {torch.__version__} diffkern {__version__} timing {_TIMING}")
