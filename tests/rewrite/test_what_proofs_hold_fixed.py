"""What a proof of a site took for fixed: attributes of the module inside of the match, and the columns of tables."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl_ltx2 import PerChannelRMSNorm
from diffusers.models.autoencoders.autoencoder_kl_wan import WanRMS_norm
from torch import Tensor, nn

from diffkern import KernelConfig, inject_optimized_kernels

SIZE, HEADS = 64, 4


class Row(nn.Module):
    """A modulation by one row of many, which the module names."""

    def __init__(self, row: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE, elementwise_affine=False)
        self.chosen: Any = row

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return self.norm(x) * (1 + scale)[:, self.chosen] + shift


class Cast(Row):
    """A modulation that is cast to what the module names."""

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return (self.norm(x) * (1 + scale[:, 0]) + shift).to(self.chosen)


class CastAsLayer(Row):
    """A modulation that is cast to the dtype of a layer."""

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.mix = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return (self.norm(x) * (1 + scale[:, 0]) + shift).to(self.mix.weight.dtype)


class Gated(Row):
    """A gated unit whose activation the module names."""

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return F.gelu(x, approximate=self.chosen) * (x + shift)


def _operands() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 16, SIZE), torch.randn(2, 4, 1, SIZE), torch.randn(2, 1, SIZE)


def _injected(*blocks: nn.Module) -> tuple[nn.ModuleList, nn.ModuleList, Any]:
    stock = nn.ModuleList(blocks).eval()
    injected = copy.deepcopy(stock)
    return stock, injected, inject_optimized_kernels(injected, config=KernelConfig(measure=False))


def _assert_same(stock: nn.Module, injected: nn.Module, *operands: Tensor) -> None:
    with torch.no_grad():
        expected, found = stock(*operands), injected(*operands)
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [(Row, 0, 3), (Cast, torch.float32, torch.bfloat16), (Gated, "none", "tanh")],
    ids=["index", "dtype", "activation"],
)
def test_blocks_of_one_class_compute_with_what_each_of_them_names(kind: type[Row], first: Any, second: Any) -> None:
    stock, injected, report = _injected(kind(first), kind(second))
    for _ in range(4):  # the third call of a site runs a function that is written for it
        for one, other in zip(stock, injected, strict=True):
            _assert_same(one, other, *_operands())
    stock[0].chosen = injected[0].chosen = second
    for _ in range(4):
        _assert_same(stock[0], injected[0], *_operands())
    if kind is not Cast:  # whose dtype no guard asks for, so that it is left as it is written
        assert [report.calls()[block]["fused"] for block in "01"] == [4, 4]


def test_a_cast_to_the_dtype_of_a_layer_follows_the_layer() -> None:
    stock, injected, _ = _injected(CastAsLayer(0))
    for _ in range(3):
        _assert_same(stock[0], injected[0], *_operands())
    for block in (stock[0], injected[0]):
        block.mix.bfloat16()  # type: ignore[union-attr, operator]
    for _ in range(3):
        _assert_same(stock[0], injected[0], *_operands())


class GatedByLayer(Row):
    """A gated unit whose activation is a layer."""

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.act = nn.GELU()

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return self.act(x) * (x + shift)


class NormOfChannels(Row):
    """A norm over channels, as autoencoders of videos have it, and SiLU."""

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.norm = WanRMS_norm(16, images=False)

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return F.silu(self.norm((x + shift).view(2, 16, 4, 4, 4)))


class PerChannel(NormOfChannels):
    """The same without a weight, over a dimension that the norm names."""

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.norm = PerChannelRMSNorm()


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (GatedByLayer, "act.approximate", "tanh"),
        (Row, "norm.normalized_shape", (16, SIZE)),
        (Row, "norm.eps", 0.5),
        (NormOfChannels, "norm.scale", 9.0),
        (NormOfChannels, "norm.channel_first", False),
        (NormOfChannels, "norm.bias", 0.5),
        (PerChannel, "norm.channel_dim", 2),
        (PerChannel, "norm.eps", 0.5),
    ],
)
def test_what_a_layer_is_set_to_after_the_injection_takes_effect(kind: type[Row], name: str, value: Any) -> None:
    stock, injected, report = _injected(kind(0))
    operands = _operands()
    for _ in range(4):
        _assert_same(stock[0], injected[0], *operands)
    assert report.calls()["0"]["fused"] == 4
    layer, _, setting = name.partition(".")
    with torch.no_grad():
        before = stock[0](*operands)
    for block in (stock[0], injected[0]):
        setattr(block.get_submodule(layer), setting, value)
    with torch.no_grad():
        assert (stock[0](*operands) - before).abs().max() > 1e-4
    for _ in range(3):
        _assert_same(stock[0], injected[0], *operands)


@pytest.mark.parametrize(("setting", "value"), [("scale", 9.0), ("channel_first", False), ("bias", 0.5)])
def test_what_a_norm_by_itself_is_set_to_after_the_injection_takes_effect(setting: str, value: Any) -> None:
    stock, injected, report = _injected(WanRMS_norm(16, images=False))
    x = torch.randn(2, 16, 4, 4, 16)
    _assert_same(stock[0], injected[0], x)
    assert report.calls()["0"]["fused"] == 1
    for norm in (stock[0], injected[0]):
        setattr(norm, setting, value)
    _assert_same(stock[0], injected[0], x)


def test_a_norm_of_another_width_than_its_input_raises_as_in_stock() -> None:
    stock, injected, _ = _injected(Row(0))
    for _ in range(3):
        _assert_same(stock[0], injected[0], *_operands())
    injected[0].norm.normalized_shape = (32,)  # type: ignore[union-attr]
    with torch.no_grad(), pytest.raises(RuntimeError, match="normalized_shape"):
        injected[0](*_operands())


def _rotated_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def _first_columns(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = x[..., : cos.shape[-1]]
    return torch.cat((turned * cos + _rotated_half(turned) * sin, x[..., cos.shape[-1] :]), -1)


def _pairs_or_elements(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if cos.shape[-1] != x.shape[-1]:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    return x * cos + _rotated_half(x) * sin


class Attention(nn.Module):
    """Queries and keys of heads: their norms, over one head or all of them, and a rotation."""

    def __init__(self, across: bool) -> None:
        super().__init__()
        width = SIZE if across else SIZE // HEADS
        self.norm_q, self.norm_k = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)


class FirstColumns(Attention):
    """Turns as many elements of a head as the tables have columns."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = _first_columns(self.norm_q(q).unflatten(-1, (4, -1)), cos, sin)
        k = _first_columns(self.norm_k(k).unflatten(-1, (4, -1)), cos, sin)
        return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2))


