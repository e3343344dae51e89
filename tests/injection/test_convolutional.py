"""Convolutional models as a user injects them: tiles, slices, caches, hooks, compilation, restoring."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kandinsky6_sr import Kandinsky6SRResnetBlock3D
from diffusers.models.autoencoders.autoencoder_kl_mochi import MochiChunkedGroupNorm3D
from diffusers.models.autoencoders.autoencoder_oobleck import Snake1d
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.sana_transformer import GLUMBConv
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from diffkern import InjectionReport, inject_optimized_kernels
from diffkern.rewrite import Rewriter, calls
from diffkern.verify.measures import relative_error
from scripts.check_models.controlnets import CONTROLNETS, missing_for
from scripts.check_models.convolutional import AUTOENCODERS, ONE_SAMPLE, UNETS, shrink_tiles
from scripts.check_models.rewritten import batch_of_two, drawing, run

EVERYWHERE = {"*": "eager"}
MODELS = AUTOENCODERS | UNETS | CONTROLNETS


def _resnet(**options: Any) -> ResnetBlock2D:
    torch.manual_seed(0)
    return ResnetBlock2D(in_channels=16, temb_channels=8, groups=4, **options).requires_grad_(False).eval()


def _injected(model: nn.Module) -> InjectionReport:
    """Kernels by eager; a model in which there is nothing to fuse takes no such wish."""
    try:
        return inject_optimized_kernels(model, config=EVERYWHERE)
    except ValueError as error:
        assert "fits none of this model" in str(error)
        return inject_optimized_kernels(model)


def _twins(cls: type[nn.Module]) -> list[nn.Module]:
    """Two modules with the same weights."""
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(cls().requires_grad_(False).eval())
    return modules


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


#: Autoencoders of every kind of tiling. That of HunyuanImage takes an image for a video in stock, and that of VidTok
#: fails on samples as small as these.
TILED = (
    "kl", "wan", "kl_flux2", "dc", "kvae", "wan_22", "qwenimage", "qwenimage21", "hunyuan_video",
    "hunyuan_video15", "hunyuan_refiner", "cogvideox", "mochi", "magvit", "consistency", "ltx", "ltx2",
)  # fmt: skip


#: Where the tiles of small samples would have less in them than the kernels of their convolutions.
LARGER = {"qwenimage21": 2, "hunyuan_refiner": 4, "mochi": 8, "ltx2": 4}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name not in ("kl", "wan"))) for name in TILED]
)
def test_tiles_and_slices_of_an_injected_autoencoder_are_those_of_stock(name: str) -> None:
    tiny = AUTOENCODERS[name]
    model: Any = tiny.build()
    small = tiny.inputs(drawing(torch.float32), 8)["sample"]
    size = min(small.shape[-2:]) * LARGER.get(name, 1)
    sample = _drawn(1 if name in ONE_SAMPLE else 2, *small.shape[1:-2], size * 3 // 2, size)
    whole = run(model, {"sample": sample})
    model.enable_slicing()
    shrink_tiles(model, size)
    stock = run(model, {"sample": sample})
    assert not torch.equal(stock, whole)
    report = inject_optimized_kernels(model, config=EVERYWHERE)
    fused = run(model, {"sample": sample})
    counts = report.calls().values()
    assert sum(one["fused"] for one in counts) > len(counts)
    assert not sum(one["stock"] for one in counts)
    assert relative_error(fused, stock) < 1e-5
    report.restore()
    assert torch.equal(run(model, {"sample": sample}), stock)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name != "unet2d_condition")) for name in MODELS]
)
def test_restoring_leaves_weights_and_results_bit_for_bit_as_they_were(name: str) -> None:
    if missing := missing_for(name):
        pytest.skip(missing)
    tiny = MODELS[name]
    model = tiny.build()
    arguments = tiny.inputs(drawing(torch.float32), 8) if name in ONE_SAMPLE else batch_of_two(tiny, torch.float32)
    stock = run(model, arguments)
    before = {name: (value.clone(), value.stride(), value.data_ptr()) for name, value in model.state_dict().items()}
    report = _injected(model)
    assert relative_error(run(model, arguments), stock) < 1e-5
    report.restore()
    assert torch.equal(run(model, arguments), stock)
    for name, value in model.state_dict().items():
        kept, stride, address = before[name]
        assert torch.equal(value, kept) and (value.stride(), value.data_ptr()) == (stride, address)
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_an_injected_convolutional_model_are_those_of_stock(name: str) -> None:
    if name == "controlnet_zimage":
        pytest.skip("stock asks for an attribute that it has not, where gradients are wanted")
    if missing := missing_for(name):
        pytest.skip(missing)
    tiny = MODELS[name]
    models = [tiny.build().requires_grad_() for _ in range(2)]
    arguments = tiny.inputs(drawing(torch.float32), 8) if name in ONE_SAMPLE else batch_of_two(tiny, torch.float32)
    _injected(models[1])
    for model in models:
        torch.manual_seed(0)
        plain = {"return_dict": False} if "return_dict" in inspect.signature(model.forward).parameters else {}
        results = tree_leaves(model(**arguments, **plain))
        sums = [x.square().mean() for x in results if isinstance(x, Tensor) and x.requires_grad]
        if not sums:
            pytest.skip("stock has no gradients either")
        torch.stack(sums).sum().backward()
    largest = max(weight.grad.norm() for weight in models[0].parameters() if weight.grad is not None)
    for (path, stock), fused in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert (stock.grad is None) == (fused.grad is None), path
        if stock.grad is not None:  # where it is 0, as of a bias in front of a norm, rounding is left
            assert (fused.grad - stock.grad).norm() <= 1e-4 * stock.grad.norm() + 1e-5 * largest, path


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shift", ["default", "scale_shift"])
def test_a_resnet_block_is_as_close_to_float64_as_stock(shift: str, channels_last: bool) -> None:
    block = _resnet(time_embedding_norm=shift)
    exact = _resnet(time_embedding_norm=shift)
    for module in (block, exact):
        torch.manual_seed(2)
        for parameter in module.parameters():
            parameter.copy_(parameter + 0.3 * torch.randn_like(parameter))
    x, temb = _drawn(3, 16, 12, 10) + 2, _drawn(3, 8)
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    reference = exact.double()(x.double(), temb.double())
    stock = block(x, temb)
    report = inject_optimized_kernels(block, config=EVERYWHERE)
    fused = block(x, temb)
    (counts,) = report.calls().values()
    assert (counts["fused"], counts["stock"]) == (3, 0)
    assert relative_error(fused, reference) <= 1.05 * relative_error(stock, reference) + 1e-6


def test_a_resnet_adds_the_embedding_of_the_time_step_inside_of_its_second_norm() -> None:
    block = _resnet()
    x, temb = _drawn(2, 16, 8, 8), _drawn(2, 8)
    report = inject_optimized_kernels(block, config=EVERYWHERE)
    text = report.source("")
    assert "hidden_states + temb" not in text and "temb is not None" not in text
    before = block(x, temb)
    block.time_emb_proj.register_forward_hook(lambda module, args, output: output + 1.5 * torch.arange(16.0))
    after, stock = block(x, temb), type(block).forward(block, x, temb)
    assert relative_error(after, stock) < 1e-6 < relative_error(before, stock)
    (counts,) = report.calls().values()
    assert (counts["fused"], counts["stock"]) == (6, 0)


def test_an_activation_inside_of_the_call_of_a_convolution_is_fused_in_each_branch() -> None:
    block = Kandinsky6SRResnetBlock3D(16, 16).requires_grad_(False)
    x = _drawn(2, 16, 3, 6, 6) + 0.5
    stock = block(x, block.make_cache())
    report = inject_optimized_kernels(block, config=EVERYWHERE)
    assert relative_error(block(x, block.make_cache()), stock) < 1e-5
    counts = report.calls()[""]
    assert (counts["fused"], counts["stock"]) == (2, 0)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("temb_channels", [8, None])
def test_the_bias_of_a_convolution_is_added_with_what_follows_where_torch_adds_it_in_a_pass_of_its_own(
    temb_channels: int | None, channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "bias_is_apart", lambda x: True)  # as on a GPU
    block, exact = [
        ResnetBlock2D(
            in_channels=16,
            out_channels=8,
            temb_channels=temb_channels,
            groups=4,
            time_embedding_norm="default" if temb_channels else "group",
        )
        for _ in range(2)
    ]
    block.requires_grad_(False)
    exact.requires_grad_(False)
    block.conv1.bias.copy_(torch.arange(8.0))
    block.conv2.bias.copy_(-torch.arange(8.0))
    exact.load_state_dict(block.state_dict())
    x, temb = _drawn(3, 16, 12, 10), _drawn(3, 8) if temb_channels else None
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
        block.to(memory_format=torch.channels_last)
    reference = exact.double()(x.double(), None if temb is None else temb.double())
    stock = block(x, temb)
    report = inject_optimized_kernels(block, config=EVERYWHERE)
    biases: list[Tensor | None] = []
    own = nn.Conv2d._conv_forward
    for conv in (block.conv1, block.conv2, block.conv_shortcut):
        conv._conv_forward = lambda x, weight, bias, conv=conv: (biases.append(bias), own(conv, x, weight, bias))[1]
    block(x, temb)
    biases.clear()  # those of the proofs
    fused = block(x, temb)
    # A residual in contiguous order is added by torch.
    assert sorted(bias is None for bias in biases) == [False, channels_last, True]
    assert fused.stride() == stock.stride()
    assert relative_error(fused, reference) <= 1.05 * relative_error(stock, reference) + 1e-6
    (counts,) = report.calls().values()
    assert (counts["fused"], counts["stock"]) == (6, 0)


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_bias_of_a_convolution_is_added_with_the_silu_behind_it(
    channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the feed-forwards of Sana, whose images come from tokens, in channels last."""
    monkeypatch.setattr(calls, "bias_is_apart", lambda x: True)  # as on a GPU
    torch.manual_seed(0)
    block = GLUMBConv(8, 8, 2.5, None, False).requires_grad_(False).eval()
    x = _drawn(2, 6, 10, 8).permute(0, 3, 1, 2)
    x = x if channels_last else x.contiguous()
    stock = block(x)
    exact = copy.deepcopy(block).double()(x.double())
    report = inject_optimized_kernels(block, config=EVERYWHERE)
    block(x)
    biases: list[Tensor | None] = []
    own, conv = nn.Conv2d._conv_forward, block.conv_inverted
    conv._conv_forward = lambda x, weight, bias: (biases.append(bias), own(conv, x, weight, bias))[1]
    fused = block(x)
    assert [bias is None for bias in biases] == [channels_last], "elsewhere torch takes no longer"
    assert fused.stride() == stock.stride()
    assert relative_error(fused, exact) <= 1.05 * relative_error(stock, exact) + 1e-6
    (counts,) = report.calls().values()
    assert (counts["fused"], counts["stock"]) == (4, 0)
    conv.register_forward_hook(lambda module, args, output: 3 * output)
    torch.testing.assert_close(block(x), GLUMBConv.forward(block, x), rtol=1e-5, atol=1e-5)
    assert relative_error(block(x), stock) > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_the_bias_of_a_convolution_is_added_with_the_gated_unit_of_its_halves(
    channels_last: bool, numerics: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "bias_is_apart", lambda x: True)  # as on a GPU
    own = nn.Conv2d._conv_forward

    def apart(conv: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = own(conv, x, weight, None)
        return y if bias is None else y + bias.view(-1, 1, 1)

    monkeypatch.setattr(nn.Conv2d, "_conv_forward", apart)
    torch.manual_seed(0)
    block = GLUMBConv(8, 8, 2.5, None, False).requires_grad_(False).eval()
    exact, block = copy.deepcopy(block).to(dtype).double(), block.to(dtype)
    x = _drawn(2, 6, 10, 8).permute(0, 3, 1, 2).to(dtype)
    x = x if channels_last else x.contiguous()
    stock = block(x)
    report = inject_optimized_kernels(block, numerics=numerics, config=EVERYWHERE)
    fused, reference = block(x), exact(x.double())
    assert "conv_depth" not in report.source("")
    assert fused.stride() == stock.stride()
    assert relative_error(fused, reference) <= 1.05 * relative_error(stock, reference) + 1e-6
    (counts,) = report.calls().values()
    assert counts["stock"] == 0 or numerics == "exact"
    assert numerics != "exact" or torch.equal(fused, stock)
    block.conv_depth.register_forward_hook(lambda module, args, output: 3 * output)
    assert relative_error(block(x), GLUMBConv.forward(block, x)) < 1e-2
    assert relative_error(block(x), stock) > 1e-1


def test_halves_of_which_one_is_read_again_and_halves_of_other_dimensions_are_no_gated_unit_of_a_convolution() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)

    class Again(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            a, b = torch.chunk(x, 2, dim=1)
            y = a * F.silu(b)
            return y + a

    class Rows(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            a, b = x.chunk(2, dim=2)
            return a * F.silu(b)

    class Swapped(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            a, b = x.chunk(2, 1)
            return F.silu(a) * b

    class Two(Block):
        def forward(self, x: Tensor) -> Tensor:
            other = 2 * x
            x = self.conv(x)
            a, _ = x.chunk(2, 1)
            other = self.conv(other)
            _, b = other.chunk(2, 1)
            return a * F.silu(b)

    x = _drawn(2, 4, 6, 6)
    for cls in (Again, Rows, Swapped, Two):
        block = cls().requires_grad_(False)
        expected = block(x)
        report = inject_optimized_kernels(block, config=EVERYWHERE)
        torch.testing.assert_close(block(x), expected, rtol=1e-5, atol=1e-6)
        assert "self.conv(" in report.source("")
        (counts,) = report.calls().values()
        assert (counts["fused"] > 0, counts["stock"]) == (True, 0)


def test_a_convolution_of_many_channels_is_proven_with_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proofs of large images are made on smaller ones, which have fewer pixels and not fewer channels."""
    monkeypatch.setattr(calls, "bias_is_apart", lambda x: True)
    torch.manual_seed(0)
    block = GLUMBConv(1100, 8, 0.01, None, False).requires_grad_(False).eval()
    x = _drawn(2, 48, 48, 1100).permute(0, 3, 1, 2)
    stock = block(x)
    report = inject_optimized_kernels(block, config=EVERYWHERE)
    torch.testing.assert_close(block(x), stock, rtol=1e-4, atol=1e-5)
    (counts,) = report.calls().values()
    assert (counts["fused"], counts["stock"]) == (2, 0)


def test_a_residual_block_is_not_divided_by_one_and_by_another_number_as_soon_as_there_is_one() -> None:
    blocks = [_resnet(), _resnet(output_scale_factor=2.0)]
    x, temb = _drawn(2, 16, 8, 8), _drawn(2, 8)
    stock = [block(x, temb) for block in blocks]
    reports = [inject_optimized_kernels(block, config=EVERYWHERE) for block in blocks]
    assert ["output_scale_factor" in report.source("") for report in reports] == [False, True]
    for block, expected in zip(blocks, stock, strict=True):
        assert relative_error(block(x, temb), expected) < 1e-6
    blocks[0].output_scale_factor = 2.0
    assert relative_error(blocks[0](x, temb), stock[1]) < 1e-6


def test_a_residual_of_fewer_dimensions_is_added_as_torch_does() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv3d(4, 4, 3, padding=1)

        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            return other + self.conv(x)

    block = Block().requires_grad_(False)
    x = _drawn(4, 4, 4, 6, 6)
    inject_optimized_kernels(block, config=EVERYWHERE)
    for other in (_drawn(4, 4, 4, 6, 6), _drawn(4, 4, 6, 6), _drawn(4, 4, 4, 1, 1), _drawn(6)):
        torch.testing.assert_close(block(x, other), Block.forward(block, x, other))
    torch.testing.assert_close(block(x[0], x[0]), Block.forward(block, x[0], x[0]))


@pytest.mark.parametrize("change", ["hook", "adapter"])
def test_a_convolution_that_someone_changed_is_called_as_a_module_between_fused_norms(change: str) -> None:
    class Wrapped(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base_layer = base

        def forward(self, x: Tensor) -> Tensor:
            return 3 * self.base_layer(x)

    blocks = [_resnet(), _resnet()]
    x, temb = _drawn(2, 16, 8, 8), _drawn(2, 8)
    report = inject_optimized_kernels(blocks[1], config=EVERYWHERE)
    order: list[str] = []
    for block in blocks:
        block.time_emb_proj.register_forward_hook(lambda module, args, output: order.append("embedding"))
        before, conv = block(x, temb), block.conv1
        if change == "hook":
            conv.register_forward_hook(lambda module, args, output: (order.append("convolution"), 3 * output)[1])
        else:
            block.conv1 = Wrapped(conv)
    order.clear()
    stock, fused = (block(x, temb) for block in blocks)
    torch.testing.assert_close(fused, stock, rtol=1e-5, atol=1e-5)
    assert relative_error(before, stock) > 1e-2
    assert order[: len(order) // 2] == order[len(order) // 2 :], "in the order of the source"
    (counts,) = report.calls().values()
    assert (counts["fused"], counts["stock"]) == (6, 0)
    blocks[1].conv1 = conv
    conv._forward_hooks.clear()
    torch.testing.assert_close(blocks[1](x, temb), before, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        blocks[1](x, temb)
    (counts,) = report.calls().values()
    assert (counts["fused"], counts["stock"]) == (9, 1)


def test_a_resnet_with_a_hook_on_a_convolution_is_one_graph_of_the_compiler() -> None:
    block = _resnet()
    x, temb = _drawn(2, 16, 8, 8), _drawn(2, 8)
    inject_optimized_kernels(block, config=EVERYWHERE)
    block.conv1.register_forward_hook(lambda module, args, output: 3 * output)
    stock = type(block).forward(block, x, temb)
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, temb), stock, rtol=1e-5, atol=1e-5)


class _InSequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU(), nn.Dropout(), nn.Conv2d(16, 16, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


@pytest.mark.parametrize("change", ["nothing", "hook", "layer", "more", "class"])
def test_a_norm_in_a_sequence_is_fused_as_long_as_the_sequence_is_what_it_was(change: str) -> None:
    class Doubled(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    blocks = _twins(_InSequence)
    x = _drawn(2, 16, 8, 8)
    report = inject_optimized_kernels(blocks[1], config=EVERYWHERE)
    for block in blocks:
        before = block(x)
        if change == "hook":
            block.layers.register_forward_hook(lambda module, args, output: 2 * output)
        elif change == "layer":
            block.layers[2] = nn.Tanh()
        elif change == "more":
            block.layers.append(nn.Tanh())
        elif change == "class":
            block.layers.__class__ = Doubled
    stock, fused = (block(x) for block in blocks)
    torch.testing.assert_close(fused, stock, rtol=1e-5, atol=1e-5)
    assert (relative_error(before, stock) > 1e-2) == (change != "nothing")
    (counts,) = report.calls().values()
    whole = change in ("nothing", "layer")
    assert counts["fused"] == (4 if whole else 2) and bool(counts["stock"]) == (not whole)


class _Convolution(nn.Conv2d):
    """A class that a loop asks for, and calls otherwise."""


class _InLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = nn.GroupNorm(4, 16), nn.SiLU(), _Convolution(16, 16, 3, padding=1)
        self.layers = nn.Sequential(*layers, nn.GroupNorm(4, 16), nn.SiLU(), nn.Dropout())

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        y = x
        for layer in self.layers:
            if isinstance(layer, _Convolution) and cache is not None:
                cache.append(x)
                x = layer(x) ** 2
            else:
                x = layer(x)
        layer = self.layers[0]
        return x + layer(y)


@pytest.mark.parametrize("change", ["nothing", "layer", "class", "more"])
def test_norms_in_a_loop_over_layers_are_fused_as_long_as_the_layers_are_of_the_classes_they_were(change: str) -> None:
    blocks = _twins(_InLoop)
    x = _drawn(2, 16, 8, 8)
    report = inject_optimized_kernels(blocks[1], config=EVERYWHERE)
    text = report.source("")
    assert "for layer" not in text and "isinstance" not in text
    for block in blocks:
        before = block(x)
        if change == "layer":
            block.layers[4] = nn.Tanh()
        elif change == "class":
            block.layers[2].__class__ = nn.Conv2d
        elif change == "more":
            block.layers.append(nn.Tanh())
    caches: list[list[Tensor]] = [[], []]
    stock, fused = (block(x, cache) for block, cache in zip(blocks, caches, strict=True))
    torch.testing.assert_close(fused, stock, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(caches[1], caches[0], rtol=1e-5, atol=1e-5)
    assert relative_error(before, stock) > 1e-2 or change == "class"
    (counts,) = report.calls().values()
    # The third norm is alone: a rule of its own.
    assert (counts["fused"], counts["stock"]) == ((6, 0) if change == "nothing" else (3, 1))


class _LastLayer(_InLoop):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return layer(x)


def test_a_loop_that_leaves_its_last_layer_behind_stays_a_loop() -> None:
    block = _LastLayer().requires_grad_(False).eval()
    x = _drawn(2, 16, 8, 8)
    stock = block(x)
    inject_optimized_kernels(block)
    torch.testing.assert_close(block(x), stock, rtol=1e-5, atol=1e-5)
    assert isinstance(Rewriter().rewrite(block), str)


class _Summed(nn.Module):
    """A norm of a sum: of an embedding for each channel, which may be left out, or of whatever it is given."""

    def __init__(self, per_channel: bool) -> None:
        super().__init__()
        self.per_channel = per_channel
        self.norm, self.act = nn.GroupNorm(4, 16), nn.SiLU()

    def forward(self, x: Tensor, temb: Tensor, left_out: bool = False) -> Tensor:
        if self.per_channel:
            temb = temb.tanh()[:, :, None, None]
        if left_out:
            temb = None
        if temb is not None:
            x = x + temb
        return self.act(self.norm(x))


def test_an_embedding_that_may_be_left_out_is_asked_for() -> None:
    block = _Summed(per_channel=True).requires_grad_(False)
    x, temb = _drawn(2, 16, 8, 8), _drawn(2, 16)
    stock = [block(x, temb, left_out) for left_out in (False, True)]
    inject_optimized_kernels(block, config=EVERYWHERE)
    for left_out in (False, True):
        torch.testing.assert_close(block(x, temb, left_out), stock[left_out], rtol=1e-5, atol=1e-5)


def test_an_activation_without_submodules_is_read_as_well() -> None:
    block = Snake1d(8).requires_grad_(False)
    block.alpha.copy_(torch.linspace(-0.5, 0.5, 8).view(1, 8, 1))
    x = _drawn(2, 8, 32)
    stock = block(x)
    report = inject_optimized_kernels(block, config=EVERYWHERE)
    torch.testing.assert_close(block(x), stock, rtol=1e-5, atol=1e-5)
    (counts,) = report.calls().values()
    assert (counts["fused"], counts["stock"]) == (1, 0)


def test_a_sum_of_two_images_is_made_before_the_norm() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.act = nn.GroupNorm(4, 16), nn.SiLU()

        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            x = x + other
            return self.act(self.norm(x))

    block = Block().requires_grad_(False)
    x, other = _drawn(2, 16, 8, 8), _drawn(2, 16, 8, 8).flip(0)
    stock = block(x, other)
    report = inject_optimized_kernels(block, config=EVERYWHERE)
    torch.testing.assert_close(block(x, other), stock, rtol=1e-5, atol=1e-5)
    (counts,) = report.calls().values()
    assert (counts["fused"], counts["stock"]) == (1, 0)


def test_each_frame_has_its_own_statistics_where_the_stock_norm_folds_time_into_the_batch() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = MochiChunkedGroupNorm3D(16, num_groups=4, chunk_size=2)
            self.act = nn.SiLU()

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            return self.act(x)

    block = Block().requires_grad_(False)
    x = _drawn(2, 16, 3, 6, 6) * torch.arange(1.0, 4.0).view(3, 1, 1)
    stock = block(x)
    report = inject_optimized_kernels(block, config=EVERYWHERE)
    assert relative_error(block(x), stock) < 1e-6
    (counts,) = report.calls().values()
    assert (counts["fused"], counts["stock"]) == (1, 0)
    seen: list[Tensor] = []
    block.norm.norm_layer.register_forward_hook(lambda module, args, output: seen.append(output))
    assert torch.equal(block(x), stock)
    assert len(seen) == 3  # six frames in chunks of two
    (counts,) = report.calls().values()
    assert (counts["fused"], counts["stock"]) == (1, 1)


@pytest.mark.parametrize("change", ["hook", "forward", "class"])
def test_a_norm_that_someone_changed_runs_as_it_is_and_is_counted(change: str) -> None:
    class Doubled(nn.GroupNorm):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    blocks = [_resnet(), _resnet()]
    x, temb = _drawn(2, 16, 8, 8), _drawn(2, 8)
    report = inject_optimized_kernels(blocks[1], config=EVERYWHERE)
    for block in blocks:
        if change == "hook":
            block.norm1.register_forward_hook(lambda module, args, output: 2 * output)
        elif change == "forward":
            block.norm1.forward = lambda y, own=block.norm1: 2 * nn.GroupNorm.forward(own, y)
        else:
            block.norm1.__class__ = Doubled
    stock, fused = (block(x, temb) for block in blocks)
    torch.testing.assert_close(fused, stock, rtol=1e-5, atol=1e-5)
    (counts,) = report.calls().values()
    assert (counts["fused"], counts["stock"]) == (2, 1)


def test_a_spatial_norm_runs_as_it_is_and_the_group_norm_in_the_other_branch_is_fused() -> None:
    tiny = AUTOENCODERS["vq_spatial"]
    model = tiny.build()
    report = inject_optimized_kernels(model, config=EVERYWHERE)
    arguments = batch_of_two(tiny, torch.float32)
    stock = run(tiny.build(), arguments)
    assert relative_error(run(model, arguments), stock) < 1e-5
    fused = {path for path, counts in report.calls().items() if counts["fused"]}
    assert any(path.startswith("encoder") for path in fused)


def test_a_block_with_group_norms_is_one_graph_of_the_compiler() -> None:
    block = _resnet(time_embedding_norm="scale_shift")
    x, temb = _drawn(2, 16, 8, 8), _drawn(2, 8)
    stock = block(x, temb)
    inject_optimized_kernels(block, config=EVERYWHERE)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(block, backend=keep, fullgraph=True)
    torch.testing.assert_close(compiled(x, temb), stock, rtol=1e-5, atol=1e-5)
    (graph,) = graphs
    assert sum("group_norm_silu" in str(node.target) for node in graph.graph.nodes) == 2


def test_gradients_of_an_injected_resnet_are_those_of_stock() -> None:
    blocks = [_resnet().requires_grad_(), _resnet().requires_grad_()]
    report = inject_optimized_kernels(blocks[1], config=EVERYWHERE)
    x, temb = _drawn(2, 16, 8, 8), _drawn(2, 8)
    for block in blocks:
        block(x, temb).square().sum().backward()
    for stock, fused in zip(blocks[0].parameters(), blocks[1].parameters(), strict=True):
        assert relative_error(fused.grad, stock.grad) < 1e-5
    (counts,) = report.calls().values()
    assert (counts["fused"], counts["stock"]) == (3, 0)


def test_the_last_norm_of_a_decoder_is_fused_with_its_activation_behind_the_branches() -> None:
    model: Any = AUTOENCODERS["kl"].build()
    report = inject_optimized_kernels(model, config=EVERYWHERE)
    text = report.source("decoder")
    assert "self.conv_norm_out(sample, latent_embeds)" in text and "self.conv_norm_out(sample)" not in text
    assert "latent_embeds)\n        sample = self.conv_act(sample)" in text
    model.decode(_drawn(1, 4, 8, 8))
    assert (report.calls()["decoder"]["fused"], report.calls()["decoder"]["stock"]) == (1, 0)


def test_a_norm_inside_of_a_rewritten_forward_is_not_reported_as_left_alone() -> None:
    report = inject_optimized_kernels(AUTOENCODERS["kl"].build(), config=EVERYWHERE)
    left = {site.path for site in report.skipped}
    assert not left & {"decoder.conv_norm_out", "decoder.mid_block.attentions.0.group_norm"}
