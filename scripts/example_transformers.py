"""Tokens a second of a language model, stock and with kernels.

python scripts/example_transformers.py                        # a small Llama with random weights
python scripts/example_transformers.py --model ./Qwen3-0.6B   # a folder on disk; nothing is downloaded
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from diffkern import inject_optimized_kernels

SMALL = LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare a language model with and without fused kernels.")
    parser.add_argument("--model", type=Path, help="folder of a saved model; without: a small one, random weights")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--runs", type=int, default=3, help="timed generations of each arm; the median counts")
    parser.add_argument("--attention", help="'auto', or a backend; without, attention stays as it is")
    return parser.parse_args()


def load(folder: Path | None, device: torch.device, dtype: torch.dtype) -> Any:
    """The model of a folder, or a small one."""
    if folder is not None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    else:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SMALL.to_dict()), dtype=dtype)
    return model.to(device).eval()


def timed(model: Any, prompt: torch.Tensor, options: argparse.Namespace) -> tuple[torch.Tensor, list[float]]:
    """The tokens, and the rate of each generation after the first."""
    settings = {"max_new_tokens": options.new_tokens, "min_new_tokens": options.new_tokens, "do_sample": False}
    tokens, rates = model.generate(prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, **settings), []
    for _ in range(options.runs):
        started = time.perf_counter()
        tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, **settings).cpu()
        rates.append(options.new_tokens / (time.perf_counter() - started))
    return tokens, rates


def main() -> None:
    options = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load(options.model, device, torch.float32 if device.type == "cpu" else torch.bfloat16)
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(vocabulary, (1, options.prompt_tokens), generator=generator).to(device)

    with torch.inference_mode():
        stock, before = timed(model, prompt, options)
        with torch.no_grad():
            report = inject_optimized_kernels(model, attention=options.attention)
        fused, after = timed(model, prompt, options)
    print(report)

    for arm, rates in (("stock", before), ("fast", after)):
        print(f"{arm}: {median(rates):.1f} tokens/s, from {min(rates):.1f} to {max(rates):.1f}")
    same = int((stock == fused).all(-1).sum())
    print(f"the same tokens in {same} of {len(stock)} texts")
    print("restored modules:", report.restore())


if __name__ == "__main__":
    main()
