"""The fused autoencoder of LTX-Video: as accurate as the stock one, in all its variants, and never in anybody's way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLLTXVideo
from diffusers.hooks import HookRegistry, ModelHook, apply_layerwise_casting
from diffusers.models.autoencoders.autoencoder_kl_ltx import (
    LTXVideoCausalConv3d,
    LTXVideoResnetBlock3d,
    LTXVideoUpsampler3d,
)
from torch import Tensor, nn

from diffkern import InjectionReport, inject_optimized_kernels, restore
from diffkern.blocks import ltx_vae
from tests.ops.reference import relative_error

_SIZES: dict[str, Any] = {
    "latent_channels": 8,
    "block_out_channels": (8, 16, 16, 16),
    "decoder_block_out_channels": (8, 16, 16, 16),
    "layers_per_block": (1, 1, 1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1, 1, 1),
}
_EQUAL = {"decoder_block_out_channels": (8, 8, 8, 8)}

#: Every way in which the released autoencoders differ.
VARIANTS: dict[str, dict[str, Any]] = {
    "0.9.0": {},
    "causal the other way round": {"decoder_causal": True, "encoder_causal": False},
    "conditioned on the timestep": {**_EQUAL, "timestep_conditioning": True},
    "with noise": {**_EQUAL, "decoder_inject_noise": (True, False, True, True, True)},
    "0.9.5": {
        "block_out_channels": (8, 16, 32, 32, 32),
        "down_block_types": ("LTXVideo095DownBlock3D",) * 4,
        "spatio_temporal_scaling": (True,) * 4,
        "downsample_type": ("spatial", "temporal", "spatiotemporal", "spatiotemporal"),
        "decoder_block_out_channels": (8, 16, 32),
        "decoder_spatio_temporal_scaling": (True,) * 3,
        "decoder_layers_per_block": (1, 1, 1, 1),
        "decoder_inject_noise": (True, False, False, True),
        "upsample_residual": (True,) * 3,
        "upsample_factor": (2, 2, 2),
        "timestep_conditioning": True,
    },
}


def autoencoder(variant: str = "0.9.0", dtype: torch.dtype = torch.float32) -> AutoencoderKLLTXVideo:
    torch.manual_seed(0)
    model = AutoencoderKLLTXVideo(**{**_SIZES, **VARIANTS[variant]}).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "per_channel_scale" in name:  # zero at first, and then nothing would show
            parameter.normal_(std=0.3)
        if "scale_shift_table" in name:
            parameter.mul_(0.5)
    for module in model.modules():
        module.to(dtype)
    return model


def latents(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (2, 8, 2, 3, 4)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def decode(model: Any, z: Tensor) -> Tensor:
    """Decodes with the noise of one seed."""
    torch.manual_seed(3)
    temb = None
    if model.config.timestep_conditioning:
        temb = torch.linspace(0.05, 0.1, z.shape[0]).to(z)
    return model.decode(z, temb, return_dict=False)[0]


def reasons(report: InjectionReport) -> set[str]:
    return {reason for count in report.calls().values() for reason in count["stock_reasons"]}


def pieces(report: InjectionReport) -> set[str]:
    return {piece for count in report.calls().values() for piece in count["stock_pieces"]}


def fused(report: InjectionReport) -> int:
    """How many calls of the autoencoder's own blocks ran fused."""
    own = {site.path for site in report.patched if (site.op or "").startswith("ltx_vae")}
    return sum(count["fused"] for path, count in report.calls().items() if path in own)


