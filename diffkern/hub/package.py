"""Writes our kernels out as a kernel repository of the Hub: builds, metadata, layers, card, and the sources."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diffkern.build import build_kernels
from diffkern.build.installed import Build, find_builds, read_build
from diffkern.build.layout import KERNEL_NAME, KERNEL_VERSION, copy_face, metadata_of
from diffkern.build.platform_tag import PlatformTag, platform_tag
from diffkern.build.sources import SUFFIXES, namespace_of, source_directory
from diffkern.hub.policy import HubError, InputError
from diffkern.hub.reference import is_repository
from diffkern.providers import eager, triton
from diffkern.providers.signatures import SIGNATURES, without_defaults

#: The builds of Triton kernels, by name, and the backend of each.
TRITON_VARIANTS = {"torch-cuda": "cuda", "torch-rocm": "rocm", "torch-xpu": "xpu"}

_TRITON_OPS = Path(__file__).with_name("triton_ops.py.template")


@dataclass(frozen=True)
class Package:
    """A kernel repository on this machine, for a repository of the Hub.

    Attributes:
        variants: Names of its builds.
        platforms: What the library of each compiled build needs; those beyond the Hub's tag run on newer systems alone.
    """

    directory: Path
    repository: str
    variants: tuple[str, ...]
    platforms: Mapping[str, PlatformTag] = field(default_factory=dict)

    @property
    def upload_command(self) -> str:
        """What puts it on the branch of its version, where builds of other platforms stay."""
        # What an older build of the same name had besides must not stay behind: its digest would not hold.
        stale = " ".join(f"--delete 'build/{variant}/**'" for variant in self.variants)
        what = f"{self.repository} {shlex.quote(str(self.directory))} . --type kernel --revision v{KERNEL_VERSION}"
        return f"hf upload {what} --exclude '**/__pycache__/**' {stale}"


def package(output: Path, repository: str, *, builds: Sequence[Build] | None = None) -> Package:
    """Writes a kernel repository.

    Args:
        output: An empty or new directory.
        repository: ``"org/repo"``, for the card and for kernel-builder.
        builds: The compiled builds to include; None takes those on this machine, and builds the CPU's if there is
            none that is up to date.

    Raises:
        InputError: ``output`` is not empty, or ``repository`` is no name of one.
    """
    if not is_repository(repository):
        raise InputError(f"{repository!r} is no repository: write 'org/repo'")
    if output.exists() and any(output.iterdir()):
        raise InputError(f"{output} is not empty: name a new directory")
    sources = source_directory()
    chosen = _up_to_date_builds() if builds is None else list(builds)
    _write_sources(output, sources, repository)
    platforms = {}
    for build in chosen:
        name = build.directory.name
        tag = _write_compiled(output / "build" / name, sources, build)
        if tag is not None:
            platforms[name] = tag
    for name, backend in TRITON_VARIANTS.items():
        _write_triton(output / "build" / name, sources, backend)
    return Package(output, repository, tuple(sorted(path.name for path in (output / "build").iterdir())), platforms)


def _up_to_date_builds() -> list[Build]:
    """The builds of the sources that are here. An older build would speak of other ops than its Python face."""
    (result,) = build_kernels("cpu")
    assert result.directory is not None
    built = read_build(result.directory)
    assert built is not None
    sources = source_directory()
    others = [build for build in find_builds() if build.namespace == namespace_of(sources, build.variant.backend)]
    others = [build for build in others if build.variant.backend != "cpu"]
    return [built, *{build.directory.name: build for build in reversed(others)}.values()]


def _write_sources(output: Path, sources: Path, repository: str) -> None:
    """Everything that kernel-builder needs to build the same again."""
    for path in sorted(sources.rglob("*")):
        if path.is_file() and path.suffix in SUFFIXES and "__pycache__" not in path.parts:
            target = output / path.relative_to(sources)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    shutil.copyfile(sources / "flake.nix", output / "flake.nix")
    shutil.copyfile(sources / "CARD.md", output / "CARD.md")
    card = (sources / "CARD.md").read_text(encoding="utf-8")
    for name, value in (("repo_id", repository), ("version", str(KERNEL_VERSION))):
        card = re.sub(rf"{{{{ ?{name} ?}}}}", value, card)
    (output / "README.md").write_text(card, encoding="utf-8")
    config = (sources / "build.toml").read_text(encoding="utf-8")
    config = re.sub(r"(?m)^version = \d+$", f"version = {KERNEL_VERSION}", config, count=1)
    config = config.replace("\n[torch]\n", f'\n[general.hub]\nrepo-id = "{repository}"\n\n[torch]\n', 1)
    (output / "build.toml").write_text(config, encoding="utf-8")


def _write_compiled(target: Path, sources: Path, build: Build) -> PlatformTag | None:
    """A build of ``diffkern build``, with the Python face of these sources; its metadata says what it runs on."""
    target.mkdir(parents=True)
    for name in ("_ops.py", *(() if build.library is None else (build.library.file,))):
        shutil.copyfile(build.directory / name, target / name)
    copy_face(target, sources)
    metadata = json.loads((build.directory / "metadata.json").read_text(encoding="utf-8"))
    tag = None if build.library is None else platform_tag(target / build.library.file, build.variant.machine)
    _write_metadata(target, {**metadata, **({} if tag is None else {"platform": tag.name})})
    return tag


def _write_triton(target: Path, sources: Path, backend: str) -> None:
    """The Triton provider's kernels as ops of their own, without the rest of diffkern."""
    target.mkdir(parents=True)
    copy_face(target, sources)
    for name, module in (("triton", triton), ("eager", eager)):
        _copy_modules(Path(str(module.__file__)).parent, target / name)
    # No defaults: torch does not pass what equals a default on to Python.
    signatures = {op: without_defaults(SIGNATURES[op]) for op in triton.MODULES}
    table = "\n".join(f"    {op!r}: ({signatures[op]!r}, {triton.MODULES[op]!r})," for op in sorted(signatures))
    content = table.encode() + b"".join(path.read_bytes() for path in sorted(target.rglob("*.py")))
    namespace = f"_{KERNEL_NAME}_triton_{hashlib.sha256(content).hexdigest()[:8]}"
    ops = _TRITON_OPS.read_text(encoding="utf-8").replace("@namespace@", namespace).replace("@table@", table)
    (target / "_ops.py").write_text(ops, encoding="utf-8")
    _write_metadata(target, metadata_of(namespace, {"type": backend}))


def _copy_modules(source: Path, target: Path) -> None:
    """Copies modules of a provider; those of a kernel import each other by relative paths alone."""
    target.mkdir()
    (target / "__init__.py").write_text('"""A part of diffkern."""\n', encoding="utf-8")
    for path in source.glob("*.py"):
        if path.name in ("__init__.py", "availability.py"):
            continue
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"(?m)^(\s*)from diffkern\.providers\.(triton|eager)\.", r"\1from ..\2.", text)
        foreign = re.search(r"(?m)^\s*(?:from|import) diffkern.*$", text)
        if foreign is not None:
            raise HubError(f"{path} imports what a kernel has not got: {foreign[0].strip()}")
        (target / path.name).write_text(text, encoding="utf-8")


def _write_metadata(target: Path, metadata: dict[str, object]) -> None:
    """Writes metadata.json with the digests of all other files, as ``kernels`` checks them."""
    files = {
        path.relative_to(target).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in sorted(target.rglob("*"))
        if path.is_file()
    }
    metadata = {**metadata, "digest": {"algorithm": "sha256", "files": files}}
    (target / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
