"""Real text encoders with two or three narrow layers."""

from __future__ import annotations

from typing import Any

from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Gemma2Config,
    Gemma2Model,
    LlamaConfig,
    LlamaModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

_T5_SIZES: dict[str, Any] = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
}


def t5_encoder(vocabulary_size: int) -> T5EncoderModel:
    """32 channels."""
    return T5EncoderModel(T5Config(vocab_size=vocabulary_size, **_T5_SIZES))


def umt5_encoder(vocabulary_size: int) -> UMT5EncoderModel:
    """32 channels."""
    return UMT5EncoderModel(UMT5Config(vocab_size=vocabulary_size, **_T5_SIZES))


def clip_encoder(vocabulary_size: int) -> CLIPTextModel:
    """32 channels, 32 pooled."""
    return CLIPTextModel(_clip_config(vocabulary_size, "quick_gelu"))


def clip_encoder_with_projection(vocabulary_size: int) -> CLIPTextModelWithProjection:
    """32 channels, 32 projected."""
    return CLIPTextModelWithProjection(_clip_config(vocabulary_size, "gelu"))


def llama_encoder(vocabulary_size: int) -> LlamaModel:
    """16 channels."""
    return LlamaModel(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=37,
            num_attention_heads=4,
            num_hidden_layers=4,  # HunyuanVideo skips the last two
            vocab_size=vocabulary_size,
            pad_token_id=2,
        )
    )


def gemma_encoder(vocabulary_size: int) -> Gemma2Model:
    """8 channels."""
    return Gemma2Model(
        Gemma2Config(
            head_dim=16,
            hidden_size=8,
            intermediate_size=64,
            max_position_embeddings=1024,
            num_attention_heads=2,
            num_hidden_layers=1,
            num_key_value_heads=2,
            vocab_size=vocabulary_size,
            query_pre_attn_scalar=16,
            attn_implementation="eager",
        )
    )


def qwen_encoder(vocabulary_size: int) -> Qwen2_5_VLForConditionalGeneration:
    """16 channels; the last token stands for everything visual, which no prompt contains."""
    visual = vocabulary_size - 1
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "vocab_size": vocabulary_size,
                "rope_parameters": {
                    "mrope_section": [1, 1, 2],
                    "rope_type": "default",
                    "type": "default",
                    "rope_theta": 1000000.0,
                },
            },
            vision_config={
                "depth": 2,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": 16,
            },
            vision_start_token_id=visual,
            vision_end_token_id=visual,
            vision_token_id=visual,
            image_token_id=visual,
            video_token_id=visual,
        )
    )


def _clip_config(vocabulary_size: int, activation: str) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=vocabulary_size,
        hidden_size=32,
        intermediate_size=37,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=77,
        projection_dim=32,
        hidden_act=activation,
        bos_token_id=vocabulary_size - 2,
        eos_token_id=vocabulary_size - 1,
        pad_token_id=vocabulary_size - 1,
    )
