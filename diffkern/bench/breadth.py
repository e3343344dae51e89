"""Every denoiser of diffusers at its real width with two layers of each kind: ``diffkern bench step --all``.

Heads, widths and tokens are those of the published model that ``what`` names, the layers are few, so that all of them
fit the time of one run. Images have 4,096 tokens where nothing else is said, videos 2,700 to 33,000.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from diffkern.bench import models
from diffkern.bench.arms import COMPILED, FAST, FAST_COMPILED, STOCK
from diffkern.bench.models import Denoiser, Made, Randn, flux, full, mask, rotary, step_of

#: What ``--all`` compares unless arms are named.
ARMS = (STOCK, COMPILED, FAST, FAST_COMPILED)

_TWO: Mapping[str, int] = {"num_layers": 2}
_BOTH: Mapping[str, int] = {"num_layers": 2, "num_single_layers": 2}


def _positions(*shape: int) -> Made:
    """The places of tokens: 0, 1, ... along the last axis."""
    return lambda randn: torch.arange(shape[-1], device=randn(1).device).expand(shape)


def _allegro_rotary(randn: Randn) -> Any:
    """Tables for each axis of 4 x 45 x 80 tokens, and where on it each token is."""
    axes = [torch.arange(size, device=randn(1).device) for size in (4, 45, 80)]
    grid = tuple(axis.reshape(1, -1) for axis in torch.meshgrid(*axes, indexing="ij"))
    return tuple(rotary(randn, len(axis), 32, neighbours=False) for axis in axes), grid


def _kandinsky(randn: Randn) -> Mapping[str, Any]:
    axes = [_positions(size)(randn) for size in (9, 32, 48)]
    text = step_of((1, 9, 64, 96, 33), encoder_hidden_states=(1, 256, 3584), pooled_projections=(1, 768))
    return {**text(randn), "visual_rope_pos": axes, "text_rope_pos": _positions(256)(randn)}


def _hidream(randn: Randn) -> Mapping[str, Any]:
    given = step_of(
        (1, 16, 128, 128), encoder_hidden_states_t5=(1, 128, 4096), encoder_hidden_states_llama3=(32, 1, 128, 4096),
        pooled_embeds=(1, 2048),
    )(randn)  # fmt: skip
    return {"timesteps" if name == "timestep" else name: value for name, value in given.items()}


_SIZES: Mapping[str, Any] = {name: full(1024, 2, 2) for name in ("original_size", "target_size", "crop_coords")}
_T5_IMAGE: Mapping[str, Any] = {"encoder_hidden_states": (1, 512, 4096), "encoder_hidden_states_image": (1, 257, 1280)}
_WAN_I2V = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
#: Names of :data:`diffkern.bench.models.DENOISERS`, by the layers that are kept of the models.
_KNOWN: tuple[tuple[Mapping[str, int], tuple[str, ...]], ...] = (
    (_BOTH, ("flux", "flux2", "chroma", "hunyuan_video")),
    (_TWO, ("qwen", "sd3", "sana", "lumina2", "wan", "cogvideox", "ltx")),
    ({"n_layers": 2}, ("z_image",)),
    ({"transformer_layers_per_block": 2}, ("sdxl",)),
    ({}, ("sd15",)),
)
#: Every other class that is whole.
_WHOLE = {
    "unet2d": Denoiser(
        "UNet2DModel",
        "DDPM CelebA-HQ, 256x256, 4 images",
        step_of((4, 3, 256, 256), first="sample"),
        {"block_out_channels": (128, 128, 256, 256, 512, 512), "attention_head_dim": None,
         "down_block_types": (*["DownBlock2D"] * 4, "AttnDownBlock2D", "DownBlock2D"),
         "up_block_types": ("UpBlock2D", "AttnUpBlock2D", *["UpBlock2D"] * 4)},
    ),
    "unet3d": Denoiser(
        "UNet3DConditionModel",
        "ModelScope 1.7B, 256x256, 16 frames, CFG",
        step_of((2, 4, 16, 32, 32), first="sample", encoder_hidden_states=(2, 77, 1024)),
    ),
}  # fmt: skip
#: Every other class, of which two layers are kept unless it says another number.
_CUT = {
    "allegro": Denoiser(
        "AllegroTransformer3DModel",
        "Allegro, 720x1280, 13 frames",
        step_of(
            (1, 4, 4, 90, 160), encoder_hidden_states=(1, 1, 512, 4096), encoder_attention_mask=full(1, 1, 512),
            attention_mask=full(1, 1, 4, 90, 160), image_rotary_emb=_allegro_rotary,
        ),
    ),
    "anyflow": Denoiser(
        "AnyFlowTransformer3DModel",
        "AnyFlow 14B, 480x832, 33 frames",
        step_of(
            (1, 9, 16, 60, 104), timestep=full(500, 1, 9), r_timestep=full(400, 1, 9),
            encoder_hidden_states=(1, 512, 4096),
        ),
    ),
    "auraflow": Denoiser(
        "AuraFlowTransformer2DModel",
        "AuraFlow 0.3, 1024x1024, CFG",
        step_of((2, 4, 128, 128), time=0.5, encoder_hidden_states=(2, 256, 2048)),
        {"pos_embed_max_size": 9216},
        {"num_mmdit_layers": 2, "num_single_dit_layers": 2},
    ),
    "bria": Denoiser(
        "BriaTransformer2DModel", "Bria 3.2, 1024x1024", flux(64, (128, 4096)), layers=_BOTH
    ),
    "bria_fibo": Denoiser(
        "BriaFiboTransformer2DModel",
        "Bria Fibo, 1024x1024",
        flux(48, (1024, 4096), text_encoder_layers=lambda randn: [randn(1, 1024, 2048) for _ in range(4)]),
        {"in_channels": 48},
        _BOTH,
    ),
    "chronoedit": Denoiser(
        "ChronoEditTransformer3DModel",
        "ChronoEdit 14B, 720x1280, 5 frames",
        step_of((1, 36, 2, 90, 160), **_T5_IMAGE),
        _WAN_I2V,
    ),
    "cogview3": Denoiser(
        "CogView3PlusTransformer2DModel",
        "CogView3-Plus 3B, 1024x1024, CFG",
        step_of((2, 16, 128, 128), encoder_hidden_states=(2, 224, 4096), **_SIZES),
    ),
    "cogview4": Denoiser(
        "CogView4Transformer2DModel",
        "CogView4 6B, 1024x1024, CFG",
        step_of((2, 16, 128, 128), encoder_hidden_states=(2, 128, 4096), **_SIZES),
        {"num_attention_heads": 32, "attention_head_dim": 128},
    ),
    "cosmos": Denoiser(
        "CosmosTransformer3DModel",
        "Cosmos 1.0 7B, 704x1280, 25 frames",
        step_of((1, 16, 4, 88, 160), encoder_hidden_states=(1, 512, 1024), fps=30),
        {"concat_padding_mask": False},  # which torchvision would have to resize
    ),
    "dit": Denoiser(
        "DiTTransformer2DModel",
        "DiT-XL/2, 512x512, CFG",
        step_of(
            (2, 4, 64, 64), timestep=full(500, 2, dtype=torch.int64), class_labels=full(7, 2, dtype=torch.int64)
        ),
        {"sample_size": 64, "out_channels": 8},
    ),
    "easyanimate": Denoiser(
        "EasyAnimateTransformer3DModel",
        "EasyAnimate 5.1 12B, 384x672, 49 frames",
        step_of((1, 16, 13, 48, 84), encoder_hidden_states=(1, 256, 3584)),
        {"in_channels": 16, "out_channels": 16, "patch_size": 2, "add_norm_text_encoder": True},
    ),
    "ernie_image": Denoiser(
        "ErnieImageTransformer2DModel",
        "ERNIE-Image 8B, 1024x1024",
        step_of((1, 128, 64, 64), text_bth=(1, 256, 3072), text_lens=full(256, 1, dtype=torch.int64)),
        {"hidden_size": 4096, "num_attention_heads": 32, "ffn_hidden_size": 12288, "text_in_dim": 3072},
    ),
    "hidream": Denoiser(
        "HiDreamImageTransformer2DModel",
        "HiDream-I1, 1024x1024",
        _hidream,
        {"patch_size": 2, "in_channels": 16, "caption_channels": [4096, 4096], "axes_dims_rope": (64, 32, 32),
         "llama_layers": (0, 1, 2, 3)},
        _BOTH,
    ),
    "hunyuan_dit": Denoiser(
        "HunyuanDiT2DModel",
        "HunyuanDiT 1.2, 1024x1024, CFG",
        step_of(
            (2, 4, 128, 128), encoder_hidden_states=(2, 77, 1024), text_embedding_mask=full(1, 2, 77),
            encoder_hidden_states_t5=(2, 256, 2048), text_embedding_mask_t5=full(1, 2, 256),
            image_rotary_emb=lambda randn: rotary(randn, 4096, 88, neighbours=True),
        ),
        {"in_channels": 4, "patch_size": 2, "sample_size": 128, "hidden_size": 1408, "mlp_ratio": 4.3637,
         "use_style_cond_and_image_meta_size": False},
        {"num_layers": 6},  # the least of which two take a skip connection
    ),
    "hunyuan_image": Denoiser(
        "HunyuanImageTransformer2DModel",
        "HunyuanImage 2.1, 2048x2048",
        step_of(
            (1, 64, 64, 64), encoder_hidden_states=(1, 1000, 3584), encoder_attention_mask=mask(1, 1000),
            encoder_hidden_states_2=(1, 128, 1472), encoder_attention_mask_2=mask(1, 128),
        ),
        {"text_embed_2_dim": 1472},
        _BOTH,
    ),
    "hunyuan_video15": Denoiser(
        "HunyuanVideo15Transformer3DModel",
        "HunyuanVideo 1.5, 480x848, 33 frames",
        step_of(
            (1, 65, 9, 30, 53), encoder_hidden_states=(1, 1000, 3584), encoder_attention_mask=mask(1, 1000),
            encoder_hidden_states_2=(1, 256, 1472), encoder_attention_mask_2=mask(1, 256),
            image_embeds=(1, 729, 1152),
        ),
    ),
    "kandinsky5": Denoiser(
        "Kandinsky5Transformer3DModel",
        "Kandinsky 5.0 Lite 2B, 512x768, 33 frames",
        _kandinsky,
        {"in_visual_dim": 16, "out_visual_dim": 16, "model_dim": 1792, "ff_dim": 7168, "visual_cond": True},
        {"num_visual_blocks": 2},
    ),
    "latte": Denoiser(
        "LatteTransformer3DModel",
        "Latte-1, 512x512, 16 frames",
        step_of((1, 4, 16, 64, 64), encoder_hidden_states=(1, 120, 4096)),
        {"attention_head_dim": 72, "in_channels": 4, "out_channels": 8, "patch_size": 2, "caption_channels": 4096,
         "cross_attention_dim": 1152, "attention_bias": True, "activation_fn": "gelu-approximate",
         "norm_type": "ada_norm_single", "num_embeds_ada_norm": 1000, "norm_elementwise_affine": False,
         "norm_eps": 1e-6},
    ),
    "longcat_image": Denoiser(
        "LongCatImageTransformer2DModel", "LongCat-Image, 1024x1024", flux(64, (512, 3584)), layers=_BOTH
    ),
    "ltx2": Denoiser(
        "LTX2VideoTransformer3DModel",
        "LTX-2 19B, 512x768, 121 frames with sound",
        step_of(
            (1, 6144, 128), audio_hidden_states=(1, 126, 128), encoder_hidden_states=(1, 1024, 3840),
            audio_encoder_hidden_states=(1, 1024, 3840), encoder_attention_mask=full(1, 1, 1024),
            audio_encoder_attention_mask=full(1, 1, 1024), num_frames=16, height=16, width=24, audio_num_frames=126,
        ),
    ),
    "mochi": Denoiser(
        "MochiTransformer3DModel",
        "Mochi 1, 480x848, 43 frames",
        step_of((1, 12, 8, 60, 106), encoder_hidden_states=(1, 256, 4096), encoder_attention_mask=mask(1, 256)),
    ),
    "omnigen": Denoiser(
        "OmniGenTransformer2DModel",
        "OmniGen-v1, 1024x1024, CFG",
        step_of(
            (2, 4, 128, 128), time=0.5, input_ids=full(7, 2, 64, dtype=torch.int64), position_ids=_positions(2, 4161),
            input_img_latents=lambda randn: [], input_image_sizes=lambda randn: {},
            attention_mask=full(1, 2, 4161, 4161),
        ),
        {"rope_scaling": {"long_factor": [1.0] * 48, "short_factor": [1.0] * 48}},
    ),
    "ovis_image": Denoiser(
        "OvisImageTransformer2DModel", "Ovis-Image 7B, 1024x1024", flux(64, (256, 2048)), layers=_BOTH
    ),
    "pixart": Denoiser(
        "PixArtTransformer2DModel",
        "PixArt-Sigma, 1024x1024, CFG",
        step_of((2, 4, 128, 128), encoder_hidden_states=(2, 300, 4096), encoder_attention_mask=full(1, 2, 300)),
        {"caption_channels": 4096, "interpolation_scale": 2, "use_additional_conditions": False},
    ),
    "prior": Denoiser(
        "PriorTransformer",
        "Prior of Kandinsky 2.2, CFG",
        step_of(
            (2, 1280), proj_embedding=(2, 1280), encoder_hidden_states=(2, 77, 1280), attention_mask=mask(2, 77)
        ),
        {"embedding_dim": 1280},
    ),
    "prx": Denoiser(
        "PRXTransformer2DModel",
        "PRX 1.2B, 1024x1024, CFG",
        step_of((2, 16, 128, 128), time=0.5, encoder_hidden_states=(2, 256, 2304), attention_mask=mask(2, 256)),
        {"axes_dim": [32, 32]},
        {"depth": 2},
    ),
    "sana_video": Denoiser(
        "SanaVideoTransformer3DModel",
        "SANA-Video 2B, 480x832, 33 frames",
        step_of((1, 16, 9, 60, 104), encoder_hidden_states=(1, 300, 2304), encoder_attention_mask=full(1, 1, 300)),
        {"mlp_ratio": 3.0},
    ),
    "skyreels": Denoiser(
        "SkyReelsV2Transformer3DModel",
        "SkyReels V2 14B, 544x960, 25 frames",
        step_of((1, 16, 7, 68, 120), encoder_hidden_states=(1, 512, 4096)),
        {"num_attention_heads": 40, "ffn_dim": 13824},
    ),
    "stable_audio": Denoiser(
        "StableAudioDiTModel",
        "Stable Audio Open 1.0, 47 s, CFG",
        step_of(
            (2, 64, 1024), time=0.5, encoder_hidden_states=(2, 130, 768), global_hidden_states=(2, 1, 1536),
            rotary_embedding=lambda randn: rotary(randn, 1025, 32, neighbours=False),
        ),
    ),
    "wan_i2v": Denoiser(
        "WanTransformer3DModel",
        "Wan 2.1 14B of an image, 480x832, 33 frames",
        step_of((1, 36, 9, 60, 104), **_T5_IMAGE),
        _WAN_I2V,
    ),
    "wan_vace": Denoiser(
        "WanVACETransformer3DModel",
        "Wan 2.1 VACE 14B, 480x832, 33 frames",
        step_of((1, 16, 9, 60, 104), encoder_hidden_states=(1, 512, 4096), control_hidden_states=(1, 96, 9, 60, 104)),
        {"vace_layers": [0, 1]},
    ),
}  # fmt: skip

#: What ``diffkern bench step --all`` runs, by name.
BREADTH: Mapping[str, Denoiser] = {
    **{name: replace(models.DENOISERS[name], layers=layers) for layers, names in _KNOWN for name in names},
    **{name: replace(model, layers=model.layers or _TWO) for name, model in _CUT.items()},
    **_WHOLE,
}
