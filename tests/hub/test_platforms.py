"""The table of platforms: that of the docs is the doctor's; it claims no more than the tests and results show."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from diffkern import platforms
from diffkern.build.archs import CUDA_ARCHS, ROCM_ARCHS
from diffkern.cli import app
from diffkern.doctor import examine
from diffkern.hub.defaults import DEFAULTS
from diffkern.platforms import platform_of
from diffkern.providers import get_provider
from scripts.write_platform_table import markdown
from tests.hub.server import LoopbackHub
from tests.ops.triton_compile import MAIN_TARGETS, OTHER_TARGETS

ROOT = Path(__file__).parents[2]


def test_the_table_of_the_docs_is_the_doctors() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    table = page.split("<!-- platform table: begin (scripts/write_platform_table.py) -->\n")[1]
    assert table.split("<!-- platform table: end -->")[0] == markdown()  # else: python scripts/write_platform_table.py


@pytest.mark.parametrize(
    ("capability", "line"),
    [
        ((12, 0), platforms.NVIDIA),
        ((10, 0), platforms.NVIDIA),
        ((9, 0), platforms.NVIDIA_HOPPER),
        ((8, 9), platforms.NVIDIA),
        ((7, 5), platforms.NVIDIA),
        ((7, 0), platforms.NVIDIA_VOLTA),
        ((7, 2), platforms.NVIDIA_VOLTA),
        ((6, 1), platforms.NVIDIA_OLDER),
    ],
)
def test_nvidia_cards_are_told_apart_by_what_is_known_of_them(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], line: platforms.Platform
) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert platform_of(torch.device("cuda", 0)) is line


def test_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, line in (("mps", platforms.APPLE), ("xpu", platforms.INTEL_XPU), ("hpu", platforms.OTHER)):
        assert platform_of(torch.device(kind)) is line
    for machine, line in (("x86_64", platforms.X86), ("arm64", platforms.ARM), ("riscv64", platforms.OTHER)):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        assert platform_of(torch.device("cpu")) is line
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert platform_of(torch.device("cuda", 0)) is platforms.AMD


def test_what_is_said_to_be_served_is_what_the_providers_say() -> None:
    kinds = {"cuda": platforms.NVIDIA, "mps": platforms.APPLE, "xpu": platforms.INTEL_XPU, "cpu": platforms.X86}
    for kind, line in kinds.items():
        triton = kind in get_provider("triton").support["rms_norm"].device_types and kind != "cpu"
        compiled = kind in get_provider("compiled").support["rms_norm"].device_types
        assert ("Triton" in line.served) == triton and ("compiled" in line.served) == compiled
    assert set(DEFAULTS) == {"cpu", "cuda", "rocm", "metal", "xpu"}  # the lines that name the Hub
    assert all("Hub" in line.served for line in platforms.PLATFORMS if line.served != "plain PyTorch")


def test_what_is_said_to_be_compiled_is_what_the_tests_compile() -> None:
    named = set(re.findall(r"\d+\.\d", platforms.NVIDIA.name + platforms.NVIDIA_HOPPER.name))
    assert named == set(CUDA_ARCHS)
    compilers = (ROOT / "tests/build/test_gpu_compilers.py").read_text()
    norms = (ROOT / "tests/providers/test_triton_compile.py").read_text()
    every = [*MAIN_TARGETS, *OTHER_TARGETS]
    assert '"sm_75", "sm_80"' in compilers and "nvcc for 7.5 and 8.0" in platforms.NVIDIA.evidence
    assert {75, 120} <= {arch for kind, arch, _ in every if kind == "cuda"}
    assert all(f'("cuda", {arch}, 32)' in norms for arch in (70, 100))
    assert '"gfx90a", "gfx1030"' in compilers and "hipcc for gfx90a and gfx1030" in platforms.AMD.evidence
    compiled = {str(arch) for kind, arch, _ in every if kind == "hip"}
    assert compiled == {"gfx942", "gfx950", "gfx1100", "gfx1201"} == set(ROCM_ARCHS) - {"gfx90a"}
    assert "Triton for gfx942, gfx950, gfx1100 and gfx1201" in platforms.AMD.evidence


def test_only_what_ran_on_the_hardware_is_said_to_have() -> None:
    said = [line for line in platforms.PLATFORMS if "run on the hardware" in line.evidence]
    assert said == [platforms.NVIDIA_HOPPER, platforms.X86]
    cards = {
        json.loads(path.read_text())["environment"]["device"] if "environment" in json.loads(path.read_text()) else ""
        for path in (ROOT / "benchmarks").glob("*_h100.json")
    }
    assert any("H100" in str(card) for card in cards)


def test_the_doctor_says_of_every_device_what_is_known(hub: LoopbackHub) -> None:
    checkup = examine()
    assert set(checkup.platforms) == {row.device for row in checkup.rows}
    assert checkup.platforms["cpu"].startswith(platform_of(torch.device("cpu")).name)
    out = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "80", "NO_COLOR": "1"}).output
    assert platform_of(torch.device("cpu")).name in out
    assert hub.requests == []


def test_the_doctor_says_what_the_hub_would_serve(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def row() -> str:
        (found,) = (row for row in examine().rows if (row.device, row.provider) == ("cpu", "hub"))
        return found.reason

    assert "hub='auto'" in row() and "kernels-community/rmsnorm@v1 (rms_norm)" in row()
    monkeypatch.setenv("DIFFKERN_HUB", "0")
    assert row() == "kernels of the Hub are switched off by DIFFKERN_HUB=0"
    monkeypatch.setenv("DIFFKERN_LOCK", "/a/lock")
    assert any("DIFFKERN_LOCK=/a/lock is set" in setting for setting in examine().settings)
