"""A build that does not fit this machine is refused in words that name both sides, before it is opened."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import pytest
import torch

from diffkern.build import Variant
from diffkern.build.archs import cuda_covers
from diffkern.build.installed import Build, read_build
from diffkern.ops import rms_norm
from diffkern.providers import NoProviderError
from diffkern.providers.compiled import PROVIDER, refusal

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


def write_broken_build(root: Path, variant: Variant, archs: tuple[str, ...] = ()) -> Build:
    """A build whose library is no library: opening it would fail with other words than a refusal's."""
    directory = root / "build" / variant.name
    directory.mkdir(parents=True)
    backend = {"type": variant.backend} | ({"archs": list(archs)} if archs else {})
    metadata = {
        "name": "diffkern",
        "id": f"_diffkern_{variant.backend}_0badc0de",
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": backend,
    }
    (directory / "metadata.json").write_text(json.dumps(metadata), encoding="utf-8")
    (directory / "__init__.py").write_text("raise ImportError('it was opened')\n", encoding="utf-8")
    build = read_build(directory)
    assert build is not None
    return build


def test_nothing_built_says_so_and_names_the_remedy(searched: Path) -> None:
    assert PROVIDER.unavailable_reason(CPU) == "not built for cpu: run `diffkern build --cpu`"
    with pytest.raises(NoProviderError, match="compiled: not built for cpu"):
        rms_norm(torch.ones(2, 8), provider="compiled")
    assert torch.equal(rms_norm(torch.ones(2, 8), eps=0.0), torch.ones(2, 8))


def test_the_reason_of_a_failed_build_is_passed_on(searched: Path) -> None:
    (searched / "build_log.json").write_text('{"cpu": "g++ broke down"}', encoding="utf-8")
    reason = PROVIDER.unavailable_reason(CPU)
    assert reason is not None and "diffkern build --cpu" in reason and "g++ broke down" in reason


def test_a_directory_that_is_not_there_is_named(searched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFKERN_KERNELS", str(searched / "nowhere"))
    assert PROVIDER.unavailable_reason(CPU) == f"DIFFKERN_KERNELS is {searched / 'nowhere'}, which is no directory"


def test_torch_versions_are_compared_before_the_library_is_opened(searched: Path) -> None:
    write_broken_build(searched, Variant("cpu", None, platform.machine(), abi=(9, 9)))
    reason = PROVIDER.unavailable_reason(CPU)
    assert reason is not None
    assert f"built for torch 9.9 or newer, and this is torch {torch.__version__}" in reason
    assert "it was opened" not in reason


def test_processors_are_compared_before_the_library_is_opened(searched: Path) -> None:
    write_broken_build(searched, Variant("cpu", None, "riscv64"))
    reason = PROVIDER.unavailable_reason(CPU)
    assert reason is not None
    assert f"built for riscv64 processors, and this is {platform.machine()}" in reason


def test_a_library_that_cannot_be_loaded_is_a_reason_and_no_crash(searched: Path) -> None:
    write_broken_build(searched, Variant("cpu", None, platform.machine()))
    reason = PROVIDER.unavailable_reason(CPU)
    assert reason is not None
    assert "ImportError: it was opened" in reason and "run `diffkern build --cpu --force`" in reason


@pytest.mark.parametrize("has", ["12.8", None])
def test_cuda_versions_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has: str | None) -> None:
    build = write_broken_build(tmp_path, Variant("cuda", (13, 0), platform.machine()), ("9.0+PTX",))
    monkeypatch.setattr(torch.version, "cuda", has)
    reason = refusal(build, GPU)
    other = f"uses CUDA {has}" if has else "has no CUDA"
    assert reason == f"built for CUDA 13.0, and torch {torch.__version__} {other}"


@pytest.mark.parametrize(
    ("archs", "capability", "fits"),
    [
        (("7.5", "8.0", "9.0+PTX"), (9, 0), True),
        (("7.5", "8.0", "9.0+PTX"), (8, 9), True),  # 8.0 code runs on all of 8.x
        (("7.5", "8.0", "9.0+PTX"), (12, 0), True),  # by its PTX
        (("7.5", "8.0", "9.0+PTX"), (7, 0), False),
        (("8.6", "9.0+PTX"), (8, 0), False),
        (("9.0",), (10, 0), False),
    ],
)
def test_gpu_architectures_are_compared(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    archs: tuple[str, ...],
    capability: tuple[int, int],
    fits: bool,
) -> None:
    assert cuda_covers(archs, capability) is fits
    build = write_broken_build(tmp_path, Variant("cuda", (13, 0), platform.machine()), archs)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Test GPU")
    arch = f"sm_{capability[0]}{capability[1]}"
    sentence = f"built for {', '.join(archs)}, and Test GPU is {arch}: run `diffkern build --cuda --arch {arch}`"
    assert refusal(build, GPU) == (None if fits else sentence)


def test_devices_without_compiled_kernels_are_told_so() -> None:
    assert PROVIDER.unavailable_reason(torch.device("mps")) == "there are no compiled kernels for mps"
    if not torch.cuda.is_available():
        assert PROVIDER.unavailable_reason(GPU) == f"torch {torch.__version__} sees no GPU"


def test_a_build_of_other_sources_is_refused_by_its_arguments(searched: Path, cpu_build: Build) -> None:
    variant = Variant("cpu", None, platform.machine())
    build = write_broken_build(searched, variant)
    namespace = build.namespace
    library = torch.library.Library(namespace, "DEF")
    for op in PROVIDER.support:
        library.define(f"{op}(Tensor x) -> Tensor")
    (build.directory / "__init__.py").write_text("", encoding="utf-8")
    reason = PROVIDER.unavailable_reason(CPU)
    assert reason is not None and "takes other arguments" in reason and os.linesep not in reason
