"""Plans and runs a build: which backends, for which architectures, into which directory."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from diffkern.build import installed
from diffkern.build.archs import ArchError, Archs, cuda_archs, rocm_archs
from diffkern.build.compiling import BuildError, OutputError, compile_library
from diffkern.build.layout import exclusively, library_name, staged, up_to_date, write_metadata, write_python
from diffkern.build.sources import namespace_of, source_directory, units
from diffkern.build.toolchain import Tool, ToolchainError, check_toolkit, find_cxx, find_hipcc, find_nvcc
from diffkern.build.variant import TORCH_ABI, Variant

#: The backends of GPUs, and what finds the compiler of each.
_COMPILERS = {"cuda": find_nvcc, "rocm": find_hipcc}
BACKENDS = ("cpu", *_COMPILERS)


@dataclass(frozen=True)
class BuildResult:
    """What became of one backend.

    Attributes:
        backend: ``"cpu"``, ``"cuda"`` or ``"rocm"``.
        directory: The variant directory, or None if the build failed.
        archs: GPU architectures in it.
        reason: Why it failed, or None.
        notes: What else there is to say, for example about architectures that were left out.
        fresh: Whether anything was compiled; False if the same build was there already.
        seconds: How long it took.
    """

    backend: str
    directory: Path | None
    archs: tuple[str, ...] = ()
    reason: str | None = None
    notes: tuple[str, ...] = ()
    fresh: bool = False
    seconds: float = 0.0


def build_kernels(
    backends: Sequence[str] | str = "auto",
    archs: Sequence[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
    verbose: bool = False,
) -> tuple[BuildResult, ...]:
    """Builds the kernels.

    Args:
        backends: Any of ``"cpu"``, ``"cuda"`` and ``"rocm"``; ``"auto"`` takes all for which there is a
            compiler (:func:`available_backends`).
        archs: GPU architectures, such as ``"sm_90"`` or ``"gfx942"``; ``"all"`` for the full list;
            ``"native"`` for the GPU of this machine. None means native if there is a GPU, all otherwise.
        output: Directory; ``build/<variant>`` comes below it. None means ``_kernels`` inside the package,
            or the user's cache if that cannot be written to.
        force: Compiles even if the same build is there already.
        verbose: Whether every command is printed.

    Returns:
        One result per backend. Failures are kept in ``build_log.json`` in the output directory, where the
        compiled provider finds the reason.

    Raises:
        BuildError, ToolchainError: a backend that was named cannot be built; of ``"auto"`` the result says it. Also
            the output directory cannot be written to, or an architecture that was named is none, or is unknown to the
            compiler.
        ValueError: a backend is unknown, or architectures are named and nothing is built for a GPU.
    """
    say = print if verbose else (lambda line: None)
    names = available_backends() if backends == "auto" else (backends,) if isinstance(backends, str) else backends
    for name in names:
        if name not in BACKENDS:
            raise ValueError(f"unknown backend {name!r}: choose from {', '.join(BACKENDS)}")
    if archs is not None and set(names) <= {"cpu"}:
        why = "no GPU compiler was found: --cuda or --rocm says what is missing"
        named = "--cpu builds for none: leave one out, or add --cuda or --rocm"
        raise ValueError(f"--arch names GPU architectures, and {why if backends == 'auto' else named}")
    if output is None:
        package = installed.package_directory()
        existing = package if package.exists() else package.parent
        output = package if os.access(existing, os.W_OK) else installed.cache_directory()
    root = Path(output).absolute()
    _check_writable(root)

    results = []
    for name in names:
        started = time.monotonic()
        try:
            result = _build(name, archs, root, force, say)
        except (BuildError, ToolchainError) as error:
            installed.record(root, {name: str(error)})
            if backends != "auto" or isinstance(error, ArchError):
                raise
            result = BuildResult(name, None, reason=str(error), seconds=time.monotonic() - started)
        else:
            installed.record(root, {name: None})
        results.append(result)
    return tuple(results)


def available_backends() -> tuple[str, ...]:
    """The backends that ``"auto"`` builds: the CPU always, a GPU's if its compiler is there.

    ROCm needs a torch built for it as well, since hipcc alone is on many machines without an AMD GPU.
    """
    import torch

    backend = "cuda" if torch.version.hip is None else "rocm"
    try:
        _COMPILERS[backend]()
    except ToolchainError:
        return ("cpu",)
    return ("cpu", backend)


def _check_writable(root: Path) -> None:
    """Tries it: permissions alone do not tell of read-only file systems."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        raise OutputError(
            f"the kernels cannot be written to {root} ({error.strerror}): choose another output"
        ) from None


def _build(
    backend: str, wanted: Sequence[str] | None, root: Path, force: bool, say: Callable[[str], None]
) -> BuildResult:
    import torch

    started = time.monotonic()
    _check_torch(torch.__version__)
    cxx = find_cxx()
    device, archs = None, Archs((), ())
    if backend in _COMPILERS:
        device = _COMPILERS[backend]()
        check_toolkit(device, torch.__version__, torch.version.cuda if backend == "cuda" else torch.version.hip)
        archs = _resolve(device, wanted)

    sources = source_directory()
    namespace = namespace_of(sources, backend)
    variant = Variant(backend, None if device is None else device.version, platform.machine())
    target = root / "build" / variant.name
    with exclusively(root):
        fresh = force or up_to_date(target, namespace, archs.names) is None
        if fresh:
            with staged(target) as stage, tempfile.TemporaryDirectory(prefix="diffkern-") as work:
                write_python(stage, sources, namespace)
                library = stage / library_name(namespace)
                compile_library(units(backend), sources, Path(work), library, namespace, cxx, device, archs, say)
                write_metadata(stage, namespace, variant, archs.names, torch.__version__)
    return BuildResult(backend, target, archs.names, None, archs.notes, fresh, time.monotonic() - started)


def _check_torch(version: str) -> None:
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < TORCH_ABI:
        oldest = ".".join(map(str, TORCH_ABI))
        raise ToolchainError(f"the kernels are built with torch {oldest} or newer, and this is torch {version}")


def _resolve(tool: Tool, wanted: Sequence[str] | None) -> Archs:
    """Turns "native", and no wish at all, into the architectures of the GPUs that are here."""
    native = None
    if wanted is None or "native" in wanted:
        native = _native_archs(tool)
        if wanted is not None and not native:
            raise ArchError('"native" needs a GPU that torch can see, and there is none: name the architectures')
    archs = (rocm_archs if tool.name == "hipcc" else cuda_archs)(tool, native or wanted)
    if wanted is None and native:
        note = f'built for the GPU of this machine, {", ".join(archs.names)}, only: "all" builds for every GPU'
        return Archs(archs.names, archs.flags, (*archs.notes, note))
    return archs


def _native_archs(tool: Tool) -> tuple[str, ...]:
    import torch

    if not torch.cuda.is_available() or (torch.version.hip is not None) != (tool.name == "hipcc"):
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        if tool.name == "hipcc":
            found.append(torch.cuda.get_device_properties(index).gcnArchName.split(":")[0])
        else:
            found.append("{}.{}".format(*torch.cuda.get_device_capability(index)))
    return tuple(dict.fromkeys(found))
