"""From a reference to checked files: versions, locks, offline use, and everything that can go wrong on the way."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from diffkern.hub.loader import load
from diffkern.hub.lock import LockedKernel, LockFile
from diffkern.hub.policy import HubError, Policy
from diffkern.hub.reference import KernelReference
from diffkern.hub.resolve import ask_hub, choose_commit, choose_variant
from tests.hub.conftest import Run, new_process, result
from tests.hub.kernels import kernel, write
from tests.hub.server import Fault, LoopbackHub

CPU = torch.device("cpu")


def fetch(text: str, policy: Policy | None = None) -> int:
    """Loads a kernel whose package has a VALUE, and returns it."""
    value: int = load(KernelReference.parse(text), policy or Policy(), CPU).module.VALUE
    return value


def publish(hub: LoopbackHub, name: str = "org/tiny", value: int = 1, branch: str = "v1", tag: str = "") -> str:
    version = int(re.sub(r"\D.*", "", branch.removeprefix("v")) or 1)
    return hub.repository(name).commit(kernel(f"VALUE = {value}\n", version=version), branch, tag)


def test_the_happy_path_asks_each_question_once(hub: LoopbackHub) -> None:
    commit = publish(hub)
    loaded = load(KernelReference.parse("org/tiny"), Policy(), CPU)
    assert loaded.module.VALUE == 1
    assert (loaded.commit, loaded.directory.name) == (commit, "torch-cpu")
    assert hub.count("/overview") == hub.count("/refs") == 1
    assert hub.count(r"GET .*/resolve/.*metadata\.json") == 1
    assert loaded.metadata.version == 1 and commit[:7] in loaded.describe()


def test_a_kernel_is_imported_once_and_asked_for_once_in_a_process(hub: LoopbackHub) -> None:
    publish(hub, value=1)
    first = load(KernelReference.parse("org/tiny"), Policy(), CPU)
    asked = len(hub.requests)
    publish(hub, value=2)
    assert load(KernelReference.parse("org/tiny:Layer"), Policy(), CPU).module is first.module
    assert len(hub.requests) == asked
    new_process()
    assert fetch("org/tiny") == 2


# --- versions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("revision", "value"),
    [
        ("", 10),
        ("@v1", 10),
        ("@1", 10),
        ("@v2", 20),
        ("@v1.2.0", 12),
        ("@1.2.0", 12),
        ("@main", 99),
        ("@>=1.0,<2.0", 14),
        ("@>=1.0,<1.3", 12),
        ("@~=1.2", 14),
        ("@>=2", 20),
        ("@!=2,>1.2", 14),
    ],
)
def test_pins_and_ranges_choose_among_branches_and_tags(hub: LoopbackHub, revision: str, value: int) -> None:
    for branch, tag, content in (
        ("v1", "", 10), ("", "v1.2.0", 12), ("", "v1.4.0", 14), ("v2", "", 20), ("main", "", 99)
    ):  # fmt: skip
        publish(hub, value=content, branch=branch, tag=tag)
    assert fetch(f"org/tiny{revision}") == value


def test_a_commit_is_what_it_is(hub: LoopbackHub) -> None:
    commit = publish(hub, value=1)
    publish(hub, value=2)
    assert fetch(f"org/tiny@{commit}") == 1
    assert hub.count("/refs") == 0


@pytest.mark.parametrize("revision", ["v3", ">=3", "nightly"])
def test_a_version_that_is_not_there_is_answered_with_those_that_are(hub: LoopbackHub, revision: str) -> None:
    publish(hub)
    publish(hub, branch="v2")
    with pytest.raises(HubError, match=rf"org/tiny has not .*{re.escape(revision)}; .*: v1, v2"):
        fetch(f"org/tiny@{revision}")


def test_the_highest_version_wins_and_numbers_are_not_text() -> None:
    reference = KernelReference.parse("org/tiny@>=1")
    assert choose_commit(reference, {"v9": "nine", "v10": "ten", "main": "x", "v11rc1": "no"}) == "ten"


# --- lock ----------------------------------------------------------------------------------------------------


def lock(path: Path, *texts: str, policy: Policy | None = None) -> LockFile:
    kernels = [ask_hub(KernelReference.parse(text), policy or Policy()) for text in texts]
    LockFile().updated(kernels).write(path)
    return LockFile.read(path)


def test_a_lock_pins_the_commit_whatever_the_branch_becomes(hub: LoopbackHub, tmp_path: Path) -> None:
    publish(hub, value=1)
    locked = lock(tmp_path / "diffkern.lock", "org/tiny@>=1")
    publish(hub, value=2)
    assert fetch("org/tiny@>=1") == 1
    assert locked.kernels[0].trusted and set(locked.kernels[0].variants) == {"torch-cpu"}
    assert hub.count("/refs") == 1  # by the locking


def test_what_is_not_in_the_lock_does_not_load(hub: LoopbackHub, tmp_path: Path) -> None:
    publish(hub)
    publish(hub, "org/other")
    path = tmp_path / "elsewhere.lock"
    lock(path, "org/tiny")
    with pytest.raises(HubError, match=r"org/other is not in .*elsewhere.lock: add it with `diffkern hub lock"):
        fetch("org/other", Policy(lock=str(path)))
    assert fetch("org/tiny", Policy(lock=str(path))) == 1


def test_the_environment_names_the_lock(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(hub)
    lock(tmp_path / "a.lock", "org/tiny")
    monkeypatch.setenv("DIFFKERN_LOCK", str(tmp_path / "a.lock"))
    assert load(KernelReference.parse("org/tiny"), Policy(), CPU).origin == f"pinned by {tmp_path / 'a.lock'}"
    monkeypatch.setenv("DIFFKERN_LOCK", str(tmp_path / "b.lock"))
    with pytest.raises(HubError, match=r"b\.lock is not there"):
        fetch("org/tiny")


def entry(**changes: object) -> str:
    """A lock file with one kernel, and something wrong with it."""
    data = {"repository": "org/tiny", "revision": "", "commit": "1" * 40, "trusted": True, "variants": {}}
    return json.dumps({"version": 1, "kernels": [data | changes]})


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"version": 1}',
        '{"version": 7, "kernels": []}',
        entry(variants=None),
        entry(variants={"torch-cpu": ["__init__.py"]}),
        entry(variants={"torch-cpu": {"__init__.py": None}}),
        entry(trusted="no"),
        entry(commit=3),
    ],
)
def test_a_damaged_lock_is_said_to_be_none(hub: LoopbackHub, tmp_path: Path, content: str) -> None:
    (tmp_path / "diffkern.lock").write_text(content)
    with pytest.raises(HubError, match=r"diffkern\.lock (is no lock file|has format 7)"):
        fetch("org/tiny")


def test_a_lock_file_reads_as_it_was_written(tmp_path: Path) -> None:
    kernels = (
        LockedKernel("a/b", "", "1" * 40, True, {"torch-cpu": {"__init__.py": "git:00"}}),
        LockedKernel("a/b", ">=1,<2", "2" * 40, False, {}),
    )
    LockFile(kernels).write(tmp_path / "x.lock")
    assert LockFile.read(tmp_path / "x.lock").kernels == kernels


# --- without a network ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["org/tiny", "org/tiny@1", "org/tiny@>=1"])
def test_offline_from_a_cache_that_others_filled(
    hub: LoopbackHub, offline: Callable[[], None], tmp_path: Path, text: str
) -> None:
    import kernels

    publish(hub)
    commit = hub.repositories["org/tiny"].branches["v1"]
    from huggingface_hub import HfApi

    # What kernels.get_kernel leaves behind: the build, under its commit, and no name for it.
    HfApi().snapshot_download(
        "org/tiny", repo_type="kernel", revision=commit, cache_dir=tmp_path / "cache", allow_patterns="build/*/*"
    )
    assert kernels.__version__ and not (tmp_path / "cache" / "kernels--org--tiny" / "refs").exists()
    offline()
    with pytest.warns(UserWarning, match="whether the publisher of org/tiny is trusted cannot be checked"):
        assert fetch(text) == 1


def test_offline_with_an_empty_cache_there_is_a_reason_and_no_attempt(
    hub: LoopbackHub, offline: Callable[[], None]
) -> None:
    publish(hub)
    offline()
    with pytest.raises(HubError, match=r"offline mode; and in the cache .*, org/tiny has not the version v1"):
        fetch("org/tiny")
    assert hub.requests == []


def test_offline_from_the_lock(hub: LoopbackHub, offline: Callable[[], None], tmp_path: Path) -> None:
    publish(hub)
    lock(tmp_path / "diffkern.lock", "org/tiny")
    assert fetch("org/tiny") == 1
    offline()
    asked = len(hub.requests)
    assert fetch("org/tiny") == 1
    assert len(hub.requests) == asked


@pytest.mark.exhaustive
def test_offline_by_the_environment_alone(hub: LoopbackHub, process: Run) -> None:
    publish(hub)
    code = (
        "import torch; from diffkern.hub.loader import load; from diffkern.hub.policy import Policy;"
        "from diffkern.hub.reference import KernelReference as R;"
        "print(load(R.parse('org/tiny@v1'), Policy(), torch.device('cpu')).module.VALUE)"
    )
    assert result(process(code)) == "1"
    asked = len(hub.requests)
    assert asked > 0
    assert result(process(code, HF_HUB_OFFLINE="1")) == "1"
    assert len(hub.requests) == asked


def test_an_unreachable_hub_leaves_what_is_here(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    publish(hub)
    assert fetch("org/tiny") == 1
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    new_process()
    with pytest.warns(UserWarning, match=r"cannot be reached \(ConnectError: Connection refused\). The copy"):
        loaded = load(KernelReference.parse("org/tiny"), Policy(), CPU)
    assert loaded.module.VALUE == 1 and "cannot be reached" in loaded.origin


# --- refusals ------------------------------------------------------------------------------------------------


def test_a_repository_that_is_not_there(hub: LoopbackHub) -> None:
    hub.organisations["org"] = True
    with pytest.raises(HubError, match=r"org/nothing at http://127.*answered 404.*of the type 'kernel'"):
        fetch("org/nothing")


@pytest.mark.parametrize("status", [401, 403])
def test_a_repository_that_is_not_for_everybody(hub: LoopbackHub, status: int) -> None:
    publish(hub)
    hub.faults.append(Fault("/refs", status))
    with pytest.raises(HubError, match=rf"not for you \(the Hub answered {status}\).*hf auth login"):
        fetch("org/tiny")


@pytest.mark.parametrize("where", ["/overview", "/refs", "/tree/"])
def test_a_busy_hub_gives_a_reason(hub: LoopbackHub, where: str) -> None:
    publish(hub)
    hub.faults.append(Fault(where, 429))
    with pytest.raises(HubError, match="busy: it answered 429"):
        fetch("org/tiny")


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens huggingface_hub's patience."""
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.01)))


