"""Nodes for models: "Optimize Model", "Report", "Verify", "Benchmark", and "Doctor"."""

from __future__ import annotations

from io import StringIO
from typing import Any

from comfy_api.latest import io, ui
from rich.console import Console
from typing_extensions import override

from diffkern.comfyui import kitchen_backend
from diffkern.comfyui.compare import benchmark, verify
from diffkern.comfyui.node_parts import (
    CATEGORY,
    OFF,
    RunsEveryTime,
    backend_input,
    mode_input,
    seed_input,
    unsupported_input,
    with_text,
)
from diffkern.comfyui.optimize import not_optimized, optimize, optimize_vae, reports_of
from diffkern.comfyui.rewrites import FAMILIES
from diffkern.injection import InjectionReport

_SEED = "Of the noise, the same for both models."
#: Columns of the report: a node scrolls where a terminal wraps.
_WIDTH = 140


class OptimizeModel(io.ComfyNode):
    """MODEL in, optimized MODEL and report out; a VAE, too, if there is one."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DiffkernOptimizeModel",
            display_name="Optimize Model (diffkern)",
            category=CATEGORY,
            description="Runs models on fused kernels. Every kind of module is proven against the stock one first. "
            "The input model stays as it is: bypass this node and it is gone.",
            search_aliases=["speed up", "kernels", "fused", "rms norm", "faster"],
            inputs=[
                io.Model.Input("model"),
                mode_input("model"),
                *(
                    io.Boolean.Input(family, default=True, tooltip=_FAMILY_TOOLTIPS[family], advanced=True)
                    for family in FAMILIES
                ),
                io.Combo.Input(
                    "comfy_kitchen",
                    options=list(kitchen_backend.CHOICES),
                    default="auto",
                    advanced=True,
                    tooltip="Also serve the functions of comfy-kitchen that this model calls. auto: where it has plain "
                    "PyTorch only. on: always. off: never.",
                ),
                backend_input(),
                io.String.Input(
                    "blocks",
                    default="",
                    advanced=True,
                    tooltip="Which blocks: empty for all, numbers and ranges such as 0-9,12, or patterns on their "
                    "paths such as double_blocks.*",
                ),
                unsupported_input(),
                io.Vae.Input("vae", optional=True, tooltip="A VAE to optimize as well."),
            ],
            outputs=[
                io.Model.Output(tooltip="The optimized model."),
                io.String.Output("report", tooltip="What was optimized, and why not elsewhere."),
                io.Vae.Output(tooltip="The optimized VAE, if one is given."),
            ],
        )

    @classmethod
    @override
    def execute(
        cls,
        model: Any,
        mode: str,
        comfy_kitchen: str,
        backend: str,
        blocks: str,
        on_unsupported: str,
        vae: Any = None,
        **families: bool,
    ) -> io.NodeOutput:
        if mode == OFF:
            return _output(model, "off: the model is handed on as it is", vae)
        options: Any = {
            "numerics": mode,
            "families": [family for family in FAMILIES if families[family]],
            "provider": None if backend == "auto" else backend,
            "strict": on_unsupported == "error",
        }
        optimized, report = optimize(model, blocks=blocks, kitchen=comfy_kitchen, **options)
        text = _as_text(report)
        if vae is not None:
            vae, report = optimize_vae(vae, **options)
            text = f"{text}\n\n{_as_text(report)}"
        return _output(optimized, text, vae)


class ReportRun(io.ComfyNode):
    """The report of an optimized model after the sampler ran, which the latent that passes through makes sure of."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DiffkernReport",
            display_name="Report (diffkern)",
            category=CATEGORY,
            description="Says what of an optimized model ran fused, and why not the rest. Put it behind the sampler: "
            "it hands the latent on as it is.",
            search_aliases=["what ran", "calls", "fused"],
            inputs=[
                io.Model.Input("model", tooltip="The optimized model that the sampler runs."),
                io.Latent.Input("latent", tooltip="The result of the sampler, so that this node runs after it."),
            ],
            outputs=[io.Latent.Output(tooltip="The latent, as it is."), io.String.Output("report")],
            is_output_node=True,
        )

    @classmethod
    @override
    def execute(cls, model: Any, latent: Any) -> io.NodeOutput:
        reports = [_as_text(report) for report in reports_of(model)]
        return with_text("\n\n".join(reports) or "this model is not optimized by diffkern", latent)


