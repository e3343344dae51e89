"""Two ranks of gloo, each with kernels of its own, draw what one process draws."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import pytest

# What a rank imports is imported once, before it is forked.
from diffusers import ContextParallelConfig, LTXPipeline  # noqa: F401

from tests.ranks import NEEDS_RANKS, on_ranks

FOLDER = Path(__file__).parents[2] / "examples" / "ltx_video"
SMALL = ["--tiny", "--steps", "2", "--height", "64", "--width", "64", "--num-frames", "9"]
SMALL += ["--no-baseline", "--warmup-iterations", "0"]
PROMPTS = ["--prompt", "a red circle moving right", "--prompt", "a blue square moving left"]

pytestmark = NEEDS_RANKS


def draw(folder: Path, ranks: int, *options: str) -> tuple[list[Path], str]:
    """The videos that so many ranks draw, and what rank 0 printed."""

    def generate() -> None:
        sys.argv = ["generate_video.py", *SMALL, *options, "--output", str(folder / "out.mp4")]
        sys.path.insert(0, str(FOLDER))
        runpy.run_path(str(FOLDER / "generate_video.py"), run_name="__main__")

    said = on_ranks(generate, ranks, folder)
    return sorted(folder.glob("*.mp4")), " ".join(said.split())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The videos of one process."""
    return draw(tmp_path_factory.mktemp("alone"), 1, *PROMPTS)[0]


@pytest.mark.exhaustive
def test_two_ranks_that_share_the_prompts_draw_the_videos_of_one(alone: list[Path], tmp_path: Path) -> None:
    shared, said = draw(tmp_path, 2, *PROMPTS)
    assert [path.name for path in shared] == ["out_0.mp4", "out_1.mp4"]
    assert [path.read_bytes() for path in shared] == [path.read_bytes() for path in alone]
    assert "ran fused" in said and "2 ranks, prompts split" in said
    assert "ran fused" not in (tmp_path / "rank_1.txt").read_text(), "rank 0 reports"


def test_a_video_that_is_split_over_two_ranks_is_that_of_one(alone: list[Path], tmp_path: Path) -> None:
    [split], said = draw(tmp_path, 2, *PROMPTS[:2], "--context-parallel", "ulysses")
    ours, theirs = (imageio.imread(path, plugin="FFMPEG").astype(np.int16) for path in (split, alone[0]))
    assert np.abs(ours - theirs).max() <= 1, "of 255: rounded otherwise at most"
    assert "ran fused" in said and "2 ranks, each video split by ulysses" in said


@pytest.mark.exhaustive
def test_the_command_of_the_readme_runs_on_a_machine_without_a_gpu(tmp_path: Path) -> None:
    script = [str(FOLDER / "generate_video.py"), *SMALL, "--baseline", "--context-parallel", "ulysses"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *script]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, "--output", str(tmp_path / "out.mp4")], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "Left out: stock, diffusers splits the heads" in " ".join(run.stdout.split())


@pytest.mark.parametrize(
    ("ranks", "options", "said"),
    [
        (1, ["--context-parallel", "ulysses"], "start it with torchrun"),
        (2, ["--context-parallel", "ring"], "use ulysses"),
        (2, [], "1 --prompt for 2 ranks: name one for each"),
    ],
)
def test_work_that_the_ranks_cannot_divide_is_refused(
    tmp_path: Path, ranks: int, options: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer import BadParameter

    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    from ranks import ContextParallel, start

    with pytest.raises(BadParameter, match=said):
        start(1, ContextParallel(options[1]) if options else None)
