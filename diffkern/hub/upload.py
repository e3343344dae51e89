"""Puts a kernel repository on the Hub."""

from __future__ import annotations

import json
import re
from pathlib import Path

from diffkern.hub.package import Package, PackageError


def read_package(directory: Path) -> tuple[Package, str]:
    """Reads a repository that :func:`diffkern.hub.package.package` wrote; returns it and the name of its repository.

    Raises:
        PackageError: it is none, or its builds are of several versions.
    """
    try:
        config = (directory / "build.toml").read_text(encoding="utf-8")
        metadata = {path.parent.name: json.loads(path.read_text()) for path in directory.glob("build/*/metadata.json")}
    except (OSError, ValueError) as error:
        raise PackageError(f"{directory} is no kernel repository: write it with `diffkern hub package`") from error
    name = re.search(r'(?m)^repo-id = "(.+)"$', config)
    versions = {build["version"] for build in metadata.values()}
    if name is None or len(versions) != 1:
        raise PackageError(f"{directory} has no repo-id, or not builds of one version: {sorted(versions)}")
    return Package(directory, int(versions.pop()), tuple(sorted(metadata))), name[1]


def upload(directory: Path, repository: str | None = None, *, private: bool = False) -> str:
    """Uploads a repository to its version's branch, which other builds on it survive; returns the commit.

    Args:
        directory: What :func:`diffkern.hub.package.package` wrote.
        repository: ``"org/repo"``; None means the one it was written for.
        private: Whether a repository that has to be created is private.

    Raises:
        PackageError: ``directory`` is no kernel repository.
        huggingface_hub.errors.HfHubHTTPError: the Hub refuses, for instance without a login.
    """
    from huggingface_hub import HfApi

    contents, named = read_package(directory)
    repository = repository or named
    branch = f"v{contents.version}"
    api = HfApi(library_name="diffkern")
    api.create_repo(repository, repo_type="kernel", private=private, exist_ok=True)
    api.create_branch(repository, branch=branch, repo_type="kernel", exist_ok=True)
    commit = api.upload_folder(
        repo_id=repository,
        repo_type="kernel",
        revision=branch,
        folder_path=directory,
        ignore_patterns=["**/__pycache__/**", "*.pyc"],
        # What an older build of the same name had besides must not stay behind: its digest would not hold.
        delete_patterns=[f"build/{variant}/**" for variant in contents.variants],
        commit_message=f"diffkern kernels, version {contents.version}: {', '.join(contents.variants)}",
    )
    return str(commit.oid)
