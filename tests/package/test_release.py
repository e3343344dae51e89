"""The version stands in one place; what a public forge runs exists, and issues ask for the checkup."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

import diffkern

ROOT = Path(__file__).parents[2]


def test_the_version_stands_in_one_place() -> None:
    quoted = re.compile(rf'version\w*\s*=\s*"{re.escape(diffkern.__version__)}"', re.IGNORECASE)
    files = [ROOT / "pyproject.toml", ROOT / "setup.py", *ROOT.glob("diffkern/**/*.py")]
    assert [file.name for file in files if quoted.search(file.read_text("utf-8"))] == ["__init__.py"]
    assert '"diffkern.__version__"' in (ROOT / "pyproject.toml").read_text("utf-8")


def test_workflows_run_what_is_there() -> None:
    yaml = pytest.importorskip("yaml")
    makefile = (ROOT / "Makefile").read_text("utf-8")
    steps = [
        step["run"]
        for path in (ROOT / ".github" / "workflows").glob("*.yml")
        for job in yaml.safe_load(path.read_text("utf-8"))["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]
    assert len(steps) >= 3
    for step in steps:
        program, argument = step.split()[:2]
        assert (ROOT / program).is_file() if program != "make" else f"\n{argument}:" in makefile, step


def test_an_issue_asks_for_the_checkup_and_the_report() -> None:
    yaml = pytest.importorskip("yaml")
    for name in ("bug", "slow"):
        template = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text("utf-8"))
        labels = [part["attributes"]["label"] for part in template["body"]]
        assert "diffkern doctor --json" in labels and any(label.startswith("print(report)") for label in labels)


def test_every_path_that_has_an_owner_is_there() -> None:
    lines = (ROOT / ".github" / "CODEOWNERS").read_text("utf-8").splitlines()
    for path, *owners in (line.split() for line in lines if line and not line.startswith("#")):
        assert owners and all(owner.startswith("@") for owner in owners)
        assert path == "*" or (ROOT / path.strip("/")).is_dir(), path


def test_the_scripts_of_the_wheels_are_shell_scripts() -> None:
    for name in ("build_wheels.sh", "try_wheel.sh"):
        subprocess.run(["bash", "-n", str(ROOT / "scripts" / name)], check=True)


def test_each_wheel_is_tried_in_an_environment_of_its_own(tmp_path: Path) -> None:
    python = tmp_path / "python"  # says what it was asked for, and makes environments of itself
    python.write_text(
        '#!/bin/sh\necho "torch $*"\necho "cache $XDG_CACHE_HOME"\n'
        'if [ "$2" = venv ]; then mkdir -p venv/bin; cp "$0" venv/bin/python; cp "$0" venv/bin/diffkern; fi\n'
    )
    python.chmod(0o755)
    wheels = [tmp_path / f"diffkern-{tag}.whl" for tag in ("any", "x86_64")]
    for wheel in wheels:
        wheel.touch()
    script = str(ROOT / "scripts" / "try_wheel.sh")
    done = subprocess.run(
        ["bash", script, *map(str, wheels), "torch==2.11.0"],
        env=os.environ | {"PYTHON": str(python), "XDG_CACHE_HOME": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    installed = [line for line in done.stdout.splitlines() if "pip install" in line]
    assert installed == [f"torch -m pip install --quiet {wheel}[diffusers] torch==2.11.0" for wheel in wheels]
    assert done.stdout.count("-m venv --clear venv") == 2
    assert len(re.findall(r"cache /.*/venv/cache", done.stdout)) == 4  # doctor and the example, of each
    nothing = subprocess.run(["bash", script, "torch==2.11.0"], capture_output=True, text=True, check=False)
    assert nothing.returncode == 1 and "name a wheel" in nothing.stderr
