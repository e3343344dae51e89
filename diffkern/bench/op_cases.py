"""The calls that ``diffkern bench ops`` times: every op at the shapes of real models, and its rivals.

A case names the fewest bytes that its op has to move: each input read once, each output written once. The
rivals are the chain of torch ops as a model writes it, the same chain compiled, the native torch function
where there is one, and Liger where it has the op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from diffkern import ops
from diffkern.bench.models import Randn

Call = Callable[[], object]


@dataclass(frozen=True)
class OpCase:
    """One op at one shape.

    Attributes:
        op: Name of the op.
        label: Shape and variant, for tables.
        bytes: Fewest bytes that the op must move.
        chain: The same as plain torch ops; a function of ``inputs``, so that it can be compiled.
        inputs: Arguments of ``chain``.
        options: Keyword arguments of the op.
        arguments: Positional ones, where they are not ``inputs``.
        rivals: Other calls that compute the same, by name.
    """

    op: str
    label: str
    bytes: int
    chain: Callable[..., object]
    inputs: tuple[Tensor, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    arguments: tuple[Any, ...] | None = None
    rivals: Mapping[str, Call] = field(default_factory=dict)

    def fused(self, provider: str) -> object:
        """Our call."""
        arguments = self.inputs if self.arguments is None else self.arguments
        return getattr(ops, self.op)(*arguments, **self.options, provider=provider)


def cases(device: torch.device) -> Iterator[Callable[[], OpCase]]:
    """Yields builders of the cases, in bfloat16, one by one: together their tensors would not fit a small card."""
    draw = partial(torch.randn, device=device, dtype=torch.bfloat16)
    rows: tuple[tuple[int, ...], ...] = (
        (1, 1024, 2048),
        (4, 1024, 2048),
        (2, 4096, 3072),
        (2, 8064, 2048),
        (1, 32760, 5120),
        (1, 4608, 24, 128),
    )
    for shape in rows:
        yield partial(_rms_norm, draw, shape)
        yield partial(_layer_norm, draw, shape)
    for shape in ((2, 2688, 2048), (2, 8064, 2048), (1, 4608, 3072), (1, 32760, 5120)):
        for per_token in (False, True):
            yield partial(_norm_modulate, draw, shape, per_token)
            yield partial(_gate_residual, draw, shape, per_token)
            yield partial(_gate_residual_norm_modulate, draw, shape, per_token)
    yield partial(_qk_norm_rope_ltx, draw, 2, (21, 16, 24), 32, 64)
    yield partial(_qk_norm_rope_heads, draw, 1, 4608, 24, 128, across=False)
    yield partial(_qk_norm_rope_heads, draw, 1, 32760, 40, 128, across=True)
    for text, image in ((512, 4096), (128, 4096)):  # Flux, Qwen-Image
        yield partial(_joint_qk_norm_rope, draw, 1, (text, image), 24, 128)
    for shape in ((2, 4096, 5120), (2, 1024, 10240)):
        yield partial(_glu, draw, shape, "geglu")
        yield partial(_glu, draw, shape, "swiglu")
    yield partial(_gelu, draw, (2, 8064, 8192))
    images: tuple[tuple[int, ...], ...] = (
        (1, 128, 1024, 1024),
        (1, 512, 128, 128),
        (2, 320, 128, 128),
        (1, 128, 20, 256, 256),
    )
    for shape in images:
        for channels_last in (False, True):
            yield partial(_group_norm_silu, draw, shape, channels_last)
    for channels_last in (False, True):
        yield partial(_channel_rms_norm_silu, draw, (1, 96, 9, 256, 256), channels_last)
    for shape in ((2, 11200, 32, 32), (9, 13440, 30, 52)):  # Sana, SANA-Video
        yield partial(_channel_glu, draw, shape)
    yield partial(_linear_attention, draw, (2, 1024, 70, 32))


def _size(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _name(shape: tuple[int, ...], *notes: str) -> str:
    return " ".join(("x".join(map(str, shape)), *filter(None, notes)))


def _rms_norm(draw: Randn, shape: tuple[int, ...]) -> OpCase:
    x, weight = draw(*shape), draw(shape[-1])

    def chain(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight.float()).to(x.dtype)

    rivals: dict[str, Call] = {"native": lambda: F.rms_norm(x, x.shape[-1:], weight, 1e-6)}
    rivals |= _liger("rms_norm", "LigerRMSNormFunction", x, weight, 1e-6, 0.0, "llama", False)
    return OpCase("rms_norm", _name(shape), 2 * _size(x), chain, (x, weight), {"eps": 1e-6}, rivals=rivals)


def _layer_norm(draw: Randn, shape: tuple[int, ...]) -> OpCase:
    x, *parameters = draw(*shape), draw(shape[-1]), draw(shape[-1])
    chain = lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias, 1e-6)
    rivals = _liger("layer_norm", "LigerLayerNormFunction", x, *parameters, 1e-6)
    options = {"eps": 1e-6}
    return OpCase("layer_norm", _name(shape), 2 * _size(x), chain, (x, *parameters), options, rivals=rivals)


def _modulation(draw: Randn, shape: tuple[int, ...], per_token: bool, count: int) -> tuple[str, tuple[Tensor, ...]]:
    """The label of a case, and views of one tensor of six modulations per sample or token, as an AdaLN block makes."""
    batch, tokens, size = shape
    views = draw(batch, tokens if per_token else 1, 6, size).unbind(2)[:count]
    return _name(shape, "per token" if per_token else "per sample"), views


def _norm_modulate(draw: Randn, shape: tuple[int, ...], per_token: bool) -> OpCase:
    x, (label, modulation) = draw(*shape), _modulation(draw, shape, per_token, 2)
    chain = lambda x, scale, shift: F.rms_norm(x, x.shape[-1:], None, 1e-6) * (1 + scale) + shift
    return OpCase("norm_modulate", label, 2 * _size(x) + _size(*modulation), chain, (x, *modulation))


def _gate_residual(draw: Randn, shape: tuple[int, ...], per_token: bool) -> OpCase:
    residual, x, (label, gate) = draw(*shape), draw(*shape), _modulation(draw, shape, per_token, 1)
    chain = lambda residual, x, gate: residual + x * gate
    return OpCase("gate_residual", label, 3 * _size(x) + _size(*gate), chain, (residual, x, *gate))


def _gate_residual_norm_modulate(draw: Randn, shape: tuple[int, ...], per_token: bool) -> OpCase:
    residual, x, (label, modulation) = draw(*shape), draw(*shape), _modulation(draw, shape, per_token, 3)

    def chain(residual: Tensor, x: Tensor, gate: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        residual = residual + x * gate
        return residual, F.rms_norm(residual, x.shape[-1:], None, 1e-6) * (1 + scale) + shift

    size = 4 * _size(x) + _size(*modulation)
    return OpCase("gate_residual_norm_modulate", label, size, chain, (residual, x, *modulation))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((-imaginary, real), -1).flatten(-2)
    return (x.float() * cos + rotated.float() * sin).to(x.dtype)


def _qk_norm_rope_ltx(draw: Randn, batch: int, grid: tuple[int, int, int], heads: int, head_dim: int) -> OpCase:
    """LTX: a norm across all heads, then one rotation over them all, with tables per axis."""
    tokens, size = grid[0] * grid[1] * grid[2], heads * head_dim
    q, k, _ = draw(batch, tokens, 3 * size).chunk(3, -1)
    weights = draw(size), draw(size)
    angles = [draw(length, size // 6, dtype=torch.float32) for length in grid]
    axes = [angle.cos() for angle in angles], [angle.sin() for angle in angles]
    layout: dict[str, Any] = {"grid": grid, "order": "alternating", "front_pad": (size % 6) // 2}
    tables = [table.repeat_interleave(2, -1) for table in ops.expand_axes(*axes, **layout)]

    def chain(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        normed = (F.rms_norm(q, q.shape[-1:], q_weight, 1e-5), F.rms_norm(k, k.shape[-1:], k_weight, 1e-5))
        return _rotate(normed[0], cos, sin), _rotate(normed[1], cos, sin)

    label, inputs = _name((batch, tokens, size), "LTX, packed, tables per axis"), (q, k, *weights, *tables)
    options = {"eps": 1e-5, "across_heads": heads, **layout}
    return OpCase("qk_norm_rope", label, 4 * _size(q), chain, inputs, options, (q, k, *weights, *axes))


def _shared_tables(draw: Randn, tokens: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of random angles, which all heads share."""
    angle = draw(tokens, head_dim // 2, dtype=torch.float32).repeat_interleave(2, -1)
    return angle.cos()[:, None], angle.sin()[:, None]


def _qk_norm_rope_heads(draw: Randn, batch: int, tokens: int, heads: int, head_dim: int, across: bool) -> OpCase:
    """Flux (a norm per head) and Wan (across heads), with one table shared by all heads."""
    q, k = (draw(batch, tokens, heads * head_dim) for _ in range(2))
    norm_size = heads * head_dim if across else head_dim
    weights = draw(norm_size), draw(norm_size)
    tables = _shared_tables(draw, tokens, head_dim)
    if not across:
        q, k = q.unflatten(-1, (heads, head_dim)), k.unflatten(-1, (heads, head_dim))

    def chain(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        results = []
        for x, weight in ((q, q_weight), (k, k_weight)):
            normed = F.rms_norm(x, x.shape[-1:], weight, 1e-6)
            results.append(_rotate(normed.unflatten(-1, (heads, head_dim)) if across else normed, cos, sin))
        return tuple(results)

    label = _name((batch, tokens, heads, head_dim), "Wan, across heads" if across else "Flux, per head")
    options = {"across_heads": heads if across else None}
    size = 4 * _size(q) + _size(*tables)
    return OpCase("qk_norm_rope", label, size, chain, (q, k, *weights, *tables), options)


def _joint_qk_norm_rope(draw: Randn, batch: int, tokens: tuple[int, int], heads: int, head_dim: int) -> OpCase:
    """Flux: text and image have norms of their own, and attend to each other in one sequence."""
    queries, keys = (tuple(draw(batch, count, heads, head_dim) for count in tokens) for _ in "qk")
    weights = [draw(head_dim) for _ in range(4)]
    tables = _shared_tables(draw, sum(tokens), head_dim)

    def chain(*given: Tensor) -> tuple[Tensor, ...]:
        streams, weights, tables = given[:4], given[4:8], given[8:]
        normed = [F.rms_norm(x, x.shape[-1:], weight, 1e-6) for x, weight in zip(streams, weights, strict=True)]
        return tuple([_rotate(torch.cat(pair, 1), *tables) for pair in (normed[:2], normed[2:])])

    arguments = (queries, keys, tuple(weights[:2]), tuple(weights[2:]), *(table.split(tokens) for table in tables))
    inputs, size = (*queries, *keys, *weights, *tables), 2 * _size(*queries, *keys) + _size(*tables)
    label = _name((batch, sum(tokens), heads, head_dim), f"joint, {tokens[0]} of text")
    return OpCase("joint_qk_norm_rope", label, size, chain, inputs, arguments=arguments)


def _glu(draw: Randn, shape: tuple[int, ...], name: str) -> OpCase:
    x = draw(*shape)
    function = F.gelu if name == "geglu" else F.silu

    def chain(x: Tensor) -> Tensor:
        value, gate = x.chunk(2, -1)
        return value * function(gate)

    return OpCase(name, _name(shape), _size(x) * 3 // 2, chain, (x,))


def _gelu(draw: Randn, shape: tuple[int, ...]) -> OpCase:
    x, options = draw(*shape), {"approximate": "tanh"}
    return OpCase("gelu", _name(shape, "tanh"), 2 * _size(x), partial(F.gelu, approximate="tanh"), (x,), options)


def _images(draw: Randn, shape: tuple[int, ...], channels_last: bool) -> tuple[str, Tensor]:
    """What to call a case of this shape, and its input."""
    kind = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    x = draw(*shape).contiguous(memory_format=kind if channels_last else torch.contiguous_format)
    return _name(shape, "channels last" if channels_last else ""), x


def _group_norm_silu(draw: Randn, shape: tuple[int, ...], channels_last: bool) -> OpCase:
    (label, x), weight, bias = _images(draw, shape, channels_last), draw(shape[1]), draw(shape[1])
    chain = lambda x, weight, bias: F.silu(F.group_norm(x, 32, weight, bias, 1e-6))
    options = {"memory_format": torch.preserve_format}
    size, arguments = 2 * _size(x), (x, 32, weight, bias, 1e-6)
    return OpCase("group_norm_silu", label, size, chain, (x, weight, bias), options, arguments)


def _channel_rms_norm_silu(draw: Randn, shape: tuple[int, ...], channels_last: bool) -> OpCase:
    (label, x), weight = _images(draw, shape, channels_last), draw(shape[1])
    gamma = weight.view(-1, *(1,) * (len(shape) - 2))
    chain = lambda x, gamma: F.silu(F.normalize(x.float(), dim=1).to(x.dtype) * x.shape[1] ** 0.5 * gamma)
    options = {"eps": 1e-12, "eps_mode": "clamp"}
    return OpCase("channel_rms_norm_silu", label, 2 * _size(x), chain, (x, gamma), options, (x, weight))


def _channel_glu(draw: Randn, shape: tuple[int, ...]) -> OpCase:
    (label, x), bias = _images(draw, shape, True), draw(shape[1])

    def chain(x: Tensor, bias: Tensor) -> Tensor:
        value, gate = (x + bias.view(-1, 1, 1)).chunk(2, 1)
        return value * F.silu(gate)

    return OpCase("channel_glu", label, _size(x) * 3 // 2, chain, (x, bias))


def _linear_attention(draw: Randn, shape: tuple[int, ...]) -> OpCase:
    q, k, v = (draw(*shape) for _ in range(3))

    def chain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, value = F.relu(q.permute(0, 2, 3, 1)).float(), v.permute(0, 2, 3, 1).float()
        key = F.relu(k.transpose(1, 2)).float()
        y = torch.matmul(torch.matmul(F.pad(value, (0, 0, 0, 1), value=1.0), key), query)
        return (y[:, :, :-1] / (y[:, :, -1:] + 1e-15)).permute(0, 3, 1, 2).to(v.dtype)

    return OpCase("linear_attention", _name(shape), 4 * _size(q), chain, (q, k, v))


def _liger(module: str, name: str, *arguments: Any) -> dict[str, Call]:
    """Liger's function of this name on these arguments, if it is installed."""
    try:
        function = getattr(import_module(f"liger_kernel.ops.{module}"), name)
    except ImportError:
        return {}
    return {"Liger": partial(function.apply, *arguments)}
