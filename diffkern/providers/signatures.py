"""The signature of each op's kernel, in torch's schema language: what a provider's callable takes, in this order.

It is the one source of them. The torch op ``diffkern::<op>`` has it with a last argument ``provider``, a build of the
compiled kernels is checked against it before it serves, and so are the functions of the other providers, by the tests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

_MODULATION = (
    "Tensor? scale=None, Tensor? shift=None, Tensor? weight=None, Tensor? bias=None, float eps=1e-6, int norm=1"
)
_NORM_MODULATE = f"(Tensor x, {_MODULATION}, float scale_offset=1.0, bool round_each=False, ScalarType? out_dtype=None)"
_GATE_RESIDUAL_NORM_MODULATE = (
    f"(Tensor residual, Tensor x, Tensor? gate=None, {_MODULATION}, int gate_activation=0, float scale_offset=1.0, "
    "bool round_each=False, ScalarType? residual_dtype=None, ScalarType? out_dtype=None)"
)
_GLU = "(Tensor value, Tensor gate, str function, bool round_activation=False)"
_PLACE = "int rotary_dim=0, int seq_dim={}, SymInt start=0, SymInt length=-1"
_AXES = "Tensor? coords, SymInt[] grid, bool alternating=False, int front_pad=0"

#: Options that are seldom given come last: a call pays for each argument it has, and leaves out the last ones that
#: have their default.
SIGNATURES: Mapping[str, str] = {
    "activation": "(Tensor x, str function) -> Tensor",
    "activation_fp8": '(Tensor x, Tensor? front=None, str function="identity") -> (Tensor, Tensor)',
    "add_norm_silu_pad": (
        "(Tensor x, Tensor? bias, Tensor? residual, Tensor? scale, Tensor? shift, float eps, bool norm, bool silu, "
        "int front, int back, bool channels_last) -> Tensor"
    ),
    "channel_glu": '(Tensor x, Tensor? bias=None, str function="silu", bool round_each=False) -> Tensor',
    "channel_rms_norm_silu": (
        "(Tensor x, Tensor? weight=None, Tensor? bias=None, Tensor? scale=None, Tensor? shift=None, float eps=1e-6, "
        "bool clamp_eps=False, bool silu=True, ScalarType? round_dtype=None) -> Tensor"
    ),
    "gate_residual": (
        "(Tensor residual, Tensor x, Tensor? gate=None, int gate_activation=0, bool round_each=False, "
        "ScalarType? out_dtype=None) -> Tensor"
    ),
    "gate_residual_norm_modulate": f"{_GATE_RESIDUAL_NORM_MODULATE} -> (Tensor, Tensor)",
    "gate_residual_norm_modulate_and_fp8": f"{_GATE_RESIDUAL_NORM_MODULATE} -> (Tensor, Tensor, Tensor, Tensor)",
    "gate_residual_norm_modulate_fp8": (
        f"(Tensor residual, Tensor x, Tensor? gate=None, {_MODULATION}) -> (Tensor, Tensor, Tensor)"
    ),
    "glu": f"{_GLU} -> Tensor",
    "glu_and_fp8": f"{_GLU} -> (Tensor, Tensor, Tensor)",
    "group_norm_silu": (
        "(Tensor x, int num_groups, Tensor? weight=None, Tensor? bias=None, Tensor? add=None, float eps=1e-5, "
        "bool silu=True, bool per_frame=False, bool preserve_strides=False) -> Tensor"
    ),
    "joint_qk_norm_rope": (
        "(Tensor q, Tensor k, Tensor q_2, Tensor k_2, Tensor? q_weight, Tensor? k_weight, Tensor? q_weight_2, "
        "Tensor? k_weight_2, Tensor? q_bias, Tensor? k_bias, Tensor? q_bias_2, Tensor? k_bias_2, Tensor[] cos, "
        "Tensor[] sin, Tensor[] cos_2, Tensor[] sin_2, int dim=1, int norm=1, float eps=1e-6, bool round_norm=False, "
        "bool half=False, int arithmetic=0) -> (Tensor, Tensor)"
    ),
    "layer_norm": (
        "(Tensor x, Tensor? weight=None, Tensor? bias=None, float eps=1e-5, ScalarType? out_dtype=None, "
        "bool preserve_strides=False) -> Tensor"
    ),
    "linear_attention": (
        "(Tensor q, Tensor k, Tensor v, Tensor? q_rotated=None, Tensor? k_rotated=None, float eps=1e-15, "
        "bool relu=True) -> Tensor"
    ),
    "linear_fp8": (
        "(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, Tensor? bias, ScalarType out_dtype) -> Tensor"
    ),
    "linear_gelu": '(Tensor x, Tensor weight, Tensor? bias=None, str function="gelu_tanh") -> Tensor',
    "norm_modulate": f"{_NORM_MODULATE} -> Tensor",
    "norm_modulate_and_fp8": f"{_NORM_MODULATE} -> (Tensor, Tensor, Tensor)",
    "norm_modulate_fp8": f"(Tensor x, {_MODULATION}) -> (Tensor, Tensor)",
    "qk_norm_rope": (
        "(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor? q_bias, Tensor? k_bias, "
        f"Tensor[] cos, Tensor[] sin, Tensor[] cos_k, Tensor[] sin_k, {_AXES}, int norm=1, float eps=1e-6, "
        "int heads=0, float weight_offset=0.0, ScalarType? round_dtype=None, bool round_norm=False, bool half=False, "
        f"int arithmetic=0, {_PLACE.format(1)}) -> (Tensor, Tensor)"
    ),
    "rms_norm": (
        "(Tensor x, Tensor? weight=None, Tensor? bias=None, float eps=1e-6, float weight_offset=0.0, "
        "ScalarType? round_dtype=None, ScalarType? out_dtype=None, bool clamp_eps=False, "
        "bool preserve_strides=False) -> Tensor"
    ),
    "rope": f"(Tensor x, Tensor cos, Tensor sin, bool half=False, int arithmetic=0, {_PLACE.format(0)}) -> Tensor",
    "rope_3d": (
        f"(Tensor x, Tensor[] cos, Tensor[] sin, {_AXES}, bool half=False, int arithmetic=0, "
        f"{_PLACE.format(1)}) -> Tensor"
    ),
}


def without_defaults(signature: str) -> str:
    """Returns a signature without the defaults of its arguments."""
    return re.sub(r"=[^,)]+", "", signature)


@cache
def schema(op: str) -> Any:
    """Returns the signature of ``op`` as torch parses it, a ``FunctionSchema``."""
    return torch._C.parse_schema(f"{op}{SIGNATURES[op]}")


def arguments(schema: Any) -> list[tuple[str, str]]:
    """Returns names and types of the arguments of a ``FunctionSchema``."""
    return [(argument.name, str(argument.real_type)) for argument in schema.arguments]
