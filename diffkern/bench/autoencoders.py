"""Autoencoders in their published configurations, with random weights: one decode, or one encode.

Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from diffkern.bench.models import Denoiser, Randn


class Half(nn.Module):
    """Decodes or encodes with an autoencoder, as pipelines do, when it is called.

    Attributes:
        autoencoder: The model.
        method: ``"decode"`` or ``"encode"``.
    """

    def __init__(self, autoencoder: nn.Module, method: str) -> None:
        super().__init__()
        self.autoencoder, self.method = autoencoder, method

    def forward(self, x: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        """The decoded image or video, or the parameters of the distribution of its latents."""
        result = getattr(self.autoencoder, self.method)(x, return_dict=return_dict)[0]
        return (result if isinstance(result, Tensor) else result.parameters,)


@dataclass(frozen=True)
class Autoencoder(Denoiser):
    """One autoencoder, and one call of a half of it.

    Attributes:
        method: ``"decode"`` or ``"encode"``.
    """

    method: str = "decode"

    @override
    def build(self, device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> nn.Module:
        return Half(super().build(device, dtype, seed), self.method)

    @override
    def injected(self, model: nn.Module) -> nn.Module:
        return model.autoencoder  # type: ignore[return-value]


def _sample(*shape: int) -> Callable[[Randn], Mapping[str, Any]]:
    return lambda randn: {"x": randn(*shape)}


_KL: Mapping[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
}
_FLUX: Mapping[str, Any] = {**_KL, "latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}

_COGVIDEOX: Mapping[str, Any] = {
    "block_out_channels": (128, 256, 256, 512),
    "layers_per_block": 3,
    "latent_channels": 16,
    "down_block_types": ("CogVideoXDownBlock3D",) * 4,
    "up_block_types": ("CogVideoXUpBlock3D",) * 4,
}


def _both(
    name: str, class_name: str, what: str, latents: tuple[int, ...], pixels: tuple[int, ...], config: Mapping[str, Any]
) -> dict[str, Autoencoder]:
    """The decode of latents and the encode of pixels of one size."""
    size = "x".join(map(str, pixels[-2:])) + (f", {pixels[2]} frames" if len(pixels) == 5 and pixels[2] > 1 else "")
    return {
        f"{name}_vae": Autoencoder(class_name, f"VAE of {what}, decode {size}", _sample(*latents), config),
        f"{name}_vae_encode": Autoencoder(
            class_name, f"VAE of {what}, encode {size}", _sample(*pixels), config, method="encode"
        ),
    }


#: What ``diffkern bench step --model`` knows beyond denoisers, by name.
AUTOENCODERS: Mapping[str, Autoencoder] = {
    **_both("sdxl", "AutoencoderKL", "SDXL", (1, 4, 128, 128), (1, 3, 1024, 1024), _KL),
    **_both("sd15", "AutoencoderKL", "Stable Diffusion 1.5", (1, 4, 64, 64), (1, 3, 512, 512), _KL),
    **_both("flux", "AutoencoderKL", "Flux.1", (1, 16, 128, 128), (1, 3, 1024, 1024), _FLUX),
    **_both("wan", "AutoencoderKLWan", "Wan 2.1", (1, 16, 5, 60, 104), (1, 3, 17, 480, 832), {}),
    **_both("qwen", "AutoencoderKLQwenImage", "Qwen-Image", (1, 16, 1, 128, 128), (1, 3, 1, 1024, 1024), {}),
    **_both("hunyuan_video", "AutoencoderKLHunyuanVideo", "HunyuanVideo", (1, 16, 5, 32, 32), (1, 3, 17, 256, 256), {}),
    **_both("cogvideox", "AutoencoderKLCogVideoX", "CogVideoX", (1, 16, 3, 60, 90), (1, 3, 9, 480, 720), _COGVIDEOX),
    **_both("ltx", "AutoencoderKLLTXVideo", "LTX-Video", (1, 128, 7, 16, 24), (1, 3, 49, 512, 768), {}),
    **_both("ltx2", "AutoencoderKLLTX2Video", "LTX-2", (1, 128, 3, 16, 24), (1, 3, 17, 512, 768), {}),
}
