"""Several GPUs, a process each: which videos are this one's, or which piece of one video.

    torchrun --nproc-per-node 2 generate_video.py --tiny --prompt "a red circle" --prompt "a blue square"
    torchrun --nproc-per-node 2 generate_video.py --tiny --context-parallel ulysses

``accelerate launch`` does as well: both name the ranks in the environment. Without GPUs the ranks are on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor

from diffkern.bench import measure

if TYPE_CHECKING:
    from diffusers import LTXPipeline


class ContextParallel(str, Enum):
    """How the tokens of one video are split in attention."""

    ULYSSES = "ulysses"
    RING = "ring"


@dataclass(frozen=True)
class Ranks:
    """This process among those that ``torchrun`` started.

    Attributes:
        number: Of this process.
        count: How many there are.
        device: That of this one.
        split: How one video is split over them, or None where the prompts are.
    """

    number: int
    count: int
    device: torch.device
    split: ContextParallel | None = None

    @property
    def first(self) -> bool:
        """Whether this one reports and writes files."""
        return self.number == 0

    def share(self, prompts: Sequence[str]) -> list[tuple[int, str]]:
        """The prompts that this rank draws, numbered; all of them where each video is split."""
        numbered = list(enumerate(prompts))
        return numbered if self.split else numbered[self.number :: self.count]

    def wait(self) -> float:
        """Waits for all ranks; returns the seconds of the host's clock when the last one is done."""
        measure.synchronize(self.device)
        if self.count > 1:
            dist.barrier()
        return measure.wall_clock(self.device)

    def gather(self, videos: Tensor, batch_size: int) -> Tensor:
        """On rank 0 the videos of all ranks, in the order of the prompts; elsewhere what was given."""
        if self.count == 1 or self.split:
            return videos
        parts: list[Any] | None = [None] * self.count if self.first else None
        dist.gather_object(videos, parts)
        if parts is None:
            return videos
        shares = [part.split(batch_size) for part in parts]
        total = sum(map(len, shares))
        return torch.cat([shares[number % self.count][number // self.count] for number in range(total)])

    def describe(self) -> str:
        """How the work is divided, or "" for one process."""
        what = f"each video split by {self.split.value}" if self.split else "prompts split"
        return f", {self.count} ranks, {what}" if self.count > 1 else ""


def start(prompts: int, split: ContextParallel | None) -> Ranks:
    """Joins the other processes; refuses what cannot be divided among them."""
    number, count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    if split is not None and count == 1:
        raise typer.BadParameter(
            f"--context-parallel {split.value} splits a video over the ranks of torchrun, and this is one process: "
            "start it with torchrun --nproc-per-node N."
        )
    if split is ContextParallel.RING and device.type == "cpu":
        raise typer.BadParameter("--context-parallel ring: diffusers has no attention for it on a CPU; use ulysses.")
    if split is None and prompts < count:
        raise typer.BadParameter(
            f"{prompts} --prompt for {count} ranks: name one for each, or split each video: --context-parallel ulysses."
        )
    if count > 1:
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", rank=number, world_size=count, device_id=device if on_gpu else None
        )
    return Ranks(number, count, device, split)


def split_videos(pipe: LTXPipeline, ranks: Ranks) -> None:
    """Lets each rank compute its share of the tokens of a video; before kernels are injected."""
    if ranks.split is None:
        return
    from diffusers import ContextParallelConfig

    if ranks.split is ContextParallel.RING:
        pipe.transformer.set_attention_backend("_native_cudnn")  # a ring needs what torch's default does not return
    degree: Any = {f"{ranks.split.value}_degree": ranks.count}
    accelerators = torch.accelerator.device_count
    if not accelerators():
        torch.accelerator.device_count = lambda: ranks.count  # diffusers takes the remainder, of zero on a CPU
    try:
        pipe.transformer.enable_parallelism(config=ContextParallelConfig(**degree))
    finally:
        torch.accelerator.device_count = accelerators


def stop(ranks: Ranks) -> None:
    """Leaves the other processes."""
    if ranks.count > 1:
        dist.barrier()
        dist.destroy_process_group()
