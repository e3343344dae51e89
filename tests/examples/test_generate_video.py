"""The LTX example as a user runs it: a process of its own, a video on disk, numbers in a JSON file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import imageio
import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "ltx_video" / "generate_video.py"


def generate(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs the script offline in ``folder`` with random weights of the tiny size."""
    command = [sys.executable, str(SCRIPT), "--random-weights", "tiny", *options]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_an_injected_run_writes_the_video_and_measures_itself_against_the_stock_run(tmp_path: Path) -> None:
    size = ["--num-frames", "9", "--height", "64", "--width", "96", "--steps", "2", "--dtype", "float32"]
    files = ["--output", "clips/out.mp4", "--json", "result.json"]
    run = generate(tmp_path, *size, *files, "--warmup-iterations", "1")
    assert run.returncode == 0, run.stderr
    with imageio.get_reader(tmp_path / "clips" / "out.mp4") as reader:
        frames = list(reader)
    assert len(frames) == 9
    assert frames[0].shape == (64, 96, 3)

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


def test_without_kernels_the_script_runs_the_stock_arm_alone_and_its_seed_decides_the_video(
    tmp_path: Path,
) -> None:
    options = [
        "--no-optimized-kernels",
        "--num-frames",
        "9",
        "--height",
        "64",
        "--width",
        "64",
        "--steps",
        "1",
    ]
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        run = generate(
            tmp_path, *options, "--seed", seed, "--output", f"{name}.mp4", "--json", f"{name}.json"
        )
        assert run.returncode == 0, run.stderr
    result = json.loads((tmp_path / "a.json").read_text())
    assert [arm["name"] for arm in result["arms"]] == ["stock"]
    assert result["report"] is None
    a, b, c = ((tmp_path / f"{name}.mp4").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_a_batch_writes_one_video_per_prompt(tmp_path: Path) -> None:
    options = [
        "--no-optimized-kernels",
        "--num-frames",
        "9",
        "--height",
        "64",
        "--width",
        "64",
        "--steps",
        "1",
    ]
    run = generate(tmp_path, *options, "--batch-size", "2", "--output", "out.mp4")
    assert run.returncode == 0, run.stderr
    assert sorted(path.name for path in tmp_path.glob("*.mp4")) == ["out_0.mp4", "out_1.mp4"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-frames", "20"], "use 17 or 25"),
        (["--num-frames", "1", "--height", "100"], "use 96 or 128"),
        (["--width", "33"], "use 32 or 64"),
        (["--steps", "0"], "x>=1"),
        (["--random-weights", "huge"], "tiny"),
    ],
)
def test_sizes_that_ltx_cannot_generate_are_refused_with_the_nearest_that_it_can(
    tmp_path: Path, options: list[str], message: str
) -> None:
    run = generate(tmp_path, *options)
    assert run.returncode == 2
    assert message in _plain(run.stderr)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, so offloading is possible")
def test_offloading_without_a_gpu_is_refused_with_what_to_do(tmp_path: Path) -> None:
    run = generate(tmp_path, "--offload", "group")
    assert run.returncode == 2
    assert "use --offload none" in _plain(run.stderr)


def test_a_model_that_is_not_there_says_what_to_give_instead(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--model", "nobody/nothing"]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
        "COLUMNS": "200",
        "NO_COLOR": "1",
    }
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "downloaded now" in _plain(run.stdout)
    assert "use --random-weights" in _plain(run.stderr)


def _plain(text: str) -> str:
    """The text without rich's frames and line breaks."""
    return re.sub(r"[\s│]+", " ", text)
