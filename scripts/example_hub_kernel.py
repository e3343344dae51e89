"""A kernel of the Hub by its name, in a model of transformers, and the same without a network.

    python scripts/example_hub_kernel.py --kernel kernels-community/rmsnorm@v1     # asks the Hub, once
    python scripts/example_hub_kernel.py --kernel kernels-community/rmsnorm@v1 --offline
    python scripts/example_hub_kernel.py --kernel ./diffkern-kernel                # what `diffkern hub package` wrote

The report says which build serves, its digest having been compared, and why not where none does. Pin the versions of
a project with ``diffkern hub lock``.
"""

from __future__ import annotations

import argparse
import os
import sys


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run a small language model on a kernel of the Hub.")
    parser.add_argument("--kernel", required=True, help="org/repo, org/repo@version, org/repo:Layer, or a path")
    parser.add_argument("--layer", default="RMSNorm", help="what it computes, as transformers calls it")
    parser.add_argument("--offline", action="store_true", help="use what is on this machine, and do not ask the Hub")
    parser.add_argument("--trust", action="store_true", help="trust the publisher, though the Hub does not list it")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.offline:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
    import torch
    from transformers import LlamaConfig, LlamaModel

    from diffkern import KernelConfig, inject_optimized_kernels

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = LlamaModel(LlamaConfig(vocab_size=64, **sizes)).eval().to(device)
    tokens = torch.arange(8, device=device)[None]

    repository = options.kernel.partition(":")[0].partition("@")[0]
    trusted = [repository] if options.trust else False
    config = KernelConfig({options.layer: options.kernel}, trust_remote_code=trusted)
    with torch.no_grad():
        stock = model(tokens).last_hidden_state
        report = inject_optimized_kernels(model, config=config)
        fused = model(tokens).last_hidden_state
    print(report)
    served = [site for site in report.patched if site.provider == options.kernel]
    print(f"{len(served)} modules run on {options.kernel}")
    print(f"largest difference from stock: {(fused - stock).abs().max():.1e}")
    report.restore()
    if not served:
        sys.exit(f"{options.kernel} serves no {options.layer} here: the report says why")


if __name__ == "__main__":
    main()
