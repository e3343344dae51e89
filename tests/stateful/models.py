"""The seven models that the state machine drives: some thousand parameters, and a forward of some milliseconds."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import (
    FluxTransformer2DModel,
    LTX2VideoTransformer3DModel,
    LTXVideoTransformer3DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    WanTransformer3DModel,
)
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.pipelines.tiny import make_visible

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A model, how to call it, and where its adapters go.

    Attributes:
        build: Makes the model, with random weights.
        inputs: Makes the arguments of a call from a function that draws random tensors, and a number; other numbers
            give other shapes.
        lora: Names of the linear layers that a LoRA adapts.
        block: Path of one block.
        text: Name of the argument that stays the same from step to step, if there is one.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[Callable[..., Tensor], int], Inputs]
    lora: tuple[str, ...]
    block: str
    text: str | None = "encoder_hidden_states"

    def model(self) -> nn.Module:
        """The model with weights that hide no error, in evaluation."""
        torch.manual_seed(0)
        model = self.build()
        make_visible(model)
        return model.eval().requires_grad_(False)

    def arguments(self, variant: int) -> Inputs:
        """Arguments of a call in float32; ``variant`` 0 and 1 differ in every value and shape."""
        generator = torch.Generator().manual_seed(variant + 1)
        return self.inputs(lambda *shape: torch.randn(shape, generator=generator), variant)

    def accepts(self, name: str) -> bool:
        """Whether the forward of the model has an argument of this name."""
        return name in inspect.signature(self.build().forward).parameters


def _ltx() -> nn.Module:
    return LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=4, attention_head_dim=8, cross_attention_dim=32,
        num_layers=2, caption_channels=32,
    )  # fmt: skip


def _ltx_inputs(random: Callable[..., Tensor], variant: int) -> Inputs:
    batch = variant + 1
    return {
        "hidden_states": random(batch, 32, 8),
        "encoder_hidden_states": random(batch, 5, 32),
        "timestep": torch.full((batch,), 500.0),
        "encoder_attention_mask": torch.ones(batch, 5, dtype=torch.int64),
        "num_frames": 2,
        "height": 4,
        "width": 4,
    }


def _ltx2() -> nn.Module:
    return LTX2VideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
        audio_in_channels=8, audio_out_channels=8, audio_num_attention_heads=2, audio_attention_head_dim=8,
        audio_cross_attention_dim=16, num_layers=2, caption_channels=32,
    )  # fmt: skip


def _ltx2_inputs(random: Callable[..., Tensor], variant: int) -> Inputs:
    batch = variant + 1
    return {
        "hidden_states": random(batch, 32, 8),
        "audio_hidden_states": random(batch, 6, 8),
        "encoder_hidden_states": random(batch, 5, 32),
        "audio_encoder_hidden_states": random(batch, 5, 32),
        "timestep": torch.full((batch,), 500.0),
        "encoder_attention_mask": torch.ones(batch, 5, dtype=torch.int64),
        "audio_encoder_attention_mask": torch.ones(batch, 5, dtype=torch.int64),
        "num_frames": 2,
        "height": 4,
        "width": 4,
        "audio_num_frames": 6,
    }


def _flux() -> nn.Module:
    return FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8), guidance_embeds=True,
    )  # fmt: skip


def _flux_inputs(random: Callable[..., Tensor], variant: int) -> Inputs:
    batch, side = variant + 1, 4
    grid = torch.stack(torch.meshgrid(torch.zeros(1), torch.arange(4.0), torch.arange(4.0), indexing="ij"), -1)
    return {
        "hidden_states": random(batch, side * side, 4),
        "encoder_hidden_states": random(batch, 5, 32),
        "pooled_projections": random(batch, 32),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": grid.reshape(-1, 3),
        "txt_ids": torch.zeros(5, 3),
        "guidance": torch.full((batch,), 3.5),
    }


def _wan() -> nn.Module:
    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=32,
        freq_dim=64, ffn_dim=32, num_layers=2, cross_attn_norm=True, rope_max_seq_len=32,
    )  # fmt: skip


def _wan_inputs(random: Callable[..., Tensor], variant: int) -> Inputs:
    batch = variant + 1
    return {
        "hidden_states": random(batch, 4, 2, 4, 4),
        "timestep": torch.full((batch,), 500.0),
        "encoder_hidden_states": random(batch, 5, 32),
    }


def _sd3() -> nn.Module:
    return SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=64, out_channels=4,
        qk_norm="rms_norm", dual_attention_layers=(0,),
    )  # fmt: skip


def _sd3_inputs(random: Callable[..., Tensor], variant: int) -> Inputs:
    batch = variant + 1
    return {
        "hidden_states": random(batch, 4, 4, 4),
        "encoder_hidden_states": random(batch, 5, 32),
        "pooled_projections": random(batch, 64),
        "timestep": torch.full((batch,), 500.0),
    }


def _sdxl() -> nn.Module:
    return UNet2DConditionModel(
        block_out_channels=(16, 32), norm_num_groups=8, sample_size=8, in_channels=4, out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1, cross_attention_dim=32, attention_head_dim=(2, 4), transformer_layers_per_block=(1, 1),
        use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=80,
    )  # fmt: skip


def _sdxl_inputs(random: Callable[..., Tensor], variant: int) -> Inputs:
    batch = variant + 1
    return {
        "sample": random(batch, 4, 8, 8),
        "timestep": torch.full((batch,), 500.0),
        "encoder_hidden_states": random(batch, 5, 32),
        "added_cond_kwargs": {"text_embeds": random(batch, 32), "time_ids": random(batch, 6)},
    }


def _llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def _llama_inputs(random: Callable[..., Tensor], variant: int) -> Inputs:
    return {"inputs_embeds": random(variant + 1, 9 + variant, 32), "use_cache": False}


_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")

SUBJECTS: dict[str, Subject] = {
    "ltx": Subject(_ltx, _ltx_inputs, (*_ATTENTION, "net.0.proj", "net.2"), "transformer_blocks.0"),
    "flux": Subject(_flux, _flux_inputs, (*_ATTENTION, "proj_mlp"), "transformer_blocks.0"),
    "llama": Subject(_llama, _llama_inputs, ("q_proj", "v_proj", "gate_proj"), "model.layers.0", None),
    "ltx2": Subject(_ltx2, _ltx2_inputs, (*_ATTENTION, "net.0.proj"), "transformer_blocks.0"),
    "wan": Subject(_wan, _wan_inputs, (*_ATTENTION, "net.0.proj"), "blocks.0"),
    "sdxl": Subject(_sdxl, _sdxl_inputs, _ATTENTION, "mid_block"),
    "sd3": Subject(_sd3, _sd3_inputs, (*_ATTENTION, "net.2"), "transformer_blocks.0"),
}
