"""The nodes "Verify" and "Benchmark": an optimized model against itself without the optimization."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io
from typing_extensions import override

from diffkern.comfyui.compare import benchmark, verify
from diffkern.comfyui.node_parts import CATEGORY, RunsEveryTime, seed_input, with_text
from diffkern.comfyui.optimize import not_optimized

_SEED = "Of the noise, the same for both models."


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
