"""Small real models for the injection tests, with weights that no wrong kernel could hide behind."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import LTXVideoTransformer3DModel
from torch import Tensor, nn

from diffkern.graph.snapshot import ModuleSnapshot
from diffkern.graph.steps import derived_state
from diffkern.injection.patching import patch_state, patches


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Gives every parameter random values; ones and zeros would hide a wrong weight or gate."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1)
    return model


def tiny_ltx(layers: int = 2, seed: int = 0) -> LTXVideoTransformer3DModel:
    """A real LTX denoiser of a few thousand parameters."""
    model = LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        patch_size=1,
        patch_size_t=1,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        num_layers=layers,
        caption_channels=32,
    )
    randomise(model, seed)
    return model.eval().requires_grad_(False)


def ltx_inputs(batch: int = 1, seed: int = 1, dtype: torch.dtype = torch.float32, frames: int = 2) -> dict[str, object]:
    """Inputs of the tiny denoiser: ``frames`` x 4 x 4 latent tokens and five caption tokens."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "hidden_states": random(batch, frames * 16, 8),
        "encoder_hidden_states": random(batch, 5, 32),
        "timestep": torch.full((batch,), 500.0),
        "encoder_attention_mask": torch.ones(batch, 5, dtype=torch.int64),
        "num_frames": frames,
        "height": 4,
        "width": 4,
        "return_dict": False,
    }


def replay_dependencies(model: nn.Module) -> tuple[ModuleSnapshot, list[Any]]:
    """What replays of a model's CUDA graphs depend on, to be compared with that at another time."""
    modules = [module for module in model.modules() if patch_state(module)]
    return ModuleSnapshot(model, patches(model)), derived_state(modules)


def run(model: nn.Module, **options: object) -> Tensor:
    """Runs the tiny denoiser under no_grad."""
    with torch.no_grad():
        result: Tensor = model(**ltx_inputs(**options))[0]  # type: ignore[arg-type]
    return result


def outermost_calls(report: Any) -> dict[str, dict[str, Any]]:
    """The counts of the sites that every run calls: those in a block that runs fused are not called themselves.

    Neither are norms in the place of which a forward around them computes.
    """
    blocks = [site.path for site in report.patched if site.how == "recipe" and site.op != "norm_modulate"]
    around = [site.path for site in report.patched if site.how == "source"]
    norms = [site.path for site in report.patched if site.op in ("layer_norm", "rms_norm")]
    modulated = {path for path in norms if _parent(path) in around}
    return {
        path: count
        for path, count in report.calls().items()
        if path not in modulated
        and not any(path != block and path.startswith(f"{block}." if block else "") for block in blocks)
    }


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def all_fused(report: Any) -> bool:
    """Whether everything ran fused, and nothing stock."""
    return all(count["fused"] for count in outermost_calls(report).values()) and not any(
        count["stock"] for count in report.calls().values()
    )
