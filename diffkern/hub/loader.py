"""Imports a kernel that was found, with the ``kernels`` package, and never twice."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from diffkern.hub import client, digests
from diffkern.hub.policy import HubError, Policy, switched_off
from diffkern.hub.reference import KernelReference
from diffkern.hub.resolve import find
from diffkern.hub.rule import device_name
from diffkern.providers.foreign import is_of_user, preserved, with_causes

if TYPE_CHECKING:
    from kernels import Metadata


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel in this process: what was asked for, its build and Python package.

    The commit that it comes from is empty for a local path; ``origin`` says how that was found.
    """

    reference: KernelReference
    directory: Path
    commit: str
    origin: str
    metadata: Metadata
    module: ModuleType

    def describe(self) -> str:
        """What was loaded, in one line."""
        commit = f" at {self.commit[:7]}" if self.commit else ""
        return f"{self.reference}{commit}, build {self.directory.name} ({self.origin})"


_lock = threading.RLock()
_loaded: dict[Path, tuple[Metadata, ModuleType]] = {}


def load(reference: KernelReference, policy: Policy, device: torch.device) -> LoadedKernel:
    """Finds, checks and imports the build of a kernel for ``device``.

    The policy is applied at every call, also to what is in the process already. Which of its layers a reference names
    is no matter here.

    Raises:
        HubError: it cannot be had, or not for this machine; the message says why and what to do.
    """
    off = switched_off()
    if off is not None:
        raise HubError(off)
    _require_kernels()
    with _lock:
        try:
            directory, commit, origin = find(reference, policy, "cpu" if device.type == "cpu" else None)
            if directory not in _loaded:
                _loaded[directory] = _import(directory, device)
        except OSError as error:
            where = error.filename or client.cache_directory()
            raise HubError(f"{reference}: {where} cannot be read ({error.strerror}): see to its permissions") from error
        metadata, module = _loaded[directory]
        _refuse_other_backends(directory, metadata, device)
        return LoadedKernel(reference, directory, commit, origin, metadata, module)


def _require_kernels() -> None:
    """Makes sure that there is a ``kernels`` package of a kind that this diffkern knows."""
    try:
        from kernels import Metadata, get_local_kernel  # noqa: F401
        from kernels.variants import parse_variant, resolve_variants  # noqa: F401
    except Exception as error:  # an old, a broken or a future package may raise anything
        raise HubError(
            f"the package 'kernels' cannot be used ({type(error).__name__}: {error}): install 'kernels>=0.17'"
        ) from error


def _import(directory: Path, device: torch.device) -> tuple[Metadata, ModuleType]:
    import kernels
    from kernels.validate import ArchValidator

    try:
        metadata = kernels.Metadata.read_from_file(directory / "metadata.json")
    except ValueError as error:
        raise HubError(f"{directory} has no metadata.json of a kernel ({error})") from error
    if metadata.kernel_depends:
        needed = ", ".join(kernel.repo_id for kernel in metadata.kernel_depends)
        raise HubError(
            f"{directory} is built on other kernels ({needed}), and diffkern loads only those that the "
            "configuration names: name a kernel that needs no other, or call this one yourself, by kernels.get_kernel"
        )
    if device.type == "cuda":
        try:  # before anything of it runs
            with torch.cuda.device(device):
                ArchValidator().validate_metadata(metadata=metadata, variant=directory.name)
        except RuntimeError as error:
            raise HubError(str(error)) from error
    name = metadata.id
    same = _already_here(name, directory)
    if same is not None:
        return metadata, same
    before = sys.modules.get(name)
    try:
        with _fresh_bytecode(), preserved(device):
            module = kernels.get_local_kernel(directory, backend="cpu" if device.type == "cpu" else None)
    except BaseException as error:  # whatever a foreign module comes up with is a reason, not a crash
        sys.modules.pop(name, None)
        if before is not None:
            sys.modules[name] = before
        if is_of_user(error):
            raise
        raise HubError(f"loading {directory} failed ({with_causes(error)})") from error
    return metadata, module


def _refuse_other_backends(directory: Path, metadata: Metadata, device: torch.device) -> None:
    """A path may lead straight to a build, of any backend."""
    backend = str(metadata.backend.backend_type).rpartition(".")[2].lower()
    if backend != device_name(device.type) and directory.name != "torch-universal":
        raise HubError(f"{directory} is a build for {backend}, and this is {device}")


def _already_here(name: str, directory: Path) -> ModuleType | None:
    """Returns the module that has the name of a build already, if it is the same build from another place.

    Two builds with other libraries cannot have one name: torch cannot define an op twice.
    """
    module = sys.modules.get(name)
    if module is None:
        return None
    other = _directory_of(module)
    if other is None:
        raise HubError(f"{directory} calls itself {name}, which is the name of another module of this process")
    if other == directory:
        return None
    here, there = digests.files_of(directory), digests.files_of(other)
    if here == there:
        return module
    libraries = [{name: files[name] for name in files if name.endswith(".so")} for files in (here, there)]
    if not libraries[0] or libraries[0] != libraries[1]:
        raise HubError(
            f"{directory} calls itself {name}, like {other}, which is loaded and is not the same: use one of them"
        )
    return None


def _directory_of(module: ModuleType) -> Path | None:
    """The build that a module was imported from, or None if it is no kernel."""
    file = getattr(module, "__file__", None)
    parents = Path(file).parents if isinstance(file, str) else ()
    return next((parent for parent in tuple(parents)[:2] if (parent / "metadata.json").is_file()), None)


@contextlib.contextmanager
def _fresh_bytecode() -> Iterator[None]:
    """Compiles from the sources, whose digests were checked, and not from what lies in ``__pycache__``."""
    prefix, writes = sys.pycache_prefix, sys.dont_write_bytecode
    # A directory that cannot exist.
    sys.pycache_prefix, sys.dont_write_bytecode = os.path.join(os.devnull, "diffkern"), True
    try:
        yield
    finally:
        sys.pycache_prefix, sys.dont_write_bytecode = prefix, writes
