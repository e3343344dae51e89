"""Other models of ComfyUI, small and random: the same rules serve them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffkern.comfyui.optimize import optimize
from tests.comfyui import double

CPU = torch.device("cpu")
TEXT = 32

_FLUX = {
    "in_channels": 64, "out_channels": 64, "vec_in_dim": None, "context_in_dim": TEXT, "hidden_size": 256,
    "mlp_ratio": 3.0, "num_heads": 2, "depth": 1, "depth_single_blocks": 1, "axes_dim": [32, 32, 32, 32],
    "theta": 2000, "patch_size": 1, "qkv_bias": False, "guidance_embed": False, "txt_ids_dims": [3],
    "default_ref_method": "index",
}  # fmt: skip
_CHROMA = {
    "in_channels": 64, "out_channels": 64, "context_in_dim": TEXT, "hidden_size": 256, "mlp_ratio": 4.0,
    "num_heads": 2, "depth": 1, "depth_single_blocks": 1, "axes_dim": [16, 56, 56], "theta": 10000, "patch_size": 2,
    "qkv_bias": True, "in_dim": 64, "out_dim": 256, "hidden_dim": 64, "n_layers": 1, "txt_ids_dims": [],
    "vec_in_dim": 1,
}  # fmt: skip
_WAN = {
    "dim": 256, "ffn_dim": 128, "num_heads": 2, "num_layers": 2, "in_dim": 16, "out_dim": 16, "text_dim": TEXT,
    "cross_attn_norm": True,
}  # fmt: skip


def _flux(random: Callable[..., Tensor], times: Tensor) -> dict[str, Any]:
    return {"x": random(2, 64, 6, 6), "timestep": times, "context": random(2, 7, TEXT), "y": None}


def _wan(random: Callable[..., Tensor], times: Tensor) -> dict[str, Any]:
    return {"x": random(2, 16, 2, 6, 8), "timestep": 1000 * times, "context": random(2, 7, TEXT)}


#: For models whose modules are many; no module may be left out.
AT_LEAST_ONE = -1

#: Name -> module, class, its configuration, inputs of a call, patched modules.
MODELS: dict[str, tuple[str, str, dict[str, Any], Callable[..., dict[str, Any]], int]] = {
    "Chroma": (
        "chroma.model", "Chroma", _CHROMA,
        lambda random, times: {
            "x": random(2, 16, 8, 8), "timestep": times, "context": random(2, 7, TEXT), "guidance": times,
        },
        3,
    ),
    "Flux.2": (
        "flux.model", "Flux", {**_FLUX, "global_modulation": True, "mlp_silu_act": True, "ops_bias": False}, _flux, 6
    ),
    "Flux with another feed-forward and a reference": (
        "flux.model", "Flux", {**_FLUX, "yak_mlp": True, "txt_norm": True},
        lambda random, times: {**_flux(random, times), "ref_latents": [random(2, 64, 4, 4)]},
        5,
    ),
    "Flux.2 with tokens of another time": (
        "flux.model", "Flux", {**_FLUX, "global_modulation": True},
        lambda random, times: {
            **_flux(random, times), "ref_latents": [random(2, 64, 4, 4)], "ref_latents_method": "index_timestep_zero",
        },
        3,
    ),
    "Hunyuan3D": (
        "hunyuan3d.model", "Hunyuan3Dv2",
        {"context_in_dim": TEXT, "hidden_size": 256, "num_heads": 2, "depth": 1, "depth_single_blocks": 1},
        lambda random, times: {"x": random(2, 64, 20), "timestep": times, "context": random(2, 14, TEXT)},
        3,
    ),
    "AuraFlow": (
        "aura.mmdit", "MMDiT",
        {"dim": 256, "n_layers": 2, "n_double_layers": 1, "n_heads": 2, "global_conddim": 256, "cond_seq_dim": TEXT,
         "max_seq": 64},
        lambda random, times: {"x": random(2, 4, 8, 8), "timestep": times, "context": random(2, 7, TEXT)},
        AT_LEAST_ONE,
    ),
    "Cosmos-Predict2": (
        "cosmos.predict2", "MiniTrainDIT",
        {"max_img_h": 16, "max_img_w": 16, "max_frames": 8, "in_channels": 16, "out_channels": 16, "patch_spatial": 2,
         "patch_temporal": 1, "model_channels": 256, "num_blocks": 1, "num_heads": 2, "crossattn_emb_channels": TEXT,
         "pos_emb_cls": "rope3d", "use_adaln_lora": True, "adaln_lora_dim": 32},
        lambda random, times: {"x": random(2, 16, 2, 6, 8), "timesteps": times, "context": random(2, 7, TEXT)},
        AT_LEAST_ONE,
    ),
    "HiDream": (
        "hidream.model", "HiDreamImageTransformer2DModel",
        {"patch_size": 2, "in_channels": 16, "num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2,
         "caption_channels": [TEXT, TEXT], "text_emb_dim": 16, "axes_dims_rope": (64, 32, 32), "llama_layers": [0, 1]},
        lambda random, times: {
            "x": random(2, 16, 8, 8), "t": times, "y": random(2, 16), "context": random(2, 7, TEXT),
            "encoder_hidden_states_llama3": random(2, 2, 5, TEXT),
        },
        AT_LEAST_ONE,
    ),
    "Kandinsky 5": (
        "kandinsky5.model", "Kandinsky5",
        {"in_text_dim": TEXT, "in_text_dim2": TEXT, "time_dim": 64, "model_dim": 256, "ff_dim": 128,
         "num_text_blocks": 1, "num_visual_blocks": 1, "visual_embed_dim": 64},
        lambda random, times: {
            "x": random(2, 16, 2, 6, 8), "timestep": times, "context": random(2, 7, TEXT), "y": random(2, TEXT),
        },
        AT_LEAST_ONE,
    ),
    "Lumina 2": (
        "lumina.model", "NextDiT",
        {"in_channels": 16, "dim": 256, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 1,
         "qk_norm": True, "cap_feat_dim": TEXT, "axes_dims": [32, 48, 48], "axes_lens": [64, 64, 64]},
        lambda random, times: {
            "x": random(2, 16, 8, 8), "timesteps": times, "context": random(2, 7, TEXT), "num_tokens": 7,
        },
        AT_LEAST_ONE,
    ),
    "PixelDiT": (
        "pixeldit.model", "PixDiT_T2I",
        {
            "num_groups": 2, "hidden_size": 128, "pixel_hidden_size": 8, "pixel_attn_hidden_size": 64,
            "pixel_num_groups": 2, "patch_depth": 2, "pixel_depth": 1, "patch_size": 4, "txt_embed_dim": TEXT,
        },
        lambda random, times: {
            "x": random(2, 3, 16, 16), "timesteps": 1000 * times, "context": random(2, 7, TEXT),
        },
        AT_LEAST_ONE,
    ),
    "Qwen-Image": (
        "qwen_image.model", "QwenImageTransformer2DModel",
        {"num_layers": 1, "num_attention_heads": 2, "joint_attention_dim": TEXT},
        lambda random, times: {"x": random(2, 16, 1, 8, 8), "timestep": times, "context": random(2, 7, TEXT)},
        AT_LEAST_ONE,
    ),
    "Stable Diffusion 3.5": (
        "modules.diffusionmodules.mmdit", "OpenAISignatureMMDITWrapper",
        {"input_size": None, "in_channels": 16, "depth": 2, "adm_in_channels": 16, "context_size": 128,
         "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": TEXT, "out_features": 128}},
         "pos_embed_max_size": 16, "num_patches": 256, "qk_norm": "rms", "x_block_self_attn_layers": [0]},
        lambda random, times: {
            "x": random(2, 16, 8, 8), "timesteps": times, "context": random(2, 7, TEXT), "y": random(2, 16),
        },
        AT_LEAST_ONE,
    ),
    "Wan Animate": (
        "wan.model_animate", "AnimateWanModel", {**_WAN, "num_layers": 5},
        lambda random, times: {
            **_wan(random, times), "clip_fea": random(2, 257, 1280), "pose_latents": random(2, 16, 1, 6, 8),
            "face_pixel_values": random(2, 3, 1, 512, 512),
        },
        AT_LEAST_ONE,
    ),
    "Wan Animate 2": (
        "wan.model_animate2", "WanAnimate2Model", {**_WAN, "in_dim": 36},
        lambda random, times: {
            **_wan(random, times), "x": random(2, 36, 2, 6, 8), "clip_fea": random(2, 257, 1280),
            "pose_latents": random(2, 16, 1, 6, 8),
        },
        AT_LEAST_ONE,
    ),
    "Wan Camera": (
        "wan.model", "CameraWanModel", _WAN,
        lambda random, times: {
            **_wan(random, times), "clip_fea": random(2, 257, 1280), "camera_conditions": random(2, 24, 2, 48, 64),
        },
        AT_LEAST_ONE,
    ),
    "Wan VACE": (
        "wan.model", "VaceWanModel", {**_WAN, "vace_layers": 1, "vace_in_dim": 96},
        lambda random, times: {
            **_wan(random, times), "vace_context": random(2, 1, 96, 2, 6, 8), "vace_strength": [1.0],
        },
        9,
    ),
    "Wan from an image": (
        "wan.model", "WanModel", {**_WAN, "model_type": "i2v"},
        lambda random, times: {**_wan(random, times), "clip_fea": random(2, 257, 1280)},
        7,
    ),
    "Wan without some norms, frames of their own times": (
        "wan.model", "WanModel", {**_WAN, "model_type": "t2v", "qk_norm": False, "cross_attn_norm": False},
        lambda random, times: {**_wan(random, times), "timestep": torch.tensor([[500.0, 0.0], [400.0, 0.0]])},
        3,
    ),
    "Z-Image": (
        "lumina.model", "NextDiT",
        {"in_channels": 16, "dim": 256, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2,
         "qk_norm": True, "cap_feat_dim": TEXT, "axes_dims": [32, 48, 48], "axes_lens": [64, 64, 64],
         "ffn_dim_multiplier": 8 / 3, "rope_theta": 256.0, "z_image_modulation": True, "time_scale": 1000.0,
         "pad_tokens_multiple": 32},
        lambda random, times: {
            "x": random(2, 16, 8, 8), "timesteps": times, "context": random(2, 7, TEXT), "num_tokens": 7,
        },
        AT_LEAST_ONE,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def inference(comfyui: None) -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_relative_is_served_exact_is_exact_and_bypassing_undoes_it(name: str, dtype: torch.dtype) -> None:
    from importlib import import_module

    import comfy.ops
    from comfy.model_patcher import ModelPatcher

    module, class_name, configuration, inputs, count = MODELS[name]
    generator = torch.Generator("cpu").manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    build = getattr(import_module(f"comfy.ldm.{module}"), class_name)
    model: nn.Module = build(**configuration, dtype=dtype, device="cpu", operations=comfy.ops.manual_cast)
    for parameter_name, parameter in model.named_parameters():
        around = 1.0 if parameter.ndim == 1 and "norm" in parameter_name and parameter_name.endswith("weight") else 0.0
        scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1
        parameter.requires_grad_(False).copy_(random(*parameter.shape) * scale + around)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name == "pos_embed":  # which a checkpoint holds
            buffer.copy_(random(*buffer.shape) * 0.1)
    arguments = inputs(random, torch.tensor([0.5, 0.4]).to(dtype))
    patcher = ModelPatcher(double.Model(model.to(dtype)), CPU, CPU)

    def run(clone: Any) -> Tensor:
        clone.patch_model()
        try:
            result: Tensor = clone.model.diffusion_model(**arguments)
            return result
        finally:
            clone.unpatch_model()

    native = run(patcher)
    optimized, report = optimize(patcher)
    fused = run(optimized)
    exact = run(optimize(patcher, numerics="exact")[0])

    assert len(report.patched) == count or (count == AT_LEAST_ONE and report.patched)
    assert not report.failed and not report.skipped
    tolerance = 1e-5 if dtype is torch.float32 else 0.03
    assert native.isfinite().all() and (fused - native).norm() <= tolerance * native.norm()
    assert torch.equal(run(patcher), native) and torch.equal(exact, native)
    reasons = {reason for calls in report.calls().values() for reason in calls["stock_reasons"]}
    assert bool(reasons) == ("tokens of another time" in name)
    assert all(reason.startswith("it is given modulation_dims") for reason in reasons)
