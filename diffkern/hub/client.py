"""The few questions that diffkern asks the Hub, and its refusals as reasons."""

from __future__ import annotations

import errno
import glob
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from diffkern.hub.policy import HubError

T = TypeVar("T")

_BUSY = (429, 500, 502, 503, 504)
_HIDDEN = (401, 403, 404)
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)

#: Files of a build by path below its directory, with the digests that the Hub gives for them.
Files = Mapping[str, str]


def endpoint() -> str:
    """The address of the Hub (``HF_ENDPOINT``)."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def cache_directory() -> Path:
    """Where downloads of kernels are kept: ``KERNELS_CACHE``, or the cache of huggingface_hub."""
    from huggingface_hub import constants

    return Path(os.environ.get("KERNELS_CACHE") or constants.HF_HUB_CACHE).expanduser()


def repository_directory(repository: str) -> Path:
    """Where the downloads of one repository are kept."""
    return cache_directory() / f"kernels--{repository.replace('/', '--')}"


def build_directory(repository: str, commit: str, variant: str) -> Path:
    """Where the files of a build at a commit are kept."""
    return repository_directory(repository) / "snapshots" / commit / "build" / variant


def references(repository: str) -> dict[str, str]:
    """Returns the commit of every branch and tag; a tag wins over a branch of its name."""
    refs = _ask(repository, lambda api: api.list_repo_refs(repository, repo_type="kernel"))
    return {ref.name: ref.target_commit for ref in (*refs.branches, *refs.tags)}


def variants(repository: str, commit: str) -> dict[str, Files]:
    """Returns every build at a commit: its files and their digests, without downloading any."""
    entries = _ask(
        repository,
        lambda api: list(api.list_repo_tree(repository, repo_type="kernel", revision=commit, recursive=True)),
    )
    builds: dict[str, dict[str, str]] = {}
    for entry in entries:
        parts = entry.path.split("/", 2)
        if len(parts) == 3 and parts[0] == "build" and hasattr(entry, "blob_id"):
            digest = f"sha256:{entry.lfs.sha256}" if entry.lfs is not None else f"git:{entry.blob_id}"
            builds.setdefault(parts[1], {})[parts[2]] = digest
    return builds  # type: ignore[return-value]


def is_trusted_publisher(repository: str) -> bool:
    """Whether the Hub lists the organisation that publishes a repository as a trusted publisher of kernels."""
    organisation = repository.partition("/")[0]
    try:
        overview = _ask(repository, lambda api: api.get_organization_overview(organisation))
    except _Missing:  # a user, who is no organisation
        return False
    return bool(getattr(overview, "trustedKernelPublisher", False))


def download(repository: str, commit: str, variant: str, files: Sequence[str]) -> None:
    """Downloads a build into the cache. Files that are there already are not fetched again.

    Raises:
        HubError: it cannot be had, or the cache cannot be written to.
    """
    paths = [glob.escape(f"build/{variant}/{name}") for name in files]
    try:
        _ask(
            repository,
            lambda api: api.snapshot_download(
                repository, repo_type="kernel", revision=commit, allow_patterns=paths, cache_dir=cache_directory()
            ),
        )
    except OSError as error:
        if not _is_of_the_disk(error):
            raise
        raise HubError(f"the cache {cache_directory()} cannot be written to ({error.strerror})") from error


class Unreachable(HubError):
    """The Hub does not answer at this moment; what is on this machine may still do."""


class _Missing(HubError):
    """There is no such thing on the Hub, or not for this user."""


def _ask(repository: str, question: Callable[[Any], T]) -> T:
    """Asks the Hub, and turns a refusal into a reason. How often a file is tried is for huggingface_hub to say."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    where = f"{repository} at {endpoint()}"
    try:
        return question(HfApi(library_name="diffkern"))
    except OfflineModeIsEnabled as error:
        raise Unreachable(f"{where} cannot be asked: huggingface_hub is in offline mode") from error
    except Exception as error:
        if _is_of_the_disk(error):
            raise
        answer: BaseException | None = error
        while answer is not None and not isinstance(answer, HfHubHTTPError):
            answer = answer.__cause__
        if answer is None:  # no connection, a broken one, a file shorter than announced ...
            raise Unreachable(f"{where} cannot be reached ({_summary(error)})") from error
        status = getattr(answer.response, "status_code", None)
        if status in _HIDDEN:
            # The Hub gives them for what is missing and for what is private alike.
            raise _Missing(
                f"{where} is not there, or not for you (the Hub answered {status}): check the name, that it is a "
                "repository of the type 'kernel', and `hf auth login`"
            ) from error
        busy = f"is busy: it answered {status}" if status in _BUSY else f"cannot be had ({_summary(answer)})"
        raise Unreachable(f"{where} {busy}") from error


def _is_of_the_disk(error: BaseException) -> bool:
    """Whether this machine refused to write, be it for rights or for room; the Hub has no part in it."""
    return isinstance(error, OSError) and error.errno in _UNWRITABLE


def _summary(error: BaseException) -> str:
    first = re.sub(r"\[Errno -?\d+\] ", "", str(error)).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
