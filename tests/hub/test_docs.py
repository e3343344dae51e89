"""The worked example of the page runs, and prints what the page says."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from diffkern.hub.defaults import DEFAULTS
from diffkern.hub.package import package
from tests.hub.conftest import ROOT
from tests.hub.server import LoopbackHub
from tests.hub.test_package import cpu_build, published, repository  # noqa: F401  (fixtures)

PAGE = (ROOT / "docs" / "hub.md").read_text(encoding="utf-8")


def masked(line: str) -> str:
    """A line without its numbers, which differ a little from one processor to the next."""
    return re.sub(r"\d\.\de-\d\d", "N", line).strip()


def test_the_worked_example_prints_what_the_page_says(
    hub: LoopbackHub,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    cpu_build: object,  # noqa: F811
) -> None:
    pytest.importorskip("transformers")
    package(tmp_path / "diffkern-kernel", "me/diffkern", builds=[cpu_build])  # type: ignore[list-item]
    example = PAGE.split("<!-- example: begin")[1].split("<!-- example: end -->")[0]
    code, output = re.findall(r"```(?:python|text)\n(.*?)```", example, re.DOTALL)
    exec(code, {})
    printed = {masked(line) for line in capsys.readouterr().out.splitlines()}
    missing = [line for line in map(masked, output.splitlines()) if "diffkern-kernel" in line and line not in printed]
    assert missing == [] and masked(output.splitlines()[-1]) in printed


def test_the_example_script_runs_a_kernel_by_its_name_and_again_without_a_network(
    published: LoopbackHub,  # noqa: F811
    offline: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # which the script sets
    script = str(ROOT / "scripts" / "example_hub_kernel.py")
    options = ["--kernel", "me/diffkern@v1", "--trust"]
    for extra in ([], ["--offline"]):
        if extra:
            offline()
            published.__exit__()
        monkeypatch.setattr("sys.argv", [script, *options, *extra])
        runpy.run_path(script, run_name="__main__")
        assert "5 modules run on me/diffkern@v1" in capsys.readouterr().out


def test_every_kernel_that_auto_takes_is_on_the_page() -> None:
    rows = dict(re.findall(r"(?m)^\| (\w+) \| (kernels-community/.*) \|$", PAGE))
    assert set(rows) == set(DEFAULTS)
    for device, ops in DEFAULTS.items():
        for op, kernel in ops.items():
            name = kernel.split("/")[1].split("@")[0]
            assert name in rows[device] and f"`{op}`" in rows[device]
