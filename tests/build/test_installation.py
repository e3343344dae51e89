"""Installing the package: with and without torch, a compiler, and the user's wishes."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from sysconfig import get_platform

import pytest
import setuptools

from diffkern.build import Variant
from diffkern.build.installed import record
from diffkern.build.platform_tag import HUB_TAG
from setup_kernels import build_for_installation, plan_installation
from tests.build.conftest import REPOSITORY, RunPython

BUILD_WHEEL = """
import os, sys
sys.path.insert(0, os.getcwd())
from setuptools import build_meta
print(build_meta.build_wheel(sys.argv[1]))
"""

pytestmark = pytest.mark.slow


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the sources, since building leaves files beside them."""
    target = tmp_path / "checkout"
    ignore = shutil.ignore_patterns("_kernels", "__pycache__", "*.egg-info")
    for name in ("csrc", "diffkern"):
        shutil.copytree(REPOSITORY / name, target / name, ignore=ignore)
    for name in ("setup.py", "setup_kernels.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copyfile(REPOSITORY / name, target / name)
    return target


def build_wheel(
    checkout: Path, python: str = sys.executable, **environment: str
) -> tuple[subprocess.CompletedProcess[str], Path | None]:
    """Builds a wheel the way pip does, and unpacks it: the result of the run, and where the wheel is."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("DIFFKERN_", "PYTHON"))}
    wheels = checkout / "wheels"
    run = subprocess.run(
        [python, "-c", BUILD_WHEEL, str(wheels)],
        cwd=checkout,
        env=clean | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    found = list(wheels.glob("*.whl"))
    if run.returncode != 0 or not found:
        return run, None
    with zipfile.ZipFile(found[0]) as archive:
        archive.extractall(checkout / "site")
    return run, found[0]


def log_of(checkout: Path) -> dict[str, str]:
    return json.loads((checkout / "site" / "diffkern" / "_kernels" / "build_log.json").read_text(encoding="utf-8"))


PRINT_REASON = """
import torch
from diffkern.providers import get_provider
from diffkern.ops import rms_norm
print(get_provider("compiled").unavailable_reason(torch.device("cpu")))
print(rms_norm(torch.full((1, 4), 2.0), eps=0.0).tolist())
"""


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("auto", "torch was not there"),
        pytest.param("0", "DIFFKERN_BUILD=0 left them out of the wheel", marks=pytest.mark.exhaustive),
    ],
)
def test_build_isolation_without_torch_gives_a_pure_wheel_that_works(
    checkout: Path, tmp_path: Path, run_python: RunPython, setting: str, said: str
) -> None:
    environment = tmp_path / "isolated"
    venv.create(environment, with_pip=False)
    packages = tmp_path / "packages"
    packages.mkdir()
    source = Path(setuptools.__file__).parents[1]
    for path in (source / "setuptools", source / "_distutils_hack", *source.glob("setuptools-*.dist-info")):
        (packages / path.name).symlink_to(path)
    left = [f"lib/diffkern/_kernels/build/{setting}/_diffkern.so", f"bdist.{get_platform()}/wheel/diffkern/removed.py"]
    for path in (checkout / "build" / name for name in left):  # by an earlier build, and by one that was interrupted
        path.parent.mkdir(parents=True)
        path.touch()
    run, wheel = build_wheel(
        checkout, str(environment / "bin" / "python"), PYTHONPATH=str(packages), DIFFKERN_BUILD=setting
    )
    assert wheel is not None, run.stderr
    assert wheel.name == "diffkern-0.1.0-py3-none-any.whl"
    assert said in log_of(checkout)["cpu"]
    site = checkout / "site"
    assert not list(site.glob("**/*.so")) and not (site / "diffkern" / "removed.py").exists()
    assert (checkout / "site" / "diffkern" / "csrc" / "build.toml").is_file()
    assert (checkout / "site" / "diffkern" / "build" / "ops.py.template").is_file()
    assert (checkout / "site" / "diffkern" / "hub" / "triton_ops.py.template").is_file()

    used = run_python(PRINT_REASON, checkout / "site", XDG_CACHE_HOME=str(tmp_path))
    reason, values = used.stdout.splitlines()
    assert "diffkern build --cpu" in reason and said in reason
    assert values == "[[1.0, 1.0, 1.0, 1.0]]"

    required, _ = build_wheel(
        checkout, str(environment / "bin" / "python"), PYTHONPATH=str(packages), DIFFKERN_BUILD="require"
    )
    assert required.returncode != 0 and "DIFFKERN_BUILD requires the kernels" in required.stderr


def test_with_torch_and_a_compiler_the_wheel_holds_the_kernels(
    checkout: Path, tmp_path: Path, run_python: RunPython
) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    run, wheel = build_wheel(checkout, DIFFKERN_BUILD="cpu,require")
    assert wheel is not None, run.stderr
    assert wheel.name == f"diffkern-0.1.0-py3-none-{HUB_TAG}_{platform.machine()}.whl"
    variant = Variant("cpu", None, platform.machine()).name
    built = checkout / "site" / "diffkern" / "_kernels" / "build" / variant
    assert len(list(built.glob("*.abi3.so"))) == 1

    used = run_python(PRINT_REASON, checkout / "site")
    assert used.stdout.splitlines() == ["None", "[[1.0, 1.0, 1.0, 1.0]]"], used.stderr
    code = "from diffkern.build import build_kernels; print(build_kernels('cpu')[0].fresh)"
    again = run_python(code, checkout / "site")
    assert again.stdout.strip() == "False", again.stderr  # the sources in the wheel are those it was built from


def test_switched_off_gives_a_pure_wheel_that_says_why(checkout: Path, tmp_path: Path, run_python: RunPython) -> None:
    run, wheel = build_wheel(checkout, DIFFKERN_BUILD="0")
    assert wheel is not None, run.stderr
    assert wheel.name == "diffkern-0.1.0-py3-none-any.whl"
    used = run_python(PRINT_REASON, checkout / "site", XDG_CACHE_HOME=str(tmp_path))
    assert "DIFFKERN_BUILD=0 switched it off" in used.stdout.splitlines()[0], used.stderr


def test_a_failed_build_installs_and_keeps_its_reason_unless_required(
    checkout: Path, tmp_path: Path, run_python: RunPython
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = -dumpfullversion ] && echo 12.2 && exit\necho broken beyond repair\nexit 1\n'
    )
    compiler.chmod(0o755)
    run, wheel = build_wheel(checkout, DIFFKERN_BUILD="cpu", CXX=str(compiler))
    assert wheel is not None, run.stderr
    assert wheel.name == "diffkern-0.1.0-py3-none-any.whl"
    used = run_python(PRINT_REASON, checkout / "site", XDG_CACHE_HOME=str(tmp_path))
    assert "broken beyond repair" in used.stdout, used.stderr
    assert used.stdout.splitlines()[-1] == "[[1.0, 1.0, 1.0, 1.0]]"

    required, _ = build_wheel(checkout, DIFFKERN_BUILD="cpu,require", CXX=str(compiler))
    assert required.returncode != 0 and "broken beyond repair" in required.stderr


def test_reasons_of_an_earlier_installation_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    record(tmp_path, {"cuda": "nvcc broke down", "rocm": "hipcc too"})
    build_for_installation(tmp_path, {"DIFFKERN_BUILD": "cpu"}, say=lambda line: None)
    log = json.loads((tmp_path / "build_log.json").read_text(encoding="utf-8"))
    assert set(log) == {"cpu"} and "no-such-compiler" in log["cpu"]


@pytest.mark.parametrize(
    ("environment", "available", "has_gpu", "backends", "required"),
    [
        ({}, ("cpu",), False, ("cpu",), False),
        ({}, ("cpu", "cuda"), False, ("cpu",), False),
        ({}, ("cpu", "cuda"), True, ("cpu", "cuda"), False),
        ({"DIFFKERN_BUILD": "require"}, ("cpu", "rocm"), True, ("cpu", "rocm"), True),
        ({"DIFFKERN_BUILD": "cuda"}, ("cpu", "cuda"), False, ("cuda",), False),
        ({"DIFFKERN_BUILD": "cuda,cpu,require"}, ("cpu",), False, ("cpu", "cuda"), True),
        ({"DIFFKERN_CUDA_ARCH": "9.0"}, ("cpu", "cuda"), False, ("cpu", "cuda"), False),
        ({"DIFFKERN_BUILD": "0"}, ("cpu", "cuda"), True, (), False),
    ],
)
def test_wishes_and_machine_decide_what_is_built(
    environment: dict[str, str],
    available: tuple[str, ...],
    has_gpu: bool,
    backends: tuple[str, ...],
    required: bool,
) -> None:
    plan = plan_installation(environment, available, has_gpu)
    assert (plan.backends, plan.required) == (backends, required)
    if environment.get("DIFFKERN_BUILD") != "0" and "DIFFKERN_BUILD" not in environment:
        assert set(plan.left_out) == set(available) - set(backends)


def test_architectures_are_read_per_backend() -> None:
    plan = plan_installation({"DIFFKERN_CUDA_ARCH": "sm_90;10.0 12.0"}, ("cpu", "cuda"), False)
    assert plan.archs == {"cuda": ("sm_90", "10.0", "12.0")}


@pytest.mark.parametrize("value", ["metal", "0,require", "cuda,0"])
def test_wishes_that_mean_nothing_are_refused(value: str) -> None:
    with pytest.raises(ValueError, match="DIFFKERN_BUILD"):
        plan_installation({"DIFFKERN_BUILD": value}, ("cpu",), False)
