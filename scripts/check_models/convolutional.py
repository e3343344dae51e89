"""Tiny autoencoders and UNets of diffusers with random weights, and inputs for them."""

from __future__ import annotations

from typing import Any

from scripts.check_models.model import Denoiser, Draw, Inputs


def _image(size: int = 16, channels: int = 3) -> Inputs:
    return lambda draw, n: {"sample": draw(1, channels, size, size)}


def _video(frames: int = 5, size: int = 16, channels: int = 3) -> Inputs:
    return lambda draw, n: {"sample": draw(1, channels, frames, size, size)}


_KL: dict[str, Any] = {
    "block_out_channels": (8, 16), "layers_per_block": 1, "latent_channels": 4, "norm_num_groups": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
}  # fmt: skip
_WAN: dict[str, Any] = {
    "base_dim": 8, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1, "temperal_downsample": [True],
    "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4,
}  # fmt: skip
_HUNYUAN_15: dict[str, Any] = {
    "latent_channels": 4, "block_out_channels": (8, 8, 16), "layers_per_block": 1, "spatial_compression_ratio": 4,
    "temporal_compression_ratio": 2,
}  # fmt: skip
UNET: dict[str, Any] = {
    "block_out_channels": (8, 16), "sample_size": 8, "layers_per_block": 1, "cross_attention_dim": 16,
    "attention_head_dim": 4, "norm_num_groups": 4,
}  # fmt: skip
_MOTION = {name: value for name, value in UNET.items() if name not in ("sample_size", "attention_head_dim")}
CROSS: dict[str, Any] = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
}  # fmt: skip


def noisy(*size: int, **more: tuple[int, ...]) -> Inputs:
    """A sample, a time step, a text, and other tensors."""

    def inputs(draw: Draw, n: int) -> dict[str, Any]:
        arguments = {"sample": draw(1, *size), "timestep": draw.time(), "encoder_hidden_states": draw(1, 6, 16)}
        return arguments | {name: draw(1, *shape) for name, shape in more.items()}

    return inputs