def _inputs() -> list[io.Input]:
    """What both take."""
    return [
        io.Model.Input("model", tooltip="An optimized model. The stock one is this model without diffkern."),
        io.Conditioning.Input("positive", tooltip="The prompt to try it with. Runs without guidance."),
        io.Latent.Input("latent_image", tooltip="The size to try it at; use that of your workflow."),
    ]


class VerifyModel(io.ComfyNode):
    """Runs both models on the same inputs and compares."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DiffkernVerify",
            display_name="Verify (diffkern)",
            category=CATEGORY,
            description="Runs an optimized model and the stock one on your own prompt and size, and says how far the "
            "results are apart, and whether they are finite.",
            search_aliases=["compare", "check", "nan", "black image"],
            inputs=[
                *_inputs(),
                io.Int.Input(
                    "steps", default=2, min=1, max=100, tooltip="Steps to compare after; errors grow with them."
                ),
                seed_input(_SEED),
                io.Float.Input(
                    "tolerance",
                    default=0.02,
                    min=0.0,
                    max=1.0,
                    step=0.001,
                    tooltip="Relative error that is allowed. 0 demands the very same bits.",
                ),
                io.Combo.Input(
                    "on_failure",
                    options=["report", "error"],
                    default="report",
                    tooltip="What to do if it fails: say so, or stop the workflow.",
                ),
            ],
            outputs=[io.Boolean.Output("passed"), io.String.Output("report")],
            is_output_node=True,
        )

    @classmethod
    @override
    def execute(
        cls, model: Any, positive: Any, latent_image: Any, steps: int, seed: int, tolerance: float, on_failure: str
    ) -> io.NodeOutput:
        if reason := not_optimized(model):  # as where the user compares by bypassing the node, which must go on
            return with_text(f"nothing to verify: {reason}", True)
        verdict = verify(model, positive, latent_image, steps=steps, seed=seed, tolerance=tolerance)
        if on_failure == "error" and not verdict.passed:
            raise RuntimeError(str(verdict))
        return with_text(str(verdict), verdict.passed)


class BenchmarkModel(RunsEveryTime):
    """Times both models in turns."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DiffkernBenchmark",
            display_name="Benchmark (diffkern)",
            category=CATEGORY,
            description="Times the steps of an optimized model and of the stock one in turns, on your own prompt and "
            "size. Says so plainly if there is no gain.",
            search_aliases=["speed", "compare", "it/s", "timing"],
            inputs=[
                *_inputs(),
                io.Int.Input("steps", default=5, min=2, max=100, tooltip="Steps of a run; the first one is not timed."),
                io.Int.Input(
                    "runs", default=3, min=1, max=20, tooltip="Timed runs of each model, after one to warm up."
                ),
                seed_input(_SEED),
            ],
            outputs=[io.Float.Output("speedup"), io.String.Output("report")],
            is_output_node=True,
        )

    @classmethod
    @override
    def execute(cls, model: Any, positive: Any, latent_image: Any, steps: int, runs: int, seed: int) -> io.NodeOutput:
        if reason := not_optimized(model):
            return with_text(f"nothing to time: {reason}", 1.0)
        comparison = benchmark(model, positive, latent_image, steps=steps, runs=runs, seed=seed)
        return with_text(str(comparison), comparison.speedup)


class Doctor(RunsEveryTime):
    """What is installed, what serves, and why the rest does not."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DiffkernDoctor",
            display_name="Doctor (diffkern)",
            category=CATEGORY,
            description="Lists versions, every provider of kernels and why it is off, the backends of comfy-kitchen, "
            "and which modules of this ComfyUI are known.",
            search_aliases=["diagnose", "version", "why slow"],
            inputs=[],
            outputs=[io.String.Output("report")],
            is_output_node=True,
        )

    @classmethod
    @override
    def execute(cls, **kwargs: Any) -> io.NodeOutput:
        from diffkern.comfyui.doctor import report

        return with_text(report())


_FAMILY_TOOLTIPS = {
    "modulation": "Norms with scale and shift, gated sums and activations.",
    "qk_norm_rope": "Norms of queries and keys, and the rotary embedding.",
}


def _output(model: Any, text: str, vae: Any) -> io.NodeOutput:
    return io.NodeOutput(model, text, vae, ui=ui.PreviewText(text))


def _as_text(report: InjectionReport) -> str:
    """The report, wider than on a terminal."""
    console = Console(file=StringIO(), width=_WIDTH, color_system=None)
    with console.capture() as capture:
        console.print(report)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
