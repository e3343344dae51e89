"""Injection and hooks in every order: no hook is bypassed, no patch is lost, restore leaves nothing."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import accelerate
import accelerate.hooks
import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32, extract_model_from_parallel
from diffusers.hooks import HookRegistry, ModelHook, apply_group_offloading, apply_layerwise_casting
from diffusers.hooks.layerwise_casting import apply_layerwise_casting_hook
from torch import nn

from diffkern import KernelConfig, inject_optimized_kernels, restore
from tests.injection.models import all_fused, ltx_inputs, run, tiny_ltx


class AccelerateAddOne(accelerate.hooks.ModelHook):
    """Adds 1 to whatever the module returns, so that a bypassed hook shows."""

    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        return output + 1


class DiffusersDouble(ModelHook):
    """Doubles whatever the module returns."""

    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        return output * 2


class DiffusersReplace(ModelHook):
    """Wraps the forward itself, as the caches do."""

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.fn_ref.original_forward(*args, **kwargs) + 10


def add_accelerate(module: nn.Module) -> None:
    accelerate.hooks.add_hook_to_module(module, AccelerateAddOne())


def remove_accelerate(module: nn.Module) -> None:
    accelerate.hooks.remove_hook_from_module(module)


def add_double(module: nn.Module) -> None:
    HookRegistry.check_if_exists_or_initialize(module).register_hook(DiffusersDouble(), "double")


def remove_double(module: nn.Module) -> None:
    HookRegistry.check_if_exists_or_initialize(module).remove_hook("double")


def add_replace(module: nn.Module) -> None:
    HookRegistry.check_if_exists_or_initialize(module).register_hook(DiffusersReplace(), "replace")


def remove_replace(module: nn.Module) -> None:
    HookRegistry.check_if_exists_or_initialize(module).remove_hook("replace")


Step = Callable[[nn.Module], None]

HOOKS: dict[str, tuple[Step, Step, Callable[[torch.Tensor], torch.Tensor]]] = {
    "accelerate": (add_accelerate, remove_accelerate, lambda y: y + 1),
    "diffusers": (add_double, remove_double, lambda y: y * 2),
    "diffusers-new-forward": (add_replace, remove_replace, lambda y: y + 10),
}


def norm() -> nn.LayerNorm:
    layer = nn.LayerNorm(64)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-1, 2, 64))
        layer.bias.copy_(torch.linspace(1, -1, 64))
    return layer


X = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))


def fused_calls(report: Any) -> int:
    return sum(count["fused"] for count in report.calls().values())


def leftovers(layer: nn.Module) -> list[str]:
    """Instance attributes that a stock module without hooks does not have, the hooks' own registry excepted."""
    fresh = set(vars(nn.LayerNorm(4)))
    return sorted(set(vars(layer)) - fresh - {"_diffusers_hook"})


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("inject_first", [True, False])
@pytest.mark.parametrize("restore_first", [True, False])
def test_one_hook_in_every_order(name: str, inject_first: bool, restore_first: bool) -> None:
    add, remove, effect = HOOKS[name]
    layer = norm()
    stock = layer(X)
    if inject_first:
        report = inject_optimized_kernels(layer)
        add(layer)
    else:
        add(layer)
        report = inject_optimized_kernels(layer)
    assert len(report.patched) == 1
    torch.testing.assert_close(layer(X), effect(stock))
    assert fused_calls(report) == 1, "the patch is not reached under the hook"
    if restore_first:
        assert report.restore() == 1
        assert torch.equal(layer(X), effect(stock))
        assert fused_calls(report) == 1
        remove(layer)
    else:
        remove(layer)
        torch.testing.assert_close(layer(X), stock)
        assert fused_calls(report) == 2, "the patch was lost with the hook"
        assert report.restore() == 1
    assert torch.equal(layer(X), stock)
    assert "_diffkern" not in vars(layer)
    assert fused_calls(report) == (1 if restore_first else 2)
    # accelerate and diffusers themselves leave the bound class forward behind; diffkern leaves nothing more.
    forward = vars(layer).get("forward")
    assert forward is None or forward.__func__ is nn.LayerNorm.forward


# Outer hook off first works for all. Inner hook off first works within diffusers' own registry only, and
# there it drops the new_forward of the hook after it, patched or not.
PAIRS = [(a, b, "outer") for a in HOOKS for b in HOOKS if a != b] + [("diffusers-new-forward", "diffusers", "inner")]


