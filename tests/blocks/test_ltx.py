"""LTX-Video by rules: as accurate as the stock block, and never in the way of what sits on it or inside it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import accelerate
import accelerate.hooks
import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from diffusers import FirstBlockCacheConfig, PyramidAttentionBroadcastConfig
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models import attention_dispatch
from diffusers.models.transformers import transformer_ltx
from diffusers.models.transformers.transformer_ltx import (
    LTXVideoAttnProcessor,
    LTXVideoRotaryPosEmbed,
    LTXVideoTransformerBlock,
)
from torch import Tensor, nn

from diffkern import inject_optimized_kernels, restore
from diffkern.bench.measure import relative_error
from diffkern.cache import memory
from diffkern.cache.rotary import by_axis
from tests.injection.models import ltx_inputs, randomise, run, tiny_ltx

DIM, TEXT = 32, 16
#: The fused calls in one of the block, by where they are.
SITES = {"": 4, "attn1": 1, "attn2": 1}


def block(dtype: torch.dtype = torch.float32, **options: Any) -> LTXVideoTransformerBlock:
    """A block of four heads of eight channels."""
    sizes = {"num_attention_heads": 4, "attention_head_dim": 8, "cross_attention_dim": TEXT}
    layer = LTXVideoTransformerBlock(DIM, **sizes, **options)
    randomise(layer)
    return layer.eval().requires_grad_(False).to(dtype)


def inputs(
    dtype: torch.dtype = torch.float32,
    batch: int = 2,
    tokens: int = 45,
    modulation: str = "sample",
    masked: bool = True,
    rotary: bool = True,
) -> dict[str, Any]:
    """What the denoiser gives its blocks; ``tokens`` a multiple of nine."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    x = random(batch, tokens, DIM)
    mask = torch.zeros(batch, 1, 7, dtype=dtype)
    mask[0, :, 4:] = -10000.0
    return {
        "hidden_states": x,
        "encoder_hidden_states": random(batch, 7, TEXT),
        "temb": random(batch, tokens if modulation == "token" else 1, 6 * DIM),
        "image_rotary_emb": LTXVideoRotaryPosEmbed(DIM)(x, 3, 3, tokens // 9, (0.3, 32.0, 32.0)) if rotary else None,
        "encoder_attention_mask": mask if masked else None,
    }


def in_float64(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double()
    return tuple(map(in_float64, value)) if isinstance(value, tuple) else value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"batch": 1, "tokens": 81},
        {"modulation": "token"},
        {"modulation": "token", "masked": False, "batch": 3},
        {"rotary": False},
    ],
    ids=str,
)
def test_as_close_to_float64_as_the_stock_block(dtype: torch.dtype, kind: dict[str, Any]) -> None:
    layer, arguments = block(dtype), inputs(dtype, **kind)
    reference = block().to(dtype).double()(**{key: in_float64(value) for key, value in arguments.items()})
    stock = layer(**arguments)
    report = inject_optimized_kernels(layer)
    fused = layer(**arguments)
    assert report.patched[0].how == "source"
    assert {path: count["fused"] for path, count in report.calls().items() if count["fused"]} == SITES
    assert not any(count["stock"] for count in report.calls().values())
    assert fused.dtype == dtype and fused.shape == stock.shape
    slack = 1e-6 if dtype == torch.float32 else 0
    assert relative_error(fused, reference) <= 1.05 * relative_error(stock, reference) + slack
    assert report.restore() == len(report.patched)
    assert torch.equal(layer(**arguments), stock)


def test_positional_arguments_and_the_errors_of_the_stock_block() -> None:
    layer, arguments = block(), inputs()
    stock = layer(**arguments)
    bad = {**arguments, "temb": arguments["temb"][:1]}
    with pytest.raises(RuntimeError) as expected:
        layer(**bad)
    inject_optimized_kernels(layer)
    torch.testing.assert_close(layer(*arguments.values()), stock, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError) as actual:
        layer(**bad)
    assert str(actual.value) == str(expected.value)
    with pytest.raises(TypeError, match="unexpected keyword argument 'speed'"):
        layer(**arguments, speed=2)


