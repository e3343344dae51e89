"""``diffkern hub``: pin, fetch and check kernels of the Hub, and publish ours."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from diffkern.cli_options import EXIT_CODES, Json, Quiet, epilog, require_writable, say_why
from diffkern.hub.lock import LockedKernel, LockFile
from diffkern.hub.policy import LOCK_FILE, HubError, InputError, Policy, switched_off

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Pin, fetch and check kernels of the Hub, and publish diffkern's own.",
    epilog=EXIT_CODES,
)

_LockOption = Annotated[Path, typer.Option("--lock", help="The lock file.")]
_AllOption = Annotated[bool, typer.Option("--all-variants", help="Builds for every machine, not only for this one.")]


@app.command(
    short_help="Pin kernels to commits and digests.",
    epilog=epilog("hub lock kernels-community/rmsnorm", "hub lock --config kernels.toml"),
)
def lock(
    kernels: Annotated[
        list[str] | None, typer.Argument(help="Kernels, such as 'org/repo@>=1.0,<2.0'; none means those in the file.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A configuration (TOML or JSON) whose kernels to pin.")] = None,
    trust: Annotated[list[str] | None, typer.Option(help="A repository of any publisher; may be repeated.")] = None,
    path: _LockOption = Path(LOCK_FILE),
    all_variants: _AllOption = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Ask the Hub for the commits of kernels, and write these down with the digests of all their files."""
    from diffkern.hub.config import KernelConfig
    from diffkern.hub.defaults import DEFAULTS
    from diffkern.hub.reference import KernelReference
    from diffkern.hub.resolve import ask_hub

    require_writable("hub lock", lock=path)
    with _reasons("lock"):
        settings = KernelConfig() if config is None else KernelConfig.from_file(config)
        vouched = settings.trust_remote_code
        policy = Policy(True if vouched is True else (*(vouched or ()), *(trust or ())))
        locked = LockFile.read(path) if path.is_file() else LockFile()
        references = [KernelReference.parse(text) for text in kernels or ()]
        local = next((reference for reference in references if reference.is_local), None)
        if local is not None:
            raise InputError(f"{local} is a path of this machine: only repositories of the Hub are pinned")
        references += [reference for reference in settings.references() if not reference.is_local]
        if settings.hub == "auto":
            references += [KernelReference.parse(text) for ops in DEFAULTS.values() for text in ops.values()]
        if config is None and not kernels:
            references = [KernelReference(entry.repository, entry.revision) for entry in locked.kernels]
        if not references:
            raise InputError("nothing to lock: name kernels of the Hub, or a configuration that does")
        wanted = dict.fromkeys(replace(reference, name="") for reference in references)
        found = [_with_own_digests(ask_hub(reference, policy), all_variants) for reference in wanted]
        locked.updated(found).write(path)
    lines = [f"{_title(kernel)}: {kernel.commit[:12]}, {len(kernel.variants)} builds" for kernel in found]
    _show(as_json, [_row(kernel, builds=list(kernel.variants)) for kernel in found], [*lines, f"wrote {path}"])


@app.command(
    short_help="Fetch the builds of what is locked.",
    epilog=epilog("hub download", "hub download --all-variants"),
)
def download(
    path: _LockOption = Path(LOCK_FILE), all_variants: _AllOption = False, as_json: Json = False, quiet: Quiet = False
) -> None:
    """Fetch the builds of all kernels in the lock file, so that they load without a network."""
    from diffkern.hub.resolve import fetch

    rows: list[_Row] = []
    with _reasons("download"):
        for kernel in LockFile.read(path).kernels:
            for variant in _variants(kernel, all_variants):
                folder = fetch(kernel, variant)
                rows.append(_row(kernel, build=variant, path=str(folder)))
                if not as_json:
                    typer.echo(f"{_title(kernel)}: {folder}")
    _show(as_json, rows, [])


@app.command(
    "list", short_help="Show what is locked, and what of it is here.", epilog=epilog("hub list", "hub list --json")
)
def list_kernels(path: _LockOption = Path(LOCK_FILE), as_json: Json = False, quiet: Quiet = False) -> None:
    """Show the kernels in the lock file: commit, publisher, the build for this machine, and whether it is here."""
    from diffkern.hub import client

    rows, lines = [], []
    with _reasons("list"):
        for kernel in LockFile.read(path).kernels:
            publisher = "trusted publisher" if kernel.trusted else "publisher not on the Hub's list"
            lines.append(f"{_title(kernel)}: {kernel.commit[:12]}, {publisher}")
            for variant in kernel.variants:
                here = client.build_directory(kernel.repository, kernel.commit, variant).is_dir()
                ours = variant in _variants(kernel, False, quiet=True)
                mark = "for this machine" if ours else "for others"
                lines.append(f"  {variant}: {mark}, {'downloaded' if here else 'not downloaded'}")
                rows.append(_row(kernel, trusted=kernel.trusted, build=variant, usable=ours, downloaded=here))
    _show(as_json, rows, lines)


