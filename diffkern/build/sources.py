"""What is compiled, and with which options. ``csrc/build.toml`` says the same to the Hub's builder."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass
from pathlib import Path

from diffkern.build.toolchain import ToolchainError
from diffkern.build.variant import TORCH_ABI


@dataclass(frozen=True)
class Unit:
    """One object file.

    Attributes:
        source: Path below the source directory.
        flags: Options of this file alone.
        object_name: Name of the object file.
        kind: ``"cpp"``; ``"torch"``, C++ that includes torch's headers; or ``"device"``, for nvcc or hipcc.
    """

    source: str
    object_name: str
    flags: tuple[str, ...] = ()
    kind: str = "cpp"


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")

# No fused multiply-add of the compiler's own making: it would change results that are promised to the bit. And a list
# of numbers for a struct that has got another member is an error: it would fill that one.
COMMON_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Werror=narrowing")
#: The oldest torch whose stable ABI is used, as its headers want to be told.
TORCH_FLAGS = (f"-DTORCH_TARGET_VERSION=0x{TORCH_ABI[0]:02x}{TORCH_ABI[1]:02x}000000000000",)


#: How the names of sources end.
SUFFIXES = (".h", ".cpp", ".cu", ".cuh", ".py")
#: Op families. Each has a folder of its own, with files named after it.
FAMILIES = ("activation", "add_norm_silu_pad", "channel_norm", "group_norm", "modulate", "norm", "rope")


def units(backend: str, machine: str = platform.machine()) -> tuple[Unit, ...]:
    """Lists the object files of a backend: ``"cpu"``, ``"cuda"`` or ``"rocm"``."""
    families = tuple(unit for family in FAMILIES for unit in _family_units(family, backend, machine))
    return (*families, Unit("common/old_runtime.cpp", "old_runtime.o"))


def _family_units(family: str, backend: str, machine: str) -> list[Unit]:
    path = f"{family}/{family}"
    if backend != "cpu":
        kernel = f"-D{backend.upper()}_KERNEL"  # as the Hub's builder says it
        return [
            Unit(f"{path}_kernels.cu", f"{family}_kernels.o", kind="device"),
            Unit(f"{path}_binding.cpp", f"{family}_binding.o", (kernel, "-DUSE_CUDA"), kind="torch"),
        ]
    levels: dict[str, tuple[str, ...]] = {"baseline": ()}
    if machine == "x86_64":
        levels |= {"avx2": _AVX2, "avx512": _AVX512}
    return [
        Unit(f"{path}_binding.cpp", f"{family}_binding.o", kind="torch"),
        Unit(f"{path}_cpu_dispatch.cpp", f"{family}_cpu_dispatch.o"),
        *(
            Unit(f"{path}_cpu.cpp", f"{family}_cpu_{level}.o", (*flags, f"-DDIFFKERN_CPU_LEVEL={level}"))
            for level, flags in levels.items()
        ),
    ]


def source_directory() -> Path:
    """Where the sources are: inside the installed package, or beside it in a checkout.

    Raises:
        ToolchainError: they are in neither place.
    """
    package = Path(__file__).resolve().parents[1]
    for directory in (package / "csrc", package.parent / "csrc"):
        if (directory / "build.toml").is_file():
            return directory
    raise ToolchainError(
        f"the kernels' sources are missing: neither {package / 'csrc'} nor ../csrc beside it holds any"
    )


def namespace_of(directory: Path, backend: str) -> str:
    """The namespace of the ops of a build of these sources."""
    return f"_diffkern_{backend}_{source_hash(directory, backend)}"


def source_hash(directory: Path, backend: str) -> str:
    """Eight hexadecimal digits that change when a source, or an option it is compiled with, does."""
    digest = hashlib.sha256(repr((units(backend), COMMON_FLAGS, TORCH_FLAGS)).encode())
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.suffix in SUFFIXES:
            digest.update(path.relative_to(directory).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:8]
