"""Pipelines whose denoiser is a UNet."""

from __future__ import annotations

from typing import Any

from diffusers import (
    DDIMScheduler,
    EulerDiscreteScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)

from tests.pipelines.autoencoders import image_vae
from tests.pipelines.text_encoders import clip_encoder, clip_encoder_with_projection
from tests.pipelines.tokenizers import clip_tokenizer

_NOISE: dict[str, Any] = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
_BLOCKS: dict[str, Any] = {
    "block_out_channels": (32, 64),
    "sample_size": 16,
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
}


def sd15() -> tuple[StableDiffusionPipeline, dict[str, Any]]:
    """Stable Diffusion 1.5."""
    tokenizer = clip_tokenizer()
    unet = UNet2DConditionModel(layers_per_block=1, cross_attention_dim=32, attention_head_dim=8, **_BLOCKS)
    pipe = StableDiffusionPipeline(
        vae=image_vae(),
        text_encoder=clip_encoder(len(tokenizer)),
        tokenizer=tokenizer,
        unet=unet,
        scheduler=DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1, **_NOISE),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    return pipe, {"prompt": "a cat", "guidance_scale": 6.0, "height": 32, "width": 32}


def sdxl() -> tuple[StableDiffusionXLPipeline, dict[str, Any]]:
    """Stable Diffusion XL."""
    tokenizer = clip_tokenizer()
    unet = UNet2DConditionModel(
        layers_per_block=1,
        cross_attention_dim=64,
        attention_head_dim=(2, 4),
        transformer_layers_per_block=(1, 2),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=80,
        **_BLOCKS,
    )
    pipe = StableDiffusionXLPipeline(
        vae=image_vae(),
        text_encoder=clip_encoder(len(tokenizer)),
        text_encoder_2=clip_encoder_with_projection(len(tokenizer)),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=unet,
        scheduler=EulerDiscreteScheduler(timestep_spacing="leading", steps_offset=1, **_NOISE),
        add_watermarker=False,
    )
    return pipe, {"prompt": "a cat", "guidance_scale": 5.0, "height": 32, "width": 32}
