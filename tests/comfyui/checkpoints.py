"""Tiny random checkpoints of the models that ComfyUI knows, written with ComfyUI's own model classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

#: Elements of a text embedding that every tiny model reads.
TEXT = 32

_LTX = {
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "cross_attention_dim": 64,
    "caption_channels": TEXT,
    "num_layers": 2,
}
_LTX2 = {
    **_LTX,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 16,
    "audio_cross_attention_dim": 32,
    "rope_type": "split",
    "apply_gated_attention": True,
    "caption_channels": TEXT // 2,  # a text embedding holds one for video and one for audio
    "connector_attention_head_dim": 8,
    "connector_num_attention_heads": 2,
    "connector_num_layers": 1,
}
_FLUX = {
    "in_channels": 16,
    "out_channels": 16,
    "vec_in_dim": 16,
    "context_in_dim": TEXT,
    "hidden_size": 256,
    "mlp_ratio": 4.0,
    "num_heads": 2,
    "depth": 1,
    "depth_single_blocks": 2,
    "axes_dim": [16, 56, 56],
    "theta": 10000,
    "patch_size": 2,
    "qkv_bias": True,
    "guidance_embed": True,
    "txt_ids_dims": [],
}
_HUNYUAN = {
    **{name: value for name, value in _FLUX.items() if name != "txt_ids_dims"},
    "vec_in_dim": None,
    "theta": 256,
    "patch_size": [1, 2, 2],
    "byt5": False,
    "meanflow": False,
    "use_cond_type_embedding": False,
    "vision_in_dim": None,
    "meanflow_sum": False,
}
_WAN = {
    "model_type": "t2v",
    "dim": 256,
    "ffn_dim": 128,
    "num_heads": 2,
    "num_layers": 2,
    "in_dim": 16,
    "out_dim": 16,
    "text_dim": TEXT,
    "cross_attn_norm": True,
}


def _model(kind: str, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    import comfy.ops

    options = {"dtype": dtype, "device": "cpu", "operations": comfy.ops.disable_weight_init}
    if kind == "ltx":
        from comfy.ldm.lightricks.model import LTXVModel

        return LTXVModel(**_LTX, **options), _LTX
    if kind == "ltx2":
        from comfy.ldm.lightricks.av_model import LTXAVModel

        return LTXAVModel(**_LTX2, **options), _LTX2
    if kind == "flux":
        from comfy.ldm.flux.model import Flux

        return Flux(**_FLUX, **options), {}
    if kind == "hunyuan":
        from comfy.ldm.hunyuan_video.model import HunyuanVideo

        return HunyuanVideo(**_HUNYUAN, **options), {}
    from comfy.ldm.wan.model import WanModel

    return WanModel(**_WAN, **options), {"text_dim": TEXT}


def write(kind: str, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Writes a checkpoint of ``"ltx"``, ``"ltx2"``, ``"flux"``, ``"hunyuan"`` or ``"wan"`` and returns its path."""
    from safetensors.torch import save_file

    model, config = _model(kind, dtype)
    generator = torch.Generator("cpu").manual_seed(3)
    state = {}
    for name, tensor in model.state_dict().items():
        scale = tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 0.1
        values = torch.randn(tensor.shape, generator=generator) * scale
        is_norm = tensor.ndim == 1 and "norm" in name and name.endswith("weight")
        state[name] = (values + 1 if is_norm else values).to(tensor.dtype).contiguous()
    save_file(state, path, metadata={"config": json.dumps({"transformer": config})})
    return path


def quantise(source: Path, path: Path, storage: torch.dtype) -> Path:
    """Writes a checkpoint again, the linear layers of its blocks in int8 or float8 with one scale for each."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(source, "pt") as file:
        metadata, state = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    layers = {}
    for name in [name for name, tensor in state.items() if "blocks." in name and tensor.ndim == 2]:
        if not name.endswith(".weight"):  # tables of modulation
            continue
        layer, weight = name.removesuffix(".weight"), state[name]
        limit = 127.0 if storage == torch.int8 else torch.finfo(storage).max
        scale = weight.abs().max() / limit
        scaled = weight / scale
        state[name] = (scaled.round() if storage == torch.int8 else scaled).to(storage)
        state[f"{layer}.weight_scale"] = scale
        layers[layer] = {"format": "int8_tensorwise" if storage == torch.int8 else "float8_e4m3fn"}
    save_file(state, path, metadata={**metadata, "_quantization_metadata": json.dumps({"layers": layers})})
    return path
