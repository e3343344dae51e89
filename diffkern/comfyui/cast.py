"""Weights as ComfyUI wants them read: with low-VRAM streaming, adapters and casts in force.

In low-VRAM mode a LoRA is a function of the weight that is called when the weight is used, and the weight itself may
be on another device, in another dtype, or not loaded yet. A plain read of ``module.weight`` sees none of that.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def weight_and_bias(module: Any, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Returns weight and bias of a small layer, such as a norm, for an input ``x``.

    What ComfyUI casts is copied, since it may use the memory again for the next layer; a norm has few weights.

    Args:
        module: A layer of ``comfy.ops``, or one of torch that knows nothing of casting.
        x: The input, which says device and dtype.

    Returns:
        What the layer would compute with; None for a parameter that it does not have.
    """
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if (weight is None and bias is None) or not _casts(module):
        return weight, bias
    import comfy.ops

    with comfy.ops.CastBiasWeightContext(module, x, offloadable=True) as (weight, bias):
        return _copy(weight), _copy(bias)


def _casts(module: Any) -> bool:
    """Whether the layer asks for its weights to be cast; torch's own layers have none of these attributes."""
    return bool(
        getattr(module, "comfy_cast_weights", False)
        or getattr(module, "weight_function", ())
        or getattr(module, "bias_function", ())
    )


def _copy(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.clone()