class PairsOrElements(Attention):
    """Takes tables with a column for each pair as well as for each element."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = _pairs_or_elements(self.norm_q(q), cos, sin)
        k = _pairs_or_elements(self.norm_k(k), cos, sin)
        return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2))


@pytest.mark.parametrize("columns", [(8,), (16,), (8, 16), (16, 8)], ids=str)
@pytest.mark.parametrize("kind", [FirstColumns, PairsOrElements])
def test_a_rotation_is_proven_for_as_many_columns_as_tables_have(kind: Any, columns: tuple[int, ...]) -> None:
    across = kind is FirstColumns
    stock, injected, report = _injected(kind(across))
    for width in columns * 2:
        for _ in range(3):
            shape = (2, 16, SIZE) if across else (2, 16, HEADS, SIZE // HEADS)
            angles = torch.randn(16, 1, width // 2).repeat(1, 1, 2)
            _assert_same(stock[0], injected[0], torch.randn(shape), torch.randn(shape), angles.cos(), angles.sin())
    if not across:
        assert sum(counts["fused"] for counts in report.calls().values()) == 6 * len(columns)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_operands_without_a_dimension_run_as_they_are_written(dtype: torch.dtype) -> None:
    stock, injected, _ = _injected(Gated("none"))
    _assert_same(stock[0], injected[0], *[torch.tensor(1.5, dtype=dtype)] * 3)
