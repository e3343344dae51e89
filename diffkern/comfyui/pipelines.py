"""Diffusers pipelines as ComfyUI nodes hand them on: injected when they run, so that a bypassed node leaves nothing.

ComfyUI keeps the outputs of nodes from run to run. If the node that optimizes patched the pipeline that the loader
keeps, the patch would stay when that node is bypassed. So nodes hand on what is wanted, and the node that generates
brings the pipeline into that state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import diffkern
from diffkern.bench.environment import dtype_argument
from diffkern.injection import InjectionReport

DTYPES = {"auto": None, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

#: Folders in folders that are looked at; the cache of the Hub has three.
_DEPTH = 5

#: Where the weights wait while they are not needed.
OFFLOADS = ("none", "model", "sequential")


@dataclass
class Loaded:
    """A pipeline in memory, and what is injected into it at this moment."""

    pipe: Any
    options: Mapping[str, Any] | None = None
    report: InjectionReport | None = None

    def bring(self, options: Mapping[str, Any] | None) -> InjectionReport | None:
        """Injects with ``options``, or restores for None; nothing to do if that is its state already."""
        if options != self.options:
            self.restore()
            if options is not None:
                self.report = diffkern.inject_optimized_kernels(self.pipe, **options)
                self.report.advises = False
            self.options = options
        return self.report

    def restore(self) -> None:
        """Takes everything back."""
        if self.report is not None:
            self.report.restore()
        self.report, self.options = None, None


@dataclass(frozen=True)
class Pipeline:
    """What nodes hand on: a pipeline, and the options of the injection that is wanted; None for none."""

    loaded: Loaded
    options: Mapping[str, Any] | None = None

    def optimized(self, **options: Any) -> Pipeline:
        """Returns the same pipeline with an injection wanted."""
        return replace(self, options=options)

    def plan(self) -> InjectionReport:
        """Says what the injection will do."""
        self.loaded.restore()
        report = diffkern.plan(self.loaded.pipe, **(self.options or {}))
        report.advises = False
        return report


def find(folders: list[str]) -> dict[str, str]:
    """Returns the pipelines in some folders, also through links: name -> folder with a ``model_index.json``."""
    found = {}
    for folder in map(Path, folders):
        # ``**`` does not follow links, which is how most people put a folder there.
        for index in sorted(
            index for depth in range(_DEPTH) for index in folder.glob("*/" * depth + "model_index.json")
        ):
            found[index.parent.relative_to(folder).as_posix()] = str(index.parent)
    return found


def load(path: str, dtype: str, offload: str, device: torch.device) -> Pipeline:
    """Loads a pipeline from a folder on this machine. Downloads nothing.

    ``dtype`` is one of :data:`DTYPES`, ``"auto"`` being bfloat16 on a GPU and float32 on a CPU; ``offload`` one of
    :data:`OFFLOADS`.
    """
    from diffusers import DiffusionPipeline

    wanted = DTYPES[dtype] or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    pipe = DiffusionPipeline.from_pretrained(path, **dtype_argument(wanted), local_files_only=True)
    if offload == "model" and device.type != "cpu":
        pipe.enable_model_cpu_offload(device=device)
    elif offload == "sequential" and device.type != "cpu":
        pipe.enable_sequential_cpu_offload(device=device)
    else:
        pipe.to(device)
    pipe.set_progress_bar_config(disable=True)
    return Pipeline(Loaded(pipe))


def generate(
    pipeline: Pipeline, progress: Callable[[int, int], None], *, seed: int, num_inference_steps: int, **arguments: Any
) -> tuple[Tensor, InjectionReport | None]:
    """Runs a pipeline for video, in the state that is wanted.

    ``progress`` is called with the steps done and their number; it may raise to stop.

    Returns:
        Frames ``[F, H, W, 3]`` between 0 and 1, in float32 on the CPU, and the report of the injection.

    Raises:
        ValueError: the frames are not finite.
    """
    report, pipe = pipeline.loaded.bring(pipeline.options), pipeline.loaded.pipe

    def step_done(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        progress(step + 1, num_inference_steps)
        return values

    arguments |= {"num_inference_steps": num_inference_steps, "generator": torch.Generator("cpu").manual_seed(seed)}
    with torch.inference_mode(False), torch.no_grad():  # weights may be moved and adapters loaded again later
        frames = pipe(**arguments, output_type="np", callback_on_step_end=step_done).frames
    result = torch.from_numpy(np.asarray(frames[0], dtype=np.float32))
    if not torch.isfinite(result).all():
        raise ValueError("the pipeline gave NaN or infinity: try dtype float32, or bypass the optimization to compare")
    return result, report