@pytest.fixture(params=["as on the CPU", "as on a GPU"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both orders of the memory and both ways with a bias, of which a device takes one."""
    if request.param == "as on a GPU":

        def convolve(causal: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
            stock = causal.conv
            assert x.is_contiguous(memory_format=torch.channels_last_3d)
            y = F.conv3d(x, weight, None, stock.stride, stock.padding)
            return y.contiguous(memory_format=torch.channels_last_3d), bias

        monkeypatch.setattr(ltx_vae, "best_memory_format", lambda x: torch.channels_last_3d)
        monkeypatch.setattr(ltx_vae, "convolve", convolve)
    chosen: str = request.param
    return chosen


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_gives_what_the_stock_autoencoder_gives(variant: str, way: str) -> None:
    model, z = autoencoder(variant), latents()
    video = torch.randn(1, 3, 9, 64, 64, generator=torch.Generator().manual_seed(2))
    wide = copy.deepcopy(model).double()
    stock, moments = decode(model, z), model.encode(video).latent_dist.mean
    report = inject_optimized_kernels(model)
    assert not report.failed and {s.how for s in report.patched if (s.op or "").startswith("ltx_vae")} == {"recipe"}
    result = decode(model, z)
    assert result.stride() == stock.stride()
    torch.testing.assert_close(result, stock, rtol=1e-4, atol=1e-5)
    error = relative_error(model.encode(video).latent_dist.mean, wide.encode(video.double()).latent_dist.mean)
    assert error <= 1.5 * relative_error(moments, wide.encode(video.double()).latent_dist.mean) + 1e-6
    assert not reasons(report) and not pieces(report) and fused(report) > 15
    assert report.restore() == len(report.patched)
    assert torch.equal(decode(model, z), stock)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_blocks_in_half_precision_are_as_close_to_float64(variant: str, dtype: torch.dtype) -> None:
    model = autoencoder(variant, dtype)
    report = inject_optimized_kernels(model)
    decode(model, latents(dtype))
    own = [site for site in report.patched if (site.op or "").startswith("ltx_vae") and site.measurements]
    assert own and not report.failed and not reasons(report)
    for site in own:
        for proof in site.measurements:
            assert proof.passed and proof.fused <= 1.05 * proof.stock + 1e-6


def test_a_whole_decode_in_half_precision_is_as_close_to_float64() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model, z = autoencoder(dtype=dtype), latents(dtype)
        truth = decode(copy.deepcopy(model).double(), z.double())
        stock = relative_error(decode(model, z), truth)
        inject_optimized_kernels(model)
        assert relative_error(decode(model, z), truth) <= 1.05 * stock


# --- what sits on the children -----------------------------------------------------------------------------


class FlipDiffusers(ModelHook):
    def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
        return output.flip(-1)


class FlipAccelerate(accelerate.hooks.ModelHook):
    def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
        return output.flip(-1)


WATCHERS: dict[str, Callable[[nn.Module], object]] = {
    "torch": lambda module: module.register_forward_hook(lambda module, args, output: output.flip(-1)),
    "accelerate": lambda module: accelerate.hooks.add_hook_to_module(module, FlipAccelerate()),
    "diffusers": lambda module: HookRegistry.check_if_exists_or_initialize(module).register_hook(
        FlipDiffusers(), "flip"
    ),
}

#: Child -> the piece that then runs stock; "" if no piece does, None if the whole block does.
CHILDREN = {
    "conv1": "conv1",
    "conv2.conv": "conv2",
    "conv_shortcut": "conv_shortcut",
    "norm3": "",
    "norm1": None,
    "norm2": None,
    "nonlinearity": None,
    "dropout": None,
}


def resnet_block(**options: Any) -> LTXVideoResnetBlock3d:
    torch.manual_seed(0)
    return LTXVideoResnetBlock3d(8, 16, **options).eval().requires_grad_(False)


@pytest.mark.parametrize("watcher", WATCHERS)
@pytest.mark.parametrize("child", CHILDREN)
@pytest.mark.parametrize("inject_first", [True, False])
def test_whoever_watches_a_child_is_heard(watcher: str, child: str, inject_first: bool) -> None:
    watched, layer, x = resnet_block(), resnet_block(), latents()
    unwatched = layer(x)
    WATCHERS[watcher](watched.get_submodule(child))
    stock = watched(x)
    assert not torch.allclose(stock, unwatched, rtol=1e-3, atol=1e-3), "the effect would not show"
    report = inject_optimized_kernels(layer) if inject_first else None
    WATCHERS[watcher](layer.get_submodule(child))
    report = report or inject_optimized_kernels(layer)
    torch.testing.assert_close(layer(x), stock, rtol=1e-4, atol=1e-5)
    count, piece = report.calls()[""], CHILDREN[child]
    if piece is None:
        assert count["stock"] == 1 and "has a hook" in next(iter(count["stock_reasons"]))
    else:
        assert count["fused"] == 1 and set(count["stock_pieces"]) == ({piece} - {""})


@pytest.mark.parametrize("child", ["", "conv", "conv.conv"])
def test_hooks_on_the_upsampler_and_its_convolution_are_heard(child: str) -> None:
    torch.manual_seed(0)
    layer = LTXVideoUpsampler3d(8, (2, 2, 2)).eval().requires_grad_(False)
    layer.get_submodule(child).register_forward_hook(lambda module, args, output: output.flip(-1))
    stock = layer(latents())
    report = inject_optimized_kernels(layer)
    torch.testing.assert_close(layer(latents()), stock, rtol=1e-4, atol=1e-5)
    assert report.calls()[""]["fused"] == (child == "")


@pytest.mark.parametrize("method", ["sequential offloading", "layerwise casting"])
def test_weights_that_come_from_elsewhere_are_called_and_not_read(method: str) -> None:
    """Offloaded layer by layer to disk or memory, or stored in fp8 and cast at every call."""
    stock_model, model, z = autoencoder(), autoencoder(), latents()
    report = inject_optimized_kernels(model)
    for each in (stock_model, model):
        if method == "sequential offloading":
            accelerate.cpu_offload(each.decoder, execution_device="cpu")
        else:
            apply_layerwise_casting(each.decoder, torch.float8_e4m3fn, torch.float32)
    torch.testing.assert_close(decode(model, z), decode(stock_model, z), rtol=1e-4, atol=1e-5)
    assert {"conv1", "conv2"} <= pieces(report)


# --- how the autoencoder is called -------------------------------------------------------------------------


@pytest.mark.parametrize("way_of_decoding", ["slices", "tiles", "frames", "tiles of frames"])
def test_slicing_tiling_and_framewise_decoding(way_of_decoding: str) -> None:
    model, z = autoencoder(), latents(shape=(2 if way_of_decoding == "slices" else 1, 8, 3, 2, 2))
    if way_of_decoding == "slices":
        model.enable_slicing()
    if "tiles" in way_of_decoding:
        model.enable_tiling(32, 32, tile_sample_stride_height=32, tile_sample_stride_width=32)
    if "frames" in way_of_decoding:
        model.use_framewise_decoding = True
    stock = decode(model, z)
    report = inject_optimized_kernels(model.decoder)
    torch.testing.assert_close(decode(model, z), stock, rtol=1e-4, atol=1e-5)
    assert not reasons(report) and fused(report) > 8


@pytest.mark.parametrize("checkpointing", [True, False])
def test_training_runs_stock_and_says_so(checkpointing: bool) -> None:
    gradients = []
    for inject in (False, True):
        model = autoencoder().requires_grad_(True).train()
        if checkpointing:
            model.enable_gradient_checkpointing()
        if inject:
            report = inject_optimized_kernels(model)
        decode(model, latents(shape=(1, 8, 2, 2, 2))).square().mean().backward()
        gradients.append({name: p.grad for name, p in model.decoder.named_parameters()})
    assert "gradients are wanted" in next(iter(reasons(report))) and not fused(report)
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        decode(model.eval(), latents())
    assert fused(report) > 8


def test_dropout_in_force_and_autocast_run_stock() -> None:
    layer = resnet_block(dropout=0.5).train()
    report = inject_optimized_kernels(layer)
    layer(latents())
    assert reasons(report) == {"its dropout is in force, or it has a hook"}
    layer.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(latents())
    assert any("autocast" in reason for reason in reasons(report))


def test_the_errors_are_those_of_the_stock_block() -> None:
    layer, x = resnet_block(), latents(shape=(2, 4, 2, 3, 4))
    with pytest.raises(RuntimeError) as expected:
        layer(x)
    inject_optimized_kernels(layer)
    with pytest.raises(RuntimeError) as actual:
        layer(x)
    assert str(actual.value) == str(expected.value)
    with pytest.raises(TypeError, match="unexpected keyword argument 'speed'"):
        layer(latents(), speed=2)


def test_the_noise_is_drawn_from_the_generator_that_is_given() -> None:
    x = latents()
    torch.manual_seed(0)
    layer = LTXVideoResnetBlock3d(8, inject_noise=True).eval().requires_grad_(False)
    for scale in (layer.per_channel_scale1, layer.per_channel_scale2):
        scale.normal_()
    stock = layer(x, None, torch.Generator().manual_seed(1))
    before = torch.get_rng_state()
    inject_optimized_kernels(layer)
    torch.testing.assert_close(layer(x, generator=torch.Generator().manual_seed(1)), stock, rtol=1e-4, atol=1e-5)
    assert torch.equal(torch.get_rng_state(), before), "a proof drew from the global generator"
    assert layer.per_channel_scale1.abs().min() > 0, "a proof wrote into the block"


# --- which modules are sites, and which of them share a proof ----------------------------------------------


def convolutions(report: InjectionReport) -> set[str]:
    return {site.path for site in report.patched if site.op == "ltx_vae_conv"}


def test_convolutions_inside_of_fused_blocks_are_no_sites_of_their_own() -> None:
    model = autoencoder()
    report = inject_optimized_kernels(model, strict=True)
    inside = [path for path in convolutions(report) if "resnets" in path or "upsamplers" in path]
    assert not inside and {"encoder.conv_in", "decoder.conv_out", "encoder.down_blocks.0.downsamplers.0"} <= {
        path.removesuffix(".conv") for path in convolutions(report)
    }
    assert not inject_optimized_kernels(model).patched, "the second injection found something that the first left"
    assert report.restore() == len(report.patched)


@pytest.mark.parametrize("path", ["decoder.mid_block.resnets.0", "decoder.mid_block.resnets.0.conv1"])
def test_convolutions_are_sites_where_config_leaves_their_block_alone(path: str) -> None:
    model, z = autoencoder(), latents()
    stock = decode(model, z)
    report = inject_optimized_kernels(model, config={path: None})
    block = "decoder.mid_block.resnets.0"
    assert block not in {site.path for site in report.patched}
    others = {f"{block}.conv1", f"{block}.conv2"} - {path}
    assert {found for found in convolutions(report) if "resnets" in found} == others
    torch.testing.assert_close(decode(model, z), stock, rtol=1e-4, atol=1e-5)


def test_a_proof_is_shared_by_blocks_that_compute_the_same_and_by_no_others() -> None:
    fusion = ltx_vae.RESNET
    block, twin = resnet_block(), resnet_block()
    twin.register_forward_hook(lambda module, args, output: None)
    assert fusion.kind(block) == fusion.kind(twin)
    for different in (resnet_block(is_causal=False), resnet_block(eps=1e-3), resnet_block(inject_noise=True)):
        assert fusion.kind(block) != fusion.kind(different)
    strides = [ltx_vae.UPSAMPLER.kind(LTXVideoUpsampler3d(8, s)) for s in ((1, 2, 2), (2, 1, 2))]
    assert strides[0] != strides[1]


# --- what stays as it was ----------------------------------------------------------------------------------


def test_weights_and_their_order_in_memory_are_untouched(way: str) -> None:
    model = autoencoder("0.9.5")
    before = {name: (t.clone(), t.stride(), t.data_ptr(), t._version) for name, t in model.state_dict().items()}
    report = inject_optimized_kernels(model)
    decode(model, latents())
    assert fused(report) > 8
    for name, tensor in model.state_dict().items():
        value, *rest = before[name]
        assert torch.equal(tensor, value) and [tensor.stride(), tensor.data_ptr(), tensor._version] == rest, name


def test_weights_loaded_after_the_injection_are_used() -> None:
    model, z = autoencoder(), latents()
    inject_optimized_kernels(model)
    before = decode(model, z)
    with torch.no_grad():
        model.decoder.up_blocks[3].upsamplers[0].conv.conv.weight.mul_(2)
        model.decoder.conv_in.conv.weight.mul_(2)
    result = decode(model, z)
    restore(model)
    assert not torch.allclose(result, before, rtol=1e-2)
    torch.testing.assert_close(result, decode(model, z), rtol=1e-4, atol=1e-5)


def test_exact_numerics_leave_resnets_and_upsamplers_alone_with_a_reason() -> None:
    model, z = autoencoder(), latents()
    stock = decode(model, z)
    report = inject_optimized_kernels(model, numerics="exact")
    assert torch.equal(decode(model, z), stock)
    left = {site.class_name.rpartition(".")[2] for site in report.skipped if "other bits" in site.reason}
    assert left == {"LTXVideoResnetBlock3d", "LTXVideoUpsampler3d"}  # frames are copied with the same bits


def test_compiled_decoders_hold_no_break() -> None:
    torch.compiler.reset()
    model, z = autoencoder(), latents()
    report = inject_optimized_kernels(model)
    with torch.no_grad():
        eager = model.decoder(z)
        compiled = torch.compile(model.decoder, fullgraph=True, backend="aot_eager")(z)
    assert fused(report) > 8
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stride", [(1, 2, 2), (2, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize("residual", [True, False])
def test_upsamplers_of_every_stride(stride: tuple[int, int, int], residual: bool, way: str) -> None:
    torch.manual_seed(0)
    factor = 2 if residual else 1
    layer = LTXVideoUpsampler3d(16, stride, residual=residual, upscale_factor=factor).eval().requires_grad_(False)
    x = latents(shape=(2, 16, 3, 2, 5))
    stock = layer(x)
    report = inject_optimized_kernels(layer)
    result = layer(x)
    torch.testing.assert_close(result, stock, rtol=1e-4, atol=1e-5)
    assert report.calls()[""]["fused"] == 1


@pytest.mark.parametrize("options", [{"stride": 2}, {"dilation": 2}, {"groups": 2}, {"padding_mode": "replicate"}])
@pytest.mark.parametrize("is_causal", [True, False])
def test_convolutions_of_every_kind(options: dict[str, Any], is_causal: bool) -> None:
    torch.manual_seed(0)
    layer = LTXVideoCausalConv3d(8, 4, 3, is_causal=is_causal, **options).eval().requires_grad_(False)
    x = latents(shape=(2, 8, 5, 6, 7))
    stock = layer(x)
    report = inject_optimized_kernels(layer)
    torch.testing.assert_close(layer(x), stock, rtol=1e-4, atol=1e-5)
    assert report.calls()[""]["fused"] == ("padding_mode" not in options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_on_a_gpu(variant: str, dtype: torch.dtype) -> None:
    model = autoencoder(variant, dtype).cuda()
    z = latents(dtype).cuda()
    before = {name: (t.clone(), t.stride()) for name, t in model.state_dict().items()}
    stock = decode(model, z)
    report = inject_optimized_kernels(model)
    result = decode(model, z)
    assert not report.failed and not reasons(report) and not pieces(report)
    assert result.stride() == stock.stride()
    torch.testing.assert_close(result, stock, rtol=0.1, atol=0.1 if dtype != torch.float32 else 0.01)
    if not any(VARIANTS[variant].get("decoder_inject_noise", ())):  # float64 has noise of its own
        truth = decode(copy.deepcopy(model).double(), z.double())
        assert relative_error(result, truth) <= 1.05 * relative_error(stock, truth) + 1e-6
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name][0]) and tensor.stride() == before[name][1]
    restore(model)
    assert torch.equal(decode(model, z), stock)


def test_a_convolution_that_was_given_another_function_computes_that() -> None:
    """Users set ``_conv_forward`` of convolutions for images and videos that can be tiled."""
    model, z = autoencoder(), latents()
    inject_optimized_kernels(model)
    before = decode(model, z)
    for module in model.decoder.modules():
        if isinstance(module, nn.Conv3d):

            def forward(x: Tensor, weight: Tensor, bias: Tensor | None, conv: nn.Conv3d = module) -> Tensor:
                return nn.Conv3d._conv_forward(conv, x, weight, bias) * 0.5

            module._conv_forward = forward  # type: ignore[method-assign]
    found = decode(model, z)
    restore(model)
    torch.testing.assert_close(found, decode(model, z), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, before, rtol=1e-2, atol=1e-2)
