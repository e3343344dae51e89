"""The name of a build says what it needs: ``torch-stable-abi211-cu130-x86_64-linux`` and the like.

The names are those of the Hub's kernel layout, so that one directory serves both diffkern and the
``kernels`` package.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

#: The torch version whose stable ABI the binaries are built for: the oldest torch that loads them.
TORCH_ABI = (2, 11)

_NAME = re.compile(
    r"torch-stable-abi(?P<abi>\d{2,3})-(?P<backend>cpu|cu(?P<cuda>\d{2,3})|rocm(?P<rocm>\d{2,3}))"
    r"-(?P<machine>\w+)-(?P<system>\w+)"
)


@dataclass(frozen=True)
class Variant:
    """One kind of binary.

    Attributes:
        backend: ``"cpu"``, ``"cuda"`` or ``"rocm"``.
        toolkit: CUDA or ROCm version (major, minor); None for ``"cpu"``.
        machine: CPU architecture as :func:`platform.machine` gives it, for example ``"x86_64"``.
        system: Operating system in lower case, for example ``"linux"``.
        abi: Oldest torch version (major, minor) that loads the binary.
    """

    backend: str
    toolkit: tuple[int, int] | None
    machine: str
    system: str = "linux"
    abi: tuple[int, int] = TORCH_ABI

    @property
    def name(self) -> str:
        """The name of the directory."""
        toolkit = "" if self.toolkit is None else f"{self.toolkit[0]}{self.toolkit[1]}"
        backend = {"cpu": "cpu", "cuda": "cu", "rocm": "rocm"}[self.backend] + toolkit
        return f"torch-stable-abi{self.abi[0]}{self.abi[1]}-{backend}-{self.machine}-{self.system}"

    @classmethod
    def parse(cls, name: str) -> Variant | None:
        """Reads a directory name; None if it is not the name of such a build."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        digits = match["cuda"] or match["rocm"]
        backend = "cuda" if match["cuda"] else "rocm" if match["rocm"] else "cpu"
        toolkit = None if digits is None else (int(digits[:-1]), int(digits[-1]))
        abi = (int(match["abi"][0]), int(match["abi"][1:]))
        return cls(backend, toolkit, match["machine"], match["system"], abi)
