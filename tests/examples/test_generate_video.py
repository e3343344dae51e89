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

from diffkern.bench.arms import ARMS, COMPILED, EXACT, FAST, FAST_COMPILED, FAST_GRAPH, FP8, FP8_GRAPH, STOCK, Arm

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
    assert (stock["name"], injected["name"]) == ("stock", "fast")
    assert stock["speedup"] is None and injected["speedup"] is None, "one run each is too few for a ratio"
    assert "float32, 96x64, 9 frames, 2 steps, batch 1. Runs stock, fast, one after the other" in " ".join(
        run.stdout.split()
    )
    assert "out.mp4: the video of the arm fast" in run.stdout
    assert "deprecated" not in run.stderr
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
        ([*SMALL, "--chart", "x.jpg"], "use x.png"),
        (["--tiny", "--model", "somebody/else"], "choose one"),
        ([*SMALL, "--model", "somebody/else"], "choose one"),
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


def test_fewer_steps_than_the_schedule_of_the_model_has_room_for_are_refused(script: ModuleType) -> None:
    run = invoke(script, "--tiny", "--steps", "1")
    assert run.exit_code == 2
    assert "--steps 1 is too few" in plain(run.output)
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
    assert "use --tiny" in output
    assert output.index("downloaded now") < output.index("could not load")


def test_the_time_to_go_counts_the_compiler(script: ModuleType) -> None:
    assert script.time_to_go(10.0, [EXACT, FAST]) == "The first arm took 10 s; about 20 s to go."
    said = script.time_to_go(10.0, [Arm(compiled=True), FAST, Arm("fast", compiled=True)])
    assert said == "The first arm took 10 s; about 70 s to go, 40 of them for the compiler in 2 of the arms."


@pytest.mark.exhaustive
def test_a_comparison_runs_every_arm_that_can_and_says_why_not_of_the_others(
    script: ModuleType, tmp_path: Path
) -> None:
    files = ["--json", "result.json", "--chart", "chart.png", "--profile", "profile"]
    run = invoke(script, *SMALL, "--compare", "--warmup-iterations", "1", "--iterations", "1", *files)
    assert run.exit_code == 0, run.output
    result = json.loads((tmp_path / "result.json").read_text())
    arms = {arm["name"]: arm for arm in result["arms"]}
    assert [*arms] == [arm.name for arm in ARMS if arm.name not in result["left_out"]]
    assert {"stock", "exact", "fast"} <= arms.keys()
    assert arms["exact"]["difference_from_stock"] == {"latents": 0.0, "frames": 0.0, "psnr": None, "ssim": 1.0}
    assert arms["fast"]["difference_from_stock"]["ssim"] > 0.999
    assert all(arm["first_call_seconds"] > 0 and arm["steps_per_second"] > 0 for arm in arms.values())
    for name, reason in result["left_out"].items():
        assert f"Left out: {name}, {reason}" in plain(run.output)
    if not torch.cuda.is_available():
        assert "CUDA graphs need a GPU" in result["left_out"]["fast + graph"]
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == [
        "fast.json.gz",
        "profile.md",
        "stock.json.gz",
    ]
    assert "| GEMM |" in (tmp_path / "profile" / "profile.md").read_text()
    before, after = (result["profile"][name]["launches"] for name in ("stock", "fast"))
    assert "rope" not in before
    assert after["rope"] > 0
    assert after["elementwise"] < before["elementwise"]


def test_the_arms_of_a_comparison_follow_from_what_is_wanted_and_what_is_there(script: ModuleType) -> None:
    none, sequential = script.Offload.NONE, script.Offload.SEQUENTIAL
    compare = {"compare": True, "baseline": True, "ranks": script.Ranks(0, 1, torch.device("cpu"))}
    chosen, left_out = script.choose_arms(FAST, **compare, offload=none)
    assert chosen == [arm for arm in ARMS if arm.name not in left_out]
    chosen, left_out = script.choose_arms(STOCK, **compare, offload=none)
    assert [arm.injected for arm in chosen] == [False] * len(chosen)
    chosen, left_out = script.choose_arms(FAST, **compare, offload=sequential)
    assert chosen == [STOCK, EXACT, FAST]
    assert set(left_out) == {arm.name for arm in (COMPILED, FAST_COMPILED, FAST_GRAPH, FP8, FP8_GRAPH)}
    own = Arm("exact", compiled=True)
    chosen, left_out = script.choose_arms(own, **compare, offload=none)
    assert own in chosen or own.name in left_out


def test_a_single_arm_brings_its_baseline_unless_told_not_to(script: ModuleType) -> None:
    one = {"compare": False, "offload": script.Offload.NONE, "ranks": script.Ranks(0, 1, torch.device("cpu"))}
    assert script.choose_arms(FAST, **one, baseline=True)[0] == [STOCK, FAST]
    assert script.choose_arms(FAST, **one, baseline=False)[0] == [FAST]
    assert script.choose_arms(STOCK, **one, baseline=True)[0] == [STOCK]


def test_attention_of_diffusers_is_left_out_where_its_mask_holds_the_heads_of_all_ranks(script: ModuleType) -> None:
    split = script.Ranks(0, 2, torch.device("cpu"), script.ContextParallel.ULYSSES)
    given = {"offload": script.Offload.NONE, "baseline": True, "ranks": split}
    chosen, left_out = script.choose_arms(FAST, **given, compare=False)
    assert chosen == [FAST] and "the mask of the text" in left_out["stock"]
    assert script.choose_arms(FAST, **given, compare=True)[0] == [FAST]
    with pytest.raises(script.typer.BadParameter, match=r"--context-parallel ulysses: diffusers splits the heads"):
        script.choose_arms(EXACT, **given, compare=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, so graphs can be captured")
def test_an_arm_that_was_asked_for_and_cannot_run_is_refused(script: ModuleType) -> None:
    run = invoke(script, *SMALL, "--cuda-graph")
    assert run.exit_code == 2
    assert "--cuda-graph: CUDA graphs need a GPU" in plain(run.output)
    run = invoke(script, *SMALL, "--numerics", "fp8")
    assert run.exit_code == 2
    assert "--numerics fp8: fp8 needs an NVIDIA GPU" in plain(run.output)
    assert "warm-up" not in run.output
    run = invoke(script, *SMALL, "--tiny")
    assert run.exit_code == 2
    assert "choose one" in plain(run.output)


def plain(text: str) -> str:
    """The text without rich's frames and line breaks."""
    return re.sub(r"[\s│]+", " ", text)
