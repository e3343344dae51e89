"""The norms of ComfyUI: they compute what torch's norms do, from weights that ComfyUI casts at every call."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from diffkern.blocks.pieces import plain, untouched
from diffkern.comfyui.cast import weight_and_bias
from diffkern.matching import TABLE, NormSemantics, full_name

_TORCH = "torch.nn.modules.normalization"
_OPS = {"rms_norm": "rms", "layer_norm": "layer"}


def _kind(class_name: str) -> str:
    semantics = TABLE[f"{_TORCH}.{class_name}"]
    assert isinstance(semantics, NormSemantics)
    return _OPS[semantics.op]


#: Exact class -> the norm that it computes, as the table of torch's classes says.
NORMS = {
    f"{home}.{class_name}": _kind(class_name)
    for class_name in ("LayerNorm", "RMSNorm")
    for home in (_TORCH, "comfy.ops.disable_weight_init", "comfy.ops.manual_cast")
}


def norm_kind(module: nn.Module | None) -> str | None:
    """Returns ``"rms"`` or ``"layer"`` for a norm over the last dimension that may be computed around, or None.

    Whatever watches the call of the module, or replaces its forward, makes it one that may not.
    """
    if module is None:
        return None
    kind = NORMS.get(full_name(type(module)))
    if kind is None or not untouched(module, type(module)):
        return None
    shape: Any = module.normalized_shape
    return kind if len(shape) == 1 else None


def readable(module: Any, x: Tensor) -> tuple[Tensor | None, Tensor | None] | None:
    """Returns weight and bias of a norm as kernels can read them beside ``x``; None if they cannot."""
    parameters = weight_and_bias(module, x)
    return parameters if all(p is None or plain(p, x.device) for p in parameters) else None
