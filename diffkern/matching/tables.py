"""Norm classes, by exact class: of torch.nn, of diffusers, and of the encoders of transformers that its pipelines use.

Two classes of one name in two files are two entries. CLIP, SigLIP, BERT, BLIP and their kin use ``torch.nn.LayerNorm``.
"""

from __future__ import annotations

from functools import partial

from diffkern.matching.semantics import Entry, LeftAlone, NormSemantics

# --- RMS norms over the last dimension -----------------------------------------------------------------

# Rounds to the dtype of a half weight, multiplies, rounds, adds: the weight decides the result's dtype.
_RMS_NORM = NormSemantics("rms_norm", bias="bias", rounding="weight", output="weight")

_T5 = NormSemantics("rms_norm", eps="variance_epsilon", rounding="weight", output="weight")

# Rounds to the dtype of the input, then multiplies: a float32 weight makes a half input float32.
_LLAMA = NormSemantics("rms_norm", eps="variance_epsilon", rounding="input", output="promote")

# Multiplies in float32 and rounds once, to the dtype of the input. Gemma 4's weight, unlike its ancestors', is the
# multiplier itself, and ``with_scale=False`` leaves it out.
_ROUNDS_ONCE = NormSemantics("rms_norm")
_GPT_OSS = NormSemantics("rms_norm", eps="variance_epsilon")
_TORCH_RMS_NORM = NormSemantics("rms_norm", "x", optional_eps=True, dim="normalized_shape", layout="contiguous")

# The weight is stored as its difference from 1. (Krea2 forms the sum in the dtype of the weight, which its
# models keep in float32; for a half weight the sum in float32 is the more accurate one.)
_ZERO_CENTRED = NormSemantics("rms_norm", weight_offset=1.0)
_GEMMA = NormSemantics("rms_norm", "x", weight_offset=1.0)
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

_LAYER_NORM = NormSemantics(
    "layer_norm", "input", bias="bias", dim="normalized_shape", layout="contiguous", mixed_dtypes=False
)
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
_GATED = LeftAlone("multiplies by an activated gate, which it takes as a second tensor")
_CUMULATIVE = LeftAlone("takes its statistics over all time steps so far, not along one dimension")
_BATCH = LeftAlone("batch normalisation uses running statistics and folds into the layer before it")
_INSTANCE = LeftAlone("instance normalisation works on whole channel planes, not along one dimension")
_LAZY = LeftAlone("a lazy module has no parameters before its first call")
_RESPONSE = LeftAlone("response normalisation works on a window of neighbouring channels")
_PARAMETRIZATION = LeftAlone("a parametrization of another module's weight, not a layer")


def _each(package: str, entry: Entry, *classes: str) -> dict[str, Entry]:
    return {f"{package}.{name}": entry for name in classes}


_torch, _diffusers = partial(_each, "torch.nn"), partial(_each, "diffusers")
_transformers = partial(_each, "transformers.models")

