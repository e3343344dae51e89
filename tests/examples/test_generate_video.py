"""The LTX example as a user runs it: a video on disk, numbers in a JSON file, refusals with advice."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import imageio.v3 as imageio
import pytest
import torch
import typer
from click.testing import Result
from typer.testing import CliRunner

from diffkern.bench.arms import ARMS, COMPILED, INJECTED, INJECTED_COMPILED, STOCK

FOLDER = Path(__file__).parents[2] / "examples" / "ltx_video"
SMALL = ["--random-weights", "tiny", "--num-frames", "9", "--height", "64", "--width", "96", "--steps", "2"]
STOCK_ONCE = [*SMALL, "--no-optimized-kernels", "--warmup-iterations", "0"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script as a module, in an empty folder, without the Hub."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return importlib.import_module("generate_video")


def invoke(script: ModuleType, *options: str) -> Result:
    """Runs the script's command in this process."""
    app = typer.Typer()
    app.command()(script.main)
    return CliRunner().invoke(app, options, env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_an_injected_run_writes_the_video_and_measures_itself_against_the_stock_run(tmp_path: Path) -> None:
    files = ["--output", "clips/out.mp4", "--json", "result.json"]
    command = [sys.executable, str(FOLDER / "generate_video.py"), *SMALL, *files, "--dtype", "float32"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert imageio.imread(tmp_path / "clips" / "out.mp4", plugin="FFMPEG").shape == (9, 64, 96, 3)

    assert ("speed-ups mean nothing" in run.stdout) == (not torch.cuda.is_available())

    result = json.loads((tmp_path / "result.json").read_text())
    stock, injected = result["arms"]
    assert (stock["name"], injected["name"]) == ("stock", "injected")
    assert stock["speedup"] == 1.0
    assert stock["difference_from_stock"] is None
    assert injected["difference_from_stock"]["latents"] < 1e-4
    assert injected["calls"]["fused"] > 0
    assert len(result["report"]["patched"]) > 0
    assert result["config"]["num_frames"] == 9
    assert result["environment"]["versions"]["torch"] == torch.__version__


def test_without_kernels_only_the_stock_pipeline_runs_and_the_seed_decides_the_video(
    script: ModuleType, tmp_path: Path
) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        files = ["--output", f"{name}.mp4", "--json", f"{name}.json"]
        run = invoke(script, *STOCK_ONCE, *files, "--seed", seed)
        assert run.exit_code == 0, run.output
    result = json.loads((tmp_path / "a.json").read_text())
    assert [arm["name"] for arm in result["arms"]] == ["stock"]
    assert result["report"] is None
    a, b, c = ((tmp_path / f"{name}.mp4").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_a_batch_writes_one_video_per_prompt(script: ModuleType, tmp_path: Path) -> None:
    run = invoke(script, *STOCK_ONCE, "--batch-size", "2", "--output", "out.mp4")
    assert run.exit_code == 0, run.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out_0.mp4", "out_1.mp4"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-frames", "20"], "use 17 or 25"),
        (["--num-frames", "1", "--height", "100"], "use 96 or 128"),
        (["--width", "33"], "use 32 or 64"),
        (["--steps", "0"], "--steps"),
        (["--random-weights", "huge"], "'tiny'"),
        (["--model", "/nonexistent"], "there is no such folder"),
        ([*SMALL, "--output", "x.txt"], "use x.mp4"),
        ([*SMALL, "--output", "."], "is a folder"),
        ([*SMALL, "--json", "."], "is a folder"),
    ],
)
def test_what_ltx_cannot_generate_is_refused_with_the_nearest_that_it_can(
    script: ModuleType, tmp_path: Path, options: list[str], message: str
) -> None:
    run = invoke(script, *options)
    assert run.exit_code == 2
    assert message in plain(run.output)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("option", "name"), [("--output", "clip.mp4"), ("--json", "result.json")])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_generated(
    script: ModuleType, tmp_path: Path, option: str, name: str
) -> None:
    (tmp_path / "occupied").write_text("")
    run = invoke(script, *SMALL, option, f"occupied/{name}")
    assert run.exit_code == 2
    assert f"{option} occupied/{name} cannot be written" in plain(run.output)
    assert "warm-up" not in run.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, so offloading is possible")
def test_offloading_without_a_gpu_is_refused_with_what_to_do(script: ModuleType) -> None:
    run = invoke(script, *SMALL, "--offload", "group")
    assert run.exit_code == 2
    assert "use --offload none" in plain(run.output)


@pytest.mark.gpu
@pytest.mark.parametrize("offload", ["model", "sequential", "group"])
def test_the_kernels_run_under_every_kind_of_offloading(script: ModuleType, tmp_path: Path, offload: str) -> None:
    run = invoke(script, *SMALL, "--dtype", "float32", "--offload", offload, "--json", "result.json")
    assert run.exit_code == 0, run.output
    injected = json.loads((tmp_path / "result.json").read_text())["arms"][1]
    assert injected["calls"]["fused"] > 0
    assert injected["difference_from_stock"]["latents"] < 1e-3


def test_a_download_is_said_before_it_starts_and_a_missing_model_says_what_to_give_instead(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    run = invoke(script, "--model", "nobody/nothing")
    assert run.exit_code == 2
    output = plain(run.output)
    assert "downloaded now" in output
    assert "use --random-weights" in output
    assert output.index("downloaded now") < output.index("could not load")


def test_a_comparison_runs_every_arm_once_and_the_stock_one_first(script: ModuleType) -> None:
    cpu, none = torch.device("cpu"), script.Offload.NONE
    compare = {"compare": True, "baseline": True, "compiled": False, "device": cpu}
    chosen, left_out = script.choose_arms(**compare, injected=True, offload=none)
    assert chosen == [arm for arm in ARMS if arm.name not in left_out]
    chosen, left_out = script.choose_arms(**compare, injected=False, offload=none)
    assert [arm.injected for arm in chosen] == [False] * len(chosen)
    chosen, left_out = script.choose_arms(**compare, injected=True, offload=script.Offload.SEQUENTIAL)
    assert chosen == [STOCK, INJECTED]
    assert set(left_out) == {COMPILED.name, INJECTED_COMPILED.name}


def test_a_single_arm_brings_its_baseline_unless_told_not_to(script: ModuleType) -> None:
    one = {"compare": False, "compiled": False, "offload": script.Offload.NONE, "device": torch.device("cpu")}
    assert script.choose_arms(**one, baseline=True, injected=True)[0] == [STOCK, INJECTED]
    assert script.choose_arms(**one, baseline=False, injected=True)[0] == [INJECTED]
    assert script.choose_arms(**one, baseline=True, injected=False)[0] == [STOCK]


def plain(text: str) -> str:
    """The text without rich's frames and line breaks."""
    return re.sub(r"[\s│]+", " ", text)
