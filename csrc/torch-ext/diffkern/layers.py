"""Layers that ``kernels.kernelize`` and diffkern put in place of those of models. None has a state or a backward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ._ops import ops


class RMSNorm(nn.Module):
    """The RMS norm of Llama and its kin: rounds the normalised value before it is multiplied with the weight."""

    has_backward = False
    can_torch_compile = True

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        dtype = hidden_states.dtype
        out_dtype = torch.promote_types(dtype, self.weight.dtype)
        return ops.rms_norm(hidden_states, self.weight, None, self.variance_epsilon, 0.0, dtype, out_dtype, False, True)


class LayerNorm(nn.Module):
    """``torch.nn.LayerNorm`` over the last dimension."""

    has_backward = False
    can_torch_compile = True

    weight: Tensor
    bias: Tensor
    eps: float

    def forward(self, input: Tensor) -> Tensor:
        return ops.layer_norm(input, self.weight, self.bias, self.eps, None, False)


class SiLU(nn.Module):
    """``torch.nn.SiLU``."""

    has_backward = False
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        return ops.activation(input, "silu")


class GELU(nn.Module):
    """``torch.nn.GELU()``, by the error function."""

    has_backward = False
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        return ops.activation(input, "gelu")


class GELUTanh(nn.Module):
    """``torch.nn.GELU("tanh")``."""

    has_backward = False
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        return ops.activation(input, "gelu_tanh")


class QuickGELU(nn.Module):
    """``x · σ(1.702 x)``, as CLIP has it."""

    has_backward = False
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        return ops.activation(input, "quick_gelu")


class SwiGLUMLP(nn.Module):
    """The gated feed-forward of Llama and its kin."""

    has_backward = False
    can_torch_compile = True

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ops.glu(self.up_proj(x), self.gate_proj(x), "silu", False))


class GeGLUMLP(nn.Module):
    """The gated feed-forward of Gemma and its kin, with the tanh GELU."""

    has_backward = False
    can_torch_compile = True

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ops.glu(self.up_proj(x), self.gate_proj(x), "gelu_tanh", False))


__all__ = ["GELU", "GELUTanh", "GeGLUMLP", "LayerNorm", "QuickGELU", "RMSNorm", "SiLU", "SwiGLUMLP"]
