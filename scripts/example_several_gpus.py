"""LTX-Video on several GPUs: the prompts split over them, or one video split by diffusers' context parallelism.

    torchrun --nproc-per-node 2 scripts/example_several_gpus.py --prompt "a red circle" --prompt "a blue square"
    torchrun --nproc-per-node 2 scripts/example_several_gpus.py --context-parallel ulysses

Kernels are injected on each rank; rank 0 reports and writes the videos. Without GPUs the ranks are processes on the
CPU. A prompt has the same noise wherever it runs, so two ranks draw what one process draws.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, LTXPipeline
from diffusers.utils import export_to_video

from diffkern import InjectionReport, inject_optimized_kernels
from diffkern.bench.environment import dtype_argument

TINY = Path(__file__).parents[1] / "examples" / "ltx_video" / "tiny"
PROMPT = "a red circle moving right on a white background"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Generate videos on several GPUs, with fused kernels on each.")
    parser.add_argument("--model", type=Path, default=TINY, help="folder of a saved LTXPipeline")
    parser.add_argument("--prompt", action="append", help="may be repeated; the prompts are split over the ranks")
    parser.add_argument("--context-parallel", choices=("ulysses", "ring"), help="split each video, not the prompts")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--size", type=int, default=128, help="height and width, in pixels")
    parser.add_argument("--frames", type=int, default=25, help="of the form 8 k + 1")
    parser.add_argument("--stock", action="store_true", help="inject nothing")
    parser.add_argument("--output", type=Path, default=Path("outputs"), help="folder for the videos")
    return parser.parse_args()


def start() -> tuple[int, int, torch.device]:
    """The rank of this process, how many there are, and its device; one alone where torchrun did not start it."""
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=rank, world_size=ranks)
    return rank, ranks, device


def load(options: argparse.Namespace, ranks: int, device: torch.device) -> tuple[LTXPipeline, InjectionReport | None]:
    """The pipeline on its device, split if that was asked for, and with kernels in it."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    pipe = LTXPipeline.from_pretrained(options.model, **dtype_argument(dtype)).to(device)
    pipe.set_progress_bar_config(disable=True)
    if options.context_parallel == "ring" and device.type == "cuda":
        pipe.transformer.set_attention_backend("_native_cudnn")  # a ring needs what torch's default does not return
    if options.context_parallel and ranks > 1:
        degree = {f"{options.context_parallel}_degree": ranks}
        pipe.transformer.enable_parallelism(config=ContextParallelConfig(**degree))
    return pipe, None if options.stock else inject_optimized_kernels(pipe)


def generate(pipe: LTXPipeline, prompt: str, seed: int, options: argparse.Namespace) -> torch.Tensor:
    """One video: frames, channels, height, width in 0 to 1, on the CPU."""
    return pipe(
        prompt=prompt,
        num_inference_steps=options.steps,
        height=options.size,
        width=options.size,
        num_frames=options.frames,
        generator=torch.Generator("cpu").manual_seed(seed),
        output_type="pt",
    ).frames[0].float().cpu()  # fmt: skip


def main() -> None:
    options = arguments()
    rank, ranks, device = start()
    if options.context_parallel == "ring" and device.type == "cpu":
        raise SystemExit("--context-parallel ring: diffusers has no attention for it on a CPU; use ulysses")
    prompts = list(enumerate(options.prompt or [PROMPT]))
    pipe, report = load(options, ranks, device)
    mine = prompts if options.context_parallel else prompts[rank::ranks]
    videos = {number: generate(pipe, prompt, number, options) for number, prompt in mine}

    gathered: list[dict[int, torch.Tensor] | None] = [videos]
    if ranks > 1:
        gathered = [None] * ranks
        dist.gather_object(videos, gathered if rank == 0 else None)
    if rank == 0:
        print(report or "stock")
        print(f"{ranks} ranks on {device.type}, {options.context_parallel or 'prompts split'}")
        options.output.mkdir(parents=True, exist_ok=True)
        for number, frames in sorted({n: v for part in gathered for n, v in (part or {}).items()}.items()):
            torch.save(frames, options.output / f"video_{number}.pt")
            film = options.output / f"video_{number}.mp4"
            export_to_video(list(frames.permute(0, 2, 3, 1).numpy()), str(film), fps=24)
            print(f"wrote {film}: {prompts[number][1]}")
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
