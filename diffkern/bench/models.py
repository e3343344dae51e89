"""Models in their published configurations, with random weights: a denoiser and the inputs of a step, a half of a VAE.

Nothing is downloaded. Where all layers of a model would need more memory or time than a comparison of steps is worth,
``layers`` says how many are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

#: Draws a tensor of the step's dtype on the step's device: ``randn(*shape)``.
Randn = Callable[..., Tensor]
#: Makes one argument of a step, or all of them.
Made = Callable[[Randn], Any]


@dataclass(frozen=True)
class Denoiser:
    """One denoiser and one of its steps, or one autoencoder and one call of a half of it.

    Attributes:
        class_name: Class in ``diffusers``.
        what: Model and size of the step, for tables.
        inputs: Makes the keyword arguments of a step; takes :data:`Randn`.
        config: Arguments of the class that differ from its defaults.
        layers: What cuts the model down, over ``config``, or nothing.
        half: ``"decode"`` or ``"encode"`` of an autoencoder, or "".
    """

    class_name: str
    what: str
    inputs: Made
    config: Mapping[str, Any] = field(default_factory=dict)
    layers: Mapping[str, int] = field(default_factory=dict)
    half: str = ""

    def build(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
        """Makes the model on ``device``, the same at every call, without gradients.

        Modules that ``from_pretrained`` keeps in float32 beside half dtypes are in float32, as for users.
        """
        import diffusers

        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.random.fork_rng(devices=[]), torch.device(device):
                torch.manual_seed(0)
                model: nn.Module = getattr(diffusers, self.class_name)(**{**self.config, **self.layers})
        finally:
            torch.set_default_dtype(default)
        wide = {*(getattr(model, "_keep_in_fp32_modules", None) or ())} if dtype.itemsize < 4 else set()

        def cast(path: str, tensor: Tensor) -> Tensor:
            floats = dtype if wide.isdisjoint(path.split(".")) else torch.float32
            return tensor.to(floats) if tensor.is_floating_point() else tensor

        for path, parameter in model.named_parameters():
            parameter.data = cast(path, parameter.data)
        for prefix, module in model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):  # which may be a view, and is another tensor then
                module._buffers[name] = cast(f"{prefix}.{name}", buffer)
        model.eval().requires_grad_(False)
        return Half(model, self.half) if self.half else model

    def injected(self, model: nn.Module) -> nn.Module:
        """What a user injects kernels into, of what :meth:`build` gives."""
        return model.autoencoder if isinstance(model, Half) else model

    def step(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
        """Makes fresh random arguments of one step."""
        return {**self.inputs(partial(torch.randn, device=device, dtype=dtype)), "return_dict": False}


def _image_ids(randn: Randn, side: int, axes: int) -> Tensor:
    """Positions of ``side x side`` image tokens on the last two of the first three axes."""
    ids = torch.zeros_like(randn(side * side, axes))
    place = torch.arange(side, device=ids.device, dtype=ids.dtype)
    ids[:, 1], ids[:, 2] = place.repeat_interleave(side), place.repeat(side)
    return ids


def step_of(
    shape: tuple[int, ...], time: float = 500.0, first: str = "hidden_states", **more: tuple[int, ...] | Made | int
) -> Made:
    """Makes a random tensor of this shape, one time step for each of its batch, and more: of a shape, or as it is."""

    def made(value: tuple[int, ...] | Made | int, randn: Randn) -> Any:
        return randn(*value) if isinstance(value, tuple) else value(randn) if callable(value) else value

    def inputs(randn: Randn) -> Mapping[str, Any]:
        others = {name: made(value, randn) for name, value in more.items()}
        return {first: randn(*shape), "timestep": torch.full_like(randn(shape[0]), time), **others}

    return inputs


def flux(channels: int, text: tuple[int, int], axes: int = 3, **more: Any) -> Made:
    """Packed latents of 1024x1024 as Flux and its relatives take them, and a text of so many tokens of this width."""
    ids: Mapping[str, Any] = {"img_ids": lambda randn: _image_ids(randn, 64, axes), "txt_ids": full(0, text[0], axes)}
    return step_of((1, 4096, channels), time=0.5, encoder_hidden_states=(1, *text), **ids, **more)


def full(value: float, *shape: int, dtype: torch.dtype | None = None) -> Made:
    """A tensor of one value."""
    return lambda randn: torch.full_like(randn(*shape), value, dtype=dtype)


def mask(*shape: int) -> Made:
    """A mask under which all tokens count."""
    return full(1, *shape, dtype=torch.bool)


def rotary(randn: Randn, tokens: int, dim: int, neighbours: bool) -> tuple[Tensor, Tensor]:
    """Cosines and sines of random angles, each for two numbers: ``neighbours``, or one of each half of a head."""
    angles = randn(tokens, dim // 2, dtype=torch.float32)
    angles = angles.repeat_interleave(2, -1) if neighbours else torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def _ltx(frames: int) -> Made:
    return step_of(
        (2, frames * 16 * 24, 128), encoder_hidden_states=(2, 128, 4096), encoder_attention_mask=full(1, 2, 128),
        rope_interpolation_scale=lambda randn: (0.32, 32.0, 32.0), num_frames=frames, height=16, width=24,
    )  # fmt: skip


def _unet(side: int, width: int, **added: tuple[int, ...]) -> Made:
    """Latents of this side and a text of this width, with and without the prompt."""
    more: Mapping[str, Any] = {"added_cond_kwargs": lambda randn: {n: randn(*shape) for n, shape in added.items()}}
    text = (2, 77, width)
    return step_of((2, 4, side, side), first="sample", encoder_hidden_states=text, **(more if added else {}))


def _sdxl(side: int) -> Made:
    return _unet(side, 2048, text_embeds=(2, 1280), time_ids=(2, 6))


_FLUX = flux(64, (512, 4096), pooled_projections=(1, 768), guidance=full(3.5, 1))
_SDXL = {
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
_WAN = step_of((1, 16, 21, 60, 104), encoder_hidden_states=(1, 512, 4096))

#: How a model of the Hub reaches a command, as its messages say.
NO_DOWNLOAD = "Nothing is downloaded: for a model of the Hub, run `hf download` and pass the folder"
#: What ``diffkern bench step --model`` knows, by name.
DENOISERS: Mapping[str, Denoiser] = {
    "flux": Denoiser("FluxTransformer2DModel", "Flux.1-dev, 1024x1024", _FLUX, {"guidance_embeds": True}),
    "flux2": Denoiser(
        "Flux2Transformer2DModel",
        "Flux.2-dev, 1024x1024",
        flux(128, (512, 15360), axes=4, guidance=full(3.5, 1)),
        layers={"num_layers": 2, "num_single_layers": 12},
    ),
    "chroma": Denoiser(
        "ChromaTransformer2DModel",
        "Chroma, 1024x1024",
        flux(64, (512, 4096)),
        layers={"num_layers": 6, "num_single_layers": 12},
    ),
    "qwen": Denoiser(
        "QwenImageTransformer2DModel",
        "Qwen-Image, 1024x1024",
        step_of(
            (1, 4096, 64),
            time=0.5,
            encoder_hidden_states=(1, 128, 3584),
            encoder_hidden_states_mask=mask(1, 128),
            img_shapes=lambda randn: [[(1, 64, 64)]],
        ),
        layers={"num_layers": 12},
    ),
    "sd3": Denoiser(
        "SD3Transformer2DModel",
        "Stable Diffusion 3 medium, 1024x1024, CFG",
        step_of((2, 16, 128, 128), encoder_hidden_states=(2, 333, 4096), pooled_projections=(2, 2048)),
        {
            "sample_size": 128,
            "num_layers": 24,
            "num_attention_heads": 24,
            "caption_projection_dim": 1536,
            "pos_embed_max_size": 192,
        },
    ),
    "sana": Denoiser(
        "SanaTransformer2DModel",
        "Sana 1.6B, 1024x1024, CFG",
        step_of((2, 32, 32, 32), encoder_hidden_states=(2, 300, 2304), encoder_attention_mask=full(1, 2, 300)),
    ),
    "z_image": Denoiser(
        "ZImageTransformer2DModel",
        "Z-Image, 1024x1024",
        lambda randn: {
            "x": [randn(16, 1, 128, 128)],
            "t": torch.full_like(randn(1), 0.5),
            "cap_feats": [randn(32, 2560)],
        },
        layers={"n_layers": 10},
    ),
    "lumina2": Denoiser(
        "Lumina2Transformer2DModel",
        "Lumina 2, 1024x1024, CFG",
        step_of((2, 16, 128, 128), time=0.5, encoder_hidden_states=(2, 256, 2304), encoder_attention_mask=mask(2, 256)),
        {"cap_feat_dim": 2304},
        layers={"num_layers": 10},
    ),
    "wan": Denoiser(
        "WanTransformer3DModel",
        "Wan 2.1 1.3B, 480x832, 81 frames",
        _WAN,
        {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
    ),
    "wan_14b": Denoiser("WanTransformer3DModel", "Wan 2.1 14B, 480x832, 81 frames", _WAN, layers={"num_layers": 10}),
    "hunyuan_video": Denoiser(
        "HunyuanVideoTransformer3DModel",
        "HunyuanVideo, 544x960, 33 frames",
        step_of(
            (1, 16, 9, 68, 120),
            encoder_hidden_states=(1, 256, 4096),
            encoder_attention_mask=mask(1, 256),
            pooled_projections=(1, 768),
            guidance=full(6000, 1),
        ),
        layers={"num_layers": 4, "num_single_layers": 8},
    ),
    "cogvideox": Denoiser(
        "CogVideoXTransformer3DModel",
        "CogVideoX-5B, 480x720, 49 frames, CFG",
        step_of(
            (2, 13, 16, 60, 90),
            encoder_hidden_states=(2, 226, 4096),
            image_rotary_emb=lambda randn: rotary(randn, 17550, 64, neighbours=True),
        ),
        {"num_attention_heads": 48, "use_rotary_positional_embeddings": True},
        layers={"num_layers": 10},
    ),
    "sdxl": Denoiser("UNet2DConditionModel", "SDXL, 1024x1024, CFG", _sdxl(128), _SDXL),
    "sdxl_512": Denoiser("UNet2DConditionModel", "SDXL, 512x512, CFG", _sdxl(64), _SDXL),
    "sd15": Denoiser(
        "UNet2DConditionModel",
        "Stable Diffusion 1.5, 512x512, CFG",
        _unet(64, 768),
        {"cross_attention_dim": 768},
    ),
    "ltx": Denoiser("LTXVideoTransformer3DModel", "LTX-Video 2B, 512x768, 49 frames, CFG", _ltx(7)),
    "ltx_long": Denoiser("LTXVideoTransformer3DModel", "LTX-Video 2B, 512x768, 161 frames, CFG", _ltx(21)),
}


# --- autoencoders: one decode, or one encode ------------------------------------------------------------------


class Half(nn.Module):
    """Decodes or encodes with an autoencoder, as pipelines do, when it is called."""

    def __init__(self, autoencoder: nn.Module, method: str) -> None:
        super().__init__()
        self.autoencoder, self.method = autoencoder, method

    def forward(self, x: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        """The decoded image or video, or the parameters of the distribution of its latents."""
        result = getattr(self.autoencoder, self.method)(x, return_dict=return_dict)[0]
        return (result if isinstance(result, Tensor) else result.parameters,)


def _sample(*shape: int) -> Made:
    return lambda randn: {"x": randn(*shape)}


_KL: Mapping[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
}
_KL_16: Mapping[str, Any] = {**_KL, "latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}

_COGVIDEOX: Mapping[str, Any] = {
    "block_out_channels": (128, 256, 256, 512),
    "layers_per_block": 3,
    "latent_channels": 16,
    "down_block_types": ("CogVideoXDownBlock3D",) * 4,
    "up_block_types": ("CogVideoXUpBlock3D",) * 4,
}


def _both(
    name: str, class_name: str, what: str, latents: tuple[int, ...], pixels: tuple[int, ...], config: Mapping[str, Any]
) -> dict[str, Denoiser]:
    """The decode of latents and the encode of pixels of one size."""
    size = "x".join(map(str, pixels[-2:])) + (f", {pixels[2]} frames" if len(pixels) == 5 and pixels[2] > 1 else "")
    return {
        f"{name}_vae{suffix}": Denoiser(class_name, f"VAE of {what}, {half} {size}", _sample(*shape), config, half=half)
        for suffix, half, shape in (("", "decode", latents), ("_encode", "encode", pixels))
    }


#: What ``diffkern bench step --model`` knows beyond denoisers, by name.
AUTOENCODERS: Mapping[str, Denoiser] = {
    **_both("sdxl", "AutoencoderKL", "SDXL", (1, 4, 128, 128), (1, 3, 1024, 1024), _KL),
    **_both("sd15", "AutoencoderKL", "Stable Diffusion 1.5", (1, 4, 64, 64), (1, 3, 512, 512), _KL),
    **_both("flux", "AutoencoderKL", "Flux.1", (1, 16, 128, 128), (1, 3, 1024, 1024), _KL_16),
    **_both("wan", "AutoencoderKLWan", "Wan 2.1", (1, 16, 5, 60, 104), (1, 3, 17, 480, 832), {}),
    **_both("qwen", "AutoencoderKLQwenImage", "Qwen-Image", (1, 16, 1, 128, 128), (1, 3, 1, 1024, 1024), {}),
    **_both("hunyuan_video", "AutoencoderKLHunyuanVideo", "HunyuanVideo", (1, 16, 5, 32, 32), (1, 3, 17, 256, 256), {}),
    **_both("cogvideox", "AutoencoderKLCogVideoX", "CogVideoX", (1, 16, 3, 60, 90), (1, 3, 9, 480, 720), _COGVIDEOX),
    **_both("ltx", "AutoencoderKLLTXVideo", "LTX-Video", (1, 128, 7, 16, 24), (1, 3, 49, 512, 768), {}),
    **_both("ltx2", "AutoencoderKLLTX2Video", "LTX-2", (1, 128, 3, 16, 24), (1, 3, 17, 512, 768), {}),
}
