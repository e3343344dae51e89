"""The ComfyUI node pack. Nothing here is imported by ``import diffkern``; ComfyUI is imported where it is used.

A folder in ComfyUI's ``custom_nodes`` hands :func:`comfy_entrypoint` on; see ``integrations/comfyui``.
"""

from __future__ import annotations

import logging
from typing import Any

from typing_extensions import override

__all__ = ["comfy_entrypoint"]

_log = logging.getLogger("diffkern")


async def comfy_entrypoint() -> Any:
    """Returns the extension with the nodes, for ComfyUI's loader of custom nodes."""
    from comfy_api.latest import ComfyExtension

    class DiffkernExtension(ComfyExtension):
        """The nodes for models, and those for pipelines where diffusers is installed."""

        @override
        async def get_node_list(self) -> list[Any]:
            from diffkern import __version__
            from diffkern.comfyui import nodes_model as model
            from diffkern.comfyui.doctor import pipelines_unavailable_reason

            nodes: list[Any] = [
                model.OptimizeModel,
                model.ReportRun,
                model.VerifyModel,
                model.BenchmarkModel,
                model.Doctor,
            ]
            reason = pipelines_unavailable_reason()
            if reason is None:
                from diffkern.comfyui.nodes_pipeline import GenerateVideo, LoadPipeline, OptimizePipeline

                nodes += [LoadPipeline, OptimizePipeline, GenerateVideo]
            else:
                _log.info("diffkern: no pipeline nodes: %s", reason)
            _log.info("diffkern %s: %d nodes", __version__, len(nodes))
            return nodes

    return DiffkernExtension()
