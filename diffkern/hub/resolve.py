"""From a reference to a directory: which commit, which build, and the files of it, checked.

A commit comes from the lock file; else from the Hub, which is asked once in a process; and where that cannot be
reached, from the cache. Which build suits this machine is for ``kernels`` to say.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

from diffkern.hub import client, digests
from diffkern.hub.client import Unreachable
from diffkern.hub.lock import LockedKernel, LockFile
from diffkern.hub.policy import HubError, Policy
from diffkern.hub.reference import KernelReference

#: The version that a reference without one means: the first stable interface of a kernel, as in transformers.
DEFAULT_VERSION = "v1"

#: What the Hub answered in this process, by its address, the repository and the revision.
_answers: dict[tuple[str, str, str], LockedKernel] = {}


def find(reference: KernelReference, policy: Policy, backend: str | None) -> tuple[Path, str, str]:
    """Finds the build of a kernel for this machine, downloaded if it is not there, whose files are what they should be.

    The backend is ``"cpu"``, or None for the accelerator of this torch.

    Returns:
        Its directory, the commit that it comes from, empty for a local path, and how that was found, for reports.

    Raises:
        HubError: it cannot be had; the message says why and what to do.
    """
    if reference.is_local:
        return _find_local(reference, backend), "", "a local path"
    kernel, origin = pin(reference, policy)
    variant = choose_variant(kernel.variants, backend, f"{reference} ({kernel.commit[:7]})")
    return fetch(kernel, variant), kernel.commit, origin


def pin(reference: KernelReference, policy: Policy) -> tuple[LockedKernel, str]:
    """Finds the commit that a reference means, and its builds; says how it was found.

    Raises:
        HubError: it cannot be found out, or its publisher is not trusted.
    """
    path = policy.lock_path()
    if path is not None:
        kernel = LockFile.read(path).find(reference)
        if kernel is None:
            raise HubError(f"{reference} is not in {path}: add it with `diffkern hub lock '{reference}'`")
        if not kernel.trusted and not policy.trusts(kernel.repository):
            raise HubError(_untrusted(reference))
        return kernel, f"pinned by {path}"
    key = client.endpoint(), reference.source, reference.revision
    kernel = _answers.get(key)
    if kernel is None or not (kernel.trusted or policy.trusts(kernel.repository)):
        try:
            kernel = _answers[key] = ask_hub(reference, policy)
        except Unreachable as error:
            kernel = _from_cache(reference, error)
            _warn_unchecked(reference, policy, error)
            return kernel, f"from the cache; {error}"
    return kernel, "found on the Hub"


def ask_hub(reference: KernelReference, policy: Policy) -> LockedKernel:
    """Asks the Hub for the commit and the builds that a reference means.

    Raises:
        HubError: its publisher is not trusted, there is no such kernel or version, or the Hub does not answer.
    """
    trusted = False
    if not policy.trusts(reference.source):
        # Before anything else of the repository is looked at.
        trusted = client.is_trusted_publisher(reference.source)
        if not trusted:
            raise HubError(_untrusted(reference))
    commit = reference.revision
    if not reference.is_commit:
        commit = choose_commit(reference, client.references(reference.source))
    builds = client.variants(reference.source, commit)
    return LockedKernel(reference.source, reference.revision, commit, trusted, builds)


def fetch(kernel: LockedKernel, variant: str) -> Path:
    """Returns the directory of a build, downloaded if something of it is missing.

    Raises:
        HubError: a file is not what was published, or is missing and cannot be downloaded.
    """
    directory = client.build_directory(kernel.repository, kernel.commit, variant)
    expected = kernel.variants[variant]
    wrong = _damage(directory, expected)
    if wrong is None:
        return directory
    if not wrong.endswith("is missing"):
        where = client.repository_directory(kernel.repository)
        raise HubError(f"{directory}: {wrong}. Find out who changed it; then delete {where} and download it again")
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise HubError(f"{directory}: {wrong}, and huggingface_hub is in offline mode: run `diffkern hub download`")
    client.download(kernel.repository, kernel.commit, variant, sorted(expected))
    wrong = _damage(directory, expected)
    if wrong is not None:
        raise HubError(f"the download of {kernel.repository} to {directory} is not what was published: {wrong}")
    return directory


def choose_commit(reference: KernelReference, commits: Mapping[str, str]) -> str:
    """Returns the commit that a reference means among the branches and tags of its repository.

    Raises:
        HubError: none of them fits; the message lists those there are.
    """
    if reference.is_range:
        from packaging.specifiers import SpecifierSet
        from packaging.version import InvalidVersion, Version

        versions: dict[Version, str] = {}
        for name, commit in commits.items():
            try:
                versions[Version(name.removeprefix("v"))] = commit
            except InvalidVersion:
                continue
        fitting = list(SpecifierSet(reference.revision).filter(versions))
        if fitting:
            return versions[max(fitting)]
    else:
        wanted = reference.revision or DEFAULT_VERSION
        for name in (wanted, f"v{wanted}", wanted.removeprefix("v")):
            if name in commits:
                return commits[name]
        wanted = f" {wanted}"
    there = ", ".join(sorted(commits)) or "none"
    asked = f"a version {reference.revision}" if reference.is_range else f"the version{wanted}"
    raise HubError(f"{reference.source} has not {asked}; its branches and tags: {there}")


def choose_variant(names: Iterable[str], backend: str | None, what: str) -> str:
    """Returns the build that suits this machine best, as the ``kernels`` package orders them.

    Raises:
        HubError: none does; the message gives the reason for each.
    """
    from kernels.variants import VariantAccepted, parse_variant, resolve_variants

    parsed = {}
    for name in names:
        try:
            parsed[parse_variant(name)] = name
        except ValueError:
            continue
    try:
        fitting, decisions = resolve_variants(list(parsed), backend)
    except ValueError as error:
        raise HubError(f"{what} cannot be loaded for {backend or 'this machine'}: {error}") from error
    if fitting:
        return parsed[fitting[0]]
    rejected = [f"{parsed[d.variant]}: {d.reason}" for d in decisions if not isinstance(d, VariantAccepted)]
    more = f"; and {len(rejected) - 4} more" if len(rejected) > 4 else ""
    raise HubError(f"no build of {what} suits {_this_machine()}: {'; '.join(rejected[:4]) or 'it has none'}{more}")


def _from_cache(reference: KernelReference, error: HubError) -> LockedKernel:
    """Takes a commit from what others downloaded: by name, else by the version in the metadata of the builds."""
    directory = client.repository_directory(reference.source)
    snapshots = sorted(directory.glob("snapshots/*/build"), key=lambda path: path.stat().st_mtime, reverse=True)
    there = {path.parent.name: path for path in snapshots}
    commits = {
        path.relative_to(directory / "refs").as_posix(): path.read_text(encoding="utf-8", errors="replace").strip()
        for path in directory.glob("refs/**/*")
        if path.is_file()
    }
    for commit, path in there.items():
        for metadata in path.glob("*/metadata.json"):
            version = _version(metadata)
            if version is not None and commits.get(f"v{version}") not in there:
                commits[f"v{version}"] = commit  # the one that came last
    try:
        commit = reference.revision if reference.is_commit else choose_commit(reference, commits)
    except HubError as missing:
        raise Unreachable(f"{error}; and in the cache {client.cache_directory()}, {missing}") from error
    if commit not in there:
        raise Unreachable(f"{error}; and it is not in the cache {client.cache_directory()}") from error
    builds = {path.name: digests.of_cache(path) for path in there[commit].iterdir() if path.is_dir()}
    return LockedKernel(reference.source, reference.revision, commit, False, builds)


def _version(metadata: Path) -> int | None:
    try:
        return int(json.loads(metadata.read_text(encoding="utf-8"))["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _warn_unchecked(reference: KernelReference, policy: Policy, error: HubError) -> None:
    """Says that the publisher could not be looked up; refuses the kernel if that is too little."""
    if policy.trusts(reference.source):
        return
    said = f"whether the publisher of {reference.source} is trusted cannot be checked: {error}"
    if policy.strict:
        raise HubError(f"{said}. Name the repository in trust_remote_code, or pin it with `diffkern hub lock`")
    warnings.warn(f"diffkern: {said}. The copy in the cache is used", stacklevel=2)


def _find_local(reference: KernelReference, backend: str | None) -> Path:
    path = reference.path
    if not path.is_dir():
        whole = f"{reference.source}:{reference.name}"
        hint = f". For the directory {whole} write {whole + ':'!r}" if Path(whole).expanduser().is_dir() else ""
        raise HubError(f"{path} is no directory: a kernel is a directory with build/<variant>/metadata.json{hint}")
    if (path / "metadata.json").is_file():
        directory = path
    else:
        places = [place for place in (path, path / "build") if place.is_dir()]
        variants = {entry.name: entry for place in places for entry in place.iterdir() if entry.is_dir()}
        directory = variants[choose_variant(variants, backend, str(path))]
    wrong = _damage(directory, digests.declared(directory))
    if wrong is not None:
        raise HubError(f"{directory}: {wrong}")
    return directory


def _damage(directory: Path, expected: Mapping[str, str]) -> str | None:
    """As :func:`diffkern.hub.digests.damage`, and whether what every build has is there."""
    if not (directory / "metadata.json").is_file():
        return "metadata.json is missing"
    if not (directory / "__init__.py").is_file() and not any(directory.glob("*/__init__.py")):
        return "__init__.py is missing"
    return digests.damage(directory, expected) if expected else None


def _untrusted(reference: KernelReference) -> str:
    return (
        f"{reference.source} is not of a publisher that the Hub lists as trusted: if you trust its code, name it in "
        f"trust_remote_code=[{reference.source!r}]"
    )


def _this_machine() -> str:
    import platform

    import torch

    toolkit = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    toolkit = toolkit if torch.version.cuda or torch.version.hip else "no CUDA or ROCm"
    return f"torch {torch.__version__} with {toolkit} on {platform.machine()} {platform.system().lower()}"