@pytest.mark.parametrize(
    "options",
    [{"elementwise_affine": True}, {"activation_fn": "gelu"}, {"activation_fn": "geglu"}, {"attention_bias": False}],
    ids=str,
)
def test_other_configurations_of_the_block(options: dict[str, Any]) -> None:
    layer, arguments = block(**options), inputs()
    stock = layer(**arguments)
    report = inject_optimized_kernels(layer)
    torch.testing.assert_close(layer(**arguments), stock, rtol=1e-4, atol=1e-5)
    assert report.calls()[""]["fused"] == SITES[""] and not report.calls()[""]["stock"]


# --- what sits on the children -----------------------------------------------------------------------------


class DoubleAccelerate(accelerate.hooks.ModelHook):
    def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
        return output * 2


class DoubleDiffusers(ModelHook):
    def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
        return output * 2


def replace_forward(module: nn.Module) -> None:
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs) * 2  # type: ignore[method-assign]


WATCHERS: dict[str, Callable[[nn.Module], object]] = {
    "torch": lambda module: module.register_forward_hook(lambda module, args, output: output * 2),
    "torch-pre": lambda module: module.register_forward_pre_hook(
        lambda module, args, kwargs: (
            tuple(x.flip(-1) for x in args),
            {key: value.flip(-1) if key == "hidden_states" else value for key, value in kwargs.items()},
        ),
        with_kwargs=True,
    ),
    "accelerate": lambda module: accelerate.hooks.add_hook_to_module(module, DoubleAccelerate()),
    "diffusers": lambda module: HookRegistry.check_if_exists_or_initialize(module).register_hook(
        DoubleDiffusers(), "double"
    ),
    "replaced": replace_forward,
}

#: Children, and whose sites run as they are written once a child is watched.
CHILDREN = {
    "norm1": "",
    "norm2": "",
    "attn1": None,
    "attn2": None,
    "attn1.norm_q": "attn1",
    "attn2.norm_k": "attn2",
    "ff": None,
    "ff.net.0": None,
    "ff.net.0.proj": None,
    "ff.net.2": None,
    "attn1.to_v": "attn1",
    "attn2.to_out.0": None,
}


@pytest.mark.parametrize("watcher", WATCHERS)
@pytest.mark.parametrize("child", CHILDREN)
@pytest.mark.parametrize("inject_first", [True, False])
def test_whoever_watches_or_replaces_a_child_is_heard(watcher: str, child: str, inject_first: bool) -> None:
    watched, layer, arguments = block(), block(), inputs()
    unwatched = layer(**arguments)
    WATCHERS[watcher](watched.get_submodule(child))
    stock = watched(**arguments)
    assert not torch.allclose(stock, unwatched, rtol=1e-3, atol=1e-3), "the effect would not show"
    report = inject_optimized_kernels(layer) if inject_first else None
    WATCHERS[watcher](layer.get_submodule(child))
    report = report or inject_optimized_kernels(layer)
    torch.testing.assert_close(layer(**arguments), stock, rtol=1e-4, atol=1e-5)
    assert {path for path, count in report.calls().items() if count["stock"]} == ({CHILDREN[child]} - {None})


def test_global_hooks_see_every_module() -> None:
    layer, arguments, seen = block(), inputs(), []
    inject_optimized_kernels(layer)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module))
    try:
        layer(**arguments)
    finally:
        handle.remove()
    assert {layer.norm1, layer.attn1, layer.attn2.norm_k, layer.ff.net[0]} <= set(seen)