def shrink_tiles(model: Any, size: int) -> None:
    """Makes the tiles of an autoencoder so wide and high, half of which overlaps, and switches them on."""
    sizes = {name: value for name, value in model.__dict__.items() if name.startswith("tile_") and "frames" not in name}
    for name, value in sizes.items():
        if "latent_min" in name:
            setattr(model, name, value * size // sizes[name.replace("latent", "sample")])
        elif "stride" in name or "min_overlap" in name:
            setattr(model, name, size // 2)
        elif "sample_min" in name:
            setattr(model, name, size)
    model.enable_tiling()


def _small_tiles(model: Any) -> None:
    """Allegro has no other way than tiles, and its own are larger than these videos."""
    model.enable_tiling()
    model.kernel, model.stride = (8, 16, 16), (4, 8, 8)


#: Models that take no two samples at once as these inputs are.
ONE_SAMPLE = frozenset({"allegro", "hunyuan_video15", "unet_motion", "controlnet_sparse", "controlnet_union"})

#: Models that have no half dtype on a CPU, stock either: pooling in three dimensions, embeddings in float32, a Fourier
#: transform, latents in bytes.
FLOAT32_ONLY = frozenset({"cosmos", "stable_cascade", "mmaudio", "tiny"})

#: Models that have no float16 there: pooling in three dimensions.
NO_FLOAT16 = frozenset({"vidtok"})

#: Classes that are exported and have no tiny model here, with the reason.
NOT_BUILT = {
    "ControlNetXSAdapter": "it has no forward: UNetControlNetXSModel runs its parts",
    "MotionAdapter": "it has no forward: UNetMotionModel runs its parts",
    "LTX2VideoDiffusionDecoderModel": "its attention runs under torch.compile, which no float64 reference passes",
}
#: Models whose forward runs a part of their modules.
RUN_IN_PART = {
    "proteina": "its forward decodes alone",
    "kandinsky6_sr_bank": "a call runs the adapters of one scale",
    "controlnet_union": "its controls have no strengths of their own",
    "kvae_video": "its norms have ways for caches that a short video does not take",
    "kl_temporal": "with a single layer the mid block of its decoder runs no attention",
}

#: Rules whose sites stay as they are written there, by model, with the reason.
NOT_FUSED = {
    "vq": {"gated residual": "the loss of the codebook is a number times a tensor of no dimension"},
    "vq_spatial": {"gated residual": "the loss of the codebook is a number times a tensor of no dimension"},
    "kvae_video": {"gated residual": "its convolutions return more than a tensor"},
    "kandinsky6_sr": {"gated residual": "the places of the taps of its convolutions are numbers"},
    "mmaudio_vocoder": {"modulation": "the places of its upsamplers are numbers"},
    "minimax_audio": {"gated residual": "the places of its residual blocks are numbers"},
    "proteina": {"gated linear unit": "its gate is a sigmoid, which glu does not know"},
    "controlnet_union": {"gated linear unit": "its gate is a sigmoid, which glu does not know"},
    "controlnet_xs": {
        "gated residual": "the strength of its control is a number",
        "gated residual, in place": "the strength of its control is a number",
    },
}

#: Why norms of a model stay as they are though an activation follows them, or though there is an op for them.
LEFT = {
    "dc": "its RMS norms are called on a view that has the channels last, with no SiLU behind them",
    "magvit_frames": "it folds time into the batch between the norm and its activation",
    "kvae": "the norms of its decoder take the latents, too",
    "kvae_video": "its norms take a cache, and those of its decoder the latents, too",
    "cogvideox": "the norms of its decoder take the latents and a cache, too",
    "vidtok": "its norms are layer norms over the channels, for which there is no op",
    "oobleck": "it has no norm",
    "unet_spatio_temporal": "the embedding of a frame is added with the bias of the convolution before the norm",
    "stable_cascade": "its norms have no activation behind them",
    "unet1d": "its norms are followed by GELU",
    "vq_spatial": "the norms of its decoder take the latents, too",
}

AUTOENCODERS: dict[str, Denoiser] = {
    "kl": Denoiser("AutoencoderKL", _KL, _image()),
    "kl_asymmetric": Denoiser(
        "AsymmetricAutoencoderKL",
        {"down_block_types": ("DownEncoderBlock2D",) * 2, "down_block_out_channels": (8, 16), "norm_num_groups": 4,
         "up_block_types": ("UpDecoderBlock2D",) * 2, "up_block_out_channels": (8, 16)},
        _image(),
    ),
    "kl_flux2": Denoiser("AutoencoderKLFlux2", _KL, _image()),
    "kl_temporal": Denoiser(
        "AutoencoderKLTemporalDecoder",
        {"down_block_types": ("DownEncoderBlock2D",) * 2, "block_out_channels": (32, 64), "latent_channels": 4},
        lambda draw, n: {"sample": draw(2, 3, 16, 16), "num_frames": 2},
    ),
    "vq": Denoiser(
        "VQModel",
        {"block_out_channels": (8, 16), "norm_num_groups": 4, "num_vq_embeddings": 16, "latent_channels": 4,
         "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
        _image(),
    ),
    "vq_spatial": Denoiser(
        "VQModel",
        {"block_out_channels": (32, 64), "num_vq_embeddings": 16, "latent_channels": 4,
         "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
         "norm_type": "spatial"},
        _image(),
    ),
    "dc": Denoiser(
        "AutoencoderDC",
        {"latent_channels": 4, "attention_head_dim": 4, "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
         "decoder_block_types": ("ResBlock", "EfficientViTBlock"), "encoder_block_out_channels": (8, 8),
         "decoder_block_out_channels": (8, 8), "encoder_layers_per_block": (1, 1), "decoder_layers_per_block": (1, 1),
         "encoder_qkv_multiscales": ((), (5,)), "decoder_qkv_multiscales": ((), (5,)),
         "decoder_conv_act_fn": "silu", "decoder_norm_types": ("rms_norm", "rms_norm"),
         "decoder_act_fns": ("silu", "silu")},
        _image(),
    ),
    "kvae": Denoiser(
        "AutoencoderKLKVAE",
        {"channels": 32, "num_enc_blocks": 1, "num_dec_blocks": 1, "z_channels": 4, "ch_mult": (1, 2)},
        _image(),
    ),
    "hunyuan_image": Denoiser(
        "AutoencoderKLHunyuanImage",
        {"in_channels": 3, "out_channels": 3, "latent_channels": 4, "block_out_channels": (32, 64),
         "layers_per_block": 1, "spatial_compression_ratio": 2, "sample_size": 16},
        _image(),
    ),
    "wan": Denoiser("AutoencoderKLWan", _WAN, _video()),
    "wan_22": Denoiser(
        "AutoencoderKLWan",
        {**_WAN, "is_residual": True, "dim_mult": [1, 1], "decoder_base_dim": 8, "patch_size": 2, "in_channels": 12,
         "out_channels": 12},
        _video(),
    ),
    "qwenimage": Denoiser("AutoencoderKLQwenImage", _WAN, _video(1)),
    "qwenimage21": Denoiser(
        "AutoencoderKLQwenImage21",
        {**_WAN, "dim_mult": [1, 1], "decoder_base_dim": 8, "in_channels": 3, "out_channels": 3},
        _video(1),
    ),
    "hunyuan_video": Denoiser(
        "AutoencoderKLHunyuanVideo",
        {"latent_channels": 4, "down_block_types": ("HunyuanVideoDownBlock3D",) * 3, "norm_num_groups": 4,
         "up_block_types": ("HunyuanVideoUpBlock3D",) * 3, "block_out_channels": (8, 8, 16), "layers_per_block": 1,
         "spatial_compression_ratio": 4, "temporal_compression_ratio": 4},
        _video(),
    ),
    "hunyuan_video15": Denoiser("AutoencoderKLHunyuanVideo15", _HUNYUAN_15, _video()),
    "hunyuan_refiner": Denoiser("AutoencoderKLHunyuanImageRefiner", _HUNYUAN_15, _video(4)),
    "cogvideox": Denoiser(
        "AutoencoderKLCogVideoX",
        {"down_block_types": ("CogVideoXDownBlock3D",) * 2, "up_block_types": ("CogVideoXUpBlock3D",) * 2,
         "block_out_channels": (8, 16), "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 4,
         "temporal_compression_ratio": 2},
        _video(),
    ),
    "mochi": Denoiser(
        "AutoencoderKLMochi",
        {"encoder_block_out_channels": (32, 32, 32, 32), "decoder_block_out_channels": (32, 32, 32, 32),
         "latent_channels": 4, "layers_per_block": (1, 1, 1, 1, 1), "latents_mean": (0.0,) * 4,
         "latents_std": (1.0,) * 4},
        _video(7, 8),
    ),
    "allegro": Denoiser(
        "AutoencoderKLAllegro",
        {"down_block_types": ("AllegroDownBlock3D",) * 4, "up_block_types": ("AllegroUpBlock3D",) * 4,
         "block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 2, "sample_size": 16},
        _video(8),
        _small_tiles,
    ),
    "cosmos": Denoiser(
        "AutoencoderKLCosmos",
        {"latent_channels": 4, "encoder_block_out_channels": (8, 8, 16), "decode_block_out_channels": (8, 8, 16),
         "attention_resolutions": (8,), "resolution": 32, "num_layers": 1, "patch_size": 2, "patch_type": "haar",
         "spatial_compression_ratio": 4, "temporal_compression_ratio": 4},
        _video(9, 16),
    ),
    "magvit": Denoiser(
        "AutoencoderKLMagvit",
        {"latent_channels": 4, "block_out_channels": [8, 16], "layers_per_block": 1, "norm_num_groups": 4,
         "down_block_types": ["SpatialDownBlock3D", "SpatialTemporalDownBlock3D"],
         "up_block_types": ["SpatialUpBlock3D", "SpatialTemporalUpBlock3D"], "spatial_group_norm": False},
        _video(),
    ),
    "magvit_frames": Denoiser(
        "AutoencoderKLMagvit",
        {"latent_channels": 4, "block_out_channels": [8, 16], "layers_per_block": 1, "norm_num_groups": 4,
         "down_block_types": ["SpatialDownBlock3D", "SpatialTemporalDownBlock3D"],
         "up_block_types": ["SpatialUpBlock3D", "SpatialTemporalUpBlock3D"]},
        _video(),
    ),
    "kvae_video": Denoiser(
        "AutoencoderKLKVAEVideo",
        {"ch": 32, "ch_mult": (1, 2), "num_res_blocks": 1, "z_channels": 4, "temporal_compress_times": 2},
        _video(),
    ),
    "vidtok": Denoiser(
        "AutoencoderVidTok",
        {"ch": 8, "ch_mult": [1, 2], "num_res_blocks": 1, "spatial_ds": [0], "spatial_us": [0], "tempo_ds": [0],
         "tempo_us": [0]},
        _video(),
    ),
    "ltx2": Denoiser(
        "AutoencoderKLLTX2Video",
        {"latent_channels": 4, "block_out_channels": (8, 8, 8, 8), "decoder_block_out_channels": (16, 32, 64),
         "layers_per_block": (1, 1, 1, 1, 1), "decoder_layers_per_block": (1, 1, 1, 1), "patch_size": 1,
         "decoder_causal": False, "timestep_conditioning": False},
        _video(9, 32),
    ),
    "ltx2_audio": Denoiser(
        "AutoencoderKLLTX2Audio",
        {"base_channels": 8, "ch_mult": (1, 2), "num_res_blocks": 1, "resolution": 16, "latent_channels": 4,
         "mel_bins": 16},
        _image(16, 2),
    ),
    "oobleck": Denoiser(
        "AutoencoderOobleck",
        {"encoder_hidden_size": 8, "downsampling_ratios": [2, 4], "channel_multiples": [1, 2], "decoder_channels": 8,
         "decoder_input_channels": 4},
        lambda draw, n: {"sample": draw(1, 2, 32)},
    ),
    "tiny": Denoiser(
        "AutoencoderTiny",
        {"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8), "num_encoder_blocks": (1, 1),
         "num_decoder_blocks": (1, 1)},
        _image(),
    ),
    "consistency": Denoiser(
        "ConsistencyDecoderVAE",
        {"encoder_block_out_channels": (8, 16), "encoder_down_block_types": ("DownEncoderBlock2D",) * 2,
         "encoder_layers_per_block": 1, "encoder_norm_num_groups": 4, "decoder_block_out_channels": (8, 16),
         "decoder_down_block_types": ("ResnetDownsampleBlock2D",) * 2, "decoder_layers_per_block": 1,
         "decoder_norm_num_groups": 4, "decoder_up_block_types": ("ResnetUpsampleBlock2D",) * 2},
        _image(),
    ),
    "ltx": Denoiser(
        "AutoencoderKLLTXVideo",
        {"latent_channels": 4, "block_out_channels": (8, 8, 8, 8), "decoder_block_out_channels": (8, 8, 8, 8),
         "layers_per_block": (1, 1, 1, 1, 1), "decoder_layers_per_block": (1, 1, 1, 1, 1), "patch_size": 1},
        _video(9, 32),
    ),
    "ltx_timestep": Denoiser(
        "AutoencoderKLLTXVideo",
        {"latent_channels": 4, "block_out_channels": (8, 8, 8, 8), "decoder_block_out_channels": (8, 8, 8, 8),
         "layers_per_block": (1, 1, 1, 1, 1), "decoder_layers_per_block": (1, 1, 1, 1, 1), "patch_size": 1,
         "timestep_conditioning": True},
        lambda draw, n: {"sample": draw(1, 3, 9, 32, 32), "temb": draw.time(1.0)},
    ),
    "kandinsky6_sr": Denoiser(
        "Kandinsky6SRVAE",
        {"latent_channels": 4, "encoder_block_out_channels": (32, 32, 32), "decoder_block_out_channels": (32, 32, 32),
         "layers_per_block": 1, "temporal_compression_ratio": 2},
        _video(),
    ),
    "kandinsky6_sr_bank": Denoiser(
        "Kandinsky6SRLatentUpscalerBank",
        {"in_channels": 4, "stage_channels": (32, 32, 32), "num_pre_blocks": 1, "num_mid_blocks": 1,
         "num_post_blocks": 1, "num_x2_adapter_blocks": 1},
        lambda draw, n: {"latents": draw(1, 4, 2, 8, 8), "scale": 2},
    ),
    "minimax": Denoiser(
        "AutoencoderKLMiniMaxH3",
        {"latent_channels": 4, "block_out_channels": (8, 16), "layers_per_block": 1,
         "spatial_downsample_factors": (2, 2), "temporal_downsample_factors": (1, 2), "norm_num_groups": 4,
         "decoder_num_layers": 1, "decoder_num_attention_heads": 2, "decoder_attention_head_dim": 16,
         "latents_mean": (0.0,) * 4, "latents_std": (1.0,) * 4, "clip_length": 5, "token_drop": 1},
        _video(10),
    ),
    "rae": Denoiser(
        "AutoencoderRAE",
        {"encoder_hidden_size": 64, "encoder_patch_size": 4, "encoder_num_hidden_layers": 1, "decoder_hidden_size": 16,
         "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2, "decoder_intermediate_size": 32,
         "patch_size": 4, "encoder_input_size": 16},
        _image(),
    ),
    "minimax_audio": Denoiser(
        "AutoencoderKLMiniMaxH3Audio",
        {"encoder_dim": 8, "encoder_rates": (2, 2), "latent_dim": 16, "latent_channels": 4, "num_attention_heads": 2,
         "decoder_dim": 16, "decoder_rates": (2, 2), "decoder_kernel_sizes": (4, 4), "resblock_kernel_sizes": (3,),
         "resblock_dilation_sizes": ((1, 3),)},
        lambda draw, n: {"sample": draw(1, 1, 32)},
    ),
    "longcat_audio": Denoiser(
        "LongCatAudioDiTVae",
        {"channels": 8, "c_mults": [1, 2], "strides": [2, 4], "latent_dim": 4, "encoder_latent_dim": 8,
         "downsampling_ratio": 8},
        lambda draw, n: {"sample": draw(1, 1, 64)},
    ),
    "mmaudio_vocoder": Denoiser(
        "MMAudioVocoder",
        {"num_mels": 8, "upsample_initial_channel": 16, "upsample_rates": (2, 2), "upsample_kernel_sizes": (4, 4),
         "resblock_kernel_sizes": (3,), "resblock_dilation_sizes": ((1, 3),)},
        lambda draw, n: {"mel": draw(1, 8, 16)},
    ),
    "minimax_vocoder": Denoiser(
        "MiniMaxMusic3Vocoder",
        {"latent_channels": 8, "decoder_input_dim": 16, "decoder_hidden_dim": 16, "upsampling_ratios": (2, 2)},
        lambda draw, n: {"latents": draw(1, 8, 16)},
    ),
    "kvae_audio": Denoiser(
        "AutoencoderKLKVAEAudio",
        {"encoder_dim": 8, "encoder_rates": [2, 4], "latent_dim": 16, "codebook_dim": 4, "decoder_dim": 16,
         "decoder_rates": [4, 2], "attn_num_heads": 2},
        lambda draw, n: {"sample": draw(1, 1, 32)},
    ),
    "cosmos3_audio": Denoiser(
        "Cosmos3AVAEAudioTokenizer",
        {"vocoder_input_dim": 4, "dec_dim": 8, "dec_c_mults": (1, 2), "dec_strides": (2, 4), "enc_dim": 8,
         "enc_intermediate_dim": 16, "enc_num_layers": 1, "enc_num_blocks": 1, "enc_n_fft": 8, "enc_hop_length": 2,
         "enc_latent_dim": 8, "enc_c_mults": (1, 2), "enc_strides": (2, 2)},
        lambda draw, n: {"sample": draw(1, 2, 64)},
    ),
    "same": Denoiser(
        "AutoencoderSAME",
        {"patch_size": 4, "encoder_channels": 16, "encoder_c_mults": [2], "encoder_strides": [2],
         "encoder_transformer_depths": [1], "latent_dim": 8, "dim_heads": 16},
        lambda draw, n: {"sample": draw(1, 2, 64)},
    ),
    "mmaudio": Denoiser(
        "MMAudioVAE",
        {"mel_bins": 16, "latent_channels": 4, "hidden_channels": 16, "channel_multipliers": (1, 2),
         "layers_per_block": 1, "n_fft": 64, "hop_length": 16},
        lambda draw, n: {"sample": draw(1, 256)},
    ),
    "proteina": Denoiser(
        "RFD4ProteinaAutoencoder",
        {"atom37_mask": [[True] * 37] * 8, "allowed_residue_types": [[True] * 8] * 3, "latent_dim": 8,
         "n_residue_types": 8, "num_token_types": 3, "nlayers": 1, "token_dim": 16, "nheads": 2, "dim_cond": 8,
         "pair_repr_dim": 8, "token_type_emb_dim": 8},
        lambda draw, n: {
            "z_latent": draw(1, 6, 8), "ca_coors_nm": draw(1, 6, 3), "padding_mask": draw.mask(1, 6).bool(),
            "token_type": draw.integers(1, 6, below=3),
            "conditioning": {
                "is_in_context_conditioning": draw.integers(1, 6, below=1), "supports_local_latent": draw.mask(1, 6),
            },
        },
    ),
}  # fmt: skip

UNETS: dict[str, Denoiser] = {
    "unet2d_condition": Denoiser("UNet2DConditionModel", {**UNET, **CROSS}, noisy(4, 8, 8)),
    "unet2d_scale_shift": Denoiser(
        "UNet2DConditionModel", {**UNET, **CROSS, "resnet_time_scale_shift": "scale_shift"}, noisy(4, 8, 8)
    ),
    "unet2d": Denoiser(
        "UNet2DModel",
        {"in_channels": 4, "out_channels": 4, "sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1,
         "norm_num_groups": 4, "attention_head_dim": 4, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
         "up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
        lambda draw, n: {"sample": draw(1, 4, 8, 8), "timestep": draw.time()},
    ),
    "unet3d": Denoiser(
        "UNet3DConditionModel",
        {**UNET, "down_block_types": ("DownBlock3D", "CrossAttnDownBlock3D"),
         "up_block_types": ("CrossAttnUpBlock3D", "UpBlock3D")},
        noisy(4, 2, 8, 8),
    ),
    "unet_motion": Denoiser(
        "UNetMotionModel",
        {**_MOTION, "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
         "block_out_channels": (16, 32), "norm_num_groups": 16,
         "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"), "num_attention_heads": 2,
         "motion_num_attention_heads": 2},
        lambda draw, n: {**noisy(4, 2, 8, 8)(draw, n), "encoder_hidden_states": draw(2, 6, 16)},
    ),
    "unet_spatio_temporal": Denoiser(
        "UNetSpatioTemporalConditionModel",
        {"block_out_channels": (32, 64), "sample_size": 8, "layers_per_block": 1, "cross_attention_dim": 16,
         "num_attention_heads": (2, 2), "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 24,
         "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
         "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal")},
        lambda draw, n: {
            "sample": draw(1, 2, 8, 8, 8), "timestep": draw.time(), "encoder_hidden_states": draw(1, 1, 16),
            "added_time_ids": draw(1, 3),
        },
    ),
    "i2vgen": Denoiser(
        "I2VGenXLUNet",
        {"block_out_channels": (8, 16), "sample_size": 8, "layers_per_block": 1, "cross_attention_dim": 16,
         "attention_head_dim": 4, "norm_num_groups": 4,
         "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
         "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D")},
        lambda draw, n: {
            "sample": draw(1, 4, 2, 8, 8), "timestep": draw.time(), "fps": draw.integers(1),
            "image_latents": draw(1, 4, 2, 8, 8), "image_embeddings": draw(1, 16),
            "encoder_hidden_states": draw(1, 6, 16),
        },
    ),
    "kandinsky3": Denoiser(
        "Kandinsky3UNet",
        {"time_embedding_dim": 16, "groups": 4, "attention_head_dim": 4, "layers_per_block": 3,
         "block_out_channels": (32, 64), "cross_attention_dim": 16, "encoder_hid_dim": 16},
        lambda draw, n: {
            **noisy(4, 8, 8)(draw, n), "encoder_attention_mask": draw.mask(1, 6),
        },
    ),
    "stable_cascade": Denoiser(
        "StableCascadeUNet",
        {"in_channels": 4, "out_channels": 4, "timestep_ratio_embedding_dim": 8, "conditioning_dim": 16,
         "block_out_channels": (8, 16), "num_attention_heads": (1, 2), "down_num_layers_per_block": (1, 1),
         "up_num_layers_per_block": (1, 1), "down_blocks_repeat_mappers": (1, 1), "up_blocks_repeat_mappers": (1, 1),
         "block_types_per_layer": (("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),) * 2,
         "clip_text_pooled_in_channels": 16, "clip_text_in_channels": 16, "clip_image_in_channels": 16,
         "clip_seq": 2},
        lambda draw, n: {
            "sample": draw(1, 4, 8, 8), "timestep_ratio": draw.time(1.0), "clip_text_pooled": draw(1, 1, 16),
            "clip_text": draw(1, 6, 16), "clip_img": draw(1, 1, 16),
        },
    ),
    "unet1d": Denoiser(
        "UNet1DModel",
        {"sample_size": 16, "in_channels": 4, "out_channels": 4, "block_out_channels": (32, 32),
         "extra_in_channels": 64, "down_block_types": ("DownBlock1DNoSkip", "DownBlock1D"),
         "up_block_types": ("UpBlock1D", "UpBlock1DNoSkip"),
         "mid_block_type": "UNetMidBlock1D"},
        lambda draw, n: {"sample": draw(1, 4, 16), "timestep": draw.time()},
    ),
    "audioldm2": Denoiser(
        "AudioLDM2UNet2DConditionModel",
        {**UNET, **CROSS, "cross_attention_dim": ((None, 16, 16),) * 2},
        lambda draw, n: {**noisy(4, 8, 8)(draw, n), "encoder_hidden_states_1": draw(1, 6, 16)},
    ),
    "uvit2d": Denoiser(
        "UVit2DModel",
        {"hidden_size": 32, "cond_embed_dim": 16, "micro_cond_encode_dim": 8, "micro_cond_embed_dim": 40,
         "encoder_hidden_size": 16, "vocab_size": 20, "codebook_size": 16, "in_channels": 16, "block_out_channels": 16,
         "num_res_blocks": 1, "block_num_heads": 2, "num_hidden_layers": 1, "num_attention_heads": 2,
         "intermediate_size": 32, "sample_size": 4},
        lambda draw, n: {
            "input_ids": draw.integers(1, 4, 4), "encoder_hidden_states": draw(1, 6, 16),
            "pooled_text_emb": draw(1, 16), "micro_conds": draw.integers(1, 5).to(draw.dtype),
        },
    ),
    "dreamlite": Denoiser("DreamLiteUNetModel", {**UNET, **CROSS}, noisy(4, 8, 8)),
}  # fmt: skip
