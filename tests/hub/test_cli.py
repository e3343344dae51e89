"""``diffkern hub`` from lock to upload."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from diffkern import KernelConfig
from diffkern.cli import app
from tests.hub import kernels
from tests.hub.conftest import new_process
from tests.hub.kernels import kernel
from tests.hub.server import LoopbackHub


def run(*arguments: str) -> Result:
    new_process()
    return CliRunner().invoke(app, ["hub", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.fixture
def published(hub: LoopbackHub) -> LoopbackHub:
    hub.repository("org/norms").commit(kernel(kernels.RMSNORM, variants=("torch-cpu", "torch-metal")), "v1", "v1.2.0")
    hub.repository("stranger/norms", trusted=False).commit(kernel(kernels.RMSNORM), "v1")
    return hub


def locked(path: Path) -> dict[str, dict[str, object]]:
    return {kernel["repository"] + kernel["revision"]: kernel for kernel in json.loads(path.read_text())["kernels"]}


def test_lock_download_list_verify(published: LoopbackHub, tmp_path: Path, offline: Callable[[], None]) -> None:
    out = run("lock", "org/norms@>=1.0,<2.0")
    assert out.exit_code == 0, out.output
    (entry,) = locked(tmp_path / "diffkern.lock").values()
    digests = entry["variants"]
    assert isinstance(digests, dict) and set(digests) == {"torch-cpu", "torch-metal"}
    assert all(digest.startswith("sha256:") for digest in digests["torch-cpu"].values())  # what was downloaded
    assert all(digest.startswith("git:") for digest in digests["torch-metal"].values())  # what the Hub says
    out = run("list")
    assert "org/norms@>=1.0,<2.0: " in out.output and "trusted publisher" in out.output
    assert "torch-cpu: for this machine, downloaded" in out.output
    assert "torch-metal: for others, not downloaded" in out.output
    out = run("download", "--all-variants")
    assert out.exit_code == 0 and "torch-metal" in out.output
    offline()
    out = run("verify")
    assert (out.exit_code, out.output.count("as locked")) == (0, 2)
    (path,) = (tmp_path / "cache").glob("kernels--org--norms/snapshots/*/build/torch-metal/__init__.py")
    path.resolve().write_text("")
    out = run("verify")
    assert out.exit_code == 1 and "torch-metal: __init__.py is not the file that was published" in out.output


def test_lock_again_takes_the_new_commit_and_leaves_other_entries(published: LoopbackHub, tmp_path: Path) -> None:
    run("lock", "org/norms")
    first = locked(tmp_path / "diffkern.lock")["org/norms"]["commit"]
    published.repository("org/norms").commit(kernel(kernels.RMSNORM + "    VALUE = 2\n"), "v1")
    run("lock", "--trust", "stranger/norms", "stranger/norms")
    entries = locked(tmp_path / "diffkern.lock")
    assert (entries["org/norms"]["commit"], entries["stranger/norms"]["trusted"]) == (first, False)
    assert "publisher not on the Hub's list" in run("list").output
    assert run("lock", "--trust", "stranger/norms").exit_code == 0  # all of them
    assert locked(tmp_path / "diffkern.lock")["org/norms"]["commit"] != first


def test_lock_what_a_configuration_names(published: LoopbackHub, tmp_path: Path) -> None:
    config = KernelConfig(
        {"rms_norm": {"metal": "org/norms@v1.2.0:RMSNorm", "cpu": "stranger/norms"}, "vae.*": "/a/path"},
        trust_remote_code=["stranger/norms"],
    )
    (tmp_path / "kernels.json").write_text(config.to_json())
    out = run("lock", "--config", "kernels.json", "--lock", "my.lock")
    assert out.exit_code == 0, out.output
    assert set(locked(tmp_path / "my.lock")) == {"org/normsv1.2.0", "stranger/norms"}


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["lock"], 2, "nothing to lock"),
        (["lock", "stranger/norms"], 1, r"not of a publisher"),
        (["lock", "org/nothing"], 1, "answered 404"),
        (["lock", "org"], 2, "names no kernel"),
        (["lock", "./kernel:Layer"], 2, "./kernel:Layer is a path of this machine"),
        (["lock", "--config", "missing.toml"], 2, "missing.toml: not found"),
        (["lock", "--config", "broken.lock"], 2, "broken.lock: Expecting"),
        (["download"], 2, "diffkern.lock: not found"),
        (["list", "--json"], 2, "diffkern.lock: not found"),
        (["verify", "--lock", "broken.lock"], 2, "broken.lock is no lock file of diffkern"),
        (["package", "out", "--repo-id", "nothing"], 2, "is no repository"),
    ],
)
def test_a_failure_is_one_line_with_the_reason(
    published: LoopbackHub, arguments: list[str], code: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / "broken.lock").write_text("no lock")
    out = run(*arguments)
    assert out.exit_code == code, out.output
    assert out.output.startswith(f"diffkern hub {arguments[0]}: ") and said in out.output
    assert len(out.output.strip().splitlines()) == 1


def test_a_configuration_without_kernels_of_the_hub_does_not_update_the_others(
    published: LoopbackHub, tmp_path: Path
) -> None:
    assert run("lock", "org/norms").exit_code == 0
    asked = len(published.requests)
    (tmp_path / "local.toml").write_text('[rules]\nrms_norm = "./kernel"\n')
    out = run("lock", "--config", "local.toml")
    assert out.exit_code == 2 and "nothing to lock" in out.output
    assert len(published.requests) == asked


def test_without_a_network_locking_fails_and_what_is_here_is_listed(
    published: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    assert run("lock", "org/norms").exit_code == 0
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    out = run("lock", "org/norms")
    said = "diffkern hub lock: org/norms at http://127.0.0.1:9 cannot be reached (ConnectError: Connection refused)"
    assert (out.exit_code, out.output.strip()) == (1, said)
    for command in ("list", "verify", "download"):
        assert run(command).exit_code == 0, "these need no network"


def test_nothing_is_asked_when_the_hub_is_switched_off(published: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFKERN_HUB", "0")
    out = run("lock", "org/norms")
    assert out.exit_code == 1 and "switched off by DIFFKERN_HUB=0" in out.output
    assert published.requests == []


def test_verify_says_when_there_is_nothing_to_verify(published: LoopbackHub, tmp_path: Path) -> None:
    (tmp_path / "diffkern.lock").write_text('{"version": 1, "kernels": []}')
    assert "nothing is downloaded" in run("verify").output


def test_lists_and_checks_come_as_json_too_and_quietly(published: LoopbackHub, tmp_path: Path) -> None:
    rows = json.loads(run("lock", "org/norms", "--json").stdout)
    assert [row["builds"] for row in rows] == [["torch-cpu", "torch-metal"]]
    assert [row["downloaded"] for row in json.loads(run("list", "--json").stdout)] == [True, False]
    assert [row["damage"] for row in json.loads(run("verify", "--json").stdout)] == [None]
    (row,) = json.loads(run("download", "--json").stdout)
    assert Path(row["path"]).is_dir() and row["kernel"] == "org/norms"
    assert run("list", "--quiet").output == ""
    (path,) = (tmp_path / "cache").glob("kernels--org--norms/snapshots/*/build/torch-cpu/__init__.py")
    path.resolve().write_text("")
    damaged = run("verify", "--quiet")
    assert damaged.exit_code == 1 and "is not the file that was published" in damaged.output
