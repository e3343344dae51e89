"""How the site of each op calls it: from the operands by name, and what the norm says of itself now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffkern import ops
from diffkern.blocks.layout import is_last
from diffkern.providers.eager import compute_dtype
from diffkern.rewrite.facts import child_of
from diffkern.rewrite.padding import padded
from diffkern.rewrite.rotation import call_qk_norm_rope

if TYPE_CHECKING:
    from diffkern.rewrite.site import FusedSite, Way

#: Operands by their names, and the provider that is asked for.
Operands = dict[str, Any]
Provider = str | None


def _norm_modulate(
    site: FusedSite, module: nn.Module, operands: Operands, way: Way, provider: Provider, op: Any = None
) -> Any:
    op = op or ops.norm_modulate
    arguments = site.norm_arguments(module, operands["x"]) if way.calls_norm is None else None
    if arguments is None:
        x = site.run_norm(module, operands.pop("x"), way.calls_norm or "same", provider)
        return op(x, **operands, **{**way.options, "norm": None}, provider=provider)
    return op(**operands, **{**arguments, **way.options}, provider=provider)


def _gate_residual(site: FusedSite, module: nn.Module, operands: Operands, way: Way, provider: Provider) -> Tensor:
    if "in_place" in way.options:
        return operands["residual"].addcmul_(operands["x"], operands["gate"])  # type: ignore[no-any-return]
    return ops.gate_residual(**_ordered(operands), **way.options, provider=provider)


def _gate_residual_norm_modulate(
    site: FusedSite, module: nn.Module, operands: Operands, way: Way, provider: Provider, op: Any = None
) -> Any:
    op = op or ops.gate_residual_norm_modulate
    operands, options = _ordered(operands), dict(way.options)
    arguments = site.norm_arguments(module, operands["x"]) if way.calls_norm is None else None
    if arguments is not None:
        return op(**operands, **{**arguments, **options}, provider=provider)
    modulation = {name: operands.pop(name) for name in ("scale", "shift") if name in operands}
    gating = {name: options[name] for name in ("gate_activation", "rounding") if name in options}
    residual = ops.gate_residual(**operands, **gating, out_dtype=options.get("residual_dtype"), provider=provider)
    y = site.run_norm(module, residual, way.calls_norm or "same", provider)
    rest = {name: options[name] for name in ("scale_offset", "rounding", "out_dtype") if name in options}
    if modulation:
        y = ops.norm_modulate(y, **modulation, **rest, norm=None, provider=provider)
    else:
        y = y.to(rest.get("out_dtype") or y.dtype)
    return (residual, y) if op is ops.gate_residual_norm_modulate else (residual, y, *ops.activation_fp8(y))


def _glu(site: FusedSite, module: nn.Module, operands: Operands, way: Way, provider: Provider, op: Any = None) -> Any:
    return (op or ops.glu)(**operands, **way.options, provider=provider)


def _channel_glu(site: FusedSite, module: nn.Module, operands: Operands, way: Way, provider: Provider) -> Tensor:
    x, bias = _convolved(site, module, operands["x"])
    if bias is None:
        value, gate = x.chunk(2, 1)
        activation, rounds = way.options["activation"], way.options["round_each"]
        return ops.glu(value, gate, activation, round_activation=rounds, provider=provider)
    return ops.channel_glu(x, bias, **way.options, provider=provider)


def _linear_attention(site: FusedSite, module: nn.Module, operands: Operands, way: Way, provider: Provider) -> Tensor:
    heads = {name: x if x.ndim == 4 else x.unflatten(-1, (module.heads, -1)) for name, x in operands.items()}
    return ops.linear_attention(**heads, **way.options, provider=provider).flatten(2)


def _linear_gelu(site: FusedSite, module: nn.Module, operands: Operands, way: Way, provider: Provider) -> Tensor:
    linear: Any = child_of(module, site.plan.modules["linear"])
    return ops.linear_gelu(operands["x"], linear.weight, linear.bias, **way.options, provider=provider)


def _group_norm_silu(site: FusedSite, module: nn.Module, operands: Operands, way: Way, provider: Provider) -> Tensor:
    x, bias = _convolved(site, module, operands["x"])
    arguments = site.norm_arguments(module, x) or {}
    if "scale" not in operands:
        add = operands.get("add")
        if bias is not None:
            bias = bias.view(-1, *(1,) * (x.ndim - 2))
            add = bias if add is None else add + bias
        return ops.group_norm_silu(x, **arguments, **way.options, add=add, provider=provider)
    # Modulation is an affine map of each channel, as weight and bias are: one of each sample, if samples are channels.
    if arguments["frames"] == "each":
        raise ValueError("a group norm of single frames takes no modulation")
    samples, channels, *size = x.shape
    dtype = compute_dtype(x)

    def of_each(value: Tensor) -> Tensor:
        return value.to(dtype).expand(samples, channels, *(1,) * len(size)).reshape(samples, channels)

    scale = 1 + of_each(operands["scale"])
    bias = arguments.get("bias")
    shift = scale * bias if bias is not None else torch.zeros_like(scale)
    shift = shift + of_each(operands["shift"]) if "shift" in operands else shift
    weight = scale * arguments["weight"] if "weight" in arguments else scale
    arguments |= {"weight": weight.reshape(-1), "bias": shift.reshape(-1)}
    arguments["num_groups"] *= samples
    flat = x if samples == 1 else x.contiguous().view(1, samples * channels, *size)
    return ops.group_norm_silu(flat, **arguments, **way.options, provider=provider).view(x.shape)


def _add_norm_silu_pad(site: FusedSite, module: nn.Module, operands: Operands, way: Way, provider: Provider) -> Tensor:
    if "norm" in site.plan.modules:
        return _norm_silu_pad(site, module, operands, way, provider)
    residual, activation = operands.get("residual"), way.options.get("activation")
    if residual is None and activation is None:
        return _pad(site, module, operands, provider)
    # The kernel is for channels that are neighbours: elsewhere the two passes of torch take no longer.
    conv: Any = child_of(module, site.plan.modules["convolution"])
    in_torch = bias_is_apart(operands["x"]) and not (is_last(operands["x"]) or is_last(conv.weight))
    x, bias = (conv(operands["x"]), None) if in_torch else _convolved(site, module, operands["x"])
    if in_torch:
        return F.silu(x) if residual is None else residual + x
    if residual is not None and residual.ndim != x.ndim:
        raise ValueError("the residual has not the dimensions of what the convolution gives")
    frames = x if x.ndim == 5 else x.unsqueeze(2)
    if residual is not None and residual.ndim != 5:
        residual = residual.unsqueeze(2)
    y = ops.add_norm_silu_pad(frames, bias, residual, norm=None, activation=activation, provider=provider)
    return y if x.ndim == 5 else y.squeeze(2)


def _norm_silu_pad(site: FusedSite, module: nn.Module, operands: Operands, way: Way, provider: Provider) -> Tensor:
    x, bias = _convolved(site, module, operands["x"])
    arguments, pad = site.norm_arguments(module, x) or {}, (operands["front"], operands.get("back", 0))
    if arguments.keys() == {"eps", "eps_mode"} and arguments["eps_mode"] == "add":
        return ops.add_norm_silu_pad(x, bias, eps=arguments["eps"], pad=pad, provider=provider)
    x = x if bias is None else x + bias.view(-1, 1, 1, 1)
    y = ops.channel_rms_norm_silu(x, **arguments, provider=provider)
    return ops.add_norm_silu_pad(y, norm=None, activation=None, pad=pad, provider=provider)


def _pad(site: FusedSite, module: nn.Module, operands: Operands, provider: Provider) -> Tensor:
    x: Tensor = operands["x"]
    if "padding" in operands:
        return padded(**operands)
    if "front" not in operands:
        conv: Any = child_of(module, site.plan.modules["convolution"])
        return _convolution(conv, x, conv.bias)
    pad = operands["front"], operands.get("back", 0)
    return ops.add_norm_silu_pad(x, norm=None, activation=None, pad=pad, provider=provider)


def _convolved(site: FusedSite, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The convolution of ``x`` where the site has one, and the bias where that is still to be added.

    On a GPU torch adds it in a pass of its own, which whatever follows can do in passing. On a CPU it is in the
    convolution, before that rounds.
    """
    path = site.plan.modules.get("convolution")
    if path is None:
        return x, None
    conv: Any = child_of(module, path)
    apart = bias_is_apart(x)
    return _convolution(conv, x, None if apart else conv.bias), conv.bias if apart else None


