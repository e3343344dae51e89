"""Two ranks of gloo, each with kernels of its own, draw what one process draws."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import socket
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

# What a rank imports is imported once, before it is forked.
from diffusers import ContextParallelConfig, LTXPipeline  # noqa: F401

from diffkern.bench.measure import relative_error

SCRIPT = Path(__file__).parents[2] / "scripts" / "example_several_gpus.py"
SMALL = ["--steps", "2", "--size", "64", "--frames", "9"]
PROMPTS = ["--prompt", "a red circle moving right", "--prompt", "a blue square moving left"]

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or not dist.is_available() or not hasattr(os, "fork"),
    reason="ranks are forked, which a process that has used a GPU cannot be",
)


def _rank(number: int, ranks: int, port: int, options: list[str], log: Path) -> None:
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.accelerator.device_count = lambda: 1  # diffusers divides by it, and here it is 0
    sys.argv = [str(SCRIPT), *options]
    with log.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        runpy.run_path(str(SCRIPT), run_name="__main__")


def draw(folder: Path, ranks: int, *options: str) -> tuple[list[torch.Tensor], str]:
    """The videos that so many ranks draw, and what rank 0 printed."""
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    given = [*SMALL, *options, "--output", str(folder)]
    logs = [folder / f"rank_{number}.txt" for number in range(ranks)]
    processes = [fork.Process(target=_rank, args=(n, ranks, port, given, log)) for n, log in enumerate(logs)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=240)
    said = "\n".join(log.read_text() for log in logs)
    assert [process.exitcode for process in processes] == [0] * ranks, said
    return [torch.load(path) for path in sorted(folder.glob("*.pt"))], logs[0].read_text()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    """The videos of one process."""
    return draw(tmp_path_factory.mktemp("alone") / "videos", 1, *PROMPTS)[0]


@pytest.mark.exhaustive
def test_two_ranks_that_share_the_prompts_draw_the_videos_of_one(alone: list[torch.Tensor], tmp_path: Path) -> None:
    shared, said = draw(tmp_path / "shared", 2, *PROMPTS)
    assert [torch.equal(ours, theirs) for ours, theirs in zip(shared, alone, strict=True)] == [True, True]
    assert "ran fused" in said and "2 ranks on cpu, prompts split" in said


def test_a_video_that_is_split_over_two_ranks_is_that_of_one(alone: list[torch.Tensor], tmp_path: Path) -> None:
    [split], said = draw(tmp_path / "split", 2, *PROMPTS[:2], "--context-parallel", "ulysses")
    assert relative_error(split, alone[0]) < 1e-4
    assert "ran fused" in said and "2 ranks on cpu, ulysses" in said