@pytest.mark.parametrize(
    ("status", "said"),
    [(404, "is not there, or not for you"), (418, "418"), (503, "is busy: it answered 503")],
)
def test_a_file_that_the_hub_refuses_is_not_said_to_be_a_broken_connection(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch, status: int, said: str
) -> None:
    publish(hub)
    hub.faults.append(Fault("/resolve/", status))
    hurry(monkeypatch)
    with pytest.raises(HubError, match=said):
        fetch("org/tiny")


def test_a_download_that_always_breaks_off_is_refused_and_leaves_no_half_file(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(hub)
    hub.faults.append(Fault(r"GET .*/resolve/.*__init__\.py", "truncate"))
    hurry(monkeypatch)
    with pytest.raises(HubError, match=r"org/tiny at http.* cannot be reached .*without sending complete message body"):
        fetch("org/tiny")
    assert not list((tmp_path / "cache").glob("kernels--org--tiny/snapshots/*/build/*/__init__.py"))


def test_a_file_tampered_with_on_the_way_is_refused(hub: LoopbackHub) -> None:
    publish(hub)
    hub.faults.append(Fault(r"GET .*/resolve/.*__init__\.py", "tamper"))
    with pytest.raises(HubError, match=r"__init__\.py is not the file that was published"):
        fetch("org/tiny")


def files_in_cache(tmp_path: Path, name: str) -> Path:
    (path,) = (tmp_path / "cache").glob(f"kernels--org--tiny/snapshots/*/build/*/{name}")
    return path


@pytest.mark.parametrize("by_lock", [True, False])
def test_a_file_tampered_with_in_the_cache_is_refused(hub: LoopbackHub, tmp_path: Path, by_lock: bool) -> None:
    publish(hub)
    if by_lock:
        lock(tmp_path / "diffkern.lock", "org/tiny")
    assert fetch("org/tiny") == 1
    path = files_in_cache(tmp_path, "__init__.py")
    path.resolve().write_text("VALUE = 7\n")
    new_process()
    with pytest.raises(HubError, match=r"__init__\.py is not the file that was published.*delete .*kernels--org--tiny"):
        fetch("org/tiny")


def test_a_file_tampered_with_in_the_cache_is_refused_offline_too(
    hub: LoopbackHub, tmp_path: Path, offline: Callable[[], None]
) -> None:
    """Neither a lock nor metadata say what it was: the cache itself names files by the digests that the Hub gave."""
    publish(hub)
    assert fetch("org/tiny") == 1
    files_in_cache(tmp_path, "__init__.py").resolve().write_text("VALUE = 7\n")
    offline()
    with pytest.warns(UserWarning, match="cannot be checked"), pytest.raises(HubError, match=r"not the file that was"):
        fetch("org/tiny")


def test_a_file_that_was_added_is_refused(hub: LoopbackHub, tmp_path: Path) -> None:
    publish(hub)
    assert fetch("org/tiny") == 1
    (files_in_cache(tmp_path, "__init__.py").parent / "extra.py").write_text("")
    new_process()
    with pytest.raises(HubError, match=r"extra\.py is none of the files that were published"):
        fetch("org/tiny")


def test_bytecode_that_was_planted_does_not_run(hub: LoopbackHub, tmp_path: Path) -> None:
    import importlib.util
    import os
    import py_compile

    publish(hub)
    assert fetch("org/tiny") == 1
    source = files_in_cache(tmp_path, "__init__.py")
    planted = tmp_path / "__init__.py"
    planted.write_text("VALUE = 6\n")
    stat = source.stat()
    os.utime(planted, (stat.st_atime, stat.st_mtime))
    assert planted.stat().st_size == stat.st_size
    py_compile.compile(str(planted), cfile=importlib.util.cache_from_source(str(source)))
    import sys

    for name in [name for name in sys.modules if name.startswith("_tiny_cpu_")]:
        del sys.modules[name]
    new_process()
    from kernels import importer

    importer._loaded_kernels.clear()
    assert fetch("org/tiny") == 1


def test_a_half_written_cache_is_completed_or_told_of(
    hub: LoopbackHub, offline: Callable[[], None], tmp_path: Path
) -> None:
    publish(hub)
    assert fetch("org/tiny") == 1
    path = files_in_cache(tmp_path, "__init__.py")
    path.resolve().unlink()
    path.unlink()
    new_process()
    assert fetch("org/tiny") == 1
    path.resolve().unlink()
    path.unlink()
    offline()
    with pytest.raises(HubError, match=r"__init__\.py is missing, and huggingface_hub is in offline mode.*download"):
        fetch("org/tiny")


# --- trust ---------------------------------------------------------------------------------------------------


def test_an_untrusted_publisher_is_refused_before_anything_of_it_is_read(hub: LoopbackHub) -> None:
    publish(hub, "stranger/tiny")
    hub.organisations["stranger"] = False
    with pytest.raises(HubError, match=r"stranger/tiny is not of a publisher .*trust_remote_code=\['stranger/tiny'\]"):
        fetch("stranger/tiny")
    assert [request for request in hub.requests if "overview" not in request] == []


def test_a_user_is_no_trusted_publisher(hub: LoopbackHub) -> None:
    publish(hub, "somebody/tiny")
    del hub.organisations["somebody"]
    with pytest.raises(HubError, match="trust_remote_code"):
        fetch("somebody/tiny")


@pytest.mark.parametrize("trust", [True, ("stranger/tiny",)])
def test_the_user_may_vouch_for_a_repository(hub: LoopbackHub, trust: bool | tuple[str, ...]) -> None:
    publish(hub, "stranger/tiny")
    hub.organisations["stranger"] = False
    assert fetch("stranger/tiny", Policy(trust)) == 1


def test_trust_of_one_configuration_is_not_that_of_another(hub: LoopbackHub, tmp_path: Path) -> None:
    publish(hub, "stranger/tiny")
    hub.organisations["stranger"] = False
    assert fetch("stranger/tiny", Policy(True)) == 1
    with pytest.raises(HubError, match="trust_remote_code"):
        fetch("stranger/tiny")  # loaded though it is
    with pytest.raises(HubError, match="trust_remote_code"):
        fetch("stranger/tiny", Policy(("stranger/other",)))
    lock(tmp_path / "diffkern.lock", "stranger/tiny", policy=Policy(True))
    with pytest.raises(HubError, match="trust_remote_code"):
        fetch("stranger/tiny")
    assert fetch("stranger/tiny", Policy(True)) == 1


def test_offline_trust_that_was_never_checked_is_told_of_or_refused(
    hub: LoopbackHub, offline: Callable[[], None], tmp_path: Path
) -> None:
    publish(hub)
    assert fetch("org/tiny") == 1
    offline()
    with pytest.warns(UserWarning, match="cannot be checked"):
        assert fetch("org/tiny") == 1
    with pytest.raises(HubError, match="cannot be checked"):
        fetch("org/tiny", Policy(strict=True))
    assert fetch("org/tiny", Policy(("org/tiny",), strict=True)) == 1


# --- builds --------------------------------------------------------------------------------------------------


def test_without_a_build_for_this_machine_every_build_has_its_reason(hub: LoopbackHub) -> None:
    names = ("torch21-cxx11-cu118-x86_64-linux", "torch-stable-abi299-cpu-x86_64-linux", "torch-metal", "nonsense")
    hub.repository("org/tiny").commit(kernel("VALUE = 1\n", variants=names), "v1")
    with pytest.raises(HubError) as error:
        fetch("org/tiny")
    said = str(error.value)
    assert (
        f"no build of org/tiny ({hub.repositories['org/tiny'].branches['v1'][:7]}) suits torch {torch.__version__}"
        in said
    )
    assert "torch21-cxx11-cu118-x86_64-linux: Torch version (2.1)" in said
    assert "torch-stable-abi299-cpu-x86_64-linux: Torch stable ABI version (2.99) is too new" in said
    assert "torch-metal: backend (metal)" in said


def test_a_build_for_another_device_is_not_taken_for_this_one(hub: LoopbackHub, tmp_path: Path) -> None:
    write(tmp_path / "kernel", kernel("VALUE = 1\n", variants=("torch-cuda",), backend="cuda"))
    with pytest.raises(HubError, match=r"build for cuda, and this is cpu"):
        fetch(str(tmp_path / "kernel" / "build" / "torch-cuda"))


def test_a_build_for_another_gpu_is_refused_before_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import contextlib

    from diffkern.hub import loader

    backend = {"type": "cuda", "archs": ["8.0", "8.6"]}
    source = "raise RuntimeError('it was imported')\n"
    write(tmp_path, kernel(source, variants=("torch-cuda",), backend="cuda"))
    directory = tmp_path / "build" / "torch-cuda"
    metadata = json.loads((directory / "metadata.json").read_text())
    (directory / "metadata.json").write_text(json.dumps({**metadata, "backend": backend}))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    with pytest.raises(HubError, match=r"CUDA capability 9\.0 of the current device is not supported.*8\.0, 8\.6"):
        loader._import(directory, torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    with pytest.raises(HubError, match="it was imported"):
        loader._import(directory, torch.device("cuda", 0))


def test_the_order_of_builds_is_that_of_the_kernels_package() -> None:
    names = ("torch-cpu", "torch-universal", "torch-stable-abi211-cpu-x86_64-linux")
    if torch.__version__ >= "2.11":
        assert choose_variant(names, "cpu", "x") == "torch-stable-abi211-cpu-x86_64-linux"
    assert choose_variant(names[:2], "cpu", "x") == "torch-cpu"
    assert choose_variant(names[1:2], "cpu", "x") == "torch-universal"


def test_a_kernel_that_needs_other_kernels_is_refused(hub: LoopbackHub) -> None:
    files = kernel("VALUE = 1\n", kernel_depends=[{"repo-id": "org/other", "version": 1}])
    hub.repository("org/tiny").commit(files, "v1")
    with pytest.raises(HubError, match=r"is built on other kernels \(org/other\).*name a kernel that needs no other"):
        fetch("org/tiny")
    assert hub.count("org/other") == 0


@pytest.mark.parametrize(
    ("init", "said"),
    [
        ("raise OSError('undefined symbol: _ZN3c10')\n", "OSError: undefined symbol: _ZN3c10"),
        ("raise SystemExit('no GPU')\n", "SystemExit: no GPU"),
    ],
)
def test_a_kernel_that_fails_to_import_gives_its_error(hub: LoopbackHub, init: str, said: str) -> None:
    hub.repository("org/tiny").commit(kernel(init), "v1")
    with pytest.raises(HubError, match=rf"failed .{said}"):
        fetch("org/tiny")


def test_two_kernels_of_one_name_do_not_meet_in_a_process(hub: LoopbackHub) -> None:
    for name, value in (("org/one", 1), ("org/two", 2)):
        hub.repository(name).commit(kernel(f"VALUE = {value}\n", identity="_same_cpu_0000001"), "v1")
    assert fetch("org/one") == 1
    with pytest.raises(HubError, match=r"calls itself _same_cpu_0000001, like .*org--one"):
        fetch("org/two")
    assert fetch("org/one") == 1


def test_two_revisions_of_a_kernel_live_side_by_side_and_a_copy_is_the_same(hub: LoopbackHub, tmp_path: Path) -> None:
    publish(hub, value=1, branch="v1")
    publish(hub, value=2, branch="v2")
    assert (fetch("org/tiny@v1"), fetch("org/tiny@v2"), fetch("org/tiny@v1")) == (1, 2, 1)
    copy = tmp_path / "copy"
    shutil.copytree(files_in_cache_of(tmp_path, hub.repositories["org/tiny"].branches["v1"]), copy)
    assert (
        load(KernelReference.parse(str(copy)), Policy(), CPU).module
        is load(KernelReference.parse("org/tiny@v1"), Policy(), CPU).module
    )


def files_in_cache_of(tmp_path: Path, commit: str) -> Path:
    return tmp_path / "cache" / "kernels--org--tiny" / "snapshots" / commit / "build" / "torch-cpu"


# --- local paths ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", ["", "build", "build/torch-cpu"])
def test_a_path_may_lead_to_the_repository_its_builds_or_one_of_them(
    hub: LoopbackHub, tmp_path: Path, depth: str
) -> None:
    write(tmp_path / "kernel", kernel("VALUE = 5\n"))
    assert fetch(str(tmp_path / "kernel" / depth)) == 5
    assert fetch("./kernel") == 5
    assert hub.requests == []


def test_a_path_whose_files_are_not_those_of_its_metadata_is_refused(hub: LoopbackHub, tmp_path: Path) -> None:
    import base64
    import hashlib

    files = kernel("VALUE = 5\n")
    digest = base64.b64encode(hashlib.sha256(b"VALUE = 4\n").digest()).decode()
    metadata = json.loads(files["build/torch-cpu/metadata.json"])
    metadata["digest"] = {"algorithm": "sha256", "files": {"__init__.py": digest}}
    files["build/torch-cpu/metadata.json"] = json.dumps(metadata).encode()
    write(tmp_path / "kernel", files)
    with pytest.raises(HubError, match=r"__init__\.py is not the file that was published"):
        fetch("./kernel")
    with pytest.raises(HubError, match="is no directory"):
        fetch("./nowhere")


# --- caches --------------------------------------------------------------------------------------------------


def test_a_cache_that_cannot_be_written_to_serves_what_it_has(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(hub)
    lock(tmp_path / "diffkern.lock", "org/tiny")
    assert fetch("org/tiny") == 1
    new_process()
    refuse_writing(monkeypatch)
    assert fetch("org/tiny") == 1


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_a_download_into_a_read_only_or_full_cache_names_the_path(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    publish(hub)
    refuse_writing(monkeypatch, code)
    said = rf"the cache {tmp_path / 'cache'} cannot be written to \({os.strerror(code)}\)"
    with pytest.raises(HubError, match=said):
        fetch("org/tiny")
    assert hub.count(r"HEAD .*/resolve/.*__init__\.py") == 1  # the Hub is not asked again for what the disk refuses


def test_a_cache_that_may_not_be_looked_into_is_a_reason(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a directory of another user without the right to enter it; a test that runs as root cannot use modes."""
    publish(hub)
    assert fetch("org/tiny") == 1
    new_process()
    stat = Path.stat

    def refuse(path: Path, **options: bool) -> os.stat_result:
        if "kernels--org--tiny" in path.parts:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(HubError, match=r"org/tiny: .*kernels--org--tiny.* cannot be read \(Permission denied\)"):
        fetch("org/tiny")


def test_a_name_that_is_damaged_in_a_shared_cache_is_found_by_its_version(
    hub: LoopbackHub, offline: Callable[[], None], tmp_path: Path
) -> None:
    publish(hub)
    assert fetch("org/tiny") == 1
    name = tmp_path / "cache" / "kernels--org--tiny" / "refs" / "v1"
    name.parent.mkdir(exist_ok=True)
    name.write_bytes(b"\xff\xfe")
    offline()
    with pytest.warns(UserWarning, match="The copy in the cache is used"):
        assert fetch("org/tiny") == 1


def refuse_writing(monkeypatch: pytest.MonkeyPatch, code: int = errno.EACCES) -> None:
    """Every attempt to write fails; a test that runs as root cannot use modes."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code), str(args[0]))

    for name in ("makedirs", "mkdir", "replace", "rename", "symlink"):
        monkeypatch.setattr(os, name, refuse)
