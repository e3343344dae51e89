"""Tokens that become an image again: in a model that computes in channels last they lie as it wants them, uncopied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor, nn

from diffkern.ops.group_norm import following_layout
from diffkern.rewrite.identity import ImageSite, _in_channels_last
from diffkern.rewrite.rewriter import Rewriter, Rewritten

LAST = torch.channels_last
#: In the order of their application: linear, then an image; or an image, then a convolution.
PROJECTIONS = [True, False]


def transformer(linear: bool) -> Transformer2DModel:
    torch.manual_seed(0)
    module = Transformer2DModel(
        2, 8, in_channels=16, num_layers=1, norm_num_groups=4, cross_attention_dim=8, use_linear_projection=linear
    )
    return module.eval().requires_grad_(False)


def installed(module: nn.Module, numerics: str = "fast") -> ImageSite:
    found = Rewriter(numerics).rewrite(module)
    assert isinstance(found, Rewritten)
    module.forward = found.function.__get__(module)  # type: ignore[method-assign]
    (site,) = [site for site in found.sites if isinstance(site, ImageSite)]
    return site


def image() -> Tensor:
    return torch.randn(2, 16, 3, 5, generator=torch.Generator().manual_seed(1))


def run(module: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return module(x, encoder_hidden_states=torch.ones(2, 4, 8), return_dict=False)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("linear", PROJECTIONS)
def test_in_channels_last_a_transformer_of_an_image_gives_it_back_so(linear: bool) -> None:
    stock, module = transformer(linear), transformer(linear)
    site = installed(module)
    module.to(memory_format=LAST)
    expected = run(stock, image())
    with following_layout():
        for _ in range(2):
            y = run(module, image().to(memory_format=LAST))
            torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
            assert y.is_contiguous(memory_format=LAST) and not y.is_contiguous()
    assert site.fused_calls == 2


@pytest.mark.parametrize("linear", PROJECTIONS)
def test_elsewhere_it_is_row_major_as_in_stock(linear: bool) -> None:
    stock, module, exact = (transformer(linear) for _ in range(3))
    site = installed(module)
    installed(exact, "exact")
    expected = run(stock, image())
    assert run(module, image()).stride() == expected.stride()
    assert (site.fused_calls, site.original_calls) == (0, 1)
    assert torch.equal(run(exact, image()), expected)
    with following_layout():
        assert (
            run(exact, image().to(memory_format=LAST)).stride() == run(stock, image().to(memory_format=LAST)).stride()
        )


def test_what_a_hook_may_write_into_has_memory_of_its_own() -> None:
    module, inside = transformer(False), list[Tensor]()
    installed(module)
    module.transformer_blocks[0].register_forward_hook(lambda _, args, y: inside.append(y))
    module.proj_out.register_forward_pre_hook(lambda _, args: args[0].zero_())
    with following_layout():
        y = run(module, image().to(memory_format=LAST))
    torch.testing.assert_close(y, image() + module.proj_out.bias.view(1, -1, 1, 1), rtol=1e-6, atol=1e-6)
    assert inside[0].abs().max() > 0.1, "the tokens of the block are not those that the hook has written into"


def test_only_an_image_in_channels_last_is_its_own_copy() -> None:
    x = torch.randn(2, 3, 5, 4).permute(0, 3, 1, 2)
    assert _in_channels_last(x, 1) is None, "outside of a model that computes so"
    with following_layout():
        assert _in_channels_last(x, 1) is x
        for other in (
            x.contiguous(),
            torch.randn(2, 3, 5, 8)[..., ::2].permute(0, 3, 1, 2),
            torch.randn(2, 5, 3, 4).permute(0, 3, 2, 1),
            nn.Parameter(x),
            x.clone().requires_grad_(),
            None,
        ):
            assert _in_channels_last(other, 1) is None
