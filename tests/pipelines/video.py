"""Video pipelines."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AutoencoderKLCogVideoX,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLLTXVideo,
    AutoencoderKLMochi,
    AutoencoderKLWan,
    CogVideoXDDIMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    LTXPipeline,
    LTXVideoTransformer3DModel,
    MochiPipeline,
    MochiTransformer3DModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)

from tests.pipelines.text_encoders import clip_encoder, llama_encoder, t5_encoder, umt5_encoder
from tests.pipelines.tokenizers import clip_tokenizer, llama_tokenizer, t5_tokenizer


def ltx() -> tuple[LTXPipeline, dict[str, Any]]:
    """LTX-Video: weightless block norms, QK norm across heads."""
    tokenizer = t5_tokenizer()
    transformer = LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=32,
    )
    vae = AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        patch_size=1,
        patch_size_t=1,
    )
    pipe = LTXPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=t5_encoder(len(tokenizer)),
        tokenizer=tokenizer,
        transformer=transformer,
    )
    return pipe, {
        "prompt": "a cat",
        "negative_prompt": "",
        "height": 32,
        "width": 32,
        "num_frames": 9,
        "guidance_scale": 3.0,
        "max_sequence_length": 16,
    }


def wan() -> tuple[WanPipeline, dict[str, Any]]:
    """Wan 2.1: norms in float32 whatever the model's dtype, channel-first norms in the VAE."""
    tokenizer = t5_tokenizer()
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=256,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        rope_max_seq_len=32,
    )
    vae = AutoencoderKLWan(
        base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    pipe = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=umt5_encoder(len(tokenizer)),
        vae=vae,
        scheduler=UniPCMultistepScheduler(flow_shift=3.0, prediction_type="flow_prediction", use_flow_sigmas=True),
        transformer=transformer,
    )
    return pipe, {
        "prompt": "a cat",
        "negative_prompt": "bad",
        "height": 16,
        "width": 16,
        "num_frames": 9,
        "guidance_scale": 5.0,
        "max_sequence_length": 16,
    }


def cogvideox() -> tuple[CogVideoXPipeline, dict[str, Any]]:
    """CogVideoX with rotary embeddings."""
    tokenizer = t5_tokenizer()
    transformer = CogVideoXTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=2,
        text_embed_dim=32,
        num_layers=2,
        sample_width=2,
        sample_height=2,
        sample_frames=9,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=16,
        use_rotary_positional_embeddings=True,
    )
    vae = AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        temporal_compression_ratio=4,
    )
    pipe = CogVideoXPipeline(
        tokenizer=tokenizer,
        text_encoder=t5_encoder(len(tokenizer)),
        vae=vae,
        transformer=transformer,
        scheduler=CogVideoXDDIMScheduler(),
    )
    return pipe, {
        "prompt": "a cat",
        "negative_prompt": "",
        "guidance_scale": 6.0,
        "height": 16,
        "width": 16,
        "num_frames": 8,
        "max_sequence_length": 16,
    }


def hunyuan_video() -> tuple[HunyuanVideoPipeline, dict[str, Any]]:
    """HunyuanVideo: token refiner, double and single blocks, Llama as text encoder."""
    llama, clip = llama_tokenizer(), clip_tokenizer()
    transformer = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=1,
        patch_size_t=1,
        guidance_embeds=True,
        text_embed_dim=16,
        pooled_projection_dim=32,
        rope_axes_dim=(2, 4, 4),
    )
    vae = AutoencoderKLHunyuanVideo(
        latent_channels=4,
        down_block_types=("HunyuanVideoDownBlock3D",) * 4,
        up_block_types=("HunyuanVideoUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        scaling_factor=0.476986,
        spatial_compression_ratio=8,
        temporal_compression_ratio=4,
    )
    pipe = HunyuanVideoPipeline(
        text_encoder=llama_encoder(len(llama)),
        tokenizer=llama,
        transformer=transformer,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=clip_encoder(len(clip)),
        tokenizer_2=clip,
    )
    return pipe, {
        "prompt": "a cat",
        "prompt_template": {"template": "{}", "crop_start": 0},
        "guidance_scale": 4.5,
        "height": 16,
        "width": 16,
        "num_frames": 9,
        "max_sequence_length": 16,
    }


def mochi() -> tuple[MochiPipeline, dict[str, Any]]:
    """Mochi: norms that multiply in float32, GroupNorm in chunks of frames."""
    tokenizer = t5_tokenizer()
    transformer = MochiTransformer3DModel(
        patch_size=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=12,
        qk_norm="rms_norm",
        text_embed_dim=32,
        time_embed_dim=4,
        activation_fn="swiglu",
        max_sequence_length=16,
    )
    vae = AutoencoderKLMochi(
        latent_channels=12,
        out_channels=3,
        encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32),
        layers_per_block=(1, 1, 1, 1, 1),
    )
    pipe = MochiPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=t5_encoder(len(tokenizer)),
        tokenizer=tokenizer,
        transformer=transformer,
        force_zeros_for_empty_prompt=False,
    )
    return pipe, {
        "prompt": "a cat",
        "negative_prompt": "",
        "guidance_scale": 4.5,
        "height": 16,
        "width": 16,
        "num_frames": 7,
        "max_sequence_length": 16,
    }
