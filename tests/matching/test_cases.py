"""Known faults of norm replacements, each with numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from diffusers.hooks.layerwise_casting import apply_layerwise_casting_hook
from diffusers.models.autoencoders.autoencoder_kl_wan import WanRMS_norm
from diffusers.models.normalization import MochiRMSNorm, RMSNorm
from diffusers.models.transformers.transformer_krea2 import Krea2RMSNorm
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21ZeroCenterRMSNorm
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from diffkern.matching import NormSemantics, apply, declines, match

bf16, fp32 = torch.bfloat16, torch.float32


def semantics_of(module: nn.Module) -> NormSemantics:
    matched = match(module)
    assert matched is not None and matched.semantics is not None
    return matched.semantics


def fused(module: nn.Module, x: Tensor) -> Tensor:
    semantics = semantics_of(module)
    assert declines(semantics, module, x) is None
    return apply(semantics, module, x)


def fill(module: nn.Module, values: Tensor) -> nn.Module:
    parameter = next(module.parameters())
    parameter.data = values.reshape(parameter.shape)
    return module.requires_grad_(False)


@pytest.mark.parametrize(
    ("module", "x_dtype", "weight_dtype", "expected"),
    [
        (RMSNorm(64, 1e-6), bf16, fp32, fp32),
        (RMSNorm(64, 1e-6), fp32, bf16, bf16),
        (RMSNorm(64, 1e-6, elementwise_affine=False), bf16, fp32, bf16),
        (nn.RMSNorm(64), bf16, fp32, bf16),
        (nn.RMSNorm(64), fp32, bf16, fp32),
        (MochiRMSNorm(64, 1e-6), bf16, fp32, bf16),
        (MochiRMSNorm(64, 1e-6), fp32, bf16, fp32),
        (LlamaRMSNorm(64), bf16, fp32, fp32),
        (LlamaRMSNorm(64), fp32, bf16, fp32),
        (T5LayerNorm(64), bf16, fp32, fp32),
        (T5LayerNorm(64), fp32, bf16, bf16),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_output_dtype_follows_the_class(
    module: nn.Module, x_dtype: torch.dtype, weight_dtype: torch.dtype, expected: torch.dtype
) -> None:
    module.to(weight_dtype)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(x_dtype)
    assert module(x).dtype == expected
    assert fused(module, x).dtype == expected


def test_each_class_keeps_its_own_rounding_order() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 4096, generator=generator).to(bf16)
    weight = (1 + 0.5 * torch.randn(4096, generator=generator)).to(bf16)
    rounds_first = [RMSNorm(4096, 1e-6), LlamaRMSNorm(4096, 1e-6), T5LayerNorm(4096, 1e-6)]
    rounds_once = [MochiRMSNorm(4096, 1e-6), nn.RMSNorm(4096, 1e-6)]
    for module in (*rounds_first, *rounds_once):
        fill(module, weight)
        # What is left are float32 sums in another order, which turn a rounding over now and then.
        assert (fused(module, x) == module(x)).double().mean() > 0.999
    between_the_orders = (fused(rounds_first[0], x) != fused(rounds_once[0], x)).double().mean().item()
    assert 0.2 < between_the_orders < 0.35
    zero_centred = Krea2RMSNorm(4096, 1e-6)
    fill(zero_centred, weight.float() - 1)
    assert torch.equal(fused(zero_centred, x), fused(rounds_once[0], x))


def test_eps_none_is_that_of_float32_for_half_input() -> None:
    module = nn.RMSNorm(64)
    assert module.eps is None
    x = torch.full((1, 64), 1e-4)
    # 1e-4 / sqrt(1e-8 + 1.19e-7) = 0.2785; with the eps of bfloat16, 7.8e-3, it were 0.00113.
    torch.testing.assert_close(
        fused(module.to(bf16), x.to(bf16)).float(), torch.full((1, 64), 0.2785), rtol=4e-3, atol=0
    )
    torch.testing.assert_close(fused(module.float(), x), torch.full((1, 64), 0.2784), rtol=1e-3, atol=0)
    # In float64 None means another number: such input runs stock.
    assert declines(semantics_of(module), module, x.double()) is not None
    # Resolved at the call, not at the match.
    semantics = semantics_of(module)
    module.eps = 1.0
    torch.testing.assert_close(apply(semantics, module, x), torch.full((1, 64), 1e-4), rtol=1e-3, atol=0)


def test_eps_none_where_the_stock_class_raises_runs_stock() -> None:
    module = RMSNorm(64, None)  # type: ignore[arg-type]
    x = torch.randn(2, 64)
    with pytest.raises(TypeError):
        module(x)
    assert declines(semantics_of(module), module, x) == "its eps is None, not a number"


def test_wan_norm_normalises_channels_and_clamps_eps() -> None:
    module = WanRMS_norm(2, images=False)
    x = torch.zeros(1, 2, 1, 2, 2)
    x[0, :, 0, 0, :] = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    expected = torch.tensor([[0.4472, 0.6325], [1.3416, 1.2649]])
    y = fused(module, x)
    torch.testing.assert_close(y[0, :, 0, 0, :], expected, rtol=0, atol=1e-4)
    assert torch.equal(y[0, :, 0, 1, :], torch.zeros(2, 2))
    torch.testing.assert_close(fused(module, torch.full((1, 2, 1, 2, 2), 1e-4)), torch.ones(1, 2, 1, 2, 2))
    # Where the length is below the bound of 1e-12: 5e-13 / 1e-12 * sqrt(2).
    tiny = torch.zeros(1, 2, 1, 1, 1)
    tiny[0, 0] = 5e-13
    torch.testing.assert_close(fused(module, tiny).flatten(), torch.tensor([0.5 * 2**0.5, 0.0]))


def test_gamma_that_would_broadcast_over_other_dimensions_runs_stock() -> None:
    module = WanRMS_norm(2, images=True)
    video = torch.randn(1, 2, 2, 3, 3)
    assert module(video).shape == video.shape  # gamma of shape [2, 1, 1] falls on the frames
    assert "has shape (2, 1, 1)" in str(declines(semantics_of(module), module, video))
    assert declines(semantics_of(module), module, torch.randn(1, 2, 3, 3)) is None


@pytest.mark.parametrize(
    "cls", [GemmaRMSNorm, Gemma2RMSNorm, Gemma3RMSNorm, Krea2RMSNorm, QwenImage21ZeroCenterRMSNorm]
)
def test_zero_centred_weights_scale_by_one_plus_weight(cls: type[nn.Module]) -> None:
    module = fill(cls(4), torch.zeros(4))
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    expected = torch.tensor([[0.3651, 0.7303, 1.0954, 1.4606]])  # x / sqrt(7.5)
    torch.testing.assert_close(fused(module, x), expected, rtol=0, atol=1e-4)


def test_gemma_4_is_not_zero_centred() -> None:
    module = fill(Gemma4RMSNorm(4), torch.zeros(4))
    assert torch.equal(fused(module, torch.tensor([[1.0, 2.0, 3.0, 4.0]])), torch.zeros(1, 4))


@pytest.mark.parametrize("cls", [GemmaRMSNorm, Gemma2RMSNorm, Gemma3RMSNorm])
def test_the_offset_is_added_in_float32(cls: type[nn.Module]) -> None:
    # In bfloat16 1 + w would be [1.0, 16.75].
    weight = torch.tensor([0.00390625, 15.8125], dtype=bf16)
    module = fill(cls(2, eps=0.0), weight)
    x = torch.ones(1, 2, requires_grad=True)
    y = fused(module, x)
    assert y.tolist() == [[1.00390625, 16.8125]]
    # d/dx_j sum_i s_i x_i / rms = s_j - (s_1 + s_2) / 2 where rms = 1.
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad, torch.tensor([[1.00390625 - 8.908203125, 16.8125 - 8.908203125]]))


@pytest.mark.parametrize(
    "module",
    [
        RMSNorm(64, 1e-6, elementwise_affine=False),
        MochiRMSNorm(64, 1e-6, elementwise_affine=False),
        nn.RMSNorm(64, elementwise_affine=False),
        nn.LayerNorm(64, elementwise_affine=False),
        nn.LayerNorm(64, bias=False),
        Gemma4RMSNorm(64, with_scale=False),
    ],
    ids=lambda module: type(module).__name__,
)
@pytest.mark.parametrize("dtype", [fp32, bf16, torch.float16])
def test_norms_without_weight_or_bias(module: nn.Module, dtype: torch.dtype) -> None:
    keys = list(module.state_dict())
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    module = module.to(dtype)
    y = fused(module, x)
    assert y.dtype == dtype
    torch.testing.assert_close(y, module(x), rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert list(module.state_dict()) == keys


def test_a_weight_stored_in_float8_runs_stock() -> None:
    module = RMSNorm(64, 1e-6).to(torch.float8_e4m3fn)
    reason = declines(semantics_of(module), module, torch.randn(2, 64).to(bf16))
    assert reason == "its weight is stored as float8_e4m3fn; float32, float16 and bfloat16 are served"
    assert declines(semantics_of(module), module, torch.randn(2, 64).to(torch.float8_e4m3fn)) is not None


def test_under_layerwise_casting_the_weight_is_bfloat16_in_time() -> None:
    module = RMSNorm(64, 1e-6)
    semantics = semantics_of(module)
    apply_layerwise_casting_hook(module, torch.float8_e4m3fn, bf16, non_blocking=False)
    registry = module._diffusers_hook
    seen = []

    def innermost(x: Tensor) -> Tensor:
        assert declines(semantics, module, x) is None
        seen.append(module.weight.dtype)
        return apply(semantics, module, x)

    holder = registry._fn_refs[0]
    holder.forward, stock_forward = innermost, holder.forward
    x = torch.randn(2, 64).to(bf16)
    y = module(x)
    holder.forward = stock_forward
    assert module.weight.dtype == torch.float8_e4m3fn
    assert seen == [bf16] and y.dtype == bf16
    torch.testing.assert_close(y, module(x), rtol=8e-3, atol=1e-6)
