"""Norm classes of diffusers, by exact class. Two classes of one name in two files are two entries."""

from __future__ import annotations

from diffkern.matching.semantics import Entry, LeftAlone, NormSemantics

# --- RMS norms over the last dimension -----------------------------------------------------------------

# Rounds to the dtype of a half weight, multiplies, rounds, adds: the weight decides the result's dtype.
_RMS_NORM = NormSemantics("rms_norm", bias="bias", rounding="weight", output="weight")

_T5 = NormSemantics("rms_norm", eps="variance_epsilon", rounding="weight", output="weight")

# Multiplies in float32 and rounds once, to the dtype of the input.
_ROUNDS_ONCE = NormSemantics("rms_norm")

# The weight is stored as its difference from 1. (Krea2 forms the sum in the dtype of the weight, which its
# models keep in float32; for a half weight the sum in float32 is the more accurate one.)
_ZERO_CENTRED = NormSemantics("rms_norm", weight_offset=1.0)
_KREA_2 = NormSemantics("rms_norm", optional_eps=True, weight_offset=1.0, layout="contiguous")

# --- RMS norms over the channels -----------------------------------------------------------------------

# F.normalize, rounded to the dtype of the input, times the root of the channel count, times gamma.
_WAN = NormSemantics(
    "rms_norm",
    "x",
    weight="gamma",
    bias="bias",
    eps=1e-12,
    dim="channel_first",
    rounding="input",
    output="promote",
    clamp_eps=True,
    root="scale",
)
_KANDINSKY_6 = NormSemantics(
    "rms_norm", weight="gamma", eps=1e-12, dim=1, rounding="input", output="promote", clamp_eps=True, root="scale"
)

# Computed in the dtype of the input by the stock classes, in float32 here.
_PER_CHANNEL = NormSemantics("rms_norm", "x", weight=None, dim="channel_dim")
_AUDIO_PIXEL = NormSemantics("rms_norm", "x", weight=None, dim="dim")

# --- layer norms ---------------------------------------------------------------------------------------

_FP32_LAYER_NORM = NormSemantics("layer_norm", "inputs", bias="bias", dim="normalized_shape", layout="contiguous")
_NCHW_LAYER_NORM = NormSemantics(
    "layer_norm", "x", bias="bias", dim="normalized_shape", layout="channels_last", mixed_dtypes=False
)

# --- left alone ----------------------------------------------------------------------------------------

_MODULATED = LeftAlone("modulates around a norm; the norm inside is handled on its own")
_CONTAINER = LeftAlone("a container; the norm inside is handled on its own")
_NO_NORM = LeftAlone("computes modulation parameters and normalises nothing")
_GROUP = LeftAlone("group normalisation works on groups of channels and positions, not along one dimension")
_GRN = LeftAlone("global response normalisation takes its statistics over the positions, not per token")


def _each(entry: Entry, *classes: str) -> dict[str, Entry]:
    return {f"diffusers.{name}": entry for name in classes}


