"""diffkern for ComfyUI. The nodes are in the package ``diffkern``, which ComfyUI's Python must have installed."""

import sys

try:
    from diffkern.comfyui import comfy_entrypoint
except ImportError as error:
    raise ImportError(
        f"diffkern is missing or broken ({error}): run '{sys.executable} -m pip install /path/to/diffkern', a checkout"
    ) from error

#: Help pages of the nodes, in ``docs``.
WEB_DIRECTORY = "./web"

__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]
