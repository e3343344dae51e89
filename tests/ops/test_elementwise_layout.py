"""Images and videos in channels last: results of ops that torch computes element by element lie as those of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from diffkern import ops

LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
#: Dense; the second half of the channels of a larger image; every second pixel of one.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "half": lambda x: torch.cat([x, x], 1).contiguous(memory_format=LAST[x.ndim]).chunk(2, 1)[1],
    "pixels": lambda x: x.repeat_interleave(2, -1).contiguous(memory_format=LAST[x.ndim])[..., ::2],
    "row-major": lambda x: x.contiguous(),
}


def _mean_square(x: Tensor) -> Tensor:
    return x.square().mean(1, keepdim=True)


#: The op, and the chain of torch: of two images, a value for each sample and channel, and the provider.
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "modulation": (
        lambda x, y, s, p: ops.norm_modulate(x, s, s[0], norm=None, provider=p),
        lambda x, y, s: x * (1 + s) + s[0],
    ),
    "scale of a number": (
        lambda x, y, s, p: ops.norm_modulate(x, s[0, 0].view(()), y, norm=None, provider=p),
        lambda x, y, s: x * (1 + s[0, 0].view(())) + y,
    ),
    "gated residual": (lambda x, y, s, p: ops.gate_residual(x, y, s, provider=p), lambda x, y, s: x + s * y),
    "residual": (lambda x, y, s, p: ops.gate_residual(x, y, provider=p), lambda x, y, s: x + y),
    "residual of another order": (
        lambda x, y, s, p: ops.gate_residual(x.contiguous(), y, s, provider=p),
        lambda x, y, s: x.contiguous() + s * y,
    ),
    "gated residual, modulation": (
        lambda x, y, s, p: ops.gate_residual_norm_modulate(x, y, s, s, s, norm=None, provider=p),
        lambda x, y, s: (x + s * y, (x + s * y) * (1 + s) + s),
    ),
    "gelu": (lambda x, y, s, p: ops.gelu(x, provider=p), lambda x, y, s: F.gelu(x)),
    "silu": (lambda x, y, s, p: ops.silu(x, provider=p), lambda x, y, s: F.silu(x)),
    "quick_gelu": (lambda x, y, s, p: ops.quick_gelu(x, provider=p), lambda x, y, s: x * torch.sigmoid(1.702 * x)),
    "glu": (lambda x, y, s, p: ops.glu(x, y, "silu", provider=p), lambda x, y, s: x * F.silu(y)),
    "swiglu": (
        lambda x, y, s, p: ops.swiglu(x, dim=1, provider=p),
        lambda x, y, s: x.chunk(2, 1)[0] * F.silu(x.chunk(2, 1)[1]),
    ),
    "channel_rms_norm_silu": (
        lambda x, y, s, p: ops.channel_rms_norm_silu(x, scale=s, provider=p),
        lambda x, y, s: F.silu(x * torch.rsqrt(_mean_square(x) + 1e-6) * (1 + s)),
    ),
    "rope": (
        lambda x, y, s, p: ops.rope(x, torch.ones_like(x[0, 0]), torch.zeros_like(x[0, 0]), provider=p),
        lambda x, y, s: x * 1.0,
    ),
}
#: Of videos alone, and by no compiled kernel.
OF_VIDEOS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sum, norm, SiLU": (
        lambda x, y, s, p: ops.add_norm_silu_pad(x, None, y, eps=1e-6, provider=p),
        lambda x, y, s: F.silu((x + y) * torch.rsqrt(_mean_square(x + y) + 1e-6)),
    ),
    "sum": (
        lambda x, y, s, p: ops.add_norm_silu_pad(x, None, y, norm=None, activation=None, provider=p),
        lambda x, y, s: x + y,
    ),
    "padding": (
        lambda x, y, s, p: ops.add_norm_silu_pad(x, norm=None, activation=None, pad=(1, 0), provider=p),
        lambda x, y, s: torch.cat([x[:, :, :1], x], 2),
    ),
}


def _image(shape: tuple[int, ...], layout: str, device: str) -> Tensor:
    return LAYOUTS[layout](torch.randn(shape, device=device).contiguous(memory_format=LAST[len(shape)]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "ndim"), [*[(name, ndim) for name in CASES for ndim in (4, 5)], *[(name, 5) for name in OF_VIDEOS]]
)
def test_a_result_lies_as_that_of_torch(name: str, ndim: int, layout: str, provider: str, device: str) -> None:
    shape = (2, 8, 3, 4, 6) if ndim == 5 else (2, 8, 4, 6)
    x, y = (_image(shape, layout, device) for _ in range(2))
    s = torch.randn(2, 8, *(1,) * (ndim - 2), device=device)
    op, chain = (CASES | OF_VIDEOS)[name]
    ours, stock = op(x, y, s, provider), chain(x, y, s)
    for result, expected in zip(*[[one] if isinstance(one, Tensor) else one for one in (ours, stock)], strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
        assert result.stride() == expected.stride()


def test_gradients_of_a_modulated_image_lie_as_the_image(provider: str, device: str) -> None:
    x = _image((2, 8, 4, 6), "dense", device)
    s = torch.randn(2, 8, 1, 1, device=device)
    grads = []
    for call in (lambda a, b: ops.norm_modulate(a, b, b, norm=None, provider=provider), lambda a, b: a * (1 + b) + b):
        a, b = x.clone().requires_grad_(), s.clone().requires_grad_()
        call(a, b).square().sum().backward()
        grads.append((a.grad, b.grad))
    for ours, stock in zip(*grads, strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)
    assert grads[0][0].is_contiguous(memory_format=torch.channels_last)


def test_a_graph_of_the_compiler_lays_an_image_out_alike() -> None:
    x, s = _image((2, 8, 4, 6), "dense", "cpu"), torch.randn(2, 8, 1, 1)
    compiled = torch.compile(lambda x, s: ops.norm_modulate(x, s, norm=None), backend="aot_eager", fullgraph=True)
    assert compiled(x, s).stride() == (x * (1 + s)).stride()


def test_what_broadcasts_an_image_is_modulated_in_row_major_order(provider: str, device: str) -> None:
    x, scale = _image((2, 8, 4, 6), "dense", device), torch.randn(3, 1, 1, 1, 1, device=device)
    y = ops.norm_modulate(x, scale, norm=None, provider=provider)
    torch.testing.assert_close(y, x * (1 + scale))


@pytest.mark.parametrize("op", [ops.rms_norm, ops.layer_norm])
def test_a_norm_over_pixels_writes_contiguously(op: Callable[..., Tensor], provider: str, device: str) -> None:
    assert op(_image((2, 8, 4, 6), "dense", device), provider=provider).is_contiguous()
