"""The nodes "Optimize Model" and "Doctor"."""

from __future__ import annotations

from io import StringIO
from typing import Any

from comfy_api.latest import io, ui
from rich.console import Console
from typing_extensions import override

from diffkern.comfyui import kitchen_backend
from diffkern.comfyui.node_parts import (
    CATEGORY,
    OFF,
    RunsEveryTime,
    backend_input,
    mode_input,
    unsupported_input,
    with_text,
)
from diffkern.comfyui.optimize import optimize, optimize_vae, reports_of
from diffkern.comfyui.rewrites import FAMILIES
from diffkern.injection import InjectionReport

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
