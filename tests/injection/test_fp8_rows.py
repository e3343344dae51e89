"""Rows of fp8 that the op before a product writes: who has them written, and that nothing computed changes by it.

On the CPU ``"eager"`` computes the ops and multiplies the numbers behind fp8.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from diffkern import KernelConfig, inject_optimized_kernels
from diffkern.blocks import fp8
from diffkern.injection import fp8_fusion, planning
from diffkern.ops import activation_fp8
from diffkern.rewrite import rooms, site
from diffkern.verify.measures import relative_error
from tests.injection import test_fp8 as tests_of_models

EAGER = KernelConfig(
    {op: "eager" for op in ("linear_fp8", "norm_modulate", "gate_residual_norm_modulate", "glu")}, measure=False
)


class Block(nn.Module):
    """A modulated norm, and another one behind a residual; two layers read each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(64, elementwise_affine=False) for _ in range(2))
        self.to_q, self.to_k, self.up, self.gate = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        y = self.norm1(x) * (1 + scale) + shift
        x = x + scale * (self.to_q(y) + self.to_k(y))
        z = self.norm2(x) * (1 + scale) + shift
        return x + self.up(z) * self.gate(z)


@pytest.fixture(autouse=True)
def _small_layers_on_this_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_fusion, "LEAST_FEATURES", 32)
    monkeypatch.setattr(fp8_fusion, "LEAST_ROWS", 8)
    monkeypatch.setattr(planning, "fp8_unavailable_reason", lambda device: None)


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What wrote rows of inputs: "apart" for a kernel of its own, else the op."""
    seen: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any, **options: Any) -> Any:
            x = args[0] if args else options.get("x", options.get("value"))
            if x.shape[-2:] != (64, 64):  # a weight
                seen.append(name)
            return function(*args, **options)

        note.__name__ = function.__name__
        return note

    monkeypatch.setattr(fp8, "activation_fp8", noted("apart", fp8.activation_fp8))
    both = {op: noted(op, function) for op, function in site.WITH_ROWS.items()}
    monkeypatch.setattr(site, "WITH_ROWS", both)
    return seen


def model_and_inputs(rows: int = 32) -> tuple[Block, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = Block().to(torch.bfloat16).eval().requires_grad_(False)
    x, scale, shift = torch.randn(2, rows, 64), torch.randn(2, 1, 64), torch.randn(2, 1, 64)
    return model, (x.bfloat16(), scale.bfloat16(), shift.bfloat16())


def test_from_the_second_call_on_the_op_before_a_product_writes_its_rows(quantised: list[str]) -> None:
    model, inputs = model_and_inputs()
    report = inject_optimized_kernels(model, numerics="fp8", config=EAGER)
    with torch.no_grad():
        results = [model(*inputs) for _ in range(3)]
    ops = ["norm_modulate", "gate_residual_norm_modulate"]
    assert quantised == ["apart", "apart", *ops, *ops]
    assert all(torch.equal(results[0], y) for y in results[1:]), "to the bit"
    calls = report.calls()
    assert all(calls[name]["fused"] == 3 for name in ("to_q", "to_k", "up", "gate"))
    report.restore()
    assert not fp8._shared


class GatedFeedForward(nn.Module):
    """Two projections, one of which gates the other, and what projects back."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


def test_a_gated_unit_writes_the_rows_of_the_layer_behind_it(quantised: list[str]) -> None:
    torch.manual_seed(0)
    model = GatedFeedForward().to(torch.bfloat16).eval().requires_grad_(False)
    x, stock = torch.randn(2, 32, 64).bfloat16(), copy.deepcopy(model)
    report = inject_optimized_kernels(model, numerics="fp8", config=EAGER)
    with torch.no_grad():
        results = [model(x) for _ in range(3)]
    # The input is read by two layers and made by none of the model.
    assert quantised == ["apart", "apart", "apart", "glu", "apart", "glu"]
    assert all(torch.equal(results[0], y) for y in results[1:]), "to the bit"
    assert relative_error(results[0], stock(x).double()) < 0.1
    assert all(report.calls()[name]["fused"] == 3 for name in ("w1", "w2", "w3"))
    model.w2.weight.requires_grad_()  # a layer that takes no fp8 any more reads the numbers themselves
    assert relative_error(model(x).detach(), stock(x).double()) < 0.1
    report.restore()
    assert torch.equal(model(x), stock(x))


