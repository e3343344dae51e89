"""How a kernel is named: ``org/repo``, ``org/repo@v1.2.0:Layer``, ``org/repo@>=1.0,<2.0``, ``/a/path:Layer``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_REPOSITORY = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
_HUB = re.compile(rf"(?P<source>{_REPOSITORY})(?:@(?P<revision>[^:@]+))?(?::(?P<name>[A-Za-z_]\w*))?")
_NAME = re.compile(r"[A-Za-z_]\w*")
_RANGE = re.compile(r"(?:(?:>=|<=|==|!=|~=|>|<)\d+(?:\.\d+)*)(?:,(?:>=|<=|==|!=|~=|>|<)\d+(?:\.\d+)*)*")
_COMMIT = re.compile(r"[0-9a-f]{40}")

_FORMS = "'org/repo', 'org/repo@v1', 'org/repo@>=1.0,<2.0:Layer', '/absolute/path:Layer'"
_LOCAL = ("/", "./", "../", "~")


@dataclass(frozen=True)
class KernelReference:
    """A kernel of the Hub or of this machine, and one of its layers or functions.

    Attributes:
        source: ``"org/repo"``, or a path.
        revision: A branch, a tag, a version (``"v1.2.0"``, ``"1"``), a commit, or a range of versions
            (``">=1.0,<2.0"``); empty for version 1. A path has none.
        name: A layer or function of the kernel; empty for whatever of it serves the op at hand. A path with a colon in
            it is written with another one at its end: ``"/a/b:c:"``, ``"/a/b:c:Layer"``.
    """

    source: str
    revision: str = ""
    name: str = ""

    @classmethod
    def parse(cls, text: str) -> KernelReference:
        """Reads a reference.

        Raises:
            ValueError: it has none of the forms; the message says how to write it.
        """
        if text.startswith(_LOCAL):
            path, colon, name = text.rpartition(":")
            if colon and (not name or _NAME.fullmatch(name)):
                return cls(path, "", name)
            return cls(text)
        compact = text.replace(" ", "")
        match = _HUB.fullmatch(compact)
        if match is None:
            hint = ""
            if re.fullmatch(r"[^:@]+:[^:@]+@[^:@]+", compact):
                repository, _, rest = compact.partition(":")
                name, _, revision = rest.partition("@")
                hint = f" The revision comes before the name: {repository}@{revision}:{name}"
            raise ValueError(f"{text!r} names no kernel: write {_FORMS}.{hint}")
        revision = match["revision"] or ""
        if revision[:1] in "<>=!~" and revision and not _RANGE.fullmatch(revision):
            raise ValueError(f"{text!r} has the range {revision!r}: write it like >=1.0,<2.0")
        return cls(match["source"], revision, match["name"] or "")

    @property
    def is_local(self) -> bool:
        """Whether it is a path on this machine."""
        return self.source.startswith(_LOCAL)

    @property
    def is_range(self) -> bool:
        """Whether any of several versions will do."""
        return bool(_RANGE.fullmatch(self.revision))

    @property
    def is_commit(self) -> bool:
        """Whether the revision is a commit, which never changes."""
        return bool(_COMMIT.fullmatch(self.revision))

    @property
    def path(self) -> Path:
        """The path of a local kernel."""
        return Path(self.source).expanduser().absolute()

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        # A colon at the end says that what follows an earlier one belongs to the path.
        name = f":{self.name}" if self.name or (self.is_local and ":" in self.source) else ""
        return f"{self.source}{revision}{name}"


def is_reference(text: str) -> bool:
    """Whether ``text`` is meant as a reference and not as the name of a provider."""
    return "/" in text or text.startswith("~")


def is_repository(text: str) -> bool:
    """Whether ``text`` is the name of a repository of the Hub, ``"org/repo"``, and nothing else."""
    return re.fullmatch(_REPOSITORY, text) is not None
