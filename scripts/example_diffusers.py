"""Any diffusers pipeline on disk, stock and with kernels: time, difference, and stock again.

    python scripts/example_diffusers.py                                       # the tiny LTX-Video of this repository
    python scripts/example_diffusers.py --model ./my-pipeline --prompt "a lighthouse" --steps 30

A folder is what ``pipe.save_pretrained`` or ``hf download`` wrote. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import inspect
import time
from pathlib import Path
from statistics import median

import torch
from diffusers import DiffusionPipeline

from diffkern import inject_optimized_kernels
from diffkern.bench.environment import dtype_argument
from diffkern.bench.measure import relative_error

TINY = Path(__file__).parents[1] / "examples" / "ltx_video" / "tiny"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare a diffusers pipeline with and without fused kernels.")
    parser.add_argument("--model", type=Path, default=TINY, help="folder of a saved pipeline")
    parser.add_argument("--prompt", default="a red circle moving right on a white background")
    parser.add_argument("--steps", type=int, default=8, help="denoising steps")
    parser.add_argument("--size", type=int, default=128, help="height and width, in pixels")
    parser.add_argument("--frames", type=int, default=9, help="of a video")
    parser.add_argument("--runs", type=int, default=3, help="timed calls of each arm; the median counts")
    parser.add_argument("--numerics", choices=("fast", "exact", "fp8"), default="fast")
    return parser.parse_args()


def generate(pipe: DiffusionPipeline, options: argparse.Namespace) -> torch.Tensor:
    """One image or video, the same at every call."""
    video = {"num_frames": options.frames} if "num_frames" in inspect.signature(pipe.__call__).parameters else {}
    output = pipe(
        prompt=options.prompt,
        num_inference_steps=options.steps,
        height=options.size,
        width=options.size,
        generator=torch.Generator("cpu").manual_seed(0),
        output_type="pt",
        **video,
    )
    return torch.as_tensor(output[0]).float().cpu()


def timed(pipe: DiffusionPipeline, options: argparse.Namespace) -> tuple[torch.Tensor, list[float]]:
    """The result, and the seconds of each call after the first."""
    result, seconds = generate(pipe, options), []
    for _ in range(options.runs):
        started = time.perf_counter()
        result = generate(pipe, options)  # ends on the CPU, so the GPU is done
        seconds.append(time.perf_counter() - started)
    return result, seconds


def main() -> None:
    options = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    pipe = DiffusionPipeline.from_pretrained(options.model, **dtype_argument(dtype)).to(device)
    pipe.set_progress_bar_config(disable=True)

    stock, before = timed(pipe, options)
    report = inject_optimized_kernels(pipe, numerics=options.numerics)
    fused, after = timed(pipe, options)
    print(report)

    for arm, seconds in (("stock", before), (options.numerics, after)):
        print(f"{arm}: {median(seconds):.2f} s, from {min(seconds):.2f} to {max(seconds):.2f}")
    apart = options.runs > 2 and (max(after) < min(before) or min(after) > max(before))
    gain = f"{median(before) / median(after):.2f} times as fast" if apart else "no clear difference in time"
    print(f"{gain} on {device.type}; difference of the results: {relative_error(fused, stock):.1e}")

    report.restore()
    print("restored, bit for bit:", torch.equal(generate(pipe, options), stock))


if __name__ == "__main__":
    main()
