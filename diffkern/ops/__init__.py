"""WHAT is computed: the public functions, and the torch ops ``torch.ops.diffkern.*`` behind them."""

from diffkern.ops.norm import layer_norm, rms_norm

__all__ = ["layer_norm", "rms_norm"]