def test_what_was_written_into_since_is_quantised_again(quantised: list[str]) -> None:
    model, inputs = model_and_inputs()
    inject_optimized_kernels(model, numerics="fp8", config=EAGER)
    twin, _ = model_and_inputs()

    def negate(layer: nn.Module, args: tuple[Tensor]) -> None:
        args[0].neg_()

    with torch.no_grad():
        for _ in range(2):
            model(*inputs)
        handles = [one.to_k.register_forward_pre_hook(negate) for one in (model, twin)]
        first, second = model(*inputs), model(*inputs)
        assert torch.equal(first, second)
        wanted, unwritten = twin(*inputs), model_and_inputs()[0](*inputs)
        assert relative_error(first, wanted.double()) < 0.1 < relative_error(first, unwritten.double())
        assert quantised.count("norm_modulate") == 3, "the other layer reads what the op wrote"
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("name", ["to_q", "to_k"])
def test_what_a_hook_writes_and_torch_does_not_count_is_quantised_again(name: str, before: bool) -> None:
    model, inputs = model_and_inputs()
    report = inject_optimized_kernels(model, numerics="fp8", config=EAGER)
    twin, _ = model_and_inputs()

    def write(layer: nn.Module, args: tuple[Tensor], *result: Tensor) -> None:
        args[0].data.mul_(-4)

    with torch.no_grad():
        for _ in range(2):
            model(*inputs)
        for one in (model, twin):
            layer = one.get_submodule(name)
            (layer.register_forward_pre_hook if before else layer.register_forward_hook)(write)
        for _ in range(3):
            assert relative_error(model(*inputs), twin(*inputs).double()) < 0.1
    assert all(report.calls()[path]["fused"] == 5 for path in ("to_q", "to_k"))


def test_an_op_whose_rows_are_not_read_stops_to_write_them(quantised: list[str]) -> None:
    model, inputs = model_and_inputs()
    _, few = model_and_inputs(rows=2)
    inject_optimized_kernels(model, numerics="fp8", config=EAGER)
    seen = []
    with torch.no_grad():
        for given in (inputs, inputs, few, few, inputs, inputs):
            model(*given)
            seen.append(quantised.copy())
            quantised.clear()
    ops = ["norm_modulate", "gate_residual_norm_modulate"]
    assert seen == [["apart"] * 2, ops, ops, [], ["apart"] * 2, ops]


def test_calls_with_gradients_and_without_fp8_write_no_rows(quantised: list[str]) -> None:
    model, inputs = model_and_inputs()
    report = inject_optimized_kernels(model, numerics="fp8", config=EAGER)
    with torch.no_grad():
        model(*inputs), model(*inputs)
    quantised.clear()
    x = inputs[0].requires_grad_()
    model(x, *inputs[1:]).sum().backward()
    assert x.grad is not None and not quantised
    report.restore()
    inject_optimized_kernels(model)
    with torch.no_grad():
        model(*inputs), model(*inputs)
    assert not quantised


class Wide(Block):
    """The same with a residual in float32."""

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        x = x.float() + scale.float() * x.float()
        z = (self.norm2(x) * (1 + scale.float()) + shift.float()).to(scale.dtype)
        return x + self.up(z) * self.gate(z)


def test_a_norm_behind_a_residual_in_float32_writes_no_rows_since_two_passes_are_quicker(quantised: list[str]) -> None:
    torch.manual_seed(0)
    model, (_, inputs) = Wide().to(torch.bfloat16).eval().requires_grad_(False), model_and_inputs()
    report = inject_optimized_kernels(model, numerics="fp8", config=EAGER)
    with torch.no_grad():
        for _ in range(3):
            model(*inputs)
    assert report.calls()[""]["fused"] >= 3 and quantised == ["apart"] * 3