class Halved(LTXVideoAttnProcessor):
    """Another processor: its attention counts half."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().__call__(*args, **kwargs) / 2


@pytest.mark.parametrize("child", ["attn1", "attn2"])
@pytest.mark.parametrize("inject_first", [True, False])
def test_a_replaced_processor_is_used(child: str, inject_first: bool) -> None:
    other, layer, arguments = block(), block(), inputs()
    other.get_submodule(child).set_processor(Halved())
    report = inject_optimized_kernels(layer) if inject_first else None
    layer.get_submodule(child).set_processor(Halved())
    report = report or inject_optimized_kernels(layer)
    torch.testing.assert_close(layer(**arguments), other(**arguments), rtol=1e-4, atol=1e-5)


def test_the_attention_backend_of_the_processor_is_used() -> None:
    layer, arguments = block(), inputs()
    inject_optimized_kernels(layer)
    for attention in (layer.attn1, layer.attn2):
        attention.processor._attention_backend = "no such backend"
    with pytest.raises(ValueError, match="no such backend"):
        layer(**arguments)


@pytest.mark.parametrize(
    "where", ["torch", "the module of the processor", "the registry", "the context", "the question"]
)
def test_attention_of_somebody_else_is_called_wherever_it_was_put(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registry, calls = attention_dispatch._AttentionBackendRegistry, []
    layer, arguments = block(), inputs()
    with torch.no_grad():
        expected = layer(**arguments)
    report = inject_optimized_kernels(layer)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(kwargs)
            return function(*args, **kwargs)

        return call

    backends, stock = dict(registry._backends), attention_dispatch.dispatch_attention_fn
    with monkeypatch.context() as within, torch.no_grad():
        if where == "torch":
            within.setattr(F, "scaled_dot_product_attention", counted(F.scaled_dot_product_attention))
        elif where == "the processor's module":
            within.setattr(transformer_ltx, "dispatch_attention_fn", counted(stock))
        elif where == "the registry":
            native = attention_dispatch.AttentionBackendName.NATIVE
            within.setattr(registry, "_backends", {**backends, native: counted(backends[native])})
        elif where == "the question":
            math = registry._backends[attention_dispatch.AttentionBackendName._NATIVE_MATH]
            answer = attention_dispatch.AttentionBackendName.NATIVE, counted(math)
            within.setattr(registry, "get_active_backend", lambda: answer)
        else:
            math = attention_dispatch.AttentionBackendName._NATIVE_MATH
            within.setattr(registry, "_backends", {**backends, math: counted(backends[math])})
            within.setattr(registry, "_active_backend", math)
        actual = layer(**arguments)
    assert len(calls) == 2 and not any(count["stock"] for count in report.calls().values())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inject_first", [True, False])
@pytest.mark.parametrize("target", ["to_q", "to_v", "to_k", "to_out.0", "net.0.proj", "net.2"])
def test_lora_on_any_linear_has_its_effect_in_both_orders(target: str, inject_first: bool) -> None:
    peft = pytest.importorskip("peft")

    def adapt(model: nn.Module) -> None:
        torch.manual_seed(7)
        model.add_adapter(peft.LoraConfig(r=2, target_modules=[target], init_lora_weights="gaussian"))
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)

    adapted, model = tiny_ltx(), tiny_ltx()
    plain = run(model)
    adapt(adapted)
    expected = run(adapted)
    assert not torch.allclose(expected, plain, rtol=1e-2, atol=1e-2), "the effect would not show"
    report = inject_optimized_kernels(model) if inject_first else None
    adapt(model)
    report = report or inject_optimized_kernels(model)
    torch.testing.assert_close(run(model), expected, rtol=1e-4, atol=1e-5)
    assert not report.calls()["transformer_blocks.0"]["stock"]
    model.disable_adapters()
    torch.testing.assert_close(run(model), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("path", ["attn1.to_q", "attn2.to_out.0", "ff.net.0.proj", "ff.net.2"])
def test_a_tensor_that_hides_a_parameter_is_what_is_computed_with(path: str, name: str) -> None:
    stock, injected = block(), block()
    inject_optimized_kernels(injected)
    with torch.no_grad():
        injected(**inputs())
        for model in (stock, injected):
            layer = model.get_submodule(path)
            layer.__dict__[name] = 2 * layer._parameters[name]  # type: ignore[operator]
        for _ in range(2):
            torch.testing.assert_close(injected(**inputs()), stock(**inputs()), rtol=1e-4, atol=1e-4)


def test_a_quantised_linear_layer_is_called_and_not_read() -> None:
    class Quantised(nn.Linear):
        """Stores its weight scaled to integers, as quantisers do; read as it is, it gives something else."""

        def forward(self, input: Tensor) -> Tensor:
            return nn.functional.linear(input, self.weight.to(input.dtype) / 100, self.bias)

    def quantise(layer: nn.Module) -> nn.Module:
        for parent in (layer.attn1, layer.attn2, layer.ff.net[0]):
            for child in parent.children():
                if type(child) is nn.Linear:
                    child.__class__ = Quantised
                    child.weight = nn.Parameter((child.weight * 100).round().to(torch.int8), requires_grad=False)
        return layer

    stock, layer, arguments = quantise(block()), quantise(block()), inputs()
    report = inject_optimized_kernels(layer)
    torch.testing.assert_close(layer(**arguments), stock(**arguments), rtol=1e-4, atol=1e-5)
    assert not report.calls()[""]["stock"]


@pytest.mark.parametrize("inject_first", [True, False])
@pytest.mark.parametrize("cache", ["first block", "pyramid attention"])
def test_caches_skip_the_same_as_without_injection(cache: str, inject_first: bool) -> None:
    """First-block caching wraps the blocks themselves, pyramid attention broadcast the attentions inside."""
    results, counts = [], []

    def enable(model: Any) -> None:
        if cache == "first block":
            model.enable_cache(FirstBlockCacheConfig(threshold=0.5))
        else:
            ranges = {"spatial_attention_block_skip_range": 2, "cross_attention_block_skip_range": 3}
            model.enable_cache(PyramidAttentionBroadcastConfig(**ranges, current_timestep_callback=lambda: 500))

    for inject in (False, True):
        model = tiny_ltx(layers=3)
        calls: list[nn.Module] = []
        model.transformer_blocks[2].ff.net[2].register_forward_hook(lambda *_, calls=calls: calls.append(1))
        model.transformer_blocks[1].attn1.to_v.register_forward_hook(lambda *_, calls=calls: calls.append(2))
        if inject and inject_first:
            report = inject_optimized_kernels(model)
        enable(model)
        if inject and not inject_first:
            report = inject_optimized_kernels(model)
        with model.cache_context("cond"):
            results.append([run(model, seed=seed) for seed in (1, 1, 2, 2)])
        counts.append(calls)
    assert counts[0] == counts[1] and 0 < len(calls) < 8, "nothing was skipped"
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert not report.calls()["transformer_blocks.0"]["stock"]


# --- grad, autocast, compile -------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [True, False])
def test_training_gives_the_stock_gradients(checkpointing: bool) -> None:
    gradients = []
    for inject in (False, True):
        model = tiny_ltx().requires_grad_(True).train()
        if checkpointing:
            model.enable_gradient_checkpointing()
        if inject:
            report = inject_optimized_kernels(model)
        model(**ltx_inputs(batch=2))[0].square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert report.calls()["transformer_blocks.0"]["fused"] > 0
    for name, expected in gradients[0].items():
        assert expected is not None and gradients[1][name] is not None, name
        error = (gradients[1][name] - expected).norm() / expected.norm().clamp_min(1e-12)
        assert error < 1e-4, (name, error)


def test_autocast_runs_stock() -> None:
    layer, arguments = block(), inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stock = layer(**arguments)
        inject_optimized_kernels(layer)
        assert torch.equal(layer(**arguments), stock)


@pytest.mark.parametrize("child", ["norm1", "attn1", "attn2.norm_q", "ff"])
def test_a_hook_on_a_child_is_heard_in_the_compiled_block(child: str) -> None:
    torch._dynamo.reset()
    layer, watched, arguments = block(), block(), inputs()
    for module in (layer, watched):
        module.get_submodule(child).register_forward_hook(lambda module, args, output: output * 2)
    inject_optimized_kernels(layer)
    with torch.no_grad():
        compiled = torch.compile(layer, backend="eager", fullgraph=True)(**arguments)
        torch.testing.assert_close(compiled, watched(**arguments), rtol=1e-4, atol=1e-5)


# --- the way in and back -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "modulation"),
    [pytest.param(torch.float32, "sample", marks=pytest.mark.exhaustive), (torch.bfloat16, "token")],
)
def test_exact_is_fused_and_bit_identical(dtype: torch.dtype, modulation: str) -> None:
    layer = block(dtype)
    report = inject_optimized_kernels(layer, numerics="exact")
    for masked in (True, False):
        arguments = inputs(dtype, batch=3, tokens=99, modulation=modulation, masked=masked)
        assert torch.equal(layer(**arguments), type(layer).forward(layer, **arguments))
    assert report.calls()[""] == {"fused": 8, "stock": 0, "stock_reasons": {}, "stock_pieces": {}}


def test_exact_keeps_the_whole_model_bit_for_bit() -> None:
    model, arguments = tiny_ltx(layers=3).to(torch.bfloat16), ltx_inputs(batch=2, dtype=torch.bfloat16)
    stock = _denoise(model, arguments)
    report = inject_optimized_kernels(model, numerics="exact")
    assert all(report.source(f"transformer_blocks.{index}") for index in range(3))
    for _ in range(2):
        assert torch.equal(_denoise(model, arguments), stock)


def test_first_use_in_another_dtype_is_proven_then() -> None:
    model = tiny_ltx()
    report = inject_optimized_kernels(model)
    model.to(torch.bfloat16)
    run(model, dtype=torch.bfloat16)
    assert report.calls()["transformer_blocks.0"] == {"fused": 4, "stock": 0, "stock_reasons": {}, "stock_pieces": {}}


def test_deep_copies_and_pickles() -> None:
    layer, arguments = block(), inputs()
    stock = layer(**arguments)
    inject_optimized_kernels(layer)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.scale_shift_table.zero_()
    plain = block()
    with torch.no_grad():
        plain.scale_shift_table.zero_()
    torch.testing.assert_close(twin(**arguments), plain(**arguments), rtol=1e-4, atol=1e-5)
    loaded = pickle.loads(pickle.dumps(layer))
    assert torch.equal(loaded(**arguments), stock)
    assert restore(twin) == restore(layer) == 9
    assert torch.equal(layer(**arguments), stock)


# --- from block to block, and the tables of a run ----------------------------------------------------------


def _denoise(model: nn.Module, arguments: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(**arguments)[0]
    return result


@pytest.mark.parametrize("patched", [LTXVideoAttnProcessor, LTXVideoTransformerBlock])
def test_a_class_that_is_patched_afterwards_is_heard(patched: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    layer, arguments, name = block(), inputs(), "__call__" if patched is LTXVideoAttnProcessor else "forward"
    inject_optimized_kernels(layer)
    stock = getattr(patched, name)
    monkeypatch.setattr(patched, name, lambda self, *args, **kwargs: stock(self, *args, **kwargs) / 2)
    torch.testing.assert_close(layer(**arguments), block()(**arguments), rtol=1e-4, atol=1e-5)


def test_a_class_that_is_patched_afterwards_is_traced_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    stack, arguments = nn.Sequential(block()), inputs()
    inject_optimized_kernels(stack)
    stock = LTXVideoAttnProcessor.__call__
    monkeypatch.setattr(
        LTXVideoAttnProcessor, "__call__", lambda self, *args, **kwargs: stock(self, *args, **kwargs) / 2
    )
    torch._dynamo.reset()
    with torch.no_grad():
        actual = torch.compile(lambda: stack[0](**arguments), backend="eager", fullgraph=True)()
        torch.testing.assert_close(actual, block()(**arguments), rtol=1e-4, atol=1e-5)


def test_a_traced_block_takes_other_sizes() -> None:
    layer, names = block(), ("hidden_states", "encoder_hidden_states", "temb")
    inject_optimized_kernels(layer)
    small, large = inputs(batch=1, tokens=9), inputs(batch=2, tokens=45)
    with torch.no_grad():
        layer(**inputs(rotary=False, masked=False))
        traced = torch.jit.trace(layer, tuple(small[name] for name in names), check_trace=False)
        given = [large[name] for name in names]
        torch.testing.assert_close(traced(*given), block()(*given), rtol=1e-4, atol=1e-5)


def test_nothing_is_left_in_a_block_that_was_restored() -> None:
    model = tiny_ltx(layers=3)
    for layer in model.transformer_blocks:
        accelerate.hooks.add_hook_to_module(layer, accelerate.hooks.ModelHook())
    report = inject_optimized_kernels(model)
    for layer in model.transformer_blocks:
        accelerate.hooks.remove_hook_from_module(layer)
    for _ in range(2):
        _denoise(model, ltx_inputs())
    restore(model.transformer_blocks[1])
    _denoise(model, ltx_inputs())
    report.restore()
    assert not any(memory(layer) for layer in model.transformer_blocks)


def test_rotary_tables_are_computed_once_and_read_by_axis() -> None:
    model, arguments = tiny_ltx(), ltx_inputs(batch=2, frames=3)
    arguments["rope_interpolation_scale"] = (0.3, 32.0, 32.0)
    stock = model.rope(arguments["hidden_states"], 3, 4, 4, (0.3, 32.0, 32.0))
    report = inject_optimized_kernels(model)
    assert {site.op for site in report.patched if site.path.endswith("rope")} == {"ltx_rope"}
    tables = model.rope(arguments["hidden_states"], 3, 4, 4, (0.3, 32.0, 32.0))
    assert all(torch.equal(own, other) for own, other in zip(tables, stock, strict=True))
    assert model.rope(torch.zeros(2, 1, 1), 3, 4, 4, (0.3, 32.0, 32.0)) is tables
    axes = by_axis(tables)
    assert axes is not None and (axes["grid"], [len(axis) for axis in axes["cos"]]) == ((3, 4, 4), [3, 4, 4])
    for changed in ((2, 4, 4, (0.3, 32.0, 32.0)), (3, 4, 4, (0.2, 32.0, 32.0)), (3, 4, 4, None)):
        fresh = model.rope(arguments["hidden_states"], *changed)
        expected = LTXVideoRotaryPosEmbed.forward(model.rope, arguments["hidden_states"], *changed)
        assert all(torch.equal(own, other) for own, other in zip(fresh, expected, strict=True))
    kept = _denoise(model, arguments)
    report.restore()
    torch.testing.assert_close(kept, _denoise(model, arguments), rtol=1e-4, atol=1e-5)


def test_tables_of_other_samples_than_are_rotated_do_as_in_stock() -> None:
    model, stock, given = tiny_ltx(1), tiny_ltx(1).transformer_blocks[0].attn1, ltx_inputs(batch=2, frames=3)
    inject_optimized_kernels(model)
    attention = model.transformer_blocks[0].attn1
    with torch.no_grad():
        model(**given)
        tables = model.rope(given["hidden_states"], 3, 4, 4)
        assert by_axis(tables) is not None
        for _ in range(3):
            for x in (torch.randn(2, 48, DIM), torch.randn(1, 48, DIM)):
                torch.testing.assert_close(attention(x, image_rotary_emb=tables), stock(x, image_rotary_emb=tables))
            with pytest.raises(RuntimeError, match="size of tensor a"):
                attention(torch.randn(4, 48, DIM), image_rotary_emb=tables)
        one = model.rope(given["hidden_states"][:1], 3, 4, 4)
        assert by_axis(one, 3) is not None
        for x in torch.randn(3, 3, 48, DIM):
            torch.testing.assert_close(attention(x, image_rotary_emb=one), stock(x, image_rotary_emb=one))


def test_tables_that_somebody_wrote_into_are_neither_kept_nor_read_by_axis() -> None:
    model, x = tiny_ltx(), torch.zeros(1, 1, 1)
    inject_optimized_kernels(model)
    tables = model.rope(x, 2, 3, 3)
    assert by_axis(tables) is not None
    tables[0].zero_()
    assert by_axis(tables) is None
    fresh = model.rope(x, 2, 3, 3)
    assert fresh is not tables and fresh[0].any()


def test_coordinates_of_its_own_are_kept_as_long_as_they_are_the_same_tensor() -> None:
    model, x = tiny_ltx(), torch.zeros(2, 1, 1)
    inject_optimized_kernels(model)
    coords = torch.rand(2, 3, 18)
    tables = model.rope(x, video_coords=coords)
    expected = LTXVideoRotaryPosEmbed.forward(model.rope, x, video_coords=coords)
    assert all(torch.equal(own, other) for own, other in zip(tables, expected, strict=True))
    assert model.rope(x, video_coords=coords) is tables and by_axis(tables) is None
    assert model.rope(x, video_coords=coords.clone()) is not tables
    coords.mul_(2)
    assert not torch.equal(model.rope(x, video_coords=coords)[0], tables[0])


def test_grids_of_as_many_tokens_have_tables_of_their_own() -> None:
    """Also where the call of a site was recorded for the tables of another grid."""
    model, stock = tiny_ltx(), tiny_ltx()
    inject_optimized_kernels(model)
    inputs = ltx_inputs(batch=2, frames=3)
    for frames, height in ((3, 4), (3, 4), (3, 4), (4, 3), (4, 3), (4, 3), (3, 4)):
        given = {**inputs, "num_frames": frames, "height": height, "width": 4}
        torch.testing.assert_close(_denoise(model, given), _denoise(stock, given), rtol=1e-4, atol=1e-5)
