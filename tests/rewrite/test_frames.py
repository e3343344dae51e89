"""Convolutions that pad frames are read where they are called, with the norm before them and what follows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_ltx2 import LTX2VideoCausalConv3d, LTX2VideoResnetBlock3d
from diffusers.models.autoencoders.autoencoder_kl_wan import WanRMS_norm
from torch import Tensor, nn

from diffkern import InjectionReport, inject_optimized_kernels
from diffkern.rewrite import Rewriter, Rewritten, calls, padding
from diffkern.verify.measures import relative_error

NORMED, SUM = "norm, SiLU, padding of frames", "convolution, residual"


def _drawn(*shape: int, last: bool = False) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) + 0.5
    return x.contiguous(memory_format=torch.channels_last_3d) if last else x


def _block(mode: str = "zeros", dropout: float = 0.0, seed: int = 0) -> LTX2VideoResnetBlock3d:
    torch.manual_seed(seed)
    block = LTX2VideoResnetBlock3d(8, dropout=dropout, spatial_padding_mode=mode)
    return block.requires_grad_(False).eval()


def _injected(module: nn.Module, **options: Any) -> InjectionReport:
    return inject_optimized_kernels(module, config={"*": "eager"}, **options)


def _rules(module: nn.Module) -> list[str]:
    rewritten = Rewriter().rewrite(module)
    return sorted([site.plan.rule.name for site in rewritten.sites]) if isinstance(rewritten, Rewritten) else []


@pytest.mark.parametrize("apart", [False, True], ids=["bias inside", "bias apart"])
@pytest.mark.parametrize("last", [False, True], ids=["planes", "channels last"])
@pytest.mark.parametrize("mode", ["zeros", "reflect"])
def test_a_block_reads_its_convolutions_where_it_calls_them(
    mode: str, last: bool, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if apart:  # as on a GPU
        monkeypatch.setattr(calls, "bias_is_apart", lambda x: True)
        monkeypatch.setattr(padding, "reorders", lambda x: True)
    block, stock, exact = _block(mode), _block(mode), _block(mode).double()
    x = _drawn(2, 8, 3, 5, 6, last=last)
    assert _rules(block) == [SUM, NORMED, NORMED]
    report = _injected(block)
    for causal in (True, False):
        reference, expected = exact(x.double(), causal=causal), stock(x, causal=causal)
        assert relative_error(block(x, causal=causal), reference) <= 1.05 * relative_error(expected, reference) + 1e-6
    counts = report.calls()
    assert {path: (one["fused"], one["stock"]) for path, one in counts.items() if any(one.values())} == {"": (6, 0)}
    report.restore()
    assert torch.equal(block(x), stock(x))


@pytest.mark.parametrize("causal", [True, False])
def test_forced_to_its_expressions_and_in_exact_numerics_a_block_has_the_bits_of_stock(causal: bool) -> None:
    block, x = _block("reflect"), _drawn(2, 8, 3, 5, 6)
    stock = block(x, causal=causal)
    rewritten = Rewriter().rewrite(block)
    assert isinstance(rewritten, Rewritten)
    rewritten.guard.force_original()
    assert torch.equal(rewritten.function(block, x, causal=causal), stock)
    inject_optimized_kernels(block, numerics="exact")
    assert torch.equal(block(x, causal=causal), stock)


@pytest.mark.parametrize("where", ["around", "inside"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_see_what_they_saw(where: str, when: str) -> None:
    block, stock, x = _block(), _block(), _drawn(1, 8, 3, 5, 6)
    if when == "after":
        _injected(block)
        block(x)
    for one in (block, stock):
        hooked = one.conv2 if where == "around" else one.conv2.conv
        hooked.register_forward_hook(lambda module, args, output: 2 * output)
    report = _injected(block) if when == "before" else None
    assert relative_error(block(x), stock(x)) < 1e-6
    assert report is None or report.calls()[""]["stock"] == 0


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_dropout_with_a_probability_drops(when: str) -> None:
    block, stock, x = _block(), _block(), _drawn(1, 8, 3, 5, 6)
    if when == "after":
        _injected(block)
    for one in (block, stock):
        one.dropout.p = 0.5
        one.train()
    report = _injected(block) if when == "before" else None
    results = []
    for one in (block, stock):
        torch.manual_seed(3)
        results.append(one(x))
    assert relative_error(*results) < 1e-6
    assert report is None or report.calls()[""]["stock"] == 0


class _Normed(nn.Module):
    """A norm and an activation before a convolution of the class ``kind``."""

    def __init__(self, kind: type[nn.Module] = LTX2VideoCausalConv3d) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.act, self.conv = WanRMS_norm(8, images=False), nn.SiLU(), kind(8, 8)
        self.norm.gamma.data += torch.linspace(-0.5, 0.5, 8).view(8, 1, 1, 1)
        self.requires_grad_(False).eval()

    def forward(self, x: Tensor, causal: bool = True) -> Tensor:
        return self.conv(self.act(self.norm(x)), causal=causal)  # type: ignore[no-any-return]


@pytest.mark.parametrize("apart", [False, True], ids=["bias inside", "bias apart"])
def test_a_norm_with_a_weight_keeps_it(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Twice(_Normed):
        def forward(self, x: Tensor, causal: bool = True) -> Tensor:
            x = self.conv(x, causal=causal)
            return self.conv(self.act(self.norm(x)), causal=causal)  # type: ignore[no-any-return]

    monkeypatch.setattr(calls, "bias_is_apart", lambda x: apart)
    module, x = Twice(), _drawn(2, 8, 3, 5, 6)
    stock = module(x)
    assert NORMED in _rules(module)
    report = _injected(module)
    assert relative_error(module(x), stock) < 1e-6
    assert report.calls()[""]["fused"] and not report.calls()[""]["stock"]


class _Convolution(nn.Module):
    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(channels, out_channels, 3, padding=(0, 1, 1))


class _Read(_Convolution):
    def forward(self, x: Tensor, causal: bool = True) -> Tensor:
        if causal:
            front = x[:, :, :1].repeat(1, 1, 2, 1, 1)
            y = torch.cat([front, x], dim=2)
        else:
            front = x[:, :, :1].repeat(1, 1, 1, 1, 1)
            y = torch.cat([front, x, x[:, :, -1:].repeat(1, 1, 1, 1, 1)], dim=2)
        return self.conv(y) + front.mean()


class _Unlike(_Convolution):
    def forward(self, x: Tensor, causal: bool = True) -> Tensor:
        y = 2 * x
        if causal:
            z = torch.cat([x[:, :, :1].repeat(1, 1, 2, 1, 1), x], dim=2)
        else:
            z = torch.cat([y[:, :, :1].repeat(1, 1, 2, 1, 1), y], dim=2)
        return self.conv(z)


class _Twice(_Convolution):
    def forward(self, x: Tensor, causal: bool = True) -> Tensor:
        x = torch.cat([x[:, :, :1].repeat(1, 1, 1, 1, 1), x], dim=2)
        x = torch.cat([x[:, :, :1].repeat(1, 1, 1, 1, 1), x], dim=2)
        return self.conv(x)


class _Taken(_Convolution):
    def forward(self, x: Tensor, causal: bool = True) -> Tensor:
        frames_in_front = 3.0
        if causal:
            x = torch.cat([x[:, :, :1].repeat(1, 1, 2, 1, 1), x], dim=2)
        else:
            x = torch.cat([x[:, :, :1].repeat(1, 1, 1, 1, 1), x, x[:, :, -1:].repeat(1, 1, 1, 1, 1)], dim=2)
        return self.conv(x) * frames_in_front


class _Beside(_Convolution):
    def forward(self, x: Tensor, causal: bool = True) -> Tensor:
        if causal:
            x = torch.cat([x[:, :, :1].repeat(1, 1, 2, 1, 1), x], dim=2)
        else:
            front = x[:, :, :1].repeat(1, 1, 1, 1, 1)
            front += 1
            x = torch.cat([front, x, x[:, :, -1:].repeat(1, 1, 1, 1, 1)], dim=2)
        return self.conv(x)


@pytest.mark.parametrize("kind", [_Read, _Unlike, _Twice, _Taken, _Beside])
def test_a_padding_that_is_not_like_the_other_branch_is_called_as_it_is(kind: type[nn.Module]) -> None:
    module, x = _Normed(kind), _drawn(2, 8, 3, 5, 6)
    stock = [module(x, causal=causal) for causal in (True, False)]
    assert NORMED not in _rules(module)
    _injected(module)
    for causal, expected in zip((True, False), stock, strict=True):
        assert relative_error(module(x, causal=causal), expected) < 1e-6


@pytest.mark.parametrize("held", ["parameter", "buffer", "module"])
def test_a_convolution_that_holds_more_is_called_as_it_is(held: str) -> None:
    module = _Normed()
    assert NORMED in _rules(module)
    if held == "module":
        module.conv.more = nn.Identity()
    elif held == "buffer":
        module.conv.register_buffer("more", torch.zeros(1))
    else:
        module.conv.more = nn.Parameter(torch.zeros(1))
    assert NORMED not in _rules(module)