class Single(nn.Module):
    """A block whose attention and feed-forward stand side by side, as in Flux; ``twice`` has the latter read again."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.norm, self.act_mlp = nn.LayerNorm(64, elementwise_affine=False), nn.GELU(approximate="tanh")
        self.to_v, self.proj_mlp, self.proj_out = nn.Linear(64, 64), nn.Linear(64, 128), nn.Linear(192, 64)
        self.twice = twice

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        y = self.norm(x) * (1 + scale) + shift
        mlp = self.act_mlp(self.proj_mlp(y))
        both = torch.cat([self.to_v(y), mlp], dim=2)
        y = self.proj_out(both)
        return x + scale * y + (both.mean() if self.twice else 0)


def single(twice: bool = False) -> tuple[Single, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Single(twice).to(torch.bfloat16).eval().requires_grad_(False), model_and_inputs()[1]


def in_float64(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    result: Tensor = copy.deepcopy(model).double()(*[x.double() for x in inputs])
    return result


def test_a_gelu_behind_attention_is_written_in_fp8_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = single()
    stock, exact, joined = model(*inputs), in_float64(model, inputs), []

    def noted(x: Tensor, function: str, *, front: Tensor) -> Any:
        joined.append((tuple(front.shape), tuple(x.shape), function))
        return activation_fp8(x, function, front=front)

    monkeypatch.setattr("diffkern.rewrite.single_stream.ops.activation_fp8", noted)
    report = inject_optimized_kernels(model, numerics="fp8", config=EAGER)
    with torch.no_grad():
        results = [model(*inputs) for _ in range(3)]
    assert all(torch.equal(results[0], y) for y in results)
    assert relative_error(stock, exact) < relative_error(results[0], exact) < 0.05
    assert joined == [((2, 32, 64), (2, 32, 128), "gelu_tanh")] * 3
    calls = report.calls()
    assert calls["proj_mlp"]["fused"] == 3 and calls["proj_out"]["fused"] == 1, "the others are the forward's"
    report.restore()
    assert torch.equal(model(*inputs), stock)


@pytest.mark.parametrize("name", ["proj_mlp", "act_mlp", "proj_out"])
def test_a_hook_on_a_part_of_a_single_stream_block_sees_what_is_written(name: str) -> None:
    model, inputs = single()
    inject_optimized_kernels(model, numerics="fp8", config=EAGER)
    seen: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        model(*inputs)
        before = model(*inputs)
        handle = model.get_submodule(name).register_forward_hook(lambda _, args, y: seen.append((args[0], y)))
        assert relative_error(model(*inputs), before.double()) < 0.02
        (given, made), widths = seen[0], {"proj_mlp": (64, 128), "act_mlp": (128, 128), "proj_out": (192, 64)}
        assert (given.shape[-1], made.shape[-1]) == widths[name] and given.dtype == made.dtype == torch.bfloat16
        handle.remove()
        assert torch.equal(model(*inputs), before)


def test_what_another_part_reads_or_a_layer_in_its_dtype_is_no_rows_of_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*args: Any, **options: Any) -> Any:
        raise AssertionError("nobody reads these rows")

    monkeypatch.setattr("diffkern.rewrite.single_stream.ops.activation_fp8", unexpected)
    for twice, exclude in ((True, []), (False, ["proj_out"])):
        model, inputs = single(twice)
        exact = in_float64(model, inputs)
        config = KernelConfig(EAGER.rules, measure=False, fp8_exclude=exclude)
        report = inject_optimized_kernels(model, numerics="fp8", config=config)
        assert ("_read" in report.source("")) is not twice
        with torch.no_grad():
            results = [model(*inputs) for _ in range(2)]
        assert torch.equal(*results) and relative_error(results[0], exact) < 0.05


def test_a_layer_of_one_stream_is_called_where_it_is_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "LEAST_ROWS", 1)
    model, inputs = tests_of_models.model_and_inputs("sd3")
    config = KernelConfig(tests_of_models.EMULATED, measure=False)
    report = inject_optimized_kernels(model, numerics="fp8", config=config, verify=False)
    tests_of_models.output(model, inputs)
    ran = tests_of_models.in_fp8(report)
    assert {"transformer_blocks.0.attn.to_out.0", "transformer_blocks.0.attn.to_add_out"} <= ran


@pytest.mark.parametrize("before", [True, False])
def test_adapters_on_both_layers_of_a_single_stream_block_have_their_effect(before: bool) -> None:
    def adapted(model: Single) -> None:
        torch.manual_seed(1)
        peft.inject_adapter_in_model(
            peft.LoraConfig(r=4, target_modules=["proj_out", "proj_mlp"], init_lora_weights=False), model
        )
        model.requires_grad_(False).to(torch.bfloat16)

    model, inputs = single()
    twin, _ = single()
    adapted(twin)
    if before:
        adapted(model)
    inject_optimized_kernels(model, numerics="fp8", config=EAGER)
    with torch.no_grad():
        for _ in range(0 if before else 2):
            model(*inputs)
        if not before:
            adapted(model)
        results = [model(*inputs) for _ in range(2)]
        wanted, without = in_float64(twin, inputs), in_float64(single()[0], inputs)
    assert torch.equal(*results)
    assert relative_error(results[0], wanted) < 0.05 < relative_error(without, wanted)


def test_a_compiled_single_stream_block_is_one_graph_as_it_is_written() -> None:
    model, inputs = single()
    exact = in_float64(model, inputs)
    inject_optimized_kernels(model, numerics="fp8", config=EAGER)
    with torch.no_grad():
        model(*inputs)
        y = torch.compile(model, fullgraph=True, backend="aot_eager")(*inputs)
    assert relative_error(y, exact) < 0.01
    torch._dynamo.reset()
