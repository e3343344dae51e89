"""The norms of ComfyUI: they compute what torch's norms do, from weights that ComfyUI casts at every call.

In low-VRAM mode a LoRA is a function of the weight that is called when the weight is used, and the weight itself may
be on another device, in another dtype, or not loaded yet. A plain read of ``module.weight`` sees none of that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffkern.blocks.pieces import plain, untouched
from diffkern.matching import TABLE, NormSemantics, full_name
from diffkern.providers.dispatch_modes import constant_in_graphs
from diffkern.rewrite.facts import GROUP_NORM, NORM_SOURCES
from diffkern.verify.samples import bare, random_input

_TORCH = "torch.nn.modules.normalization"
_KINDS = {"LayerNorm": "layer", "RMSNorm": "rms"}
#: Exact class -> the norm that it computes.
NORMS = {
    f"{home}.{name}": kind
    for name, kind in _KINDS.items()
    for home in (_TORCH, "comfy.ops.disable_weight_init", "comfy.ops.manual_cast")
}

_GROUP_NORMS = frozenset({"comfy.ops.disable_weight_init.GroupNorm", "comfy.ops.manual_cast.GroupNorm"})

#: Norms over channels, by exact class: what diffusers has for Wan, with a weight that is cast at every call.
_CHANNEL_NORMS = frozenset({"comfy.ldm.wan.vae.RMS_norm", "comfy.ldm.hunyuan_video.vae_refiner.RMS_norm"})

#: Class and the forwards that it had when it was probed -> the norm that it computes without weights, or None.
_probed: dict[tuple[Any, ...], str | None] = {}


def norm_kind(module: nn.Module | None) -> str | None:
    """Returns ``"rms"`` or ``"layer"`` for a norm over the last dimension that may be computed around, or None.

    Whatever watches the call of the module, or replaces its forward, makes it one that may not.
    """
    if module is None:
        return None
    kind = NORMS.get(full_name(type(module))) or _kind_by_probe(module)
    if kind is None or not untouched(module, type(module)):
        return None
    shape: Any = module.normalized_shape
    return kind if len(shape) == 1 else None


@constant_in_graphs
def _kind_by_probe(module: Any) -> str | None:
    """The norm that a subclass of a known class computes where it has no weights, which loaders of GGUF files bring.

    Such a class unpacks weights in its own way. Without any, its forward must give the bits of torch's function.
    """
    cls = type(module)
    known = next((NORMS[name] for base in cls.__mro__ if (name := full_name(base)) in NORMS), None)
    if known is None or any(parameter is not None for parameter in module._parameters.values()):
        return None
    key = cls, cls.forward, getattr(cls, "forward_comfy_cast_weights", None), module.normalized_shape, module.eps
    if key not in _probed:
        x = random_input(torch.Size((4, *module.normalized_shape)), torch.device("cpu"), torch.float32)
        function = F.layer_norm if known == "layer" else F.rms_norm
        try:
            with torch.no_grad():
                same = torch.equal(bare(module)(x), function(x, module.normalized_shape, eps=module.eps))
        except Exception:  # what does not run on the probe is called as a module
            same = False
        _probed[key] = known if same else None
    return _probed[key]


def norm_semantics(module: nn.Module) -> NormSemantics | None:
    """What one of these norms computes, for rules that look for norms; its weights are read by :func:`readable`."""
    if full_name(type(module)) in _GROUP_NORMS:
        return _OF_GROUPS if untouched(module, type(module)) else None
    if full_name(type(module)) in _CHANNEL_NORMS and getattr(module, "channel_first", True):
        return _OF_CHANNELS if untouched(module, type(module)) else None
    if not hasattr(module, "normalized_shape") or full_name(type(module)) in TABLE:
        return None  # torch's own reads its weights as they are, here as in any other library
    kind = norm_kind(module)
    return None if kind is None else _SEMANTICS[kind]


def weight_and_bias(module: Any, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Returns what a norm, of ``comfy.ops`` or of torch, computes with for an input ``x``: weight and bias, or None.

    What ComfyUI casts is copied, since it may use the memory again for the next layer; a norm has few weights.
    """
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    # Torch's own layers have none of these attributes.
    casts = any(getattr(module, name, ()) for name in ("comfy_cast_weights", "weight_function", "bias_function"))
    if (weight is None and bias is None) or not casts:
        return weight, bias
    import comfy.ops

    with comfy.ops.CastBiasWeightContext(module, x, offloadable=True) as (weight, bias):
        return None if weight is None else weight.clone(), None if bias is None else bias.clone()


def readable(module: Any, x: Tensor) -> tuple[Tensor | None, Tensor | None] | None:
    """Returns weight and bias of a norm as kernels can read them beside ``x``; None if they cannot."""
    return _if_plain(weight_and_bias(module, x), x)


def _gamma_and_bias(module: Any, x: Tensor) -> tuple[Tensor | None, Tensor | None] | None:
    """Weight and bias of a norm over channels as it casts them; None where kernels cannot read them."""
    found = [getattr(module, name, None) for name in ("gamma", "bias")]
    weight, bias = [None if p is None else p.to(device=x.device, dtype=x.dtype) for p in found]
    return _if_plain((weight, bias), x)


def _if_plain(parameters: tuple[Tensor | None, Tensor | None], x: Tensor) -> tuple[Tensor | None, Tensor | None] | None:
    in_float64 = x.dtype is torch.float64  # a reference, which the eager provider computes
    return parameters if in_float64 or all(p is None or plain(p, x.device) for p in parameters) else None


def _of_table(class_name: str, **changes: Any) -> NormSemantics:
    semantics = TABLE[class_name]
    assert isinstance(semantics, NormSemantics)
    return replace(semantics, **changes)


_SEMANTICS = {kind: _of_table(f"{_TORCH}.{name}", reader=readable) for name, kind in _KINDS.items()}
_WAN = "diffusers.models.autoencoders.autoencoder_kl_wan.WanRMS_norm"
_OF_CHANNELS = _of_table(_WAN, argument="x", dim=1, reader=_gamma_and_bias)
_OF_GROUPS = replace(GROUP_NORM, reader=readable)
NORM_SOURCES.append(norm_semantics)
