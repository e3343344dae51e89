"""Image pipelines whose denoiser is a transformer."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AutoencoderDC,
    AutoencoderKLQwenImage,
    DDIMScheduler,
    DiTPipeline,
    DiTTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    PixArtAlphaPipeline,
    PixArtTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)

from tests.pipelines.autoencoders import image_vae, shifted_image_vae
from tests.pipelines.text_encoders import (
    clip_encoder,
    clip_encoder_with_projection,
    gemma_encoder,
    qwen_encoder,
    t5_encoder,
)
from tests.pipelines.tokenizers import clip_tokenizer, gemma_tokenizer, qwen_tokenizer, t5_tokenizer


def flux() -> tuple[FluxPipeline, dict[str, Any]]:
    """Flux.1-dev: a double block and a single block, guidance embedded."""
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=shifted_image_vae(latent_channels=1),
        text_encoder=clip_encoder(len(clip)),
        tokenizer=clip,
        text_encoder_2=t5_encoder(len(t5)),
        tokenizer_2=t5,
        transformer=transformer,
    )
    return pipe, {
        "prompt": "a cat",
        "height": 16,
        "width": 16,
        "guidance_scale": 5.0,
        "max_sequence_length": 16,
    }


def sd3() -> tuple[StableDiffusion3Pipeline, dict[str, Any]]:
    """Stable Diffusion 3.5: QK norm, and dual attention in the first block."""
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    transformer = SD3Transformer2DModel(
        sample_size=32,
        patch_size=1,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
        qk_norm="rms_norm",
        dual_attention_layers=(0,),
    )
    pipe = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=shifted_image_vae(latent_channels=4),
        text_encoder=clip_encoder_with_projection(len(clip)),
        tokenizer=clip,
        text_encoder_2=clip_encoder_with_projection(len(clip)),
        tokenizer_2=clip,
        text_encoder_3=t5_encoder(len(t5)),
        tokenizer_3=t5,
    )
    return pipe, {
        "prompt": "a cat",
        "height": 16,
        "width": 16,
        "guidance_scale": 5.0,
        "max_sequence_length": 16,
    }


def qwenimage() -> tuple[QwenImagePipeline, dict[str, Any]]:
    """Qwen-Image, with true classifier-free guidance."""
    tokenizer = qwen_tokenizer()
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=16,
        guidance_embeds=False,
        axes_dims_rope=(8, 4, 4),
    )
    vae = AutoencoderKLQwenImage(
        base_dim=24,
        z_dim=4,
        dim_mult=[1, 2, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    pipe = QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=qwen_encoder(len(tokenizer)),
        tokenizer=tokenizer,
        transformer=transformer,
    )
    return pipe, {
        "prompt": "a cat",
        "negative_prompt": "bad quality",
        "true_cfg_scale": 1.5,
        "height": 32,
        "width": 32,
        "max_sequence_length": 16,
    }


def sana() -> tuple[SanaPipeline, dict[str, Any]]:
    """Sana: linear attention and a deep-compression autoencoder."""
    tokenizer = gemma_tokenizer()
    transformer = SanaTransformer2DModel(
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=8,
        sample_size=32,
    )
    vae = AutoencoderDC(
        in_channels=3,
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,
    )
    pipe = SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=gemma_encoder(len(tokenizer)),
        vae=vae,
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
    )
    return pipe, {
        "prompt": "a cat",
        "negative_prompt": "bad",  # an empty prompt would mask every token: NaN in float64
        "guidance_scale": 6.0,
        "height": 32,
        "width": 32,
        "max_sequence_length": 16,
        "complex_human_instruction": None,
        "use_resolution_binning": False,
    }


def pixart() -> tuple[PixArtAlphaPipeline, dict[str, Any]]:
    """PixArt-alpha: one modulation shared by all blocks."""
    tokenizer = t5_tokenizer()
    transformer = PixArtTransformer2DModel(
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=3,
        caption_channels=32,
        in_channels=4,
        cross_attention_dim=24,
        out_channels=8,
        attention_bias=True,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        norm_eps=1e-6,
        use_additional_conditions=False,
    )
    pipe = PixArtAlphaPipeline(
        tokenizer=tokenizer,
        text_encoder=t5_encoder(len(tokenizer)),
        vae=image_vae(),
        transformer=transformer,
        scheduler=DDIMScheduler(),
    )
    return pipe, {
        "prompt": "a cat",
        "guidance_scale": 5.0,
        "height": 16,
        "width": 16,
        "use_resolution_binning": False,
        "clean_caption": False,
        "max_sequence_length": 16,
    }


def dit() -> tuple[DiTPipeline, dict[str, Any]]:
    """DiT: classes instead of a prompt."""
    transformer = DiTTransformer2DModel(
        sample_size=16,
        num_layers=2,
        patch_size=4,
        attention_head_dim=8,
        num_attention_heads=2,
        in_channels=4,
        out_channels=8,
        attention_bias=True,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_zero",
        norm_elementwise_affine=False,
    )
    pipe = DiTPipeline(transformer=transformer, vae=image_vae(), scheduler=DDIMScheduler())
    return pipe, {"class_labels": [1], "guidance_scale": 4.0, "output_type": "np"}
