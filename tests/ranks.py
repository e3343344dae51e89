"""Runs a function on several ranks of gloo, which are processes forked from this one."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

NEEDS_RANKS = pytest.mark.skipif(
    torch.cuda.is_available() or not dist.is_available() or not hasattr(os, "fork"),
    reason="ranks are forked, which a process that has used a GPU cannot be",
)


def _rank(work: Callable[[], object], number: int, ranks: int, port: int, log: Path) -> None:
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.accelerator.device_count = lambda: 1  # diffusers divides by it, and here it is 0
    with log.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        work()


def on_ranks(work: Callable[[], object], ranks: int, folder: Path) -> str:
    """Runs ``work`` on so many ranks, and returns what rank 0 printed; what the others did is in ``folder``.

    Raises:
        AssertionError: a rank failed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    logs = [folder / f"rank_{number}.txt" for number in range(ranks)]
    processes = [fork.Process(target=_rank, args=(work, n, ranks, port, log)) for n, log in enumerate(logs)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=240)
    said = "\n".join(log.read_text() for log in logs)
    assert [process.exitcode for process in processes] == [0] * ranks, said
    return logs[0].read_text()
