"""Layer norms that are modulated in the forward around them: found in its source, and one op there."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch
from diffusers import LTXVideoTransformer3DModel
from diffusers.models import attention as attention_module
from diffusers.models.normalization import (
    AdaLayerNorm,
    AdaLayerNormContinuous,
    AdaLayerNormZero,
    AdaLayerNormZeroSingle,
    CogVideoXLayerNormZero,
    SD35AdaLayerNormZeroX,
)
from diffusers.models.transformers.sana_transformer import SanaTransformerBlock
from diffusers.models.transformers.transformer_flux import FluxTransformerBlock
from diffusers.models.transformers.transformer_flux2 import Flux2SingleTransformerBlock, Flux2TransformerBlock
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel, WanTransformerBlock
from torch import Tensor, nn

from diffkern import StrictModeError, inject_optimized_kernels, plan
from diffkern.blocks import inner_recipe_for
from diffkern.blocks.modulated import ModulatedNorms, modulated_norms
from diffkern.verify.measures import relative_error
from tests.injection.models import ltx_inputs, randomise, run, tiny_ltx


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


D = 48
#: A module, and the arguments of a call.
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "AdaLayerNorm": (lambda: AdaLayerNorm(D, output_dim=2 * D, chunk_dim=1), (random(2, 9, D), None, random(2, D))),
    "AdaLayerNormZero": (lambda: AdaLayerNormZero(D), (random(2, 9, D), None, None, None, random(2, D))),
    "AdaLayerNormZeroSingle": (lambda: AdaLayerNormZeroSingle(D), (random(2, 9, D), random(2, D))),
    "AdaLayerNormContinuous": (
        lambda: AdaLayerNormContinuous(D, D, elementwise_affine=False, eps=1e-6),
        (random(2, 9, D), random(2, D)),
    ),
    "FluxTransformerBlock": (
        lambda: FluxTransformerBlock(D, 3, 16),
        (random(2, 9, D), random(2, 4, D), random(2, D)),
    ),
    "Flux2TransformerBlock": (
        lambda: Flux2TransformerBlock(D, 3, 16),
        (random(2, 9, D), random(2, 4, D), random(2, 1, 6 * D), random(2, 1, 6 * D, seed=1)),
    ),
    "Flux2SingleTransformerBlock": (
        lambda: Flux2SingleTransformerBlock(D, 3, 16),
        (random(2, 9, D), None, random(2, 1, 3 * D)),
    ),
    "SanaTransformerBlock": (
        lambda: SanaTransformerBlock(D, 3, 16, num_cross_attention_heads=3, cross_attention_head_dim=16,
                                     cross_attention_dim=D),
        (random(2, 12, D), None, random(2, 4, D), None, random(2, 6 * D), 3, 4),
    ),
    "AdaLayerNormZero in float32": (
        lambda: AdaLayerNormZero(D, norm_type="fp32_layer_norm"),
        (random(2, 9, D), None, None, None, random(2, D)),
    ),
    "WanTransformerBlock": (
        lambda: WanTransformerBlock(D, 96, 3, cross_attn_norm=True),
        (random(2, 9, D), random(2, 4, D), random(2, 6, D), None),
    ),
    "WanTransformerBlock, a modulation for each token": (
        lambda: WanTransformerBlock(D, 96, 3, cross_attn_norm=True),
        (random(2, 9, D), random(2, 4, D), random(2, 9, 6, D), None),
    ),
}  # fmt: skip


def tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [part for part in result if isinstance(part, Tensor)]


def call(module: nn.Module, arguments: tuple[Any, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    with torch.no_grad():
        return tensors(module(*[part.to(dtype) if isinstance(part, Tensor) else part for part in arguments]))


def build(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    make, arguments = CASES[name]
    if name.startswith("Flux2") and "temb_mod" not in signature(Flux2SingleTransformerBlock.forward).parameters:
        pytest.skip("the blocks of this diffusers take their modulation in parts")
    return randomise(make()).eval().requires_grad_(False), arguments


def fused_site(report: Any, path: str = "") -> Any:
    (site,) = (site for site in report.patched if site.op == "norm_modulate" and site.path == path)
    return site


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_modules_of_diffusers_keep_the_contract(name: str, dtype: torch.dtype) -> None:
    module, arguments = build(name)
    module.to(dtype)
    rounded = tuple(part.to(dtype) if isinstance(part, Tensor) else part for part in arguments)
    stock, reference = call(module, arguments, dtype), call(copy.deepcopy(module).double(), rounded, torch.float64)
    report = inject_optimized_kernels(module)
    assert fused_site(report).how == "recipe"
    results = call(module, arguments, dtype)
    assert report.calls()[""]["fused"] == 1 and report.calls()[""]["stock"] == 0
    for result, other, exact in zip(results, stock, reference, strict=True):
        assert result.dtype == other.dtype and result.shape == other.shape
        slack = 2e-7 if dtype == torch.float32 else 2e-4
        assert relative_error(result, exact) <= 1.05 * relative_error(other, exact) + slack
    assert report.restore() == len(report.patched)
    assert all(map(torch.equal, call(module, arguments, dtype), stock)) and "forward" not in module.__dict__


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exact_is_exact(name: str, dtype: torch.dtype) -> None:
    module, arguments = build(name)
    module.to(dtype)
    stock = call(module, arguments, dtype)
    report = inject_optimized_kernels(module, numerics="exact")
    assert fused_site(report).measurements[0].bit_identical
    assert all(map(torch.equal, call(module, arguments, dtype), stock))
    assert report.calls()[""]["fused"] == 1


def test_ltx_ends_in_one_op_in_all_numerics_and_with_gradients() -> None:
    model = tiny_ltx()
    stock = run(model)
    for numerics in ("fast", "exact"):
        report = inject_optimized_kernels(model, numerics=numerics)
        result = run(model)
        assert report.calls()[""] == {"fused": 1, "stock": 0, "stock_reasons": {}, "stock_pieces": {}}
        assert torch.equal(result, stock) if numerics == "exact" else relative_error(result, stock) < 1e-5
        report.restore()
    model.requires_grad_(True)
    model(**ltx_inputs())[0].square().sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    report = inject_optimized_kernels(model)
    model(**ltx_inputs())[0].square().sum().backward()
    assert report.calls()[""]["fused"] == 1
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-4)


def test_ltx2_ends_in_two() -> None:
    ltx2 = pytest.importorskip("diffusers.models.transformers.transformer_ltx2", reason="this diffusers has no LTX-2")
    recipe = inner_recipe_for(ltx2.LTX2VideoTransformer3DModel)
    assert isinstance(recipe, ModulatedNorms) and recipe.norms == ("norm_out", "audio_norm_out")


@pytest.mark.parametrize("verify", [True, False])
def test_the_whole_model_compiles_without_a_break(verify: bool) -> None:
    """With nothing proven, the first call of all may be the one that is traced."""
    torch._dynamo.reset()
    model = tiny_ltx()
    stock = run(model)
    inject_optimized_kernels(model, verify=verify)
    with torch.no_grad():
        result = torch.compile(model, fullgraph=True, backend="aot_eager")(**ltx_inputs())[0]
    torch.testing.assert_close(result, stock, rtol=1e-4, atol=1e-5)


def test_tracing_it_warns_of_nothing() -> None:
    torch._dynamo.reset()
    module, arguments = build("AdaLayerNormContinuous")
    inject_optimized_kernels(module, config={"norm_modulate": "eager"})
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", UserWarning)
        torch.compile(module, fullgraph=True, backend="eager")(*arguments)


def test_the_scale_of_adapters_reaches_the_decorator_of_the_forward() -> None:
    peft = pytest.importorskip("peft")
    model = tiny_ltx()
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q", "proj_out"], init_lora_weights=False), "one")

    def scaled(scale: float) -> Tensor:
        with torch.no_grad():
            result: Tensor = model(**ltx_inputs(), attention_kwargs={"scale": scale})[0]
        return result

    expected = [scaled(scale) for scale in (1.0, 0.25)]
    report = inject_optimized_kernels(model)
    for scale, stock in zip((1.0, 0.25), expected, strict=True):
        torch.testing.assert_close(scaled(scale), stock, rtol=1e-4, atol=1e-5)
    assert not torch.equal(*expected) and report.calls()[""]["fused"] == 2


# --- what keeps a call stock -------------------------------------------------------------------------------


def test_a_hook_on_the_norm_is_called() -> None:
    model = tiny_ltx()
    report = inject_optimized_kernels(model)
    expected = run(model)
    handle = model.norm_out.register_forward_hook(lambda module, args, y: 2 * y)
    assert relative_error(run(model), expected) > 0.1
    handle.remove()
    assert torch.equal(run(model), expected)
    reason = "norm_out has a hook, or is another module than it was"
    assert report.calls()[""]["stock_reasons"] == {reason: 1} and report.calls()[""]["fused"] == 2


def test_a_hook_on_the_norm_runs_in_no_proof() -> None:
    model, seen = tiny_ltx(), []
    model.norm_out.register_forward_hook(lambda module, args, y: seen.append(y.shape))
    inject_optimized_kernels(model)
    assert seen == []
    run(model)
    assert seen == [(1, 32, 32)]


def test_another_norm_in_its_place_is_used() -> None:
    model = tiny_ltx()
    report = inject_optimized_kernels(model)
    run(model)
    model.norm_out = nn.LayerNorm(32, eps=1e-6)
    nn.init.constant_(model.norm_out.weight, 3.0)
    fused = run(model)
    assert list(report.calls()[""]["stock_reasons"]) == ["norm_out has a hook, or is another module than it was"]
    report.restore()
    torch.testing.assert_close(fused, run(model), rtol=1e-4, atol=1e-5)


def test_a_forward_replaced_in_the_class_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """As caches of steps do."""
    model = tiny_ltx()
    report = inject_optimized_kernels(model)
    stock = LTXVideoTransformer3DModel.forward

    def cached(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (7 * stock(self, *args, **kwargs)[0],)

    expected = run(model)
    monkeypatch.setattr(LTXVideoTransformer3DModel, "forward", cached)
    torch.testing.assert_close(run(model), 7 * expected, rtol=1e-4, atol=1e-4)
    assert report.calls()[""]["stock_reasons"] == {"what its class computes was replaced after the injection": 1}
    monkeypatch.undo()
    assert torch.equal(run(model), expected)


def test_a_forward_replaced_before_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = LTXVideoTransformer3DModel.forward
    monkeypatch.setattr(
        LTXVideoTransformer3DModel, "forward", lambda self, *args, **kwargs: stock(self, *args, **kwargs)
    )
    assert not any(site.op == "norm_modulate" for site in plan(tiny_ltx()).patched)


def test_errors_are_those_of_torch() -> None:
    module, arguments = build("AdaLayerNormZeroSingle")
    bad = (random(2, 9, D + 1), arguments[1])
    with pytest.raises(RuntimeError) as expected:
        module(*bad)
    inject_optimized_kernels(module)
    with pytest.raises(RuntimeError) as actual:
        module(*bad)
    assert str(actual.value) == str(expected.value)
    with pytest.raises(TypeError, match="unexpected keyword argument 'speed'"):
        module(*arguments, speed=2)


def test_strict_raises_for_a_hook() -> None:
    model = tiny_ltx()
    inject_optimized_kernels(model, strict=True)
    model.norm_out.register_forward_hook(lambda *call: None)
    with pytest.raises(StrictModeError, match="norm_out has a hook"):
        run(model)


def test_config_that_leaves_the_norm_alone_is_obeyed() -> None:
    model = tiny_ltx()
    for config in ({"norm_out": None}, {"norm_modulate": None}):
        report = plan(model, config=config)
        assert not any(site.op == "norm_modulate" for site in report.patched)
        assert any("config" in site.reason for site in report.skipped if site.path == "")
    assert any(site.op == "norm_modulate" for site in plan(model, config={"transformer_blocks.0.*": None}).patched)


def test_norms_with_weights_pass_without_a_word() -> None:
    affine = CogVideoXLayerNormZero(D, D, elementwise_affine=True)
    report = inject_optimized_kernels(affine)
    assert [site.op for site in report.patched] == ["layer_norm"]


# --- what is found in a source -----------------------------------------------------------------------------


class Forwards:
    def pair(self, x, scale, shift):  # type: ignore[no-untyped-def]
        y = self.norm(x)
        y = y * (1 + scale) + shift
        return y

    def turned(self, x, scale, shift):  # type: ignore[no-untyped-def]
        y = self.norm(x)
        y = (1 + scale[:, None]) * y + shift.unsqueeze(1)
        return y

    def expression(self, x, scale, shift):  # type: ignore[no-untyped-def]
        return x + self.norm(x + 1) * (1 + scale)[:, None] + shift[:, None]

    def wide(self, x, scale, shift):  # type: ignore[no-untyped-def]
        x = (self.norm(x.float()) * (1 + scale) + shift).type_as(x)
        return x

    def wide_like_another(self, x, y, scale, shift):  # type: ignore[no-untyped-def]
        return (self.norm(x.float()) * (1 + scale) + shift).type_as(y)

    def wide_and_not(self, x, scale, shift):  # type: ignore[no-untyped-def]
        x = (self.norm(x.float()) * (1 + scale) + shift).type_as(x)
        x = self.norm(x) * (1 + scale) + shift
        return x

    def in_a_branch(self, x, scale, shift):  # type: ignore[no-untyped-def]
        if scale is not None:
            x = self.norm(x) * (1 + scale) + shift
        return x

    def kept(self, x, scale, shift):  # type: ignore[no-untyped-def]
        y = self.norm(x)
        z = y * (1 + scale) + shift
        return y + z

    def of_itself(self, x, scale, shift):  # type: ignore[no-untyped-def]
        y = self.norm(x)
        y = y * (1 + scale) + y
        return y

    def other_offset(self, x, scale, shift):  # type: ignore[no-untyped-def]
        return self.norm(x) * (2 + scale) + shift

    def boolean(self, x, scale, shift):  # type: ignore[no-untyped-def]
        return self.norm(x) * (True + scale) + shift

    def side_effect(self, x, scale, shift):  # type: ignore[no-untyped-def]
        return self.norm(x) * (1 + scale) + shift.add_(1)

    def two_arguments(self, x, scale, shift):  # type: ignore[no-untyped-def]
        return self.norm(x, scale) * (1 + scale) + shift

    def perhaps(self, x, scale, shift):  # type: ignore[no-untyped-def]
        return x if scale is None else self.norm(x) * (1 + scale) + shift


@pytest.mark.parametrize("name", ["pair", "turned", "wide", "wide_like_another"])
def test_found(name: str) -> None:
    recipe = modulated_norms(getattr(Forwards, name))
    assert recipe is not None and recipe.norms == ("norm",) and recipe.wide == (name == "wide")


@pytest.mark.parametrize(
    "name",
    ["expression", "in_a_branch", "kept", "of_itself", "other_offset", "boolean", "side_effect", "two_arguments",
     "perhaps", "wide_and_not"],
)  # fmt: skip
def test_not_found(name: str) -> None:
    assert modulated_norms(getattr(Forwards, name)) is None


def test_the_function_in_the_class_stays_as_it_is() -> None:
    code = AdaLayerNormZero.forward.__code__
    module, arguments = build("AdaLayerNormZero")
    inject_optimized_kernels(module)
    call(module, arguments)
    assert AdaLayerNormZero.forward.__code__ is code
    other = AdaLayerNormZero(D)
    assert "forward" not in other.__dict__


def test_a_second_norm_of_the_same_result_is_left_alone() -> None:
    """Stable Diffusion 3.5 modulates one norm twice."""
    assert inner_recipe_for(SD35AdaLayerNormZeroX) is None
    assert inner_recipe_for(attention_module.BasicTransformerBlock) is None


# --- what a proof, a graph and a pipeline need ---------------------------------------------------------------


@pytest.mark.parametrize("affine", [True, False])
def test_weights_that_are_plain_attributes_are_weights(affine: bool) -> None:
    """Sharding leaves them so."""
    module, arguments = build("AdaLayerNormContinuous")
    for name in ("weight", "bias"):
        del module.norm._parameters[name]
        setattr(module.norm, name, random(D) if affine else None)
    stock = call(module, arguments)
    for options in ({}, {"verify": False}):
        report = inject_optimized_kernels(module, **options)
        assert not affine or not any(site.op == "norm_modulate" for site in report.patched)
        torch.testing.assert_close(call(module, arguments), stock, rtol=1e-4, atol=1e-5)
        report.restore()


@pytest.mark.parametrize("name", ["AdaLayerNormZero", "AdaLayerNormZero in float32"])
def test_a_norm_that_computes_something_else_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, arguments = build(name)
    stock, cls = call(module, arguments), type(module.norm)
    report = inject_optimized_kernels(module)
    original = cls.forward

    def doubled(self: nn.Module, x: Tensor) -> Tensor:
        return 2 * original(self, x)

    monkeypatch.setattr(cls, "forward", doubled)
    other = call(module, arguments)
    reasons = report.calls()[""]["stock_reasons"]
    assert reasons == {"what a class inside of it computes was replaced after the injection": 1}
    assert not torch.equal(other[0], stock[0])
    report.restore()
    assert all(map(torch.equal, call(module, arguments), other))
    report = inject_optimized_kernels(module)
    (site,) = (site for site in report.failed if site.op == "norm_modulate")
    assert "away from what it is known to compute" in site.reason
    assert all(map(torch.equal, call(module, arguments), other))


def test_blocks_of_a_class_share_a_graph() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=32,
        ffn_dim=32, num_layers=10, cross_attn_norm=True,
    ).eval().requires_grad_(False)  # fmt: skip
    arguments = random(1, 4, 1, 4, 4), torch.tensor([5]), random(1, 3, 16)
    with torch.no_grad():
        stock = model(*arguments)[0]
        inject_optimized_kernels(model)
        model.compile_repeated_blocks(backend="eager", fullgraph=True)
        torch.testing.assert_close(model(*arguments)[0], stock, rtol=1e-4, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_forward_replaced_in_the_class_is_heard_by_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    module, arguments = build("AdaLayerNormZeroSingle")
    inject_optimized_kernels(module)
    stock = AdaLayerNormZeroSingle.forward

    def shifted(self: nn.Module, x: Tensor, emb: Tensor) -> tuple[Tensor, ...]:
        y, gate = stock(self, x, emb)
        return y + 100, gate

    monkeypatch.setattr(AdaLayerNormZeroSingle, "forward", shifted)
    with torch.no_grad():
        compiled = torch.compile(module, backend="eager")(*arguments)
        torch.testing.assert_close(compiled[0], module(*arguments)[0])
    assert compiled[0].mean() > 90


def test_half_precision_models_train_fused_where_they_modulate_in_float32() -> None:
    module, arguments = build("WanTransformerBlock")
    module.bfloat16().requires_grad_(True)
    report = inject_optimized_kernels(module, strict=True)
    x, text, modulation, rotary = arguments
    module(x.bfloat16(), text.bfloat16(), modulation, rotary).sum().backward()
    assert report.calls()[""]["fused"] == 1


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("wide", [True, False])
def test_modulations_in_half_precision_beside_float32(numerics: str, wide: bool) -> None:
    """As models are that were cast as a whole, and such as keep some parameters in float32."""
    recipe = inner_recipe_for(WanTransformerBlock if wide else AdaLayerNormZero)
    assert recipe is not None
    recipe = recipe.for_numerics(numerics)
    norm = nn.LayerNorm(D, elementwise_affine=False)
    dtypes = [torch.bfloat16, torch.float32]
    for x_dtype, dtype in ((one, other) for one in dtypes for other in dtypes):
        inputs = random(2, 9, D).to(x_dtype), random(2, 1, D).to(dtype), random(2, 1, D, seed=1).to(dtype)
        stock, fused = recipe.stock(norm, inputs), recipe.fused(norm, inputs, None)
        exact = recipe.reference(norm, tuple(part.double() for part in inputs))
        assert fused.dtype == stock.dtype
        if numerics == "exact":
            assert torch.equal(fused, stock)
        assert relative_error(fused, exact) <= 1.05 * relative_error(stock, exact) + 1e-6
