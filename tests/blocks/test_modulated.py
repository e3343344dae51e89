"""Modulated norms, gated residuals and gated units: found in the source of forwards, and one op each there."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch
from diffusers import LTXVideoTransformer3DModel
from diffusers.models.normalization import (
    AdaLayerNorm,
    AdaLayerNormContinuous,
    AdaLayerNormZero,
    AdaLayerNormZeroSingle,
    CogVideoXLayerNormZero,
)
from diffusers.models.transformers.sana_transformer import SanaTransformerBlock
from diffusers.models.transformers.transformer_flux import FluxTransformerBlock
from diffusers.models.transformers.transformer_flux2 import Flux2SingleTransformerBlock, Flux2TransformerBlock
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel, WanTransformerBlock
from torch import Tensor, nn

from diffkern import StrictModeError, inject_optimized_kernels, plan
from diffkern.rewrite import Rewriter, Rewritten
from diffkern.verify.measures import relative_error
from tests.injection.models import ltx_inputs, randomise, run, tiny_ltx
from tests.rewrite.modules import SIZE, block


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


D = 48
MODULATED = "return self.norm(x) * (1 + scale) + shift"
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

#: Fused sites of the forward itself, not of its children.
SITES = {"FluxTransformerBlock": 4, "Flux2TransformerBlock": 6, "Flux2SingleTransformerBlock": 2,
         "SanaTransformerBlock": 4, "WanTransformerBlock": 4,
         "WanTransformerBlock, a modulation for each token": 4}  # fmt: skip


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
    (site,) = (site for site in report.patched if site.how == "source" and site.path == path)
    return site


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_modules_of_diffusers_keep_the_contract(name: str, dtype: torch.dtype) -> None:
    module, arguments = build(name)
    module.to(dtype)
    rounded = tuple(part.to(dtype) if isinstance(part, Tensor) else part for part in arguments)
    stock, reference = call(module, arguments, dtype), call(copy.deepcopy(module).double(), rounded, torch.float64)
    report = inject_optimized_kernels(module)
    assert fused_site(report).how == "source"
    results = call(module, arguments, dtype)
    assert report.calls()[""]["fused"] == SITES.get(name, 1) and report.calls()[""]["stock"] == 0
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
    assert all(proof.bit_identical for proof in fused_site(report).measurements)
    assert all(map(torch.equal, call(module, arguments, dtype), stock))
    assert report.calls()[""]["fused"] >= 1


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
    pytest.importorskip("diffusers.models.transformers.transformer_ltx2", reason="this diffusers has no LTX-2")
    from tests.stateful.models import _ltx2

    found = Rewriter().rewrite(_ltx2())
    assert isinstance(found, Rewritten)
    norms = {path for site in found.sites for path in site.plan.modules.values()}
    assert norms == {("norm_out",), ("audio_norm_out",)}


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
    assert not any(site.how == "source" and site.path == "" for site in plan(tiny_ltx()).patched)


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
        assert not any(site.how == "source" and site.path == "" for site in report.patched)
        assert any("config" in site.reason for site in report.skipped if site.path == "")
    assert any(
        site.how == "source" and site.path == ""
        for site in plan(model, config={"transformer_blocks.0.*": None}).patched
    )


def test_norms_with_weights_are_served_as_well() -> None:
    affine = randomise(CogVideoXLayerNormZero(D, D, elementwise_affine=True))
    arguments = random(2, 9, D), random(2, 4, D), random(2, D)
    stock = call(affine, arguments)
    report = inject_optimized_kernels(affine)
    for fused, other in zip(call(affine, arguments), stock, strict=True):
        torch.testing.assert_close(fused, other, rtol=1e-4, atol=1e-5)
    assert report.calls()[""]["fused"] == 2 and report.calls()[""]["stock"] == 0


def test_the_function_in_the_class_stays_as_it_is() -> None:
    code = AdaLayerNormZero.forward.__code__
    module, arguments = build("AdaLayerNormZero")
    inject_optimized_kernels(module)
    call(module, arguments)
    assert AdaLayerNormZero.forward.__code__ is code
    other = AdaLayerNormZero(D)
    assert "forward" not in other.__dict__


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
    assert reasons == {"norm has a hook, or is another module than it was": 1}
    assert not torch.equal(other[0], stock[0])
    report.restore()
    assert all(map(torch.equal, call(module, arguments), other))
    inject_optimized_kernels(module)
    for result, expected in zip(call(module, arguments), other, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


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
    assert report.calls()[""]["fused"] == 4


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("wide", [True, False])
def test_modulations_in_half_precision_beside_float32(numerics: str, wide: bool) -> None:
    """As models are that were cast as a whole, and such as keep some parameters in float32."""
    body = "return (self.norm(x.float()) * (1 + scale) + shift).type_as(x)" if wide else MODULATED
    module = block("x, scale, shift", body)
    found = Rewriter(numerics).rewrite(module)
    assert isinstance(found, Rewritten)
    dtypes = [torch.bfloat16, torch.float32]
    for x_dtype, dtype in ((one, other) for one in dtypes for other in dtypes):
        inputs = random(2, 64, SIZE).to(x_dtype), random(2, 1, SIZE).to(dtype), random(2, 1, SIZE, seed=1).to(dtype)
        stock, fused = module(*inputs), found.function(module, *inputs)
        x, scale, shift = [part.double() for part in inputs]
        exact = nn.functional.layer_norm(x, (SIZE,), eps=1e-6) * (1 + scale) + shift
        assert fused.dtype == stock.dtype
        if numerics == "exact":
            assert torch.equal(fused, stock)
        assert relative_error(fused, exact) <= 1.05 * relative_error(stock, exact) + 1e-6
    assert found.sites[0].fused_calls == 4
