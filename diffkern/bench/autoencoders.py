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

#: What ``diffkern bench step --model`` knows beyond denoisers, by name.
AUTOENCODERS: Mapping[str, Autoencoder] = {
    "sdxl_vae": Autoencoder("AutoencoderKL", "VAE of SDXL, decode 1024x1024", _sample(1, 4, 128, 128), _KL),
    "sdxl_vae_encode": Autoencoder(
        "AutoencoderKL", "VAE of SDXL, encode 1024x1024", _sample(1, 3, 1024, 1024), _KL, method="encode"
    ),
    "sd15_vae": Autoencoder("AutoencoderKL", "VAE of Stable Diffusion 1.5, decode 512x512", _sample(1, 4, 64, 64), _KL),
    "flux_vae": Autoencoder("AutoencoderKL", "VAE of Flux.1, decode 1024x1024", _sample(1, 16, 128, 128), _FLUX),
    "wan_vae": Autoencoder("AutoencoderKLWan", "VAE of Wan 2.1, decode 480x832, 17 frames", _sample(1, 16, 5, 60, 104)),
    "wan_vae_encode": Autoencoder(
        "AutoencoderKLWan", "VAE of Wan 2.1, encode 480x832, 17 frames", _sample(1, 3, 17, 480, 832), method="encode"
    ),
    "qwen_vae": Autoencoder(
        "AutoencoderKLQwenImage", "VAE of Qwen-Image, decode 1024x1024", _sample(1, 16, 1, 128, 128)
    ),
    "hunyuan_video_vae": Autoencoder(
        "AutoencoderKLHunyuanVideo", "VAE of HunyuanVideo, decode 256x256, 17 frames", _sample(1, 16, 5, 32, 32)
    ),
    "cogvideox_vae": Autoencoder(
        "AutoencoderKLCogVideoX",
        "VAE of CogVideoX, decode 480x720, 9 frames",
        _sample(1, 16, 3, 60, 90),
        {
            "block_out_channels": (128, 256, 256, 512),
            "layers_per_block": 3,
            "latent_channels": 16,
            "down_block_types": ("CogVideoXDownBlock3D",) * 4,
            "up_block_types": ("CogVideoXUpBlock3D",) * 4,
        },
    ),
    "ltx_vae": Autoencoder(
        "AutoencoderKLLTXVideo", "VAE of LTX-Video, decode 512x768, 49 frames", _sample(1, 128, 7, 16, 24)
    ),
    "ltx2_vae": Autoencoder(
        "AutoencoderKLLTX2Video", "VAE of LTX-2, decode 512x768, 17 frames", _sample(1, 128, 3, 16, 24)
    ),
}