#: Every known norm class: full name -> what it computes, or why it is left alone.
TABLE: dict[str, Entry] = {
    # --- torch.nn
    **_torch(_LAYER_NORM, "modules.normalization.LayerNorm"),
    **_torch(_TORCH_RMS_NORM, "modules.normalization.RMSNorm"),
    **_torch(
        LeftAlone("group normalisation works on groups of channels and all positions, not along one dimension"),
        "modules.normalization.GroupNorm",
    ),
    **_torch(_RESPONSE, "modules.normalization.LocalResponseNorm", "modules.normalization.CrossMapLRN2d"),
    **_torch(_BATCH, *(f"modules.batchnorm.BatchNorm{n}d" for n in (1, 2, 3))),
    **_torch(_BATCH, "modules.batchnorm.SyncBatchNorm"),
    **_torch(_INSTANCE, *(f"modules.instancenorm.InstanceNorm{n}d" for n in (1, 2, 3))),
    **_torch(_LAZY, *(f"modules.batchnorm.LazyBatchNorm{n}d" for n in (1, 2, 3))),
    **_torch(_LAZY, *(f"modules.instancenorm.LazyInstanceNorm{n}d" for n in (1, 2, 3))),
    **_torch(_PARAMETRIZATION, "utils.parametrizations._SpectralNorm", "utils.parametrizations._WeightNorm"),
    # --- diffusers
    **_diffusers(_RMS_NORM, "models.normalization.RMSNorm"),
    **_diffusers(_T5, "models.transformers.t5_film_transformer.T5LayerNorm"),
    **_diffusers(
        _ROUNDS_ONCE,
        "models.normalization.MochiRMSNorm",
        "models.transformers.transformer_cosmos3.Cosmos3NemotronRMSNorm",
        "pipelines.kolors.text_encoder.RMSNorm",
    ),
    **_diffusers(
        NormSemantics("rms_norm", weight="gamma"), "models.transformers.transformer_stable_audio3.StableAudio3RMSNorm"
    ),
    **_diffusers(_ZERO_CENTRED, "models.transformers.transformer_qwenimage21.QwenImage21ZeroCenterRMSNorm"),
    **_diffusers(_KREA_2, "models.transformers.transformer_krea2.Krea2RMSNorm"),
    **_diffusers(
        _WAN,
        "models.autoencoders.autoencoder_kl_hunyuanimage_refiner.HunyuanImageRefinerRMS_norm",
        "models.autoencoders.autoencoder_kl_hunyuanvideo15.HunyuanVideo15RMS_norm",
        "models.autoencoders.autoencoder_kl_qwenimage.QwenImageRMS_norm",
        "models.autoencoders.autoencoder_kl_qwenimage21.QwenImage21RMS_norm",
        "models.autoencoders.autoencoder_kl_wan.WanRMS_norm",
    ),
    **_diffusers(
        _KANDINSKY_6,
        "models.autoencoders.autoencoder_kandinsky6_sr.Kandinsky6VAERMSNorm",
        "models.latent_upscaler.latent_upscaler_kandinsky6_sr.Kandinsky6SRLatentUpscalerRMSNorm",
    ),
    **_diffusers(_PER_CHANNEL, "models.autoencoders.autoencoder_kl_ltx2.PerChannelRMSNorm"),
    **_diffusers(_AUDIO_PIXEL, "models.autoencoders.autoencoder_kl_ltx2_audio.LTX2AudioPixelNorm"),
    **_diffusers(_FP32_LAYER_NORM, "models.normalization.FP32LayerNorm"),
    **_diffusers(
        _NCHW_LAYER_NORM,
        "models.unets.unet_stable_cascade.SDCascadeLayerNorm",
        "pipelines.deprecated.wuerstchen.modeling_wuerstchen_common.WuerstchenLayerNorm",
    ),
    **_diffusers(
        LeftAlone("divides by the p-norm of the vector and does not scale by the root of its size"),
        "models.normalization.LpNorm",
    ),
    **_diffusers(
        _GRN,
        "models.normalization.GlobalResponseNorm",
        "models.transformers.transformer_longcat_audio_dit.AudioDiTGRN",
        "models.unets.unet_stable_cascade.GlobalResponseNorm",
        "pipelines.deprecated.wuerstchen.modeling_wuerstchen_common.GlobalResponseNorm",
    ),
    **_diffusers(
        _GROUP,
        "models.autoencoders.autoencoder_kl_cosmos.CosmosCausalGroupNorm",
        "models.autoencoders.autoencoder_kl_kvae_video.KVAECachedGroupNorm",
        "models.autoencoders.autoencoder_kl_minimax_h3.MiniMaxH3VideoGroupNorm",
        "models.autoencoders.autoencoder_kl_mochi.MochiChunkedGroupNorm3D",
        "models.normalization.AdaGroupNorm",
        "models.unets.unet_kandinsky3.Kandinsky3ConditionalGroupNorm",
    ),
    **_diffusers(
        LeftAlone("multiplies by a factor that it is given; fused with what calls it, or the norm inside on its own"),
        "models.transformers.transformer_mochi.MochiModulatedRMSNorm",
    ),
    **_diffusers(_CONTAINER, "models.autoencoders.autoencoder_vidtok.VidTokLayerNorm"),
    **_diffusers(
        LeftAlone("rescales latents by a running deviation; it normalises nothing at inference"),
        "models.autoencoders.autoencoder_same.SoftNormBottleneck",
    ),
    **_diffusers(
        LeftAlone("shifts and scales image embeddings by fixed statistics"),
        "pipelines.stable_diffusion.stable_unclip_image_normalizer.StableUnCLIPImageNormalizer",
    ),
    **_diffusers(
        LeftAlone("a residual block of convolutions; the norms inside are handled on their own"),
        "models.resnet.ResnetBlockCondNorm2D",
    ),
    **_diffusers(
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
    **_diffusers(
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
    # --- transformers
    **_transformers(
        _T5, "t5.modeling_t5.T5LayerNorm", "mt5.modeling_mt5.MT5LayerNorm", "umt5.modeling_umt5.UMT5LayerNorm"
    ),
    **_transformers(
        _LLAMA,
        "cosmos3_edge.modeling_cosmos3_edge.Cosmos3EdgeTextRMSNorm",
        "glm.modeling_glm.GlmRMSNorm",
        "glm4.modeling_glm4.Glm4RMSNorm",
        "glm4v.modeling_glm4v.Glm4vRMSNorm",
        "glm_image.modeling_glm_image.GlmImageRMSNorm",
        "llama.modeling_llama.LlamaRMSNorm",
        "ministral.modeling_ministral.MinistralRMSNorm",
        "ministral3.modeling_ministral3.Ministral3RMSNorm",
        "mistral.modeling_mistral.MistralRMSNorm",
        "mistral3.modeling_mistral3.Mistral3RMSNorm",
        "phi3.modeling_phi3.Phi3RMSNorm",
        "pixtral.modeling_pixtral.PixtralRMSNorm",
        "qwen2.modeling_qwen2.Qwen2RMSNorm",
        "qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLRMSNorm",
        "qwen2_vl.modeling_qwen2_vl.Qwen2VLRMSNorm",
        "qwen3.modeling_qwen3.Qwen3RMSNorm",
        "qwen3_moe.modeling_qwen3_moe.Qwen3MoeRMSNorm",
        "qwen3_vl.modeling_qwen3_vl.Qwen3VLTextRMSNorm",
        "qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeTextRMSNorm",
        "smollm3.modeling_smollm3.SmolLM3RMSNorm",
    ),
    **_transformers(_GPT_OSS, "gpt_oss.modeling_gpt_oss.GptOssRMSNorm"),
    **_transformers(
        _GEMMA,
        "gemma.modeling_gemma.GemmaRMSNorm",
        "gemma2.modeling_gemma2.Gemma2RMSNorm",
        "gemma3.modeling_gemma3.Gemma3RMSNorm",
        "qwen3_5.modeling_qwen3_5.Qwen3_5RMSNorm",
        "t5gemma.modeling_t5gemma.T5GemmaRMSNorm",
        "t5gemma2.modeling_t5gemma2.T5Gemma2RMSNorm",
    ),
    **_transformers(
        _ROUNDS_ONCE,
        "diffusion_gemma.modeling_diffusion_gemma.DiffusionGemmaRMSNorm",
        "gemma3n.modeling_gemma3n.Gemma3nRMSNorm",
        "gemma4.modeling_gemma4.Gemma4RMSNorm",
        "gemma4_unified.modeling_gemma4_unified.Gemma4UnifiedRMSNorm",
    ),
    **_transformers(_GATED, "qwen3_5.modeling_qwen3_5.Qwen3_5RMSNormGated"),
    **_transformers(_CUMULATIVE, "gemma3n.modeling_gemma3n.Gemma3nAudioCumulativeGroupNorm"),
}
