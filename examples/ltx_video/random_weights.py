"""LTX pipelines with random weights, built in memory: real classes, real sizes, no download.

``full`` is the real 2B configuration of the transformer and of the VAE, so its speed and its memory are
those of LTX-Video. Only the text encoder has fewer layers than T5-XXL (it runs once per video); its width,
which the transformer sees, is the real one. ``tiny`` has the same compression and layer structure and runs
on a CPU in seconds.

What comes out is noise, of course. It is the noise that every correct kernel must reproduce.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from diffusers import (
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)
from torch import nn
from transformers import T5Config, T5EncoderModel, T5Tokenizer

Size = Literal["tiny", "full"]

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!?-'\""


def build_pipeline(size: Size, device: torch.device, dtype: torch.dtype, seed: int = 0) -> LTXPipeline:
    """Builds an LTX pipeline whose weights depend on ``size``, ``seed`` and the kind of device alone.

    The weights are drawn on ``device`` in float32 and then cast, as a checkpoint would be.
    """
    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    with device:
        if size == "full":
            transformer = LTXVideoTransformer3DModel()
            vae = AutoencoderKLLTXVideo()
        else:
            transformer = LTXVideoTransformer3DModel(
                num_attention_heads=4,
                attention_head_dim=32,
                cross_attention_dim=128,
                num_layers=2,
                caption_channels=64,
                in_channels=16,
                out_channels=16,
            )
            vae = AutoencoderKLLTXVideo(
                latent_channels=16,
                block_out_channels=(16, 16, 16, 16),
                decoder_block_out_channels=(16, 16, 16, 16),
                layers_per_block=(1, 1, 1, 1, 1),
                decoder_layers_per_block=(1, 1, 1, 1, 1),
            )
        text_encoder = T5EncoderModel(_text_encoder_config(size, len(tokenizer)))
        for model in (transformer, vae, text_encoder):
            randomize_constants(model)
            # nn.Module's own cast: diffusers' warns about modules to keep in float32, of which LTX has none.
            nn.Module.to(model.eval().requires_grad_(False), dtype)
    return LTXPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    )


def build_tokenizer() -> T5Tokenizer:
    """A T5 tokenizer of single characters; the classes and the special tokens are the real ones."""
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    vocabulary += [(letter, -3.0 - 0.01 * rank) for rank, letter in enumerate(_LETTERS)]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=512)


def randomize_constants(model: nn.Module, scale: float = 0.1) -> None:
    """Adds noise to every parameter that is one constant: ones in norms, zeros in biases and gates.

    A wrong kernel would hide behind a weight of ones, and a whole block behind a gate of zeros.
    """
    for parameter in model.parameters():
        values = parameter.data
        if values.numel() > 1 and bool((values == values.flatten()[0]).all()):
            values.add_(torch.randn_like(values), alpha=scale)


def _text_encoder_config(size: Size, vocabulary_size: int) -> T5Config:
    dimensions: dict[str, Any]
    if size == "full":
        dimensions = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_heads": 64}
    else:
        dimensions = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4}
    return T5Config(vocab_size=vocabulary_size, num_layers=2, feed_forward_proj="gated-gelu", **dimensions)