@app.command(
    short_help="Compare downloads with their locked digests.",
    epilog=epilog("hub verify", "hub verify --lock my.lock --json"),
)
def verify(path: _LockOption = Path(LOCK_FILE), as_json: Json = False, quiet: Quiet = False) -> None:
    """Compare every downloaded build with the digests in the lock file; signatures are `kernels verify-signature`'s."""
    from diffkern.hub import client, digests

    rows: list[_Row] = []
    with _reasons("verify"):
        for kernel in LockFile.read(path).kernels:
            for variant, files in kernel.variants.items():
                directory = client.build_directory(kernel.repository, kernel.commit, variant)
                if not directory.is_dir():
                    continue
                wrong = digests.damage(directory, files)
                rows.append(_row(kernel, build=variant, damage=wrong))
                if wrong is not None or not as_json:
                    typer.echo(f"{_title(kernel)} {variant}: {wrong or 'as locked'}", err=wrong is not None)
    _show(as_json, rows, [] if rows else ["nothing is downloaded: run `diffkern hub download`"])
    if any(row["damage"] for row in rows):
        raise typer.Exit(1)


@app.command(
    "package",
    short_help="Write diffkern's kernels as a kernel repository.",
    epilog=epilog("hub package ./out --repo-id me/diffkern"),
)
def write_package(
    output: Annotated[Path, typer.Argument(help="A new directory.")],
    repo_id: Annotated[str, typer.Option("--repo-id", help="The repository it is for: org/repo.")],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write diffkern's kernels as a kernel repository: every build on this machine, Triton kernels, and the sources."""
    from diffkern.build import BuildError, ToolchainError
    from diffkern.build.layout import KERNEL_VERSION
    from diffkern.hub.package import package

    with _reasons("package", BuildError, ToolchainError):
        written = package(output, repo_id)
    rows: list[_Row] = []
    lines = [f"{written.directory}: version {KERNEL_VERSION}"]
    for variant in written.variants:
        tag = written.platforms.get(variant)
        rows.append({"build": variant, "platform": None if tag is None else tag.name})
        lines.append(f"  build/{variant}{'' if tag is None else f': {tag.describe()}'}")
    _show(as_json, rows, [*lines, f"to publish it, after `hf auth login`: {written.upload_command}"])


@contextlib.contextmanager
def _reasons(command: str, *kinds: type[Exception]) -> Iterator[None]:
    """Ends the program with the reason alone where one of these errors says it all."""
    expected: tuple[type[Exception], ...] = (HubError, ValueError, OSError, *kinds)
    try:
        off = switched_off() if command in ("lock", "download") else None
        if off is not None:
            raise HubError(off)
        yield
    except expected as error:
        typer.echo(f"diffkern hub {command}: {say_why(error)}", err=True)
        raise typer.Exit(2 if isinstance(error, (InputError, ValueError, FileNotFoundError)) else 1) from None


_Row = dict[str, object]


def _row(kernel: LockedKernel, **more: object) -> _Row:
    return {"kernel": _title(kernel), "commit": kernel.commit, **more}


def _show(as_json: bool, rows: list[_Row], lines: list[str]) -> None:
    """Prints the result of a command: as JSON, or as lines for people."""
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    elif lines:
        typer.echo("\n".join(lines))


def _title(kernel: LockedKernel) -> str:
    return f"{kernel.repository}@{kernel.revision}" if kernel.revision else kernel.repository


def _variants(kernel: LockedKernel, every: bool, quiet: bool = False) -> list[str]:
    """The builds for every machine, or those that this one can use: one for the CPU, one for its accelerator."""
    from diffkern.hub.resolve import choose_variant

    if every:
        return list(kernel.variants)
    found: dict[str, None] = {}
    reasons = []
    for backend in ("cpu", None):
        try:
            found[choose_variant(kernel.variants, backend, _title(kernel))] = None
        except HubError as error:
            reasons.append(str(error))
    if not found and not quiet:
        raise HubError(reasons[0])
    return list(found)


def _with_own_digests(kernel: LockedKernel, every: bool) -> LockedKernel:
    """Replaces the Hub's digests by SHA-256 of what it sends, for the builds that this machine downloads now."""
    from diffkern.hub import digests
    from diffkern.hub.resolve import fetch

    variants = dict(kernel.variants)
    for variant in _variants(kernel, every, quiet=True):
        directory = fetch(kernel, variant)
        variants[variant] = {name: digests.sha256(directory / name) for name in kernel.variants[variant]}
    return replace(kernel, variants=variants)
