"""Images and videos that a convolution cuts into patches become tokens in one product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.embeddings import CogVideoXPatchEmbed, PatchEmbed
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoPatchEmbed
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from diffkern.rewrite.patches import PatchesSite, of_patches
from diffkern.rewrite.rewriter import Rewriter
from diffkern.verify.measures import relative_error
from tests.rewrite.modules import written
from tests.rewrite.test_rooms import launches

RULE, WIDTH = "patch embedding", 24


def of_sd3() -> nn.Module:
    return PatchEmbed(16, 16, 2, 4, WIDTH, pos_embed_max_size=16)


def of_cogvideox() -> nn.Module:
    options = {"use_positional_embeddings": False, "use_learned_positional_embeddings": False}
    return CogVideoXPatchEmbed(2, None, 4, WIDTH, 8, **options)


def of_hunyuan_video() -> nn.Module:
    return HunyuanVideoPatchEmbed((1, 2, 2), 4, WIDTH)


def made(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return make().to(dtype).eval().requires_grad_(False)


def given(make: Any, dtype: torch.dtype = torch.float32, side: int = 16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    if make is of_cogvideox:
        return {"text_embeds": draw(2, 5, 8), "image_embeds": draw(2, 3, 4, side, 12)}
    return {"latent": draw(2, 4, side, 12)} if make is of_sd3 else {"hidden_states": draw(2, 4, 3, side, 12)}


def installed(module: nn.Module) -> PatchesSite:
    found = Rewriter("fast").rewrite(module)
    assert not isinstance(found, str), found
    module.forward = found.function.__get__(module)  # type: ignore[method-assign]
    (site,) = [site for site in found.sites if isinstance(site, PatchesSite)]
    assert site.plan.rule.name == RULE
    return site


def run(module: nn.Module, arguments: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return module(**arguments)  # type: ignore[no-any-return]


EMBEDDINGS = [of_sd3, of_cogvideox, of_hunyuan_video]
CONVOLUTIONS = frozenset({"aten::conv2d", "aten::conv3d"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", EMBEDDINGS)
def test_patches_become_tokens_in_one_product(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    stock, module, reference = made(make, dtype), made(make, dtype), made(make, dtype).double()
    site, arguments = installed(module), given(make, dtype)
    exact = run(reference, {name: x.double() for name, x in arguments.items()})
    expected = run(stock, arguments)
    for _ in range(2):
        y = run(module, arguments)
        assert y.dtype is expected.dtype and y.shape == expected.shape and y.is_contiguous()
        assert relative_error(y, exact) <= 1.05 * relative_error(expected, exact) + 1e-6
    assert (site.fused_calls, site.original_calls) == (2, 0)
    assert not CONVOLUTIONS & {*launches(module, arguments)}
    assert CONVOLUTIONS & {*launches(stock, arguments)}


@pytest.mark.parametrize("make", EMBEDDINGS)
def test_exact_numerics_leave_an_embedding_alone_that_has_nothing_else(make: Callable[[], nn.Module]) -> None:
    left = Rewriter("exact").rewrite(made(make))
    assert isinstance(left, str) and "would lie in memory otherwise" in left


def test_pixels_behind_the_last_patch_count_for_nothing() -> None:
    stock, module = made(of_hunyuan_video), made(of_hunyuan_video)
    installed(module)
    arguments = given(of_hunyuan_video, side=15)
    expected = run(stock, arguments)
    assert expected.shape == (2, 3 * 7 * 6, WIDTH)
    torch.testing.assert_close(run(module, arguments), expected, rtol=1e-5, atol=1e-5)


def test_a_single_sample_keeps_the_strides_of_stock_and_says_so() -> None:
    stock, module = made(of_hunyuan_video), made(of_hunyuan_video)
    site, reasons = installed(module), []
    site.observer = lambda _, reason: reasons.append(reason)
    arguments = {name: value[:1] for name, value in given(of_hunyuan_video, side=14).items()}
    one, other = run(module, arguments), run(stock, arguments)
    assert torch.equal(one, other) and one.stride() == other.stride()
    assert (site.fused_calls, site.original_calls) == (0, 1)
    assert reasons == [f"{site}: a single sample lies as in stock"]


def test_a_proof_on_smaller_images_keeps_the_channels() -> None:
    module = made(lambda: PatchEmbed(16, 16, 2, 200, WIDTH, pos_embed_type=None))
    site = installed(module)
    run(module, {"latent": torch.randn(2, 200, 160, 160)})
    assert not site.reasons and site.fused_calls == 1


def _hooked(module: nn.Module) -> None:
    module.proj.register_forward_hook(lambda _, args, y: y + 1.0)


def _adapted(module: nn.Module) -> None:
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["proj"], init_lora_weights=False), module)


def _padded(module: nn.Module) -> None:
    module.proj.padding = (1, 1)
    module.proj._reversed_padding_repeated_twice = [1, 1, 1, 1]


def _overlapping(module: nn.Module) -> None:
    module.proj.stride = (1, 1)


def _spread(module: nn.Module) -> None:
    module.proj.dilation = (2, 2)


def _computed_otherwise(module: nn.Module) -> None:
    module.proj._conv_forward = lambda x, weight, bias: nn.Conv2d._conv_forward(module.proj, 2 * x, weight, bias)


class _Quantized(Tensor):
    pass


def _quantized(module: nn.Module) -> None:
    module.proj.weight = nn.Parameter(module.proj.weight.detach().as_subclass(_Quantized), requires_grad=False)


CHANGES = [_hooked, _adapted, _padded, _overlapping, _spread, _computed_otherwise, _quantized]


@pytest.mark.parametrize("change", CHANGES)
def test_a_convolution_that_was_changed_is_called(change: Callable[[nn.Module], None]) -> None:
    stock, module = (made(lambda: PatchEmbed(16, 16, 2, 4, WIDTH, pos_embed_type=None)) for _ in range(2))
    site, arguments = installed(module), given(of_sd3)
    run(module, arguments)
    for one in (stock, module):
        torch.manual_seed(2)
        change(one)
    assert torch.equal(run(module, arguments), run(stock, arguments))
    assert (site.fused_calls, site.original_calls) == (1, 1)


def test_weights_in_channels_last_are_the_same_weights() -> None:
    stock, module = made(of_sd3), made(of_sd3)
    site = installed(module)
    module.to(memory_format=torch.channels_last)
    torch.testing.assert_close(run(module, given(of_sd3)), run(stock, given(of_sd3)), rtol=1e-5, atol=1e-5)
    assert site.fused_calls == 1


def test_gradients_are_those_of_stock() -> None:
    results = []
    for rewrites in (True, False):
        module = made(of_hunyuan_video).requires_grad_()
        site = installed(module) if rewrites else None
        x = given(of_hunyuan_video)["hidden_states"].requires_grad_()
        module(x).square().sum().backward()
        results.append([x.grad, *[parameter.grad for parameter in module.parameters()]])
        assert site is None or site.fused_calls == 1
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_the_compiler_sees_the_convolution() -> None:
    module, graphs = made(of_hunyuan_video), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    installed(module)
    run(module, given(of_hunyuan_video))  # which is proven
    run(torch.compile(module, backend=backend, fullgraph=True), given(of_hunyuan_video))
    torch._dynamo.reset()
    assert len(graphs) == 1 and "conv3d" in graphs[0] and "unfold" not in graphs[0]


#: What becomes of the result ``y`` of a convolution, and whether it may lie as tokens.
READERS = {
    "y.flatten(2).transpose(1, 2)": True,
    "y.to(x.dtype).flatten(2).transpose(1, 2).contiguous()": True,
    "y.view(1, 2, *y.shape[1:]).flatten(3).transpose(2, 3).flatten(1, 2)": True,
    "y.flatten(2)": False,
    "y.flatten(2).transpose(1, 2) + y.mean()": False,
    "y.flatten(3).transpose(2, 3)": False,
    "y.view(2, 3, -1).transpose(1, 2)": False,
    "y.flatten(2).transpose(1, 2).transpose(1, 2).view(2, 3, 2, 2)": False,
}


@pytest.mark.parametrize("read", READERS)
def test_only_what_tokens_are_made_of_lies_as_tokens(read: str) -> None:
    source = f"class Embeds(Block):\n    def forward(self, x):\n        y = self.cut(x)\n        return {read}\n"
    module = written(source)["Embeds"]()
    module.cut = nn.Conv2d(3, 3, 2, 2)
    found = Rewriter("fast").rewrite(module.eval().requires_grad_(False))
    assert (not isinstance(found, str)) is READERS[read]
    x = torch.randn(2, 3, 4, 4)
    if not isinstance(found, str):
        torch.testing.assert_close(found.function(module, x), module(x), rtol=1e-5, atol=1e-5)
        assert [site.fused_calls for site in found.sites] == [1]


#: Convolutions that are no product of patches.
OTHERS = [
    {"kernel_size": 3, "stride": 2},
    {"kernel_size": 2, "stride": (2, 1)},
    {"kernel_size": 2, "stride": 2, "padding": 1},
    {"kernel_size": 2, "stride": 2, "groups": 2},
    {"kernel_size": 2, "stride": 2, "dilation": 2},
]


@pytest.mark.parametrize("options", OTHERS, ids=str)
def test_other_convolutions_stay_as_they_are(options: dict[str, Any]) -> None:
    module = made(lambda: PatchEmbed(16, 16, 2, 4, WIDTH, pos_embed_type=None))
    module.proj = nn.Conv2d(4, WIDTH, **options).requires_grad_(False)
    assert isinstance(Rewriter("fast").rewrite(module), str)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.Conv3d])
def test_the_product_is_the_convolution_in_float64(kind: type[nn.Module], bias: bool) -> None:
    kernel: Any = (3, 2) if kind is nn.Conv2d else (2, 1, 3)
    conv = kind(5, 7, kernel, kernel, bias=bias).double()
    x = torch.randn(2, 8, 7, *(9,) * (len(kernel) - 1), dtype=torch.float64)[:, ::2][:, :, 1:]
    x = torch.cat([x, x[:, :1]], 1).movedim(1, -1).contiguous().movedim(-1, 1)  # any strides
    torch.testing.assert_close(of_patches(x, conv), conv(x), rtol=1e-12, atol=1e-12)
