"""What ComfyUI loads: the nodes, and a line in its log about those that cannot be offered here."""

from __future__ import annotations

import logging

from comfy_api.latest import ComfyExtension, io
from typing_extensions import override

from diffkern import __version__
from diffkern.comfyui.doctor import pipelines_unavailable_reason

_log = logging.getLogger("diffkern")


class DiffkernExtension(ComfyExtension):
    """The node pack."""

    @override
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """Returns the nodes for models, and those for pipelines where diffusers is installed."""
        from diffkern.comfyui.nodes_measure import BenchmarkModel, VerifyModel
        from diffkern.comfyui.nodes_optimize import Doctor, OptimizeModel, ReportRun

        nodes: list[type[io.ComfyNode]] = [OptimizeModel, ReportRun, VerifyModel, BenchmarkModel, Doctor]
        reason = pipelines_unavailable_reason()
        if reason is None:
            from diffkern.comfyui.nodes_pipeline import GenerateVideo, LoadPipeline, OptimizePipeline

            nodes += [LoadPipeline, OptimizePipeline, GenerateVideo]
        else:
            _log.info("diffkern: no pipeline nodes: %s", reason)
        _log.info("diffkern %s: %d nodes", __version__, len(nodes))
        return nodes
