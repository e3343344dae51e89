"""A build has the layout of a Hub kernel, and works from there through diffkern and through ``kernels``."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diffkern.build import Build, Variant, build_kernels
from tests.build.conftest import REPOSITORY, RunPython
from tests.package.test_cli import invoke

CHECK_VALUES = """
import torch
def check(rms_norm, layer_norm):
    torch.manual_seed(0)
    for dtype, bound in ((torch.float32, 1e-6), (torch.float16, 2**-10), (torch.bfloat16, 2**-7)):
        for size in (1, 46, 128, 5120):
            x, w, b = torch.randn(7, size).to(dtype), torch.randn(size).to(dtype), torch.randn(size)
            wide = x.double()
            rms = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w.double() + b.double()
            centred = wide - wide.mean(-1, keepdim=True)
            deviation = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            layer = centred / deviation * w.double() + b.double()
            for got, want in ((rms_norm(x, w, b, 1e-6), rms), (layer_norm(x, w, b, 1e-5), layer)):
                error = ((got.double() - want).abs() / (want.abs() + 1)).max().item()
                assert got.dtype == dtype and error <= bound, (dtype, size, error)
"""


def test_metadata_has_the_keys_the_hub_wants(cpu_build: Build) -> None:
    metadata = json.loads((cpu_build.directory / "metadata.json").read_text(encoding="utf-8"))
    assert set(metadata) == {"name", "id", "version", "license", "python-depends", "backend", "library"}
    assert metadata["backend"] == {"type": "cpu"}
    assert re.fullmatch(r"_diffkern_cpu_[0-9a-f]{8}", metadata["id"])
    names = {path.name for path in cpu_build.directory.iterdir() if path.name != "__pycache__"}
    library = f"{metadata['id']}.abi3.so"
    content = (cpu_build.directory / library).read_bytes()
    assert metadata["library"] == {
        "file": library,
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "torch": torch.__version__,
    }
    assert {"__init__.py", "_ops.py", "metadata.json", library} <= names
    assert all(name.endswith(".py") for name in names - {"metadata.json", library})


def test_library_depends_on_torch_but_on_no_python(cpu_build: Build) -> None:
    library = cpu_build.directory / f"{cpu_build.namespace}.abi3.so"
    run = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True)
    needed = set(re.findall(r"NEEDED.*\[(.*?)\]", run.stdout))
    assert {"libtorch.so", "libtorch_cpu.so"} <= needed
    assert not any("python" in name for name in needed)
    assert "RPATH" not in run.stdout and "RUNPATH" not in run.stdout


def test_library_holds_no_path_of_the_machine_it_was_built_on(cpu_build: Build) -> None:
    content = (cpu_build.directory / f"{cpu_build.namespace}.abi3.so").read_bytes()
    assert str(Path(torch.__file__).parent).encode() not in content
    assert str(Path(__file__).parents[2]).encode() not in content


def test_provider_loads_the_build_that_the_environment_names(kernels_root: Path, run_python: RunPython) -> None:
    code = f"""{CHECK_VALUES}
from functools import partial
from diffkern.ops import layer_norm, rms_norm
check(partial(rms_norm, provider="compiled"), partial(layer_norm, provider="compiled"))
from diffkern.providers import get_provider
print(get_provider("compiled").build(torch.device("cpu")).directory)
"""
    run = run_python(code, DIFFKERN_KERNELS=str(kernels_root))
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip().startswith(str(kernels_root))


def test_get_local_kernel_loads_the_same_build(kernels_root: Path, run_python: RunPython) -> None:
    pytest.importorskip("kernels", reason="the kernels package is not installed")
    code = f"""{CHECK_VALUES}
import pathlib, kernels
module = kernels.get_local_kernel(pathlib.Path({str(kernels_root)!r}), backend="cpu")
check(module.rms_norm, module.layer_norm)
compiled = torch.compile(lambda x: module.rms_norm(x) + module.layer_norm(x), fullgraph=True, backend="eager")
x = torch.randn(3, 64)
torch.testing.assert_close(compiled(x), module.rms_norm(x) + module.layer_norm(x))
torch.library.opcheck(module.ops.rms_norm, (x.t(), None, None, 1e-6, 0.0, None, None, False, True))
torch.library.opcheck(module.ops.layer_norm, (x, None, None, 1e-5, torch.float16, False))
"""
    run = run_python(code)
    assert run.returncode == 0, run.stderr


def test_two_copies_of_one_build_live_in_one_process(kernels_root: Path, tmp_path: Path, run_python: RunPython) -> None:
    pytest.importorskip("kernels", reason="the kernels package is not installed")
    copy = tmp_path / "copy"
    shutil.copytree(kernels_root, copy)
    code = f"""{CHECK_VALUES}
import pathlib, kernels
from functools import partial
from diffkern.ops import layer_norm, rms_norm
check(partial(rms_norm, provider="compiled"), partial(layer_norm, provider="compiled"))
module = kernels.get_local_kernel(pathlib.Path({str(copy)!r}), backend="cpu")
check(module.rms_norm, module.layer_norm)
"""
    run = run_python(code, DIFFKERN_KERNELS=str(kernels_root))
    assert run.returncode == 0, run.stderr


def test_the_command_says_what_is_there_already(kernels_root: Path) -> None:
    said = invoke("build", "--cpu", "--output", str(kernels_root))
    assert said.exit_code == 0 and said.output.startswith("cpu: already there: ")
    (built,) = json.loads(invoke("build", "--cpu", "--output", str(kernels_root), "--json").output)
    assert built["backend"] == "cpu" and not built["fresh"] and Path(built["directory"]).is_dir()
    assert invoke("build", "--cpu", "--output", str(kernels_root), "--quiet").output == ""


def test_same_sources_are_not_compiled_twice(kernels_root: Path) -> None:
    (first,) = build_kernels("cpu", output=kernels_root)
    (second,) = build_kernels("cpu", output=kernels_root)
    assert not second.fresh and second.directory == first.directory


@pytest.mark.slow
def test_simultaneous_builds_compile_once_and_both_succeed(tmp_path: Path) -> None:
    code = f"""
from diffkern.build import build_kernels
print(build_kernels('cpu', output={str(tmp_path)!r})[0].fresh)
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    answers = sorted(process.communicate(timeout=300)[0].strip() for process in processes)
    assert answers == ["False", "True"]
    assert [path.name for path in (tmp_path / "build").iterdir()] == [Variant("cpu", None, platform.machine()).name]


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        (Variant("cpu", None, "x86_64"), "torch-stable-abi211-cpu-x86_64-linux"),
        (Variant("cuda", (13, 0), "x86_64"), "torch-stable-abi211-cu130-x86_64-linux"),
        (Variant("cuda", (12, 8), "aarch64", abi=(2, 9)), "torch-stable-abi29-cu128-aarch64-linux"),
        (Variant("rocm", (7, 1), "x86_64"), "torch-stable-abi211-rocm71-x86_64-linux"),
    ],
)
def test_variant_names_can_be_read_back(variant: Variant, name: str) -> None:
    assert variant.name == name
    assert Variant.parse(name) == variant


@pytest.mark.parametrize("name", ["torch213-cxx11-cu130-x86_64-linux", "torch-cuda", "torch-stable-abi211", ""])
def test_other_kinds_of_hub_builds_are_not_taken_for_ours(name: str) -> None:
    assert Variant.parse(name) is None
