"""Norm classes of transformers' text and vision encoders that diffusers pipelines use, by exact class.

CLIP, SigLIP, BERT, BLIP and their kin use ``torch.nn.LayerNorm``.
"""

from __future__ import annotations

from diffkern.matching.semantics import Entry, LeftAlone, NormSemantics

# Rounds to the dtype of a half weight, then multiplies: the weight decides the dtype of the result.
_T5 = NormSemantics("rms_norm", eps="variance_epsilon", rounding="weight", output="weight")

# Rounds to the dtype of the input, then multiplies: a float32 weight makes a half input float32.
_LLAMA = NormSemantics("rms_norm", eps="variance_epsilon", rounding="input", output="promote")

# Rounds once, after a multiplication in float32.
_GPT_OSS = NormSemantics("rms_norm", eps="variance_epsilon")

# The weight is stored as its difference from 1; the sum is formed in float32.
_GEMMA = NormSemantics("rms_norm", "x", weight_offset=1.0)

# Unlike its ancestors: the weight is the multiplier itself, and ``with_scale=False`` leaves it out.
_GEMMA_4 = NormSemantics("rms_norm")

_GATED = LeftAlone("multiplies by an activated gate, which it takes as a second tensor")
_CUMULATIVE = LeftAlone("takes its statistics over all time steps so far, not along one dimension")


def _each(entry: Entry, *classes: str) -> dict[str, Entry]:
    return {f"transformers.models.{name}": entry for name in classes}


TABLE: dict[str, Entry] = {
    **_each(
        _T5,
        "t5.modeling_t5.T5LayerNorm",
        "mt5.modeling_mt5.MT5LayerNorm",
        "umt5.modeling_umt5.UMT5LayerNorm",
    ),
    **_each(
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
    **_each(_GPT_OSS, "gpt_oss.modeling_gpt_oss.GptOssRMSNorm"),
    **_each(
        _GEMMA,
        "gemma.modeling_gemma.GemmaRMSNorm",
        "gemma2.modeling_gemma2.Gemma2RMSNorm",
        "gemma3.modeling_gemma3.Gemma3RMSNorm",
        "qwen3_5.modeling_qwen3_5.Qwen3_5RMSNorm",
        "t5gemma.modeling_t5gemma.T5GemmaRMSNorm",
        "t5gemma2.modeling_t5gemma2.T5Gemma2RMSNorm",
    ),
    **_each(
        _GEMMA_4,
        "diffusion_gemma.modeling_diffusion_gemma.DiffusionGemmaRMSNorm",
        "gemma3n.modeling_gemma3n.Gemma3nRMSNorm",
        "gemma4.modeling_gemma4.Gemma4RMSNorm",
        "gemma4_unified.modeling_gemma4_unified.Gemma4UnifiedRMSNorm",
    ),
    **_each(_GATED, "qwen3_5.modeling_qwen3_5.Qwen3_5RMSNormGated"),
    **_each(_CUMULATIVE, "gemma3n.modeling_gemma3n.Gemma3nAudioCumulativeGroupNorm"),
}
