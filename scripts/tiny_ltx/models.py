"""The parts of the pipeline: the classes of LTX-Video, at a size for a repository and a CPU."""

from __future__ import annotations

from diffusers import (
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)
from transformers import T5Config, T5EncoderModel, T5Tokenizer

from tiny_ltx.scenes import WORDS

LATENT_CHANNELS = 16
TEXT_WIDTH = 128
FRAME_RATE = 25

#: Tokens of a prompt: what LTXPipeline pads to unless told otherwise.
PROMPT_TOKENS = 128


def build_vae() -> AutoencoderKLLTXVideo:
    """The autoencoder of LTX-Video 0.9.5: patches of 4x4 pixels, halved twice in time and space.

    That makes it 16 times smaller in space and 4 times in time. The shortcuts around its down- and upsampling
    are what lets it learn in a minute.
    """
    vae = AutoencoderKLLTXVideo(
        latent_channels=LATENT_CHANNELS,
        block_out_channels=(24, 48, 48),
        down_block_types=("LTXVideo095DownBlock3D", "LTXVideo095DownBlock3D"),
        spatio_temporal_scaling=(True, True),
        layers_per_block=(1, 1, 1),
        downsample_type=("spatiotemporal", "spatiotemporal"),
        decoder_block_out_channels=(32, 32),
        decoder_spatio_temporal_scaling=(True, True),
        decoder_layers_per_block=(1, 1, 1),
        decoder_inject_noise=(False, False, False),
        upsample_residual=(True, True),
        upsample_factor=(1, 1),
    )
    # Little noise at first: a decoder that sees only noise learns to ignore its latents.
    vae.encoder.conv_out.conv.bias.data[-1] = -6.0
    return vae


def build_transformer() -> LTXVideoTransformer3DModel:
    """Four blocks of width 192."""
    return LTXVideoTransformer3DModel(
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=6,
        attention_head_dim=32,
        cross_attention_dim=192,
        num_layers=4,
        caption_channels=TEXT_WIDTH,
    )


def build_text_encoder() -> T5EncoderModel:
    """Two layers of width 128; a word is a token."""
    return T5EncoderModel(
        T5Config(
            vocab_size=len(build_tokenizer()),
            d_model=TEXT_WIDTH,
            d_kv=32,
            d_ff=192,
            num_layers=2,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
        )
    )


def build_tokenizer() -> T5Tokenizer:
    """A T5 tokenizer whose pieces are the words of the captions; any other word is unknown."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((f"\u2581{word}", -2.0) for word in ("A", "An", *WORDS))]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=PROMPT_TOKENS)


def build_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """The scheduler of LTX-Video, with its shift by the length of the sequence."""
    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.95,
        max_shift=2.05,
        base_image_seq_len=1024,
        max_image_seq_len=4096,
        shift_terminal=0.1,
    )


def build_pipeline(
    vae: AutoencoderKLLTXVideo,
    transformer: LTXVideoTransformer3DModel,
    text_encoder: T5EncoderModel,
    tokenizer: T5Tokenizer,
) -> LTXPipeline:
    """Puts the parts together."""
    return LTXPipeline(
        scheduler=build_scheduler(), vae=vae, text_encoder=text_encoder, tokenizer=tokenizer, transformer=transformer
    )