def _convolution(conv: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution with another bias, or none; one that pads with pixels of the image follows its order of memory."""
    if conv.padding_mode == "zeros" or "_conv_forward" in conv.__dict__:
        return conv._conv_forward(x, conv.weight, bias)  # type: ignore[no-any-return]
    x = padded(x, conv._reversed_padding_repeated_twice, conv.padding_mode)
    compute = F.conv2d if isinstance(conv, nn.Conv2d) else F.conv3d
    return compute(x, conv.weight, bias, conv.stride, 0, conv.dilation, conv.groups)


def bias_is_apart(x: Tensor) -> bool:
    """Whether torch adds the bias of a convolution of ``x`` in a pass of its own."""
    return x.is_cuda


def _channel_rms_norm_silu(
    site: FusedSite, module: nn.Module, operands: Operands, way: Way, provider: Provider
) -> Tensor:
    arguments = site.norm_arguments(module, operands["x"]) or {}
    return ops.channel_rms_norm_silu(**operands, **arguments, **way.options, provider=provider)


def _rope(
    site: FusedSite, module: nn.Module, operands: Operands, way: Way, provider: Provider
) -> tuple[Tensor, Tensor]:
    options = dict(way.options)
    dim, per_pair = options.pop("unsqueeze_dim"), options.pop("per_pair")
    cos, sin = operands["cos"].unsqueeze(dim), operands["sin"].unsqueeze(dim)
    options["rotary_dim"] = (2 if per_pair else 1) * cos.shape[-1]
    q, k = [ops.rope(operands[name], cos, sin, **options, provider=provider) for name in ("q", "k")]
    return q, k


def _ordered(operands: Operands) -> Operands:
    """A product says nothing of which factor is the gate: the smaller one is."""
    gate, x = operands.get("gate"), operands["x"]
    if gate is not None and "gate_activation" not in operands and gate.numel() > x.numel():
        operands["gate"], operands["x"] = x, gate
    return operands


#: What computes an op and rows of fp8 of its result, which is the last one without them, in one pass.
WITH_ROWS: Mapping[str, Any] = {
    "norm_modulate": ops.norm_modulate_and_fp8,
    "gate_residual_norm_modulate": ops.gate_residual_norm_modulate_and_fp8,
    "glu": ops.glu_and_fp8,
}
#: How the site of an op calls it.
CALLS: Mapping[str, Any] = {
    "norm_modulate": _norm_modulate,
    "gate_residual": _gate_residual,
    "gate_residual_norm_modulate": _gate_residual_norm_modulate,
    "glu": _glu,
    "channel_glu": _channel_glu,
    "linear_attention": _linear_attention,
    "linear_gelu": _linear_gelu,
    "qk_norm_rope": call_qk_norm_rope,
    "group_norm_silu": _group_norm_silu,
    "channel_rms_norm_silu": _channel_rms_norm_silu,
    "add_norm_silu_pad": _add_norm_silu_pad,
    "rope": _rope,
}
