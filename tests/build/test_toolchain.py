"""A compiler that is missing, broken or of the wrong version gives one sentence with a remedy."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from diffkern.build import BuildError, ToolchainError, available_backends, build_kernels, failure_reason
from diffkern.build.archs import cuda_archs, rocm_archs
from diffkern.build.toolchain import Tool, check_toolkit, find_cxx, find_hipcc, find_nvcc

HOME_VARIABLES = ("CXX", "CUDA_HOME", "CUDA_PATH", "ROCM_HOME", "ROCM_PATH", "HIP_PATH")

FakeTool = Callable[[str, str], Path]


@pytest.fixture(autouse=True)
def no_homes(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in HOME_VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def test_a_missing_cpp_compiler_is_named_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match=r"no C\+\+ compiler was found: install g\+\+"):
        find_cxx()
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(ToolchainError, match="CXX names 'no-such-compiler'"):
        find_cxx()


@pytest.mark.parametrize(("find", "variable"), [(find_nvcc, "CUDA_HOME"), (find_hipcc, "ROCM_HOME")])
def test_a_toolkit_variable_is_binding(
    find: Callable[[], Tool], variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, str(tmp_path))
    with pytest.raises(ToolchainError, match=f"correct or unset {variable}"):
        find()


def test_nvcc_of_another_cuda_than_torchs_is_refused_naming_both(
    fake_tool: FakeTool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fake_tool("nvcc", "echo 'Cuda compilation tools, release 11.8, V11.8.89'")
    monkeypatch.setenv("CUDA_HOME", str(path.parents[1]))
    nvcc = find_nvcc()
    assert nvcc.version == (11, 8)
    with pytest.raises(ToolchainError) as caught:
        check_toolkit(nvcc, "2.11.0+cu124", "12.4")
    message = str(caught.value)
    assert "CUDA 11.8" in message and "torch 2.11.0+cu124 was built for CUDA 12.4" in message
    assert "CUDA_HOME" in message and "\n" not in message
    check_toolkit(nvcc, "2.11.0+cpu", None)  # a torch without CUDA builds for another machine
    check_toolkit(nvcc, "2.4.0+cu113", "11.3")  # any minor version of the same major one


def test_the_mismatch_stops_the_build_and_is_kept_for_later(
    fake_tool: FakeTool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fake_tool("nvcc", "echo 'Cuda compilation tools, release 11.8, V11.8.89'")
    monkeypatch.setenv("CUDA_HOME", str(path.parents[1]))
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    output = tmp_path / "kernels"
    with pytest.raises(ToolchainError, match=r"CUDA 11\.8"):
        build_kernels("cuda", output=output)
    monkeypatch.setenv("DIFFKERN_KERNELS", str(output))
    assert "CUDA 11.8" in str(failure_reason("cuda"))


def test_a_compiler_that_cannot_tell_its_version_is_called_broken(
    fake_tool: FakeTool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(fake_tool("nvcc", "echo nonsense").parents[1]))
    with pytest.raises(ToolchainError, match="does not tell a version"):
        find_nvcc()


def test_a_failing_compiler_fails_the_build_with_its_own_words(
    fake_tool: FakeTool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = 'case "$1" in -dumpfullversion) echo 12.2.0;; *) echo "internal compiler error: 42"; exit 3;; esac'
    monkeypatch.setenv("CXX", str(fake_tool("g++", script)))
    output = tmp_path / "kernels"
    with pytest.raises(BuildError, match=r"exit status 3(.|\n)*internal compiler error: 42"):
        build_kernels("cpu", output=output)
    assert not any((output / "build").iterdir())  # nothing half done is left behind
    monkeypatch.setenv("DIFFKERN_KERNELS", str(output))
    reason = failure_reason("cpu")
    assert reason is not None and "internal compiler error: 42" in reason


def test_without_compilers_the_automatic_build_reports_and_does_not_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert available_backends() == ("cpu",)
    (result,) = build_kernels(output=tmp_path / "kernels")
    assert result.backend == "cpu" and result.directory is None
    assert result.reason is not None and "no C++ compiler was found" in result.reason


def test_an_unknown_backend_is_a_value_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown backend 'metal'"):
        build_kernels("metal", output=tmp_path)


def fake_nvcc(fake_tool: FakeTool, *codes: str) -> Tool:
    path = fake_tool("nvcc", "printf '" + "\\n".join(codes) + "\\n'")
    return Tool("nvcc", (str(path),), (12, 4))


def test_architectures_unknown_to_nvcc_are_left_out_with_a_reason(fake_tool: FakeTool) -> None:
    archs = cuda_archs(fake_nvcc(fake_tool, "sm_75", "sm_80", "sm_86", "sm_89", "sm_90"), None)
    assert archs.names == ("7.5", "8.0", "8.6", "8.9", "9.0+PTX")
    assert archs.flags[-1] == "-gencode=arch=compute_90,code=compute_90"
    assert archs.notes == tuple(f"sm_{arch} is left out: nvcc 12.4 does not know it" for arch in ("100", "120"))


@pytest.mark.parametrize("name", ["sm_90", "90", "9.0", "compute_90", "9.0+PTX"])
def test_one_architecture_has_many_spellings(fake_tool: FakeTool, name: str) -> None:
    assert cuda_archs(fake_nvcc(fake_tool, "sm_80", "sm_90"), [name]).names == ("9.0+PTX",)


@pytest.mark.parametrize("name", ["hopper", "sm_9", "9", "gfx942", ""])
def test_what_is_no_cuda_architecture_is_refused(fake_tool: FakeTool, name: str) -> None:
    with pytest.raises(ToolchainError, match="is no CUDA architecture"):
        cuda_archs(fake_nvcc(fake_tool, "sm_90"), [name])


def test_a_target_of_rocm_is_sent_there(fake_tool: FakeTool) -> None:
    with pytest.raises(ToolchainError, match=r"or build for ROCm alone \(--rocm\)$"):
        cuda_archs(fake_nvcc(fake_tool, "sm_90"), ["gfx942"])


def test_no_architecture_left_is_an_error(fake_tool: FakeTool) -> None:
    with pytest.raises(ToolchainError, match=r"nvcc 12\.4 knows none of sm_75, .*sm_120: install a newer toolkit"):
        cuda_archs(fake_nvcc(fake_tool, "sm_50"), None)


def test_a_named_architecture_is_built_or_refused_but_never_left_out(fake_tool: FakeTool) -> None:
    with pytest.raises(ToolchainError, match=r"nvcc 12\.4 does not know sm_120: name others"):
        cuda_archs(fake_nvcc(fake_tool, "sm_75"), ["sm_75", "sm_120"])


@pytest.mark.parametrize(
    ("arch", "message"),
    [("sm_120", r"nvcc 12\.4 does not know sm_120"), ("hopper", "'hopper' is no CUDA architecture")],
)
def test_a_named_architecture_that_is_unknown_stops_the_automatic_build(
    arch: str, message: str, fake_tool: FakeTool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = 'case "$1" in -dumpfullversion) echo 12.2.0;; *) exit 3;; esac'
    monkeypatch.setenv("CXX", str(fake_tool("g++", broken)))  # the CPU's build fails at once, and is only reported
    script = 'case "$1" in --version) echo "release 12.4, V12.4.99";; *) echo sm_90;; esac'
    monkeypatch.setenv("CUDA_HOME", str(fake_tool("nvcc", script).parents[1]))
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(ToolchainError, match=message):
        build_kernels("auto", [arch], tmp_path / "kernels")


@pytest.mark.parametrize(
    ("backends", "hint"), [("cpu", "--cpu builds for none"), ("auto", "no GPU compiler was found")]
)
def test_architectures_for_a_build_without_a_gpu_backend_are_a_value_error(
    backends: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))  # where there is no nvcc
    with pytest.raises(ValueError, match=f"--arch names GPU architectures, and {hint}"):
        build_kernels(backends, ["sm_90", "sm_100"], tmp_path / "kernels")
    assert not (tmp_path / "kernels").exists()


@pytest.mark.parametrize("backends", ["cpu", "auto"])
def test_an_output_that_cannot_be_written_to_is_named_with_the_reason(backends: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for output, reason in ((file, "File exists"), (file / "below", "Not a directory")):
        with pytest.raises(BuildError, match=reason) as caught:
            build_kernels(backends, output=output)
        assert str(output) in str(caught.value) and "choose another output" in str(caught.value)
    if os.geteuid() != 0:  # whom permissions do not stop
        locked = tmp_path / "locked"
        locked.mkdir(mode=0o500)
        with pytest.raises(BuildError, match="Permission denied"):
            build_kernels(backends, output=locked)


def test_rocm_targets_are_asked_of_hipcc(fake_tool: FakeTool) -> None:
    path = fake_tool("hipcc", 'case "$*" in *gfx90a*|*gfx942*) exit 0;; *) exit 1;; esac')
    hipcc = Tool("hipcc", (str(path),), (6, 2))
    archs = rocm_archs(hipcc, None)
    assert archs.names == ("gfx90a", "gfx942")
    assert archs.notes[0] == "gfx950 is left out: hipcc 6.2 does not know it"
    with pytest.raises(ToolchainError, match="'sm_90' is no ROCm target"):
        rocm_archs(hipcc, ["sm_90"])
