"""Tiny ControlNets and adapters of diffusers with random weights, and inputs for them."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from scripts.check_models.convolutional import CROSS, UNET, noisy
from scripts.check_models.denoisers import DENOISERS
from scripts.check_models.model import Denoiser, Draw

_CONTROL: dict[str, Any] = {
    **{name: value for name, value in UNET.items() if name != "sample_size"}, "in_channels": 4,
    "down_block_types": CROSS["down_block_types"], "conditioning_embedding_out_channels": (8, 8),
}  # fmt: skip
_FLUX = DENOISERS["flux"].config
_ADAPTER: dict[str, Any] = {"channels": [8, 16], "num_res_blocks": 1, "downscale_factor": 4}


def _controlled(draw: Draw, n: int) -> dict[str, Any]:
    return noisy(4, 8, 8, controlnet_cond=(3, 16, 16))(draw, n)


def _union(draw: Draw, n: int) -> dict[str, Any]:
    """One image for the second of two kinds of control."""
    return {
        **noisy(4, 8, 8)(draw, n), "controlnet_cond": [draw(1, 3, 16, 16)], "control_type_idx": [1],
        "control_type": torch.tensor([[0.0, 1.0]], device=draw.device),
        "added_cond_kwargs": {"text_embeds": draw(1, 32), "time_ids": draw.integers(1, 6, below=64)},
    }  # fmt: skip


def _same_as(denoiser: str, **shape: tuple[int, ...]) -> Any:
    """What the denoiser takes, and tensors of these shapes."""

    def inputs(draw: Draw, n: int) -> dict[str, Any]:
        arguments = DENOISERS[denoiser].inputs(draw, n)
        return {**arguments, **{name: draw(1, *size) for name, size in shape.items()}}

    return inputs


def _with_the_parts_of_a_transformer(model: Any) -> None:
    """Z-Image's ControlNet embeds what it is given with the modules of the transformer that it controls."""
    type(model).from_transformer(model, DENOISERS["zimage"].build())


def _twice(one: Denoiser, count: int = 2, **more: Any) -> Denoiser:
    """Two ControlNets of one kind, or one that is called twice, with an image and a scale for each call."""

    def inputs(draw: Draw, n: int) -> dict[str, Any]:
        arguments, other = one.inputs(draw, n), one.inputs(draw, n)
        images = [arguments.pop("controlnet_cond"), other["controlnet_cond"]]
        return {**arguments, "controlnet_cond": images, "conditioning_scale": [1.0, 0.5], **more}

    name = one.cls.replace("ControlNet", "MultiControlNet")
    return Denoiser(name, {"controlnets": (one,) * count}, inputs, one.prepare)


def _zimage(draw: Draw, n: int) -> dict[str, Any]:
    return {**DENOISERS["zimage"].inputs(draw, n), "control_context": [draw(4, 1, n, n)]}


def _cosmos(draw: Draw, n: int) -> dict[str, Any]:
    return {
        "controls_latents": draw(1, 4, 2, n, n), "latents": draw(1, 4, 2, n, n), "timestep": draw.time(1.0),
        "encoder_hidden_states": draw(1, 6, 32), "condition_mask": torch.ones(1, 1, 2, n, n).to(draw.dtype),
        "padding_mask": torch.zeros(1, 1, n, n).to(draw.dtype),
    }  # fmt: skip


