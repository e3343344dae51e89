"""What a library asks of the machine that loads it, as a platform tag: ``manylinux_2_28_x86_64`` and the like."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

Version = tuple[int, ...]

#: What the Hub's builds may need at most.
HUB_TAG = "manylinux_2_28"

#: The newest symbol versions that the systems of a tag have, by the names of the libraries' version sets.
_POLICIES: Mapping[str, Mapping[str, Version]] = {
    HUB_TAG: {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GCC": (8, 0, 0)},
    "manylinux_2_31": {"GLIBC": (2, 31), "GLIBCXX": (3, 4, 28), "CXXABI": (1, 3, 12), "GCC": (10, 0, 0)},
    "manylinux_2_34": {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (11, 0, 0)},
    "manylinux_2_35": {"GLIBC": (2, 35), "GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13), "GCC": (12, 0, 0)},
    "manylinux_2_39": {"GLIBC": (2, 39), "GLIBCXX": (3, 4, 33), "CXXABI": (1, 3, 15), "GCC": (14, 0, 0)},
}

_VERSIONS = re.compile(rb"\0(GLIBC|GLIBCXX|CXXABI|GCC)_(\d+(?:\.\d+)+)(?=\0)")


@dataclass(frozen=True)
class PlatformTag:
    """What a library needs.

    Attributes:
        name: The oldest manylinux tag whose systems load it, with the processor; ``linux_<processor>`` if none does.
        needs: The newest symbol version of each set that it needs, for example ``{"GLIBC": (2, 17)}``.
    """

    name: str
    needs: Mapping[str, Version]

    def describe(self) -> str:
        """The tag, and what makes it newer than the Hub's."""
        beyond = [
            f"{kind} {'.'.join(map(str, version))}"
            for kind, version in sorted(self.needs.items())
            if version > _POLICIES[HUB_TAG][kind]
        ]
        return self.name + (f" (needs {', '.join(beyond)}; the Hub's builds are {HUB_TAG})" if beyond else "")


def widest(tags: Iterable[PlatformTag]) -> str:
    """Returns the name of the tag whose systems load all of some libraries: the newest one."""
    newest_first = ("linux", *reversed(list(_POLICIES)))
    return max((tag.name for tag in tags), key=lambda name: [name.startswith(each) for each in newest_first])


def platform_tag(library: Path, machine: str = platform.machine()) -> PlatformTag:
    """Reads the symbol versions that a shared library needs.

    Their names stand in its string table, each between zeros: a string elsewhere in the file that looks like one makes
    the tag newer, never older.
    """
    needs: dict[str, Version] = {}
    for kind, digits in _VERSIONS.findall(library.read_bytes()):
        name, version = kind.decode(), tuple(map(int, digits.split(b".")))
        needs[name] = max(needs.get(name, ()), version)
    fitting = (
        tag for tag, newest in _POLICIES.items() if all(version <= newest[kind] for kind, version in needs.items())
    )
    return PlatformTag(f"{next(fitting, 'linux')}_{machine}", needs)
