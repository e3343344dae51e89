"""Tiny random language models of transformers, with weights that no wrong kernel could hide behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _decoder(name: str, **options: Any) -> Callable[..., Any]:
    def make(**more: Any) -> Any:
        config = getattr(transformers, f"{name}Config")(**{**_SIZES, **options, **more})
        return getattr(transformers, f"{name}ForCausalLM")(config)

    return make


def _t5(**more: Any) -> Any:
    sizes = {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(**{**sizes, "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0, **more})
    return transformers.T5ForConditionalGeneration(config)


#: Builders by name: grouped queries throughout, weights stored as their difference from 1 (Gemma), norms of queries
#: and keys (Qwen 3), packed projections and half rotated heads (Phi 3), windows (Mistral), an encoder (T5).
BUILDERS: dict[str, Callable[..., Any]] = {
    "llama": _decoder("Llama"),
    "qwen2": _decoder("Qwen2"),
    "qwen3": _decoder("Qwen3", head_dim=8),
    "mistral": _decoder("Mistral", sliding_window=5),
    "gemma": _decoder("Gemma", head_dim=8),
    "gemma2": _decoder("Gemma2", head_dim=8, attn_logit_softcapping=None, sliding_window=5),
    "phi3": _decoder("Phi3", partial_rotary_factor=0.5),
    "t5": _t5,
}


#: Modules with a fused forward, by op. Gemma's norms, whose weights are differences from 1, stay apart from residuals.
_GEMMA = {"rms_norm": 5, "glu": 2, "rope": 2}
_DECODER = _GEMMA | {"gate_residual_norm_modulate": 2}
SITES: dict[str, dict[str, int]] = {
    **dict.fromkeys(("llama", "qwen2", "mistral", "phi3"), _DECODER),
    "qwen3": _DECODER | {"rms_norm": 9},
    "gemma": _GEMMA,
    "gemma2": _GEMMA | {"rms_norm": 9},
    "t5": {"rms_norm": 12, "glu": 4},
}


def all_is_fused(name: str, report: Any, *, joined: bool = True) -> bool:
    """Whether nothing ran stock, and nothing was idle but the norms that are computed with the residual before them.

    Norms that a kernel of another library computes are not ``joined`` with residuals: then none is idle.
    """
    counts = report.calls().values()
    idle = sum(count["fused"] == 0 for count in counts)
    expected = SITES[name].get("gate_residual_norm_modulate", 0) if joined else 0
    return idle == expected and not any(count["stock"] for count in counts)


def build(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu", **options: Any) -> Any:
    """Builds a model in evaluation."""
    torch.manual_seed(0)
    model = BUILDERS[name](**options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
            if "norm" in parameter_name and not name.startswith("gemma"):
                parameter.add_(1)
    return model.to(device, dtype).eval()


def inputs(name: str, padding: str = "", device: str = "cpu") -> dict[str, Tensor]:
    """Two sequences of ten tokens, of which three of the first are padding, on the ``"left"`` or the ``"right"``."""
    ids = torch.randint(3, 61, (2, 10), generator=torch.Generator().manual_seed(2))
    batch = {"input_ids": ids}
    if padding:
        mask = torch.ones_like(ids)
        mask[0, slice(3) if padding == "left" else slice(-3, None)] = 0
        batch["attention_mask"] = mask
    if name == "t5":
        batch["decoder_input_ids"] = ids.flip(1)[:, :7]
    return {key: value.to(device) for key, value in batch.items()}


def logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Runs without gradients."""
    with torch.no_grad():
        result: Tensor = model(**batch).logits
    return result


def step(model: Any, batch: dict[str, Tensor], seed: int = 3) -> Tensor:
    """One training step: the gradients of all parameters in one vector; some labels do not count."""
    labels = batch.get("decoder_input_ids", batch["input_ids"]).clone()
    labels[:, ::4] = -100
    model.zero_grad()
    torch.manual_seed(seed)
    model(**batch, labels=labels).loss.backward()
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def in_float64(model: Any) -> Any:
    """The same model in float64, as far as its code goes: the norms compute in float32 whatever they are given."""
    return copy.deepcopy(model).double()
