"""Training steps of a LoRA on a denoiser, stock and with fused ops: losses, gradients, time.

    python scripts/example_train_lora.py
    python scripts/example_train_lora.py --steps 20 --rank 16 --checkpointing

The ops have gradients of their own, proven against float64 at the first call that a backward may follow. Adapters sit
on linear layers, which are called as modules, so a LoRA may be added before or after the injection.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path

import torch
from diffusers import LTXVideoTransformer3DModel
from peft import LoraConfig
from torch import nn

from diffkern import inject_optimized_kernels
from diffkern.bench.measure import relative_error

TINY = Path(__file__).parents[1] / "examples" / "ltx_video" / "tiny" / "transformer"
FRAMES, HEIGHT, WIDTH, TEXT = 3, 4, 4, 12


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a LoRA on a denoiser of LTX-Video with fused ops.")
    parser.add_argument("--model", type=Path, default=TINY, help="folder of an LTXVideoTransformer3DModel")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--checkpointing", action="store_true", help="compute the blocks again in the backward")
    return parser.parse_args()


def batch(model: nn.Module, seed: int) -> tuple[dict[str, object], torch.Tensor]:
    """Noisy latents with their text and time, and the velocity that the model shall find."""
    generator, config = torch.Generator().manual_seed(seed), model.config
    device, count = next(model.parameters()).device, FRAMES * HEIGHT * WIDTH
    latents, noise = torch.randn(2, 1, count, config.in_channels, generator=generator).to(device)
    time = torch.rand(1, generator=generator).to(device)
    inputs = {
        "hidden_states": (1 - time) * latents + time * noise,
        "encoder_hidden_states": torch.randn(1, TEXT, config.caption_channels, generator=generator).to(device),
        "encoder_attention_mask": torch.ones(1, TEXT, device=device),
        "timestep": 1000 * time,
        "num_frames": FRAMES,
        "height": HEIGHT,
        "width": WIDTH,
        "return_dict": False,
    }
    return inputs, noise - latents


def train(model: nn.Module, steps: int) -> tuple[list[float], list[torch.Tensor], float]:
    """Losses, the gradients of the first step, and the seconds of a step after the first."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    losses: list[float] = []
    gradients: list[torch.Tensor] = []
    started = time.perf_counter()
    for step in range(steps):
        inputs, velocity = batch(model, step)
        loss = torch.nn.functional.mse_loss(model(**inputs)[0], velocity)
        loss.backward()
        if not gradients:
            gradients = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
            started = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients, (time.perf_counter() - started) / max(steps - 1, 1)


def main() -> None:
    options = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = LTXVideoTransformer3DModel.from_pretrained(options.model).float().to(device).train().requires_grad_(False)
    adapter = LoraConfig(r=options.rank, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False)
    model.add_adapter(adapter)
    if options.checkpointing:
        model.enable_gradient_checkpointing()
    twin = copy.deepcopy(model)

    losses, stock, before = train(twin, options.steps)
    report = inject_optimized_kernels(model)
    fused_losses, fused, after = train(model, options.steps)
    print(report)

    difference = max(relative_error(ours, theirs) for ours, theirs in zip(fused, stock, strict=True))
    print(f"stock: loss {losses[0]:.4f} -> {losses[-1]:.4f}, {1e3 * before:.0f} ms a step")
    print(f"fused: loss {fused_losses[0]:.4f} -> {fused_losses[-1]:.4f}, {1e3 * after:.0f} ms a step")
    print(f"gradients of {len(fused)} adapter weights, largest relative difference: {difference:.1e}")
    print("restored modules:", report.restore())


if __name__ == "__main__":
    main()
