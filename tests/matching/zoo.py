"""Every served norm class in its variants, with random parameters, and what each computes in float64.

The formulas here are written from the sources of the classes, not from the tables under test.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from diffkern.matching import TABLE, NormSemantics

SIZE = 96  # Not a power of 4, whose root would multiply without rounding.

SERVED = sorted(name for name, entry in TABLE.items() if isinstance(entry, NormSemantics))

_WAN_LIKE = (
    "HunyuanImageRefinerRMS_norm",
    "HunyuanVideo15RMS_norm",
    "QwenImage21RMS_norm",
    "QwenImageRMS_norm",
    "WanRMS_norm",
)
_LAYER_NORMS = ("LayerNorm", "FP32LayerNorm", "SDCascadeLayerNorm", "WuerstchenLayerNorm")
_ZERO_CENTRED = (
    "GemmaRMSNorm",
    "Gemma2RMSNorm",
    "Gemma3RMSNorm",
    "Krea2RMSNorm",
    "Qwen3_5RMSNorm",
    "QwenImage21ZeroCenterRMSNorm",
    "T5GemmaRMSNorm",
    "T5Gemma2RMSNorm",
)
_CHANNELS = (
    "Kandinsky6SRLatentUpscalerRMSNorm",
    "Kandinsky6VAERMSNorm",
    "LTX2AudioPixelNorm",
    "PerChannelRMSNorm",
    "SDCascadeLayerNorm",
    "WuerstchenLayerNorm",
)


def load(name: str) -> type[nn.Module]:
    """Imports a class by its full name."""
    module, _, qualname = name.rpartition(".")
    cls: type[nn.Module] = getattr(importlib.import_module(module), qualname)
    return cls


@dataclass(frozen=True)
class Specimen:
    """One class, built in one way.

    Attributes:
        name: Full name of the class.
        args: Arguments of the constructor.
        shape: Shape of an input with at least 64 normalised vectors.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] = (3, 5, 7, SIZE)

    def __str__(self) -> str:
        parts = (*map(str, self.args), *(f"{key}={value}" for key, value in self.kwargs.items()))
        library = self.name.partition(".")[0]
        return f"{library}.{self.name.rpartition('.')[2]}({', '.join(parts)})"

    def build(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Module:
        """Builds it with parameters that are neither all one nor all zero."""
        module = load(self.name)(*self.args, **self.kwargs)
        generator = torch.Generator().manual_seed(1)
        for parameter in module.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5 + 0.7
        return module.to(device, dtype).requires_grad_(False)

    def reference(self, module: nn.Module, x: Tensor) -> Tensor:
        """The result in float64, from the values of the parameters as they are."""
        short = self.name.rpartition(".")[2]
        x = x.double()
        weight = getattr(module, "weight", getattr(module, "gamma", None))
        bias = getattr(module, "bias", None)
        channels = short in _CHANNELS or (short in _WAN_LIKE and module.channel_first)
        dims: tuple[int, ...] = (1,) if channels else (-1,)
        if isinstance(getattr(module, "normalized_shape", None), tuple) and not channels:
            dims = tuple(range(-len(module.normalized_shape), 0))
        if short in _LAYER_NORMS:
            x = x - x.mean(dims, keepdim=True)
            y = x / (x.square().mean(dims, keepdim=True) + module.eps).sqrt()
        elif short in _WAN_LIKE or short.startswith("Kandinsky6"):
            length = x.square().sum(dims, keepdim=True).sqrt()
            y = x / length.clamp_min(1e-12) * x.shape[dims[0]] ** 0.5
        else:
            eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
            eps = torch.finfo(torch.float32).eps if eps is None else eps
            y = x / (x.square().mean(dims, keepdim=True) + eps).sqrt()
        if isinstance(weight, Tensor):
            y = y * (_along(weight, channels, x) + (1.0 if short in _ZERO_CENTRED else 0.0))
        return y + _along(bias, channels, x) if isinstance(bias, Tensor) else y


def _along(parameter: Tensor, channels: bool, x: Tensor) -> Tensor:
    parameter = parameter.double()
    return parameter.reshape(1, -1, *(1,) * (x.ndim - 2)) if channels else parameter


def random_input(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Samples of different scales around a mean that is not zero."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(shape, generator=generator) + 0.3
    scale = torch.exp2(torch.linspace(-3, 3, shape[0])).reshape(-1, *(1,) * (len(shape) - 1))
    return (x * scale).to(device, dtype)


def specimens() -> Iterator[Specimen]:
    """Yields every served class in every variant of its constructor that changes what it computes."""
    image, video = (3, SIZE, 6, 5), (3, SIZE, 3, 4, 5)
    for name in SERVED:
        short = name.rpartition(".")[2]
        if short in _WAN_LIKE:
            for bias in (False, True):
                yield Specimen(name, (SIZE,), {"images": True, "bias": bias}, image)
                yield Specimen(name, (SIZE,), {"images": False, "bias": bias}, video)
            yield Specimen(name, (SIZE,), {"channel_first": False, "bias": True})
        elif short.startswith("Kandinsky6"):
            yield Specimen(name, (SIZE,), shape=video)
        elif short in ("PerChannelRMSNorm", "LTX2AudioPixelNorm"):
            yield Specimen(name, (), shape=image)
            yield Specimen(name, (), shape=video)
        elif short in ("SDCascadeLayerNorm", "WuerstchenLayerNorm"):
            yield Specimen(name, (SIZE,), {"eps": 1e-6}, image)
            yield Specimen(name, (SIZE,), {"eps": 1e-6, "elementwise_affine": False}, image)
        elif short in ("LayerNorm", "FP32LayerNorm"):
            yield Specimen(name, (SIZE,))
            yield Specimen(name, (SIZE,), {"elementwise_affine": False})
            yield Specimen(name, (SIZE,), {"bias": False})
            yield Specimen(name, ((7, SIZE),), shape=(70, 7, SIZE))
            yield Specimen(name, ((7, SIZE),), {"elementwise_affine": False}, shape=(70, 7, SIZE))
        elif name == "torch.nn.modules.normalization.RMSNorm":
            yield Specimen(name, (SIZE, 1e-5))
            yield Specimen(name, (SIZE, None))
            yield Specimen(name, (SIZE, 1e-6), {"elementwise_affine": False})
            yield Specimen(name, ((7, SIZE), 1e-6), shape=(70, 7, SIZE))
            yield Specimen(name, ((7, SIZE), None), {"elementwise_affine": False}, shape=(70, 7, SIZE))
        elif name == "diffusers.models.normalization.RMSNorm":
            yield Specimen(name, (SIZE, 1e-6))
            yield Specimen(name, (SIZE, 1e-6), {"bias": True})
            yield Specimen(name, (SIZE, 1e-6), {"elementwise_affine": False})
            yield Specimen(name, (0, 1e-6), {"elementwise_affine": False})
        elif short == "MochiRMSNorm":
            yield Specimen(name, (SIZE, 1e-6))
            yield Specimen(name, (SIZE, 1e-6), {"elementwise_affine": False})
        elif short == "StableAudio3RMSNorm":
            yield Specimen(name, (SIZE,))
            yield Specimen(name, (SIZE,), {"force_fp32": False})
        elif short.startswith(("Gemma3n", "Gemma4", "DiffusionGemma")):
            yield Specimen(name, (SIZE,))
            yield Specimen(name, (SIZE,), {"with_scale": False})
        else:
            yield Specimen(name, (SIZE, 1e-6))