@pytest.mark.parametrize(("first", "second", "off_first"), PAIRS)
@pytest.mark.parametrize("inject_at", [0, 1, 2])
def test_two_hooks_in_every_order(first: str, second: str, off_first: str, inject_at: int) -> None:
    layer = norm()
    stock = layer(X)
    steps = [HOOKS[first], HOOKS[second]]
    report = None
    expected = stock
    for index in range(3):
        if index == inject_at:
            report = inject_optimized_kernels(layer)
        if index < 2:
            steps[index][0](layer)
            expected = steps[index][2](expected)
    assert report is not None and len(report.patched) == 1
    torch.testing.assert_close(layer(X), expected)
    assert fused_calls(report) == 1
    removed, kept = (steps[1], steps[0]) if off_first == "outer" else (steps[0], steps[1])
    removed[1](layer)
    torch.testing.assert_close(layer(X), kept[2](stock))
    assert fused_calls(report) == 2
    assert restore(layer) == 1
    assert torch.equal(layer(X), kept[2](stock))
    kept[1](layer)
    assert torch.equal(layer(X), stock)
    assert fused_calls(report) == 2
    assert not [name for name in leftovers(layer) if name != "forward"]


def test_a_forward_replaced_by_someone_else_is_left_alone() -> None:
    layer = norm()
    layer.forward = lambda input: input  # type: ignore[method-assign,assignment]
    report = inject_optimized_kernels(layer)
    assert not report.patched and "its forward was replaced by" in report.skipped[0].reason
    assert torch.equal(layer(X), X)


@pytest.mark.parametrize("left", ["nothing", "the class's own"])
def test_a_patch_that_a_user_took_away_is_restored_in_the_report(left: str) -> None:
    layer = norm()
    stock, report = layer(X), inject_optimized_kernels(layer)
    fused = layer.forward
    layer.forward = lambda input: fused(input) + 1  # type: ignore[method-assign]
    torch.testing.assert_close(layer(X), stock + 1)
    assert report.active and fused_calls(report) == 1, "whether it calls the one before, nothing tells"
    del layer.forward
    if left != "nothing":
        layer.forward = MethodType(nn.LayerNorm.forward, layer)  # type: ignore[method-assign]
    assert torch.equal(layer(X), stock)
    assert not report.active and report.summary().startswith("restored: all 1 module of LayerNorm run stock again")
    again = inject_optimized_kernels(layer)
    torch.testing.assert_close(layer(X), stock)
    assert fused_calls(again) == 1 and again.active and report.restored and report.restore() == 0
    assert again.restore() == 1


def test_a_restored_hooked_module_keeps_no_reference_to_the_patch() -> None:
    layer = norm()
    report = inject_optimized_kernels(layer)
    add_accelerate(layer)
    add_double(layer)
    report.restore()
    seen, stack = set(), [vars(layer)["forward"], vars(layer)["_old_forward"], *layer._diffusers_hook._fn_refs]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        assert "diffkern" not in getattr(getattr(item, "__func__", item), "__module__", "")
        stack += [value for value in getattr(item, "__dict__", {}).values() if callable(value)]


@pytest.mark.parametrize("inject_first", [True, False])
def test_sequential_offload(inject_first: bool) -> None:
    """Weights are on the meta device between calls; the patch reads them only inside the hook."""
    stock = run(tiny_ltx())
    model = tiny_ltx()
    if inject_first:
        report = inject_optimized_kernels(model)
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        report = inject_optimized_kernels(model)
    assert len(report.patched) == 23 and not report.failed
    torch.testing.assert_close(run(model), stock, rtol=1e-4, atol=1e-5)
    # A norm with a hook of its own is called, and what stands around it runs as it is written.
    assert report.calls()["transformer_blocks.0"]["fused"] > 0
    assert report.restore() == 23
    assert torch.equal(run(model), stock)
    accelerate.hooks.remove_hook_from_submodules(model)
    assert torch.equal(run(model), stock)


@pytest.mark.parametrize("inject_first", [True, False])
@pytest.mark.parametrize("level", ["block_level", "leaf_level"])
def test_group_offload(inject_first: bool, level: str) -> None:
    stock = run(tiny_ltx())
    model = tiny_ltx()

    def offload() -> None:
        blocks = {"num_blocks_per_group": 1} if level == "block_level" else {}
        apply_group_offloading(
            model, onload_device=torch.device("cpu"), offload_device=torch.device("cpu"), offload_type=level, **blocks
        )

    if inject_first:
        report = inject_optimized_kernels(model)
        offload()
    else:
        offload()
        report = inject_optimized_kernels(model)
    torch.testing.assert_close(run(model), stock, rtol=1e-4, atol=1e-5)
    assert all_fused(report) or (level == "leaf_level" and report.calls()["transformer_blocks.0"]["fused"] > 0)
    assert report.restore() == 23
    assert torch.equal(run(model), stock)


