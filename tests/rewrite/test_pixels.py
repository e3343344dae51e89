"""Copies of images and videos whose results lie in channels last, where a model computes so."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_ltx2 import LTX2VideoDownsampler3d, LTX2VideoUpsampler3d
from torch import Tensor, nn

from diffkern import inject_optimized_kernels
from diffkern.blocks.layout import is_last
from diffkern.ops.group_norm import following_layout
from diffkern.rewrite import Rewriter, Rewritten
from diffkern.verify.measures import relative_error

SAMPLERS: dict[str, Callable[[], nn.Module]] = {
    "down, in space": lambda: LTX2VideoDownsampler3d(16, 32, (1, 2, 2)),
    "down, in time": lambda: LTX2VideoDownsampler3d(16, 32, (2, 1, 1)),
    "down": lambda: LTX2VideoDownsampler3d(16, 32, (2, 2, 2)),
    "up": lambda: LTX2VideoUpsampler3d(128, None, (2, 2, 2), residual=True, upscale_factor=2),
    "up, reflecting": lambda: LTX2VideoUpsampler3d(64, None, (1, 2, 2), residual=True, spatial_padding_mode="reflect"),
}
IN_ORDER = {"pixels", "pixels, residual", "repetition of channels", "concatenation with nothing"}


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def _drawn(*shape: int) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) + 0.5
    return x.contiguous(memory_format=torch.channels_last_3d)


def _rewritten(module: nn.Module, numerics: str = "fast") -> Rewritten:
    found = Rewriter(numerics).rewrite(module.requires_grad_(False))
    assert isinstance(found, Rewritten), found
    return found


def _fused(rewritten: Rewritten) -> dict[str, int]:
    """How often sites of each of these rules ran fused."""
    sites = [site for site in rewritten.sites if site.plan.rule.name in IN_ORDER]
    return {name: sum(s.fused_calls for s in sites if s.plan.rule.name == name) for name in IN_ORDER}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_gives_channels_last_where_a_model_computes_so(name: str) -> None:
    torch.manual_seed(0)
    module = SAMPLERS[name]().requires_grad_(False)
    x = _drawn(2, module.conv.in_channels, 3, 4, 6)
    stock = module(x)
    rewritten = _rewritten(module)
    made = rewritten.function(module, x)
    assert relative_error(made, stock) < 1e-6 and not sum(_fused(rewritten).values())
    assert made.stride() == stock.stride()
    with following_layout():
        made = rewritten.function(module, x)
    assert relative_error(made, stock) < 1e-6
    assert made.stride(1) == 1 < stock.stride(1)
    fused = _fused(rewritten)
    if name.startswith("up"):
        assert (fused["pixels"], fused["repetition of channels"]) == (2, 1)
    else:
        assert (fused["pixels"], fused["pixels, residual"]) == (1, 1)
        assert fused["concatenation with nothing"] == (name == "down, in space")


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_in_exact_numerics_a_sampler_has_the_bits_and_the_layout_of_stock(numerics: str) -> None:
    module = SAMPLERS["down, in space"]().requires_grad_(False)
    x = _drawn(2, 16, 3, 4, 6)
    stock = module(x)
    inject_optimized_kernels(module, numerics=numerics)
    with following_layout():
        made = module(x)
    assert (torch.equal(made, stock) and made.stride() == stock.stride()) == (numerics == "exact")


class _Copies(nn.Module):
    """One convolution, so that there is something to fuse."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(16, 16, 1)


class _Split(_Copies):
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        y = self.conv(x) + x
        y = y.unflatten(4, (-1, 2)).permute(0, 1, 5, 2, 3, 4).flatten(1, 2)
        return y + residual


class _Viewed(_Copies):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x) + x
        y = y.unflatten(4, (-1, 2)).permute(0, 1, 5, 2, 3, 4).flatten(1, 2)
        return y.view(y.shape[0], -1)


class _Joined(_Copies):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x) + x
        y = torch.cat([y[:, :, :0], y], dim=2)
        return 2 * y


class _Returned(_Copies):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x) + x
        y = torch.cat([y[:, :, :0], y], dim=2)
        y += 1
        return y


class _Other(_Copies):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x) + x
        y = torch.cat([x[:, :, :0], y], dim=2)
        return 2 * y


class _Within(_Copies):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x) + x
        y = torch.cat([y[:, :, 1:2], y], dim=2)
        return 2 * y


class _Alone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).unflatten(4, (-1, 2)).permute(0, 1, 5, 2, 3, 4).flatten(1, 2)  # type: ignore[no-any-return]


def _names(module: nn.Module) -> set[str]:
    return {site.plan.rule.name for site in _rewritten(module).sites}


