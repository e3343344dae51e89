"""Attention divides by a factor that is mostly 1: then what it made is the result, without a pass over memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn

from diffkern.rewrite.identity import DividedSite, _undivided
from diffkern.rewrite.rewriter import Rewriter
from tests.rewrite.test_rooms import launches


def attention(**options: Any) -> Attention:
    torch.manual_seed(0)
    return Attention(32, heads=2, dim_head=16, **options).eval().requires_grad_(False)


def installed(module: nn.Module, numerics: str = "fast") -> list[DividedSite]:
    found = Rewriter(numerics).rewrite(module)
    if isinstance(found, str):
        return []
    module.forward = found.function.__get__(module)  # type: ignore[method-assign]
    return [site for site in found.sites if isinstance(site, DividedSite)]


def tokens() -> Tensor:
    return torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(1))


def divisions(module: nn.Module) -> int:
    return launches(module, {"hidden_states": tokens()}).count("aten::div")


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("options", [{}, {"residual_connection": True}], ids=["alone", "residual"])
def test_attention_does_not_divide_by_one(options: dict[str, Any], numerics: str) -> None:
    stock, module = attention(**options), attention(**options)
    (site,) = installed(module, numerics)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(module(tokens()), stock(tokens()))
    assert (divisions(stock), divisions(module)) == (1, 0)
    assert site.fused_calls == 3


def test_any_other_factor_is_one_to_divide_by_also_where_it_is_set_later() -> None:
    assert not installed(attention(rescale_output_factor=2.0))
    stock, module = attention(), attention()
    installed(module)
    stock.rescale_output_factor = module.rescale_output_factor = 2.0
    with torch.no_grad():
        assert torch.equal(module(tokens()), stock(tokens()))
    assert divisions(module) == 1


def test_what_a_hook_keeps_is_not_the_result() -> None:
    module, kept = attention(), list[Tensor]()
    installed(module)
    module.to_out[0].register_forward_hook(lambda _, args, y: kept.append(y))
    with torch.no_grad():
        y = module(tokens())
    assert torch.equal(kept[0], y) and kept[0].data_ptr() != y.data_ptr()


class ReturnsAnArgument(nn.Module):
    factor = 1.0

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        gated = x * gate + x
        return gated, x / self.factor  # type: ignore[return-value]


class WritesBehind(nn.Module):
    factor = 1.0

    def forward(self, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        whole = x * gate
        part = whole / self.factor
        whole.add_(1.0)
        return part, whole


@pytest.mark.parametrize("cls", [ReturnsAnArgument, WritesBehind])
def test_an_argument_or_what_is_written_into_is_divided(cls: type[nn.Module]) -> None:
    assert not installed(cls().eval())


class Kept(nn.Module):
    """What is divided leaves the function in another way as well."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []


class ReturnsBoth(Kept):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        whole = x * x
        return whole[:1], whole / self.factor


class KeepsIt(Kept):
    def forward(self, x: Tensor) -> Tensor:
        whole = x * x
        self.last = whole
        return whole / self.factor


class AppendsIt(Kept):
    def forward(self, x: Tensor) -> Tensor:
        whole = x * x
        self.kept.append(whole)
        return whole / self.factor


@pytest.mark.parametrize("cls", [ReturnsBoth, KeepsIt, AppendsIt])
def test_what_leaves_the_function_otherwise_is_divided(cls: type[nn.Module]) -> None:
    assert not installed(cls().eval())


class DividesTwice(Kept):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        whole = x * x
        return whole / self.factor, whole.transpose(0, 1) / self.factor


def test_results_of_two_divisions_do_not_share_memory() -> None:
    module = DividesTwice().eval()
    assert len(installed(module)) == 1
    with torch.no_grad():
        one, other = module(torch.ones(2, 3))
    one.add_(1.0)
    assert torch.equal(other, torch.ones(3, 2))


class DividesParts(Kept):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * x)[:, :2] / self.factor, (x + x).mean(0, keepdim=True).expand(4, -1) / self.factor


def test_a_quotient_has_the_strides_of_stock() -> None:
    module = DividesParts().eval()
    assert len(installed(module)) == 2
    with torch.no_grad():
        part, expanded = module(torch.ones(2, 3))
    assert part.is_contiguous() and expanded.is_contiguous()


def test_only_a_number_that_is_one_divides_nothing() -> None:
    x = torch.randn(3)
    turned = torch.randn(2, 3, 4).transpose(0, 2)
    assert _undivided(x, 1, 0) is x and _undivided(x, 1.0, 0) is x and _undivided(turned, 1.0, 0) is turned
    for dividend, n in (
        (x, 2.0),
        (x, True),
        (x, torch.ones(())),
        (torch.ones(3, dtype=torch.int64), 1),
        (x.clone().requires_grad_(), 1.0),
        (2.0, 1.0),
    ):
        assert _undivided(dividend, n, 0) is None
