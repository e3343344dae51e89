"""The causal convolutions of Wan and Qwen-Image without the copies and zeros of their padding, and upsampling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d, QwenImageUpsample
from diffusers.models.autoencoders.autoencoder_kl_qwenimage21 import QwenImage21Upsample
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, WanUpsample
from torch import Tensor

from diffkern import InjectionReport, KernelConfig, inject_optimized_kernels
from diffkern.verify.measures import relative_error
from scripts.check_models.convolutional import AUTOENCODERS

#: Kernel, stride and padding as the models have them.
GEOMETRIES = (
    (3, 1, 1),
    (1, 1, 0),
    ((3, 1, 1), 1, (1, 0, 0)),
    ((3, 1, 1), (2, 1, 1), (0, 0, 0)),
)


def _made(cls: type[Any], kernel: Any, stride: Any, padding: Any) -> Any:
    torch.manual_seed(0)
    return cls(6, 4, kernel, stride=stride, padding=padding).requires_grad_(False).eval()


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _injected(conv: Any, **options: Any) -> InjectionReport:
    return inject_optimized_kernels(conv, cuda_graph=False, **options)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("cls", [WanCausalConv3d, QwenImageCausalConv3d])
def test_results_and_their_layouts_are_those_of_stock_for_any_frames_and_caches(
    cls: type[Any], geometry: tuple[Any, ...], channels_last: bool
) -> None:
    conv, stock = _made(cls, *geometry), _made(cls, *geometry)
    report = _injected(conv)
    for frames, cached in ((3, None), (1, None), (2, None), (1, 2), (4, 2), (2, 1), (3, 3)):
        x, cache = _drawn(2, 6, frames, 7, 5), None if cached is None else _drawn(2, 6, cached, 7, 5)
        if geometry[2] == (0, 0, 0) and frames < 3:
            continue  # than the kernel has
        if channels_last:
            x = x.to(memory_format=torch.channels_last_3d)
        expected, reference = stock(x, cache), stock.double()(x.double(), None if cache is None else cache.double())
        stock.float()
        result = conv(x, cache)
        # A kernel of one place gives torch's result in either order there.
        assert result.stride() == expected.stride() or (channels_last and geometry[0] == (3, 1, 1))
        assert relative_error(result, reference) <= 1.05 * relative_error(expected, reference) + 1e-6
    assert not report.calls()[""]["stock"]


def test_a_frame_alone_is_convolved_as_an_image_and_nothing_is_padded_in_space() -> None:
    conv = _made(WanCausalConv3d, 3, 1, 1)
    _injected(conv)
    first, later = _drawn(1, 6, 1, 8, 8), _drawn(1, 6, 4, 8, 8)
    conv(first), conv(later, first)
    with torch.profiler.profile() as profile:
        conv(first)
        conv(later, _drawn(1, 6, 2, 8, 8))
    names = [event.name for event in profile.events()]
    assert names.count("aten::conv2d") == names.count("aten::conv3d") == 1
    assert "aten::pad" not in names and "aten::constant_pad_nd" not in names


def test_numerics_exact_leave_it_as_it_is() -> None:
    conv = _made(WanCausalConv3d, 3, 1, 1)
    x = _drawn(1, 6, 1, 8, 8)
    stock = conv(x)
    _injected(conv, numerics="exact")
    assert torch.equal(conv(x), stock)


def test_another_way_to_pad_that_someone_put_into_it_is_kept() -> None:
    conv, x = _made(WanCausalConv3d, 3, 1, 1), _drawn(1, 6, 1, 8, 8)
    report = _injected(conv)
    conv(x)

    def circular(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv3d(x.roll(1, -1), weight, bias)

    conv._conv_forward = circular
    assert torch.equal(conv(x), type(conv).forward(conv, x))
    assert report.calls()[""]["stock"] == 1


def test_gradients_are_those_of_stock() -> None:
    conv, stock = (_made(WanCausalConv3d, 3, 1, 1).requires_grad_() for _ in range(2))
    _injected(conv)
    x = _drawn(1, 6, 1, 8, 8)
    for module in (conv, stock):
        module(x).square().sum().backward()
    assert torch.equal(conv.weight.grad, stock.weight.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cls", [WanUpsample, QwenImageUpsample, QwenImage21Upsample])
def test_pixels_are_repeated_without_a_copy_in_float32_bit_for_bit(cls: type[Any], dtype: torch.dtype) -> None:
    layer, stock = (cls(scale_factor=(2.0, 2.0), mode="nearest-exact") for _ in range(2))
    x = _drawn(2, 6, 5, 7).to(dtype).to(memory_format=torch.channels_last)
    report = _injected(layer)
    assert torch.equal(layer(x), stock(x)) and layer(x).stride() == stock(x).stride()
    assert report.calls()[""] | {"fused": 0} == {"fused": 0, "stock": 0, "stock_reasons": {}, "stock_pieces": {}}
    with torch.profiler.profile() as profile:
        layer(x)
    assert not any("copy" in event.name for event in profile.events())
    smooth = cls(scale_factor=(2.0, 2.0), mode="bilinear")
    _injected(smooth)
    assert torch.equal(smooth(x), type(smooth).forward(smooth, x))


@pytest.mark.parametrize("name", ["wan", "qwenimage"])
def test_a_batch_of_images_is_laid_out_as_by_stock(name: str) -> None:
    model: Any = AUTOENCODERS[name].build()
    images = _drawn(2, 3, 1, 16, 16)
    with torch.no_grad():
        latents = model.encode(images).latent_dist.mode()
        stock = model.decode(latents).sample
        report = inject_optimized_kernels(model, config=KernelConfig(measure=False))
        for _ in range(2):
            assert model.encode(images).latent_dist.mode().stride() == latents.stride()
            assert model.decode(latents).sample.stride() == stock.stride()
    calls = report.calls()
    assert all(calls[f"{part}.mid_block.resnets.1.conv1"]["fused"] for part in ("encoder", "decoder"))


@pytest.mark.parametrize("name", ["wan", "qwenimage"])
def test_every_convolution_of_an_autoencoder_is_fused_in_a_decode(name: str) -> None:
    model: Any = AUTOENCODERS[name].build()
    latents = _drawn(1, 4, 1 if name == "qwenimage" else 3, 4, 4)
    with torch.no_grad():
        stock = model.decode(latents).sample
        report = inject_optimized_kernels(model, config={"*": "eager"})
        assert relative_error(model.decode(latents).sample, stock) < 1e-5
    sites = {site.path for site in report.patched if site.op == "causal_conv"}
    kinds = (WanCausalConv3d, QwenImageCausalConv3d)
    assert sites == {path for path, module in model.named_modules() if isinstance(module, kinds)}
    calls = report.calls()
    # An image is not upsampled in time.
    called = [path for path in sites if path.startswith("decoder") and (name == "wan" or "time_conv" not in path)]
    assert called and all(calls[path]["fused"] and not calls[path]["stock"] for path in called)
    report.restore()
    with torch.no_grad():
        assert torch.equal(model.decode(latents).sample, stock)