@pytest.mark.parametrize("inject_first", [True, False])
def test_layerwise_casting_with_float8_norms(inject_first: bool) -> None:
    """Even norms stored in float8: the hook casts them, and nothing is ever computed in float8."""

    def cast(model: nn.Module) -> nn.Module:
        apply_layerwise_casting(
            model, torch.float8_e4m3fn, torch.bfloat16, skip_modules_pattern=(), skip_modules_classes=()
        )
        # That casts layers of matrices only; norms take the hook by hand.
        for module in model.modules():
            if isinstance(module, nn.RMSNorm):
                apply_layerwise_casting_hook(module, torch.float8_e4m3fn, torch.bfloat16, non_blocking=False)
        return model

    model = tiny_ltx().to(torch.bfloat16)
    if inject_first:
        report = inject_optimized_kernels(model)
        cast(model)
    else:
        cast(model)
        report = inject_optimized_kernels(model)
    norms = [module for module in model.modules() if isinstance(module, nn.RMSNorm)]
    assert len(norms) == 8 and all(norm.weight.dtype == torch.float8_e4m3fn for norm in norms)
    result = run(model, dtype=torch.bfloat16)
    calls = report.calls()
    assert all(calls[f"transformer_blocks.{i}.attn{j}.norm_q"]["fused"] for i in (0, 1) for j in (1, 2))
    stock = run(cast(tiny_ltx().to(torch.bfloat16)), dtype=torch.bfloat16)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result, stock, rtol=0.05, atol=0.05)
    assert len(report.patched) == 23
    report.restore()
    assert torch.equal(run(model, dtype=torch.bfloat16), stock)


def test_float8_weights_without_a_hook_go_to_stock() -> None:
    layer = norm().to(torch.bfloat16)
    report = inject_optimized_kernels(layer)
    layer.to(torch.float8_e4m3fn)
    with pytest.raises((RuntimeError, NotImplementedError)):
        layer(X.bfloat16())
    reasons = next(iter(report.calls().values()))["stock_reasons"]
    assert any("float8" in reason for reason in reasons)


def test_the_signature_stays_that_of_the_stock_forward() -> None:
    """Modular pipelines pass on what they find there."""
    model = tiny_ltx()
    signature = inspect.signature(model.forward)
    inject_optimized_kernels(model)
    assert inspect.signature(model.forward) == signature
    inject_optimized_kernels(model, cuda_graph=True)
    assert inspect.signature(model.forward) == signature == inspect.signature(copy.deepcopy(model).forward)


def test_accelerate_unwraps_a_model_to_its_patches() -> None:
    for cls in (nn.LayerNorm, type(tiny_ltx())):
        module = nn.LayerNorm(8) if cls is nn.LayerNorm else tiny_ltx()
        report = inject_optimized_kernels(module)
        signature = inspect.signature(module.forward)
        forward = module.forward
        module._original_forward = forward  # as Accelerator.prepare wraps a model for mixed precision
        module.forward = MethodType(convert_outputs_to_fp32(forward.__func__), module)
        assert inspect.signature(module.forward) == signature
        module = extract_model_from_parallel(module, keep_fp32_wrapper=False)
        before = report.calls()[""]["fused"]
        run(module) if cls is not nn.LayerNorm else module(torch.randn(3, 8))
        assert report.calls()[""]["fused"] == before + 1
        assert report.restore() == len(report.patched) and module.forward.__func__ is cls.forward


@pytest.mark.parametrize("norm", [nn.LayerNorm(64), nn.RMSNorm(64)], ids=lambda norm: type(norm).__name__)
def test_what_stands_over_the_weight_of_a_norm_is_its_weight(norm: nn.Module) -> None:
    """Python looks into the dictionary of a module before it asks for parameters, and so does the stock forward."""
    model, x = nn.ModuleDict({"norm": copy.deepcopy(norm)}).requires_grad_(False), torch.randn(4, 64)
    inject_optimized_kernels(model, config=KernelConfig(measure=False))
    model["norm"](x)
    model["norm"].__dict__["weight"] = torch.full((64,), 7.0)
    found = model["norm"](x)
    restore(model)
    torch.testing.assert_close(found, model["norm"](x), rtol=1e-4, atol=1e-5)


def test_what_stands_over_the_weight_of_a_norm_in_a_block_of_ltx_is_its_weight() -> None:
    model = tiny_ltx(1).requires_grad_(False)
    inputs = ltx_inputs(batch=2)
    inject_optimized_kernels(model, config=KernelConfig(measure=False))
    model(**inputs)
    norm = model.transformer_blocks[0].attn1.norm_q
    norm.__dict__["weight"] = torch.full_like(norm._parameters["weight"], 7.0)
    found = model(**inputs)[0]
    restore(model)
    torch.testing.assert_close(found, model(**inputs)[0], rtol=1e-4, atol=1e-5)
