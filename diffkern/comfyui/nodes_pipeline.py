"""Nodes for diffusers pipelines: load, optimize, generate. Imported only where diffusers is installed."""

from __future__ import annotations

from typing import Any

import comfy.model_management
import comfy.utils
import folder_paths
from comfy_api.latest import io
from typing_extensions import override

from diffkern.comfyui import pipelines
from diffkern.comfyui.node_parts import (
    CATEGORY,
    OFF,
    backend_input,
    mode_input,
    seed_input,
    unsupported_input,
    with_text,
)

_CATEGORY = f"{CATEGORY}/pipeline"

PipelineType: Any = io.Custom("DIFFKERN_PIPELINE")


def _available() -> dict[str, str]:
    return pipelines.find(folder_paths.get_folder_paths("diffusers"))


class LoadPipeline(io.ComfyNode):
    """A pipeline from ``models/diffusers``."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DiffkernLoadPipeline",
            display_name="Load Diffusers Pipeline (diffkern)",
            category=_CATEGORY,
            description="Loads a diffusers pipeline from a folder in models/diffusers. Downloads nothing.",
            inputs=[
                io.Combo.Input(
                    "pipeline",
                    options=sorted(_available()),
                    tooltip="Folders with a model_index.json in models/diffusers.",
                ),
                io.Combo.Input(
                    "dtype",
                    options=list(pipelines.DTYPES),
                    default="auto",
                    tooltip="auto: bfloat16 on a GPU, float32 on a CPU.",
                ),
                io.Combo.Input(
                    "offload",
                    options=list(pipelines.OFFLOADS),
                    default="none",
                    tooltip="Where the weights wait: none keeps all on the GPU, model moves one component at a time, "
                    "sequential one layer at a time.",
                ),
            ],
            outputs=[PipelineType.Output("pipeline")],
        )

    @classmethod
    @override
    def execute(cls, pipeline: str, dtype: str, offload: str) -> io.NodeOutput:
        path = _available().get(pipeline)
        if path is None:
            raise ValueError(f"no pipeline {pipeline!r} in models/diffusers: a folder there with a model_index.json")
        device = comfy.model_management.get_torch_device()
        comfy.model_management.unload_all_models()
        return io.NodeOutput(pipelines.load(path, dtype, offload, device))


class OptimizePipeline(io.ComfyNode):
    """What ``inject_optimized_kernels`` does, when the pipeline runs."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DiffkernOptimizePipeline",
            display_name="Optimize Diffusers Pipeline (diffkern)",
            category=_CATEGORY,
            description="Runs a diffusers pipeline on fused kernels. Takes effect when the pipeline runs: bypass this "
            "node and it is gone.",
            inputs=[
                PipelineType.Input("pipeline"),
                mode_input("pipeline", ("fast", "exact")),
                backend_input(),
                unsupported_input(),
            ],
            outputs=[PipelineType.Output("pipeline"), io.String.Output("plan", tooltip="What will be optimized.")],
        )

    @classmethod
    @override
    def execute(cls, pipeline: pipelines.Pipeline, mode: str, backend: str, on_unsupported: str) -> io.NodeOutput:
        if mode == OFF:
            return with_text("off: the pipeline is handed on as it is", pipeline)
        wanted = pipeline.optimized(
            numerics=mode,
            config=None if backend == "auto" else {"*": backend},
            strict=on_unsupported == "error",
        )
        return with_text(str(wanted.plan()), wanted)


class GenerateVideo(io.ComfyNode):
    """A prompt in, frames out."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DiffkernGenerateVideo",
            display_name="Generate Video with Pipeline (diffkern)",
            category=_CATEGORY,
            description="Runs a diffusers pipeline for video, such as LTX-Video, and returns its frames.",
            inputs=[
                PipelineType.Input("pipeline"),
                io.String.Input("prompt", multiline=True, default="A lighthouse on a cliff in a storm, film grain"),
                io.String.Input("negative_prompt", multiline=True, default="worst quality, blurry, distorted"),
                io.Int.Input("width", default=768, min=32, max=4096, step=32),
                io.Int.Input("height", default=512, min=32, max=4096, step=32),
                io.Int.Input("num_frames", default=49, min=1, max=1025, step=8, tooltip="1 more than a multiple of 8."),
                io.Int.Input("steps", default=30, min=1, max=200),
                io.Float.Input("guidance_scale", default=3.0, min=0.0, max=30.0, step=0.1),
                seed_input("Of the noise."),
            ],
            outputs=[
                io.Image.Output("frames"),
                io.String.Output("report", tooltip="What was optimized, and the calls."),
            ],
        )

    @classmethod
    @override
    def execute(cls, pipeline: pipelines.Pipeline, steps: int, **video: Any) -> io.NodeOutput:
        bar = comfy.utils.ProgressBar(steps)

        def progress(done: int, total: int) -> None:
            comfy.model_management.throw_exception_if_processing_interrupted()
            bar.update_absolute(done, total)

        frames, report = pipelines.generate(pipeline, progress, num_inference_steps=steps, **video)
        return with_text("nothing is injected" if report is None else str(report), frames)
