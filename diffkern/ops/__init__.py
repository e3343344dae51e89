"""WHAT is computed: the public functions, and the torch ops ``torch.ops.diffkern.*`` behind them."""

from diffkern.ops.activation import channel_glu, geglu, gelu, glu, quick_gelu, silu, swiglu
from diffkern.ops.add_norm_silu_pad import add_norm_silu_pad
from diffkern.ops.fp8 import (
    activation_fp8,
    gate_residual_norm_modulate_and_fp8,
    gate_residual_norm_modulate_fp8,
    glu_and_fp8,
    linear_fp8,
    norm_modulate_and_fp8,
    norm_modulate_fp8,
)
from diffkern.ops.group_norm import channel_rms_norm_silu, group_norm_silu
from diffkern.ops.joint_qk_norm_rope import joint_qk_norm_rope
from diffkern.ops.linear import linear_gelu
from diffkern.ops.linear_attention import linear_attention
from diffkern.ops.modulate import gate_residual, gate_residual_norm_modulate, norm_modulate
from diffkern.ops.norm import layer_norm, rms_norm
from diffkern.ops.qk_norm_rope import qk_norm_rope
from diffkern.ops.rope import expand_axes, rope, rope_3d

__all__ = [
    "activation_fp8",
    "add_norm_silu_pad",
    "channel_glu",
    "channel_rms_norm_silu",
    "expand_axes",
    "gate_residual",
    "gate_residual_norm_modulate",
    "gate_residual_norm_modulate_and_fp8",
    "gate_residual_norm_modulate_fp8",
    "geglu",
    "gelu",
    "glu",
    "glu_and_fp8",
    "group_norm_silu",
    "joint_qk_norm_rope",
    "layer_norm",
    "linear_attention",
    "linear_fp8",
    "linear_gelu",
    "norm_modulate",
    "norm_modulate_and_fp8",
    "norm_modulate_fp8",
    "qk_norm_rope",
    "quick_gelu",
    "rms_norm",
    "rope",
    "rope_3d",
    "silu",
    "swiglu",
]