TABLE: dict[str, Entry] = {
    **_each(_RMS_NORM, "models.normalization.RMSNorm"),
    **_each(_T5, "models.transformers.t5_film_transformer.T5LayerNorm"),
    **_each(
        _ROUNDS_ONCE,
        "models.normalization.MochiRMSNorm",
        "models.transformers.transformer_cosmos3.Cosmos3NemotronRMSNorm",
        "pipelines.kolors.text_encoder.RMSNorm",
    ),
    "diffusers.models.transformers.transformer_stable_audio3.StableAudio3RMSNorm": NormSemantics(
        "rms_norm", weight="gamma"
    ),
    **_each(_ZERO_CENTRED, "models.transformers.transformer_qwenimage21.QwenImage21ZeroCenterRMSNorm"),
    **_each(_KREA_2, "models.transformers.transformer_krea2.Krea2RMSNorm"),
    **_each(
        _WAN,
        "models.autoencoders.autoencoder_kl_hunyuanimage_refiner.HunyuanImageRefinerRMS_norm",
        "models.autoencoders.autoencoder_kl_hunyuanvideo15.HunyuanVideo15RMS_norm",
        "models.autoencoders.autoencoder_kl_qwenimage.QwenImageRMS_norm",
        "models.autoencoders.autoencoder_kl_qwenimage21.QwenImage21RMS_norm",
        "models.autoencoders.autoencoder_kl_wan.WanRMS_norm",
    ),
    **_each(
        _KANDINSKY_6,
        "models.autoencoders.autoencoder_kandinsky6_sr.Kandinsky6VAERMSNorm",
        "models.latent_upscaler.latent_upscaler_kandinsky6_sr.Kandinsky6SRLatentUpscalerRMSNorm",
    ),
    **_each(_PER_CHANNEL, "models.autoencoders.autoencoder_kl_ltx2.PerChannelRMSNorm"),
    **_each(_AUDIO_PIXEL, "models.autoencoders.autoencoder_kl_ltx2_audio.LTX2AudioPixelNorm"),
    **_each(_FP32_LAYER_NORM, "models.normalization.FP32LayerNorm"),
    **_each(
        _NCHW_LAYER_NORM,
        "models.unets.unet_stable_cascade.SDCascadeLayerNorm",
        "pipelines.deprecated.wuerstchen.modeling_wuerstchen_common.WuerstchenLayerNorm",
    ),
    **_each(
        LeftAlone("divides by the p-norm of the vector and does not scale by the root of its size"),
        "models.normalization.LpNorm",
    ),
    **_each(
        _GRN,
        "models.normalization.GlobalResponseNorm",
        "models.transformers.transformer_longcat_audio_dit.AudioDiTGRN",
        "models.unets.unet_stable_cascade.GlobalResponseNorm",
        "pipelines.deprecated.wuerstchen.modeling_wuerstchen_common.GlobalResponseNorm",
    ),
    **_each(
        _GROUP,
        "models.autoencoders.autoencoder_kl_cosmos.CosmosCausalGroupNorm",
        "models.autoencoders.autoencoder_kl_kvae_video.KVAECachedGroupNorm",
        "models.autoencoders.autoencoder_kl_minimax_h3.MiniMaxH3VideoGroupNorm",
        "models.autoencoders.autoencoder_kl_mochi.MochiChunkedGroupNorm3D",
        "models.normalization.AdaGroupNorm",
        "models.unets.unet_kandinsky3.Kandinsky3ConditionalGroupNorm",
    ),
    **_each(
        LeftAlone("multiplies by a factor that it is given; fused with what calls it, or the norm inside on its own"),
        "models.transformers.transformer_mochi.MochiModulatedRMSNorm",
    ),
    **_each(_CONTAINER, "models.autoencoders.autoencoder_vidtok.VidTokLayerNorm"),
    **_each(
        LeftAlone("rescales latents by a running deviation; it normalises nothing at inference"),
        "models.autoencoders.autoencoder_same.SoftNormBottleneck",
    ),
    **_each(
        LeftAlone("shifts and scales image embeddings by fixed statistics"),
        "pipelines.stable_diffusion.stable_unclip_image_normalizer.StableUnCLIPImageNormalizer",
    ),
    **_each(
        LeftAlone("a residual block of convolutions; the norms inside are handled on their own"),
        "models.resnet.ResnetBlockCondNorm2D",
    ),
    **_each(
        _NO_NORM,
        "models.normalization.AdaLayerNormSingle",
        "models.transformers.transformer_hunyuan_video.HunyuanVideoAdaNorm",
        "models.transformers.transformer_hunyuan_video15.HunyuanVideo15AdaNorm",
        "models.transformers.transformer_hunyuanimage.HunyuanImageAdaNorm",
        "models.transformers.transformer_ltx2.LTX2AdaLayerNormSingle",
        "models.transformers.transformer_minimax_h3.MiniMaxH3AdaLayerNormModulation",
        "models.transformers.transformer_motif_video.MotifVideoAdaNorm",
        "models.transformers.transformer_sana_wm_refiner.SanaWMLTX2AdaLayerNormSingle",
    ),
    **_each(
        _MODULATED,
        "models.attention_processor.SpatialNorm",
        "models.autoencoders.autoencoder_kandinsky6_sr.Kandinsky6SRSpatialNorm3D",
        "models.autoencoders.autoencoder_kl_cogvideox.CogVideoXSpatialNorm3D",
        "models.autoencoders.autoencoder_kl_kvae.KVAEDecoderSpatialNorm2D",
        "models.autoencoders.autoencoder_kl_kvae_video.KVAECachedSpatialNorm3D",
        "models.autoencoders.autoencoder_rfd4_proteina.RFD4ProteinaAdaptiveNorm",
        "models.latent_upscaler.latent_upscaler_kandinsky6_sr.Kandinsky6SRLatentUpscalerModulatedNorm",
        "models.normalization.AdaLayerNorm",
        "models.normalization.AdaLayerNormContinuous",
        "models.normalization.AdaLayerNormZero",
        "models.normalization.AdaLayerNormZeroSingle",
        "models.normalization.CogVideoXLayerNormZero",
        "models.normalization.CogView3PlusAdaLayerNormZeroTextImage",
        "models.normalization.LuminaLayerNormContinuous",
        "models.normalization.LuminaRMSNormZero",
        "models.normalization.SD35AdaLayerNormZeroX",
        "models.transformers.hunyuan_transformer_2d.AdaLayerNormShift",
        "models.transformers.sana_transformer.SanaModulatedNorm",
        "models.transformers.transformer_chroma.ChromaAdaLayerNormContinuousPruned",
        "models.transformers.transformer_chroma.ChromaAdaLayerNormZeroPruned",
        "models.transformers.transformer_chroma.ChromaAdaLayerNormZeroSinglePruned",
        "models.transformers.transformer_cogview4.CogView4AdaLayerNormContinuous",
        "models.transformers.transformer_cogview4.CogView4AdaLayerNormZero",
        "models.transformers.transformer_cosmos.CosmosAdaLayerNorm",
        "models.transformers.transformer_cosmos.CosmosAdaLayerNormZero",
        "models.transformers.transformer_easyanimate.EasyAnimateLayerNormZero",
        "models.transformers.transformer_flux3.Flux3AdaLayerNorm",
        "models.transformers.transformer_glm_image.GlmImageAdaLayerNormContinuous",
        "models.transformers.transformer_glm_image.GlmImageAdaLayerNormZero",
        "models.transformers.transformer_helios.HeliosOutputNorm",
        "models.transformers.transformer_hunyuan_video.HunyuanVideoTokenReplaceAdaLayerNormZero",
        "models.transformers.transformer_hunyuan_video.HunyuanVideoTokenReplaceAdaLayerNormZeroSingle",
        "models.transformers.transformer_longcat_audio_dit.AudioDiTAdaLayerNormZeroFinal",
        "models.transformers.transformer_minimax_h3.MiniMaxH3AdaLayerNormOut",
        "models.transformers.transformer_mochi.MochiLayerNormContinuous",
        "models.transformers.transformer_mochi.MochiRMSNormZero",
        "models.transformers.transformer_qwenimage21.QwenImage21AdaLayerNormContinuous",
        "models.transformers.transformer_rfd4_proteina.RFD4ProteinaAdaptiveNorm",
        "models.transformers.transformer_sana_video.SanaModulatedNorm",
    ),
}