CONTROLNETS: dict[str, Denoiser] = {
    "controlnet": Denoiser("ControlNetModel", _CONTROL, _controlled),
    "controlnet_union": Denoiser(
        "ControlNetUnionModel",
        {**_CONTROL, "num_control_type": 2, "num_trans_channel": 8, "num_trans_head": 2, "num_proj_channel": 8,
         "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
         "projection_class_embeddings_input_dim": 80},
        _union,
    ),
    "controlnet_sparse": Denoiser(
        "SparseControlNetModel",
        {**_CONTROL, "down_block_types": ("DownBlockMotion", "CrossAttnDownBlockMotion"),
         "motion_num_attention_heads": 2, "num_attention_heads": 2, "use_simplified_condition_embedding": False,
         "conditioning_channels": 3, "concat_conditioning_mask": True},
        lambda draw, n: {
            **noisy(4, 2, 8, 8, controlnet_cond=(3, 2, 16, 16))(draw, n), "conditioning_mask": draw(1, 1, 2, 16, 16),
            "encoder_hidden_states": draw(2, 6, 16),
        },
    ),
    "controlnet_xs": Denoiser(
        "UNetControlNetXSModel",
        {**CROSS, "sample_size": 8, "block_out_channels": (8, 16), "norm_num_groups": 4, "cross_attention_dim": 16,
         "num_attention_heads": 2, "ctrl_conditioning_embedding_out_channels": (8, 8),
         "ctrl_block_out_channels": (4, 8), "ctrl_num_attention_heads": 2, "ctrl_max_norm_num_groups": 4},
        _controlled,
    ),
    "controlnet_flux": Denoiser(
        "FluxControlNetModel",
        {**_FLUX, "num_single_layers": 1},
        _same_as("flux", controlnet_cond=(64, 16)),
    ),
    "controlnet_sd3": Denoiser(
        "SD3ControlNetModel",
        DENOISERS["sd3"].config,
        _same_as("sd3", controlnet_cond=(4, 8, 8)),
    ),
    "controlnet_qwenimage": Denoiser(
        "QwenImageControlNetModel",
        DENOISERS["qwenimage"].config,
        _same_as("qwenimage", controlnet_cond=(64, 16)),
    ),
    "controlnet_sana": Denoiser(
        "SanaControlNetModel",
        DENOISERS["sana"].config,
        _same_as("sana", controlnet_cond=(4, 8, 8)),
    ),
    "controlnet_hunyuan": Denoiser(
        "HunyuanDiT2DControlNetModel",
        {**{name: value for name, value in DENOISERS["hunyuan_dit"].config.items() if name != "num_layers"},
         "transformer_num_layers": 4},
        _same_as("hunyuan_dit", controlnet_cond=(4, 8, 8)),
    ),
    "controlnet_cosmos": Denoiser(  # resizes masks with torchvision
        "CosmosControlNetModel",
        {"n_controlnet_blocks": 1, "in_channels": 6, "latent_channels": 6, "model_channels": 32,
         "num_attention_heads": 2, "attention_head_dim": 16, "text_embed_dim": 32, "adaln_lora_dim": 4,
         "max_size": (4, 16, 16)},
        _cosmos,
    ),
    "controlnet_zimage": Denoiser(
        "ZImageControlNetModel",
        {"control_layers_places": [0], "control_in_dim": 4, "dim": 32, "n_refiner_layers": 1, "n_heads": 2,
         "n_kv_heads": 2},
        _zimage,
        _with_the_parts_of_a_transformer,
    ),
    "t2i_adapter": Denoiser("T2IAdapter", _ADAPTER, lambda draw, n: {"x": draw(1, 3, 16, 16)}),
    "t2i_adapter_light": Denoiser(
        "T2IAdapter", {**_ADAPTER, "adapter_type": "light_adapter"}, lambda draw, n: {"x": draw(1, 3, 16, 16)}
    ),
}  # fmt: skip
CONTROLNETS |= {
    "controlnet_multi": _twice(CONTROLNETS["controlnet"]),
    "controlnet_flux_multi": _twice(
        CONTROLNETS["controlnet_flux"], controlnet_mode=[torch.zeros(1, dtype=torch.int64)] * 2
    ),
    "controlnet_sd3_multi": _twice(CONTROLNETS["controlnet_sd3"]),
    "controlnet_qwenimage_multi": _twice(CONTROLNETS["controlnet_qwenimage"], 1),
    "controlnet_hunyuan_multi": _twice(CONTROLNETS["controlnet_hunyuan"]),
    "t2i_adapter_multi": Denoiser(
        "MultiAdapter",
        {"adapters": (CONTROLNETS["t2i_adapter"], CONTROLNETS["t2i_adapter"])},
        lambda draw, n: {"xs": [draw(1, 3, 16, 16), draw(1, 3, 16, 16)], "adapter_weights": [0.5, 1.0]},
    ),
}


def missing_for(name: str) -> str | None:
    """Why a model cannot run here: one asks for torchvision, which may be missing, or be for another torch."""
    if name != "controlnet_cosmos":
        return None
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError) as error:
        return f"it needs torchvision: {error}"
    return None
