"""The ComfyUI node pack. Nothing here is imported by ``import diffkern``; ComfyUI is imported where it is used.

A folder in ComfyUI's ``custom_nodes`` hands :func:`comfy_entrypoint` on; see ``integrations/comfyui``.
"""

from __future__ import annotations

from typing import Any

__all__ = ["comfy_entrypoint"]


async def comfy_entrypoint() -> Any:
    """Returns the extension with the nodes, for ComfyUI's loader of custom nodes."""
    from diffkern.comfyui.extension import DiffkernExtension

    return DiffkernExtension()
