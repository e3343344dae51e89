"""Tiny denoisers of every family of diffusers with random weights, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scripts.check_models.model import Denoiser, Draw, Inputs

_IMAGE: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
_WAN: dict[str, Any] = {
    **_IMAGE, "in_channels": 4, "out_channels": 4, "text_dim": 32, "freq_dim": 32, "ffn_dim": 64, "rope_max_seq_len": 32
}  # fmt: skip
_UNET: dict[str, Any] = {
    "block_out_channels": (32, 64), "sample_size": 8, "layers_per_block": 1, "cross_attention_dim": 32,
    "attention_head_dim": 8,
}  # fmt: skip
_FLUX: dict[str, Any] = {
    "patch_size": 1, "in_channels": 16, "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 16,
    "num_attention_heads": 2, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8),
}  # fmt: skip


def _image(channels: int = 4, text: int = 32, time: str = "timestep", **more: Inputs) -> Inputs:
    def inputs(draw: Draw, n: int) -> dict[str, Any]:
        return {
            "hidden_states": draw(1, channels, n, n), time: draw.time(), "encoder_hidden_states": draw(1, 6, text),
            **{name: value(draw, n) for name, value in more.items()},
        }  # fmt: skip

    return inputs


def _video(channels: int = 4, text: int = 32, **more: Any) -> Inputs:
    def inputs(draw: Draw, n: int) -> dict[str, Any]:
        return {
            "hidden_states": draw(1, channels, 2, n, n), "timestep": draw.time(),
            "encoder_hidden_states": draw(1, 6, text), **{name: value(draw, n) for name, value in more.items()},
        }  # fmt: skip

    return inputs


def _tokens(channels: int = 16, text: int = 32, axes: int = 3, **more: Any) -> Inputs:
    """Packed latents as Flux and its relatives take them."""

    def inputs(draw: Draw, n: int) -> dict[str, Any]:
        return {
            "hidden_states": draw(1, n * n, channels), "encoder_hidden_states": draw(1, 6, text),
            "timestep": draw.time(1.0), "img_ids": draw.ids(n * n, axes), "txt_ids": draw.ids(6, axes),
            **{name: value(draw, n) for name, value in more.items()},
        }  # fmt: skip

    return inputs


def _sample(**more: Any) -> Inputs:
    def inputs(draw: Draw, n: int) -> dict[str, Any]:
        return {
            "sample": draw(1, 4, n, n), "timestep": draw.time(), "encoder_hidden_states": draw(1, 6, 32),
            **{name: value(draw, n) for name, value in more.items()},
        }  # fmt: skip

    return inputs


def _guidance(draw: Draw, n: int) -> Tensor:
    return draw.time(5.0)


def _rounded_time(draw: Draw, n: int) -> Tensor:
    """A time step in the dtype of the model, for those that embed it as it comes."""
    return draw.time().to(draw.dtype)


def _per_frame(draw: Draw) -> Tensor:
    """One time step for each of two frames."""
    return draw.time()[:, None].expand(1, 2)


def _pooled(width: int = 32) -> Any:
    return lambda draw, n: draw(1, width)


def _text_mask(draw: Draw, n: int) -> Tensor:
    return draw.mask(1, 6)


def _sizes(draw: Draw, n: int) -> Tensor:
    return torch.tensor([[64.0, 64.0]], device=draw.device)


def _ltx(draw: Draw, n: int) -> dict[str, Any]:
    return {
        "hidden_states": draw(1, 2 * n * n, 8), "encoder_hidden_states": draw(1, 6, 32), "timestep": draw.time(),
        "encoder_attention_mask": draw.mask(1, 6), "num_frames": 2, "height": n, "width": n,
    }  # fmt: skip


def _ltx2(draw: Draw, n: int) -> dict[str, Any]:
    return {
        "hidden_states": draw(1, 2 * n * n, 8), "audio_hidden_states": draw(1, n, 8), "timestep": draw.time(),
        "encoder_hidden_states": draw(1, 6, 32), "audio_encoder_hidden_states": draw(1, 6, 32),
        "encoder_attention_mask": draw.mask(1, 6), "audio_encoder_attention_mask": draw.mask(1, 6),
        "num_frames": 2, "height": n, "width": n, "audio_num_frames": n,
    }  # fmt: skip


def _qwen(draw: Draw, n: int) -> dict[str, Any]:
    return {
        "hidden_states": draw(1, n * n, 16), "encoder_hidden_states": draw(1, 6, 32), "timestep": draw.time(1.0),
        "encoder_hidden_states_mask": draw.mask(1, 6), "img_shapes": [[(1, n, n)]],
    }  # fmt: skip


def _hidream(draw: Draw, n: int) -> dict[str, Any]:
    return {
        "hidden_states": draw(1, 4, n, n), "timesteps": draw.time(), "encoder_hidden_states_t5": draw(1, 6, 32),
        "encoder_hidden_states_llama3": draw(2, 1, 6, 32), "pooled_embeds": draw(1, 32),
    }  # fmt: skip


def _kandinsky(draw: Draw, n: int) -> dict[str, Any]:
    axes = [torch.arange(size, device=draw.device) for size in (2, n // 2, n // 2)]
    return {
        "hidden_states": draw(1, 2, n, n, 4), "encoder_hidden_states": draw(1, 6, 32), "timestep": draw.time(),
        "pooled_projections": draw(1, 32), "visual_rope_pos": axes,
        "text_rope_pos": torch.arange(6, device=draw.device),
    }  # fmt: skip


def _omnigen(draw: Draw, n: int) -> dict[str, Any]:
    length = 6 + 1 + n * n // 4
    return {
        "hidden_states": draw(1, 4, n, n), "timestep": draw.time(1.0), "input_ids": draw.integers(1, 6),
        "input_img_latents": [], "input_image_sizes": {},
        "attention_mask": torch.ones(1, length, length, device=draw.device),
        "position_ids": torch.arange(length, device=draw.device)[None],
    }  # fmt: skip


def _zimage(draw: Draw, n: int) -> dict[str, Any]:
    return {"x": [draw(4, 1, n, n)], "t": draw.time(1.0), "cap_feats": [draw(32, 32)]}


def _latte(draw: Draw, n: int) -> dict[str, Any]:
    return {"hidden_states": draw(1, 4, 2, 8, 8), "timestep": draw.time(), "encoder_hidden_states": draw(1, n, 32)}


def _rotary(dim: int) -> Any:
    def inputs(draw: Draw, n: int) -> Any:
        angles = torch.rand(n, dim, generator=draw.generator).to(draw.device)
        return angles.cos(), angles.sin()

    return inputs


def _cogview3(draw: Draw, n: int) -> dict[str, Any]:
    sizes = {name: _sizes(draw, n).long() for name in ("original_size", "target_size", "crop_coords")}
    return {**_image()(draw, n), **sizes}


def _mochi(draw: Draw, n: int) -> dict[str, Any]:
    return {**_video()(draw, n), "encoder_attention_mask": draw.mask(1, 6).bool()}


def _cogvideox(draw: Draw, n: int) -> dict[str, Any]:
    return {"hidden_states": draw(1, 2, 4, 8, 8), "encoder_hidden_states": draw(1, n, 32), "timestep": draw.time()}


def _hunyuan_dit(draw: Draw, n: int) -> dict[str, Any]:
    angles = torch.rand(16, 16, generator=draw.generator).to(draw.device)
    batch = n // 8 + n % 8 // 4
    return {
        "hidden_states": draw(batch, 4, 8, 8), "timestep": draw.time().expand(batch).to(draw.dtype),
        "image_meta_size": None,
        "encoder_hidden_states": draw(batch, 8, 32), "text_embedding_mask": draw.mask(batch, 8), "style": None,
        "encoder_hidden_states_t5": draw(batch, 8, 32), "text_embedding_mask_t5": draw.mask(batch, 8),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }  # fmt: skip


def _prior(draw: Draw, n: int) -> dict[str, Any]:
    return {
        "hidden_states": draw(1, 32), "timestep": draw.time(), "proj_embedding": draw(1, 32),
        "encoder_hidden_states": draw(1, 12, 32),
    }  # fmt: skip


_CROSS_2D = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
}
_TEXT_TIME = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 80,
}


def _sdxl(draw: Draw, n: int) -> dict[str, Any]:
    added = {"text_embeds": draw(1, 32), "time_ids": draw.integers(1, 6, below=64)}
    return {**_sample()(draw, n), "added_cond_kwargs": added}


DENOISERS: dict[str, Denoiser] = {
    "allegro": Denoiser(
        "AllegroTransformer3DModel",
        {**_IMAGE, "attention_head_dim": 24, "cross_attention_dim": 48, "sample_height": 8, "sample_width": 8,
         "sample_frames": 2, "caption_channels": 32},
        lambda draw, n: {
            **_video()(draw, 8), "encoder_hidden_states": draw(1, 1, n, 32), "encoder_attention_mask": draw.mask(1, n),
            "attention_mask": torch.ones(1, 2, 8, 8, device=draw.device),
            "image_rotary_emb": _allegro_tables(draw),
        },
    ),
    "auraflow": Denoiser(
        "AuraFlowTransformer2DModel",
        {"sample_size": 12, "num_mmdit_layers": 1, "num_single_dit_layers": 1, "attention_head_dim": 16,
         "num_attention_heads": 2, "joint_attention_dim": 32, "caption_projection_dim": 32, "pos_embed_max_size": 64},
        _image(),
    ),
    "bria": Denoiser("BriaTransformer2DModel", {**_FLUX, "axes_dims_rope": [4, 4, 8]}, _tokens()),
    "anyflow": Denoiser(
        "AnyFlowTransformer3DModel",
        {**_WAN, "cross_attn_norm": True},
        lambda draw, n: {
            **_video()(draw, n), "hidden_states": draw(1, 2, 4, n, n), "timestep": _per_frame(draw),
            "r_timestep": _per_frame(draw),
        },
    ),
    "bria_fibo": Denoiser(
        "BriaFiboTransformer2DModel",
        {**_FLUX, "axes_dims_rope": [4, 4, 8], "text_encoder_dim": 16},
        _tokens(text_encoder_layers=lambda draw, n: [draw(1, 6, 16), draw(1, 6, 16), draw(1, 6, 16)]),
    ),
    "chroma": Denoiser(
        "ChromaTransformer2DModel",
        {**_FLUX, "approximator_num_channels": 16, "approximator_hidden_dim": 32, "approximator_layers": 1},
        _tokens(),
    ),
    "chronoedit": Denoiser("ChronoEditTransformer3DModel", {**_WAN, "rope_temporal_skip_len": 2}, _video()),
    "cogvideox": Denoiser(
        "CogVideoXTransformer3DModel",
        {**_IMAGE, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 32, "sample_width": 8,
         "sample_height": 8, "sample_frames": 5, "max_text_seq_length": 8,
         "use_rotary_positional_embeddings": True},
        _cogvideox,
    ),
    "cogview3": Denoiser(
        "CogView3PlusTransformer2DModel",
        {**_IMAGE, "in_channels": 4, "out_channels": 4, "text_embed_dim": 32, "time_embed_dim": 8, "condition_dim": 8,
         "pos_embed_max_size": 16, "sample_size": 8},
        _cogview3,
    ),
    "cogview4": Denoiser(
        "CogView4Transformer2DModel",
        {**_IMAGE, "in_channels": 4, "out_channels": 4, "text_embed_dim": 32, "time_embed_dim": 8, "condition_dim": 8,
         "sample_size": 8, "rope_axes_dim": (8, 8)},
        _cogview3,
    ),
    "cosmos": Denoiser(
        "CosmosTransformer3DModel",
        {**_IMAGE, "in_channels": 4, "out_channels": 4, "text_embed_dim": 32, "adaln_lora_dim": 4,
         "max_size": (4, 16, 16), "rope_scale": (2.0, 1.0, 1.0), "concat_padding_mask": False},
        _video(),
    ),
    "dit": Denoiser(
        "DiTTransformer2DModel",
        {"sample_size": 8, "num_layers": 2, "patch_size": 2, "attention_head_dim": 16, "num_attention_heads": 2,
         "in_channels": 4, "out_channels": 8, "attention_bias": True, "activation_fn": "gelu-approximate",
         "num_embeds_ada_norm": 1000, "norm_type": "ada_norm_zero", "norm_elementwise_affine": False},
        lambda draw, n: {
            "hidden_states": draw(1 if n == 8 else 2, 4, 8, 8), "timestep": draw.time().long(),
            "class_labels": draw.integers(1 if n == 8 else 2),
        },
    ),
    "easyanimate": Denoiser(
        "EasyAnimateTransformer3DModel",
        {**_IMAGE, "in_channels": 4, "out_channels": 4, "patch_size": 2, "sample_width": 8, "sample_height": 8,
         "mmdit_layers": 1, "time_embed_dim": 8, "text_embed_dim": 32},
        _video(),
    ),
    "flux": Denoiser(
        "FluxTransformer2DModel",
        {**_FLUX, "pooled_projection_dim": 32, "guidance_embeds": True},
        _tokens(pooled_projections=_pooled(), guidance=_guidance),
    ),
    "flux2": Denoiser(
        "Flux2Transformer2DModel",
        {**_FLUX, "axes_dims_rope": (4, 4, 4, 4), "timestep_guidance_channels": 16},
        _tokens(axes=4, guidance=_guidance),
    ),
    "ernie_image": Denoiser(
        "ErnieImageTransformer2DModel",
        {"hidden_size": 32, "num_attention_heads": 2, "num_layers": 2, "ffn_hidden_size": 64, "in_channels": 4,
         "out_channels": 4, "text_in_dim": 32, "rope_axes_dim": (4, 4, 8)},
        lambda draw, n: {
            "hidden_states": draw(1, 4, n, n), "timestep": draw.time(), "text_bth": draw(1, 6, 32),
            "text_lens": torch.full((1,), 6, device=draw.device),
        },
    ),
    "hidream": Denoiser(
        "HiDreamImageTransformer2DModel",
        {"patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 1,
         "attention_head_dim": 16, "num_attention_heads": 2, "caption_channels": [32, 32], "text_emb_dim": 32,
         "axes_dims_rope": (4, 4, 8), "max_resolution": (32, 32), "llama_layers": (0, 1)},
        _hidream,
    ),
    "hunyuan_dit": Denoiser(
        "HunyuanDiT2DModel",
        {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "patch_size": 2, "sample_size": 8,
         "hidden_size": 32, "num_layers": 2, "cross_attention_dim": 32, "cross_attention_dim_t5": 32,
         "pooled_projection_dim": 16, "text_len": 8, "text_len_t5": 8, "use_style_cond_and_image_meta_size": False},
        _hunyuan_dit,
    ),
    "hunyuan_image": Denoiser(
        "HunyuanImageTransformer2DModel",
        {**_IMAGE, "in_channels": 4, "out_channels": 4, "num_single_layers": 1, "num_refiner_layers": 1,
         "text_embed_dim": 32, "rope_axes_dim": (8, 8)},
        _image(encoder_attention_mask=_text_mask, timestep=_rounded_time),
    ),
    "hunyuan_video": Denoiser(
        "HunyuanVideoTransformer3DModel",
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1,
         "num_single_layers": 1, "num_refiner_layers": 1, "patch_size": 1, "patch_size_t": 1, "guidance_embeds": True,
         "text_embed_dim": 32, "pooled_projection_dim": 32, "rope_axes_dim": (4, 4, 8)},
        _video(encoder_attention_mask=_text_mask, pooled_projections=_pooled(), guidance=_guidance),
    ),
    "hunyuan_video15": Denoiser(
        "HunyuanVideo15Transformer3DModel",
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1,
         "num_refiner_layers": 1, "text_embed_dim": 32, "text_embed_2_dim": 32, "image_embed_dim": 32,
         "rope_axes_dim": (4, 4, 8), "target_size": 16},
        _video(
            timestep=_rounded_time, encoder_attention_mask=_text_mask,
            encoder_hidden_states_2=lambda draw, n: draw(1, 6, 32),
            encoder_attention_mask_2=_text_mask, image_embeds=lambda draw, n: draw(1, 3, 32),
        ),
    ),
    "kandinsky5": Denoiser(
        "Kandinsky5Transformer3DModel",
        {"in_text_dim": 32, "in_text_dim2": 32, "time_dim": 32, "model_dim": 32, "ff_dim": 64, "num_text_blocks": 1,
         "num_visual_blocks": 1, "axes_dims": (4, 4, 8)},
        _kandinsky,
    ),
    "latte": Denoiser(
        "LatteTransformer3DModel",
        {**_IMAGE, "in_channels": 4, "out_channels": 8, "sample_size": 8, "patch_size": 2, "caption_channels": 32,
         "cross_attention_dim": 32, "norm_type": "ada_norm_single", "num_embeds_ada_norm": 1000, "video_length": 2,
         "activation_fn": "gelu-approximate", "norm_elementwise_affine": False, "attention_bias": True},
        _latte,
    ),
    "longcat_image": Denoiser(
        "LongCatImageTransformer2DModel",
        {**_FLUX, "pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8]},
        _tokens(),
    ),
    "ltx": Denoiser(
        "LTXVideoTransformer3DModel",
        {"in_channels": 8, "out_channels": 8, "num_attention_heads": 4, "attention_head_dim": 8,
         "cross_attention_dim": 32, "num_layers": 2, "caption_channels": 32},
        _ltx,
    ),
    "ltx2": Denoiser(
        "LTX2VideoTransformer3DModel",
        {"in_channels": 8, "out_channels": 8, "num_attention_heads": 2, "attention_head_dim": 16,
         "cross_attention_dim": 32, "audio_in_channels": 8, "audio_out_channels": 8, "audio_num_attention_heads": 2,
         "audio_attention_head_dim": 8, "audio_cross_attention_dim": 16, "num_layers": 2, "caption_channels": 32},
        _ltx2,
    ),
    "lumina2": Denoiser(
        "Lumina2Transformer2DModel",
        {"sample_size": 8, "in_channels": 4, "hidden_size": 32, "num_layers": 1, "num_refiner_layers": 1,
         "num_attention_heads": 2, "num_kv_heads": 1, "multiple_of": 16, "axes_dim_rope": (4, 4, 8),
         "axes_lens": (64, 32, 32), "cap_feat_dim": 32},
        _image(encoder_attention_mask=_text_mask),
    ),
    "mochi": Denoiser(
        "MochiTransformer3DModel",
        {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "pooled_projection_dim": 32,
         "in_channels": 4, "text_embed_dim": 32, "time_embed_dim": 4, "max_sequence_length": 8},
        _mochi,
    ),
    "omnigen": Denoiser(
        "OmniGenTransformer2DModel",
        {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64,
         "num_layers": 2, "pad_token_id": 0, "vocab_size": 100, "max_position_embeddings": 1024,
         "original_max_position_embeddings": 512, "pos_embed_max_size": 16, "time_step_dim": 32,
         "rope_scaling": {"long_factor": [1.0] * 8, "short_factor": [1.0] * 8}},
        _omnigen,
    ),
    "ovis_image": Denoiser("OvisImageTransformer2DModel", {**_FLUX, "out_channels": 16}, _tokens()),
    "pixart": Denoiser(
        "PixArtTransformer2DModel",
        {**_IMAGE, "sample_size": 8, "in_channels": 4, "out_channels": 8, "cross_attention_dim": 32,
         "caption_channels": 32, "use_additional_conditions": False},
        _image(encoder_attention_mask=_text_mask),
    ),
    "prior": Denoiser(
        "PriorTransformer",
        {**_IMAGE, "embedding_dim": 32, "num_embeddings": 12},
        _prior,
    ),
    "prx": Denoiser(
        "PRXTransformer2DModel",
        {"in_channels": 4, "context_in_dim": 32, "hidden_size": 32, "num_heads": 2, "depth": 2, "axes_dim": [8, 8]},
        _image(),
    ),
    "qwenimage": Denoiser(
        "QwenImageTransformer2DModel",
        {**_IMAGE, "patch_size": 2, "in_channels": 16, "out_channels": 4, "joint_attention_dim": 32,
         "axes_dims_rope": (8, 4, 4)},
        _qwen,
    ),
    "sana": Denoiser(
        "SanaTransformer2DModel",
        {**_IMAGE, "in_channels": 4, "out_channels": 4, "num_cross_attention_heads": 2,
         "cross_attention_head_dim": 16, "cross_attention_dim": 32, "caption_channels": 32, "sample_size": 8,
         "patch_size": 1},
        _image(),
    ),
    "sana_video": Denoiser(
        "SanaVideoTransformer3DModel",
        {**_IMAGE, "in_channels": 4, "out_channels": 4, "num_cross_attention_heads": 2,
         "cross_attention_head_dim": 16, "cross_attention_dim": 32, "caption_channels": 32, "sample_size": 8},
        _video(),
    ),
    "sd15": Denoiser("UNet2DConditionModel", {**_UNET, **_CROSS_2D}, _sample()),
    "sd3": Denoiser(
        "SD3Transformer2DModel",
        {**_IMAGE, "sample_size": 16, "patch_size": 1, "in_channels": 4, "joint_attention_dim": 32,
         "caption_projection_dim": 32, "pooled_projection_dim": 32, "out_channels": 4, "qk_norm": "rms_norm",
         "dual_attention_layers": (0,)},
        _image(pooled_projections=_pooled()),
    ),
    "sdxl": Denoiser(
        "UNet2DConditionModel",
        {**_UNET, **_CROSS_2D, **_TEXT_TIME, "use_linear_projection": True, "transformer_layers_per_block": (1, 2)},
        _sdxl,
    ),
    "skyreels": Denoiser("SkyReelsV2Transformer3DModel", _WAN, _video()),
    "stable_audio": Denoiser(
        "StableAudioDiTModel",
        {"sample_size": 8, "in_channels": 4, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2,
         "num_key_value_attention_heads": 1, "out_channels": 4, "cross_attention_dim": 32, "time_proj_dim": 16,
         "global_states_input_dim": 32, "cross_attention_input_dim": 32},
        lambda draw, n: {
            "hidden_states": draw(1, 4, n), "timestep": draw.time(1.0), "encoder_hidden_states": draw(1, 6, 32),
            "global_hidden_states": draw(1, 1, 32), "rotary_embedding": _rotary(8)(draw, n + 1),
        },
    ),
    "unet2d": Denoiser(
        "UNet2DModel",
        {"in_channels": 4, "out_channels": 4, "sample_size": 8, "block_out_channels": (32, 64), "layers_per_block": 1,
         "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
         "resnet_time_scale_shift": "scale_shift"},
        lambda draw, n: {"sample": draw(1, 4, n, n), "timestep": draw.time()},
    ),
    "unet3d": Denoiser(
        "UNet3DConditionModel",
        {**_UNET, "down_block_types": ("DownBlock3D", "CrossAttnDownBlock3D"),
         "up_block_types": ("CrossAttnUpBlock3D", "UpBlock3D")},
        lambda draw, n: {**_sample()(draw, n), "sample": draw(1, 4, 2, n, n)},
    ),
    "wan": Denoiser("WanTransformer3DModel", {**_WAN, "cross_attn_norm": True}, _video()),
    "wan_i2v": Denoiser(
        "WanTransformer3DModel",
        {**_WAN, "cross_attn_norm": True, "image_dim": 32, "added_kv_proj_dim": 32},
        _video(encoder_hidden_states_image=lambda draw, n: draw(1, 5, 32)),
    ),
    "wan_vace": Denoiser(
        "WanVACETransformer3DModel",
        {**_WAN, "cross_attn_norm": True, "vace_layers": [0, 1], "vace_in_channels": 8},
        _video(control_hidden_states=lambda draw, n: draw(1, 8, 2, n, n)),
    ),
    "zimage": Denoiser(
        "ZImageTransformer2DModel",
        {"in_channels": 4, "dim": 32, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2,
         "cap_feat_dim": 32, "axes_dims": [4, 4, 8], "axes_lens": [128, 32, 32]},
        _zimage,
    ),
}  # fmt: skip


def _allegro_tables(draw: Draw) -> Any:
    """Tables of cosines and sines for each axis, and the positions of the tokens on it."""
    frames, rows, columns = torch.meshgrid(torch.arange(2), torch.arange(4), torch.arange(4), indexing="ij")
    tables = []
    for size in (2, 4, 4):
        angles = torch.rand(size, 8, generator=draw.generator).to(draw.device)
        tables.append((angles.cos(), angles.sin()))
    grid = [axis.reshape(1, -1).to(draw.device) for axis in (frames, rows, columns)]
    return tuple(tables), tuple(grid)
