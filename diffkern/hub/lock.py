"""``diffkern.lock``: for every kernel that is used, the commit and the digests of all its builds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffkern.hub.policy import InputError
from diffkern.hub.reference import KernelReference

_FORMAT = 1


@dataclass(frozen=True)
class LockedKernel:
    """One kernel, pinned.

    Attributes:
        repository: ``"org/repo"``.
        revision: What was asked for: ``">=1.0,<2.0"``, ``"v1"``, or ``""``.
        commit: The commit that this was.
        trusted: Whether the Hub listed its publisher as trusted; if not, a user must state their trust to load it.
        variants: The builds at that commit: the digests of their files.
    """

    repository: str
    revision: str
    commit: str
    trusted: bool
    variants: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LockedKernel:
        """Reads what ``vars`` returns, from a file that anybody may have changed.

        Raises:
            TypeError: there is something else in it.
        """
        kernel = cls(**data)
        texts = (kernel.repository, kernel.revision, kernel.commit)
        digests = [value for files in _table(kernel.variants) for value in _table(files)]
        if not all(isinstance(text, str) for text in (*texts, *digests)) or not isinstance(kernel.trusted, bool):
            raise TypeError(f"the entry of {kernel.repository!r} has values of other types than it should")
        return kernel


@dataclass(frozen=True)
class LockFile:
    """All pinned kernels of a project."""

    kernels: tuple[LockedKernel, ...] = ()

    def find(self, reference: KernelReference) -> LockedKernel | None:
        """Returns the entry for what ``reference`` asks for, whichever layer of it."""
        for kernel in self.kernels:
            if (kernel.repository, kernel.revision) == (reference.source, reference.revision):
                return kernel
        return None

    def updated(self, kernels: Iterable[LockedKernel]) -> LockFile:
        """Returns the lock file with entries added or replaced, in the order of their names."""
        entries = {(kernel.repository, kernel.revision): kernel for kernel in (*self.kernels, *kernels)}
        return LockFile(tuple(entries[key] for key in sorted(entries)))

    @classmethod
    def read(cls, path: Path) -> LockFile:
        """Reads a lock file.

        Raises:
            InputError: it is none, or one of a newer diffkern.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["version"] != _FORMAT:
                raise InputError(f"{path} has format {data['version']}, and this diffkern reads {_FORMAT}: update it")
            return cls(tuple(LockedKernel.from_dict(entry) for entry in data["kernels"]))
        except FileNotFoundError as error:
            raise InputError(f"{path}: not found: write it with `diffkern hub lock`") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"{path} is no lock file of diffkern ({error}): write it with `diffkern hub lock`"
            raise InputError(reason) from None

    def write(self, path: Path) -> None:
        """Writes the file at once, so that no reader sees half of it."""
        data = {"version": _FORMAT, "kernels": [vars(kernel) for kernel in self.kernels]}
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)


def _table(data: Any) -> list[Any]:
    if not isinstance(data, Mapping):
        raise TypeError(f"{data!r} is no table")
    return list(data.values())
