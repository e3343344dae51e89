"""A small call of every kernel, with the arguments of the ops' schemas, for what holds whatever the op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from diffkern.providers.base import Kernel

#: Calls a kernel on a batch of the given size on a device; a batch of 0 leaves it nothing to compute.
Call = Callable[[Kernel, int, str], "Tensor | tuple[Tensor, ...]"]

_ANGLES = torch.linspace(0, 3, 5 * 16).view(5, 1, 16)


def _tokens(batch: int, device: str) -> Tensor:
    return torch.linspace(-1, 1, batch * 5 * 32, device=device).view(batch, 5, 32)


def _heads(batch: int, device: str) -> Tensor:
    return _tokens(batch, device).view(batch, 5, 2, 16)


def _image(batch: int, device: str) -> Tensor:
    return _tokens(batch, device).view(batch, 32, 5, 1)


def _modulation(batch: int, device: str) -> Tensor:
    return torch.full((batch, 1, 32), 0.5, device=device)


def _tables(device: str) -> tuple[Tensor, Tensor]:
    return _ANGLES.cos().to(device), _ANGLES.sin().to(device)


def _axis(device: str) -> tuple[list[Tensor], list[Tensor]]:
    cos, sin = _tables(device)
    return [cos[:, 0, :8].contiguous()], [sin[:, 0, :8].contiguous()]


def _norm_and_rotate(kernel: Kernel, batch: int, device: str) -> Any:
    q, weight = _heads(batch, device), torch.ones(16, device=device)
    tables = ([cos := _tables(device)[0]], [sin := _tables(device)[1]], [cos], [sin])
    norm, rotation = (1, 1e-6, 0, 0.0, None, False), (False, 0, 0, 1, 0, -1)
    return kernel(q, q, weight, weight, None, None, *tables, None, [], False, 0, *norm, *rotation)


def _normalise_and_join(kernel: Kernel, batch: int, device: str) -> Any:
    x, (cos, sin), weight = _heads(batch, device), _tables(device), torch.ones(16, device=device)
    return kernel(x, x, x, x, *[weight] * 4, *[None] * 4, [cos], [sin], [], [], 1, 1, 1e-6, False, False, 0)


CALLS: dict[str, Call] = {
    "add_norm_silu_pad": lambda f, b, d: f(_image(b, d)[..., None], *[None] * 4, 1e-6, True, True, 1, 2, False),
    "activation": lambda f, b, d: f(_tokens(b, d), "silu"),
    "activation_fp8": lambda f, b, d: f(_tokens(b, d), _tokens(b, d), "silu"),
    "channel_glu": lambda f, b, d: f(_image(b, d), torch.linspace(-1, 1, 32, device=d), "silu", False),
    "channel_rms_norm_silu": lambda f, b, d: f(_image(b, d), None, None, None, None, 1e-6, False, True, None),
    "gate_residual": lambda f, b, d: f(_tokens(b, d), _tokens(b, d), _modulation(b, d), 0, False, None),
    "gate_residual_norm_modulate": lambda f, b, d: f(
        *(_tokens(b, d), _tokens(b, d), *[_modulation(b, d)] * 3, None, None), 1e-6, 1, 0, 1.0, False, None, None
    ),
    "gate_residual_norm_modulate_and_fp8": lambda f, b, d: CALLS["gate_residual_norm_modulate"](f, b, d),
    "gate_residual_norm_modulate_fp8": lambda f, b, d: f(
        _tokens(b, d), _tokens(b, d), *[_modulation(b, d)] * 3, None, None, 1e-6, 1
    ),
    "glu": lambda f, b, d: f(_tokens(b, d), _tokens(b, d), "gelu", False),
    "glu_and_fp8": lambda f, b, d: CALLS["glu"](f, b, d),
    "group_norm_silu": lambda f, b, d: f(_image(b, d), 4, None, None, None, 1e-5, True, False, False),
    "joint_qk_norm_rope": _normalise_and_join,
    "layer_norm": lambda f, b, d: f(_tokens(b, d), None, None, 1e-5, None, False),
    "linear_attention": lambda f, b, d: f(*[_heads(b, d)] * 3, None, None, 1e-15, True),
    "norm_modulate": lambda f, b, d: f(
        _tokens(b, d), _modulation(b, d), _modulation(b, d), None, None, 1e-6, 1, 1.0, False, None
    ),
    "norm_modulate_and_fp8": lambda f, b, d: CALLS["norm_modulate"](f, b, d),
    "norm_modulate_fp8": lambda f, b, d: f(_tokens(b, d), _modulation(b, d), _modulation(b, d), None, None, 1e-6, 1),
    "qk_norm_rope": _norm_and_rotate,
    "rms_norm": lambda f, b, d: f(_tokens(b, d), None, None, 1e-6, 0.0, None, None, False, False),
    "rope": lambda f, b, d: f(_heads(b, d), *_tables(d), False, 0, 0, 1, 0, -1),
    "rope_3d": lambda f, b, d: f(_heads(b, d), *_axis(d), None, [5], False, 0, False, 0, 0, 1, 0, -1),
}