def test_what_needs_its_order_in_memory_or_memory_of_its_own_is_copied_as_it_is_written() -> None:
    assert "pixels, residual" in _names(_Split()) and "concatenation with nothing" in _names(_Joined())
    for kind in (_Viewed, _Returned, _Other, _Within):
        assert not _names(kind()) & IN_ORDER, kind
    assert isinstance(Rewriter().rewrite(_Alone()), str), "a copy alone is no reason to rewrite a forward"


@pytest.mark.parametrize("shape", [(1, 32, 3, 4, 3), (1, 32, 1, 1, 1), (1, 32, 3, 4, 3, "double")])
def test_a_residual_of_another_shape_or_dtype_is_added_as_it_is_written(shape: tuple[int, ...]) -> None:
    module, x = _Split(), _drawn(1, 16, 3, 4, 6)
    residual = _drawn(*shape[:5])
    residual = residual.double() if shape[5:] else residual
    rewritten = _rewritten(module)
    stock = module(x, residual)
    with following_layout():
        made = rewritten.function(module, x, residual)
    assert made.dtype is stock.dtype and relative_error(made, stock) < 1e-6
    assert _fused(rewritten)["pixels, residual"] == (shape == (1, 32, 3, 4, 3))


def test_an_image_of_few_channels_is_row_major_as_the_user_gave_or_wants_it() -> None:
    class Few(_Copies):
        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x) + x
            return y.unflatten(1, (-1, 2)).permute(0, 1, 3, 4, 5, 2).flatten(4, 5)

    module, x = Few(), _drawn(1, 16, 3, 4, 6)
    rewritten = _rewritten(module)
    with following_layout():
        made = rewritten.function(module, x)
    assert made.is_contiguous() and not _fused(rewritten)["pixels"]


def test_pixels_that_stay_where_they_are_are_a_view() -> None:
    class Within(_Copies):
        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x) + x
            return x.unflatten(4, (-1, 1)).permute(0, 1, 5, 2, 3, 4).flatten(1, 2) + y

    module, x = Within(), _drawn(1, 16, 3, 4, 6)
    rewritten = _rewritten(module)
    stock = module(x)
    with following_layout():
        made = rewritten.function(module, x)
    assert torch.allclose(made, stock) and is_last(made)
    assert not _fused(rewritten)["pixels"] + _fused(rewritten)["pixels, residual"]


def test_what_is_cut_into_patches_alone_has_no_order_to_keep() -> None:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj, self.norm = nn.Conv3d(16, 16, (1, 2, 2), stride=(1, 2, 2)), nn.LayerNorm(6)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            x = self.norm(x) * (1 + scale)
            x = self.proj(x)
            return x.unflatten(1, (-1, 2)).permute(0, 1, 3, 4, 5, 2).flatten(4, 5)

    assert _names(Patches()) and not _names(Patches()) & IN_ORDER


def test_samples_that_become_frames_are_no_pixels() -> None:
    class Folded(_Copies):
        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x) + x
            return y.permute(0, 2, 1, 3, 4).flatten(0, 1)

    assert _names(Folded()) and not _names(Folded()) & IN_ORDER


def test_gradients_go_through_what_is_written() -> None:
    module, x = SAMPLERS["down"](), _drawn(1, 16, 3, 4, 6)
    rewritten = _rewritten(module)
    with following_layout(), torch.enable_grad():
        given = x.clone().requires_grad_()
        rewritten.function(module, given).square().sum().backward()
        again = x.clone().requires_grad_()
        module(again).square().sum().backward()
    assert given.grad is not None and relative_error(given.grad, again.grad) < 1e-5


def test_a_hook_that_may_write_sees_a_copy() -> None:
    module, x = _Joined().requires_grad_(False), _drawn(1, 16, 3, 4, 6)
    rewritten = _rewritten(module)
    with following_layout():
        rewritten.function(module, x)
        assert _fused(rewritten)["concatenation with nothing"] == 1
        module.conv.register_forward_hook(lambda module, args, output: None)
        rewritten.function(module, x)
    assert _fused(rewritten)["concatenation with nothing"] == 1


def test_channels_are_repeated_in_channels_last_alone() -> None:
    class Repeated(_Copies):
        def forward(self, x: Tensor, n: int) -> Tensor:
            y = self.conv(x) + x
            return x.repeat(1, n, 1, 1, 1) + y.mean()

    module, x = Repeated(), _drawn(2, 16, 3, 4, 6)
    rewritten = _rewritten(module)
    for given, n, count in ((x, 2, 1), (x, 1, 2), (x, 0, 2), (x.contiguous(), 2, 2)):
        stock = module(given, n)
        with following_layout():
            made = rewritten.function(module, given, n)
        assert torch.allclose(made, stock, rtol=1e-6, atol=1e-6)
        assert is_last(made) == (given is x and n > 0)
        assert _fused(rewritten)["repetition of channels"] == count
