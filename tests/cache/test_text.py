"""What is computed once for each text: kept from step to step, and never out of date without a word."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import peft
import pytest
import torch
from diffusers.models.embeddings import PixArtAlphaTextProjection
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from diffkern import KernelConfig, inject_optimized_kernels
from diffkern.bench.measure import relative_error
from diffkern.cache import memory
from diffkern.cache.text import MAX_TEXTS
from tests.injection.models import all_fused, ltx_inputs, randomise, tiny_ltx

LAYERS = 2


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="diffkern: a tensor was written")
        yield


@pytest.fixture
def model(device: str) -> Any:
    return tiny_ltx(LAYERS).to(device)


def inputs_on(device: str, text: int = 1) -> dict[str, Any]:
    inputs = ltx_inputs(batch=2)
    generator = torch.Generator().manual_seed(text)
    inputs["encoder_hidden_states"] = torch.randn(2, 5, 32, generator=generator)
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}


def step(model: Any, inputs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(**inputs)[0]
    return result


def in_float64(model: Any, inputs: dict[str, Any]) -> Tensor:
    exact = copy.deepcopy(model).double()
    exact.rope.double_precision = True
    wide = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    return step(exact, wide)


def assert_right(model: Any, inputs: dict[str, Any], y: Tensor | None = None) -> None:
    assert relative_error(step(model, inputs) if y is None else y, in_float64(model, inputs)) < 2e-5


def pairs(model: Any) -> list[Any]:
    """Keys and values that the first block keeps, one entry per text."""
    layers = [memory(model.transformer_blocks[0].attn2)["texts"][name] for name in ("to_k", "to_v")]
    results = [[text.result for text in layer.texts] for layer in layers]
    return [None if key is None else (key, value) for key, value in zip(*results, strict=True)]


def warm(model: Any, device: str) -> dict[str, Any]:
    """Injects, and calls the model until everything is kept that will be; returns the arguments."""
    inject_optimized_kernels(model)
    inputs = inputs_on(device)
    for _ in range(3):
        step(model, inputs)
    return inputs


#: The step after a write that PyTorch does not count in which it is found at the latest.
LATEST = {"cpu": 0, "cuda": 20}


def assert_found(model: Any, inputs: dict[str, Any], device: str) -> None:
    """A write that PyTorch did not count shows in time, with a single warning."""
    with pytest.warns(UserWarning, match="PyTorch does not count") as caught:
        for _ in range(LATEST[device]):
            step(model, inputs)
        for _ in range(3):
            assert_right(model, inputs)
    assert len([warning for warning in caught if "PyTorch does not count" in str(warning.message)]) == 1


def test_keys_and_values_are_computed_once_for_a_text(model: Any, device: str) -> None:
    inputs = inputs_on(device)
    stock = step(model, inputs)
    report = inject_optimized_kernels(model)
    first, second = step(model, inputs), step(model, inputs)
    (pair,) = pairs(model)
    inputs["timestep"] = inputs["timestep"] - 100
    another = step(model, inputs)
    assert pairs(model) == [pair] and all(part.shape == (2, 5, 32) for part in pair)
    assert_right(model, inputs, another)
    inputs["timestep"] = inputs["timestep"] + 100
    third = step(model, inputs)
    assert torch.equal(first, second) and torch.equal(first, third)
    assert not any(count["stock"] for count in report.calls().values())
    report.restore()
    assert torch.equal(step(model, inputs), stock)
    assert not memory(model.caption_projection) and not any(map(memory, model.transformer_blocks))


def test_the_first_call_of_a_text_keeps_nothing(model: Any, device: str) -> None:
    inject_optimized_kernels(model)
    step(model, inputs_on(device))
    assert pairs(model) == [None]


def test_what_is_another_tensor_at_every_call_takes_no_sums_of_weights(device: str) -> None:
    """The guidance of Chroma goes through such layers, and is that of the time step."""
    torch.manual_seed(0)
    module = PixArtAlphaTextProjection(16, 32).to(device)
    stock = copy.deepcopy(module)
    inject_optimized_kernels(module)
    with torch.no_grad():
        for _ in range(4):
            given = torch.randn(2, 5, 16, device=device)
            assert torch.equal(module(given), stock(given))
        with torch.profiler.profile() as seen:
            module(torch.randn(2, 5, 16, device=device))
    assert not memory(module)["caption"].entries()
    assert device == "cuda" or not {"aten::sum", "aten::_int_mm"} & {event.name for event in seen.events()}


def test_another_text_gives_other_keys(model: Any, device: str) -> None:
    inject_optimized_kernels(model)
    for text in (1, 2, 3):
        inputs = inputs_on(device, text)
        for _ in range(3):
            assert_right(model, inputs)
    assert len(pairs(model)) <= MAX_TEXTS


def test_two_texts_in_turn_are_both_kept(model: Any, device: str) -> None:
    inject_optimized_kernels(model)
    both = [inputs_on(device, 1), inputs_on(device, 2)]
    for _ in range(3):
        results = [step(model, inputs) for inputs in both]
    kept = pairs(model)
    assert None not in kept and len(kept) == MAX_TEXTS
    again = [step(model, inputs) for inputs in both]
    assert all(map(torch.equal, again, results))
    assert {id(key) for key, _ in pairs(model)} == {id(key) for key, _ in kept}


def test_texts_at_the_same_address_are_told_apart(model: Any, device: str) -> None:
    inject_optimized_kernels(model)
    for text in range(6):
        inputs = inputs_on(device, text)
        assert_right(model, inputs)
        del inputs
        gc.collect()


def test_a_text_written_in_place_is_another_one(model: Any, device: str) -> None:
    inputs = warm(model, device)
    for _ in range(3):
        inputs["encoder_hidden_states"].mul_(-1.3)
        assert_right(model, inputs)


@pytest.mark.parametrize("name", ["to_k.weight", "to_k.bias", "to_v.weight", "to_v.bias", "norm_k.weight"])
@pytest.mark.parametrize("how", ["in place", "replaced", "loaded"])
def test_weights_whose_change_is_counted_take_effect_at_once(model: Any, device: str, name: str, how: str) -> None:
    inject_optimized_kernels(model)
    inputs = inputs_on(device)
    for _ in range(3):
        before = step(model, inputs)
    attention = model.transformer_blocks[0].attn2
    weight = attention.get_parameter(name)
    with torch.no_grad():
        if how == "in place":
            weight.mul_(1.7)
        elif how == "replaced":
            layer, _, own = name.rpartition(".")
            setattr(attention.get_submodule(layer), own, nn.Parameter(weight * 1.7, requires_grad=False))
        else:
            model.load_state_dict({k: v * 1.7 if k.endswith(f"attn2.{name}") else v for k, v in model.state_dict().items()}, assign=True)  # fmt: skip  # noqa: E501
    after = step(model, inputs)
    assert relative_error(after, before) > 1e-5
    assert_right(model, inputs, after)


@pytest.mark.parametrize(
    "name",
    [
        "transformer_blocks.0.attn2.to_k.weight",
        "transformer_blocks.1.attn2.to_v.bias",
        "caption_projection.linear_2.weight",
    ],
)
def test_a_write_into_some_elements_that_is_not_counted_is_found(model: Any, device: str, name: str) -> None:
    inputs = warm(model, device)
    weight = model.get_parameter(name)
    (weight[5] if weight.ndim > 1 else weight[5:6]).data.mul_(-1.7).add_(1)
    assert_found(model, inputs, device)


def test_a_text_that_is_written_and_not_counted_is_found(model: Any, device: str) -> None:
    inputs = warm(model, device)
    inputs["encoder_hidden_states"].data[1, 3, 7] += 5.0
    assert_found(model, inputs, device)


@pytest.mark.parametrize("target", ["attn2.to_k", "caption_projection.linear_1"])
def test_layers_with_adapters_are_called_every_time(model: Any, device: str, target: str) -> None:
    inputs = warm(model, device)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=[target], init_lora_weights="gaussian"))
    lora = [parameter for name, parameter in model.named_parameters() if "lora_" in name]
    for factor in (1.0, 2.0, -1.0):
        with torch.no_grad():
            for parameter in lora:
                parameter.data = torch.full_like(parameter, 0.1 * factor)
        assert_right(model, inputs)


def test_a_hook_in_the_projection_is_called_every_time(model: Any, device: str) -> None:
    report = inject_optimized_kernels(model)
    calls: list[None] = []
    handle = model.caption_projection.linear_1.register_forward_hook(lambda *_: calls.append(None))
    for _ in range(3):
        step(model, inputs_on(device))
    assert len(calls) == 3
    handle.remove()
    assert report.calls()["caption_projection"]["stock_pieces"] == {"linear_1": 3}


def test_nothing_is_kept_where_a_gradient_is_wanted_or_writes_are_not_counted(model: Any, device: str) -> None:
    inject_optimized_kernels(model)
    inputs = inputs_on(device)
    for _ in range(3):
        with torch.inference_mode():
            y = model(**inputs)[0]
    assert_right(model, inputs, y)
    with torch.inference_mode():
        inside = inputs_on(device, 2)
        for _ in range(3):
            model(**inside)
            inside["encoder_hidden_states"].mul_(-1.1)
            assert relative_error(model(**inside)[0], in_float64(model, {k: v.clone() if isinstance(v, Tensor) else v for k, v in inside.items()})) < 2e-5  # fmt: skip  # noqa: E501
    caption = inputs["encoder_hidden_states"].requires_grad_()
    for _ in range(3):
        model(**inputs)[0].square().sum().backward()
    assert caption.grad is not None and caption.grad.abs().sum() > 0


def test_a_restored_model_gives_its_memory_back(model: Any, device: str) -> None:
    report = inject_optimized_kernels(model)
    inputs = inputs_on(device)
    for _ in range(3):
        step(model, inputs)
    kept = [weakref.ref(part) for part in pairs(model)[0]]
    weight = weakref.ref(model.transformer_blocks[0].attn2.to_k.weight)
    report.restore()
    gc.collect()
    assert all(part() is None for part in kept)
    del model.transformer_blocks
    gc.collect()
    assert weight() is None


def test_the_projection_alone_is_a_site(device: str) -> None:
    projection = randomise(PixArtAlphaTextProjection(16, 8, act_fn="silu")).to(device).requires_grad_(False)
    caption = torch.randn(1, 5, 16, device=device)
    stock = projection(caption)
    report = inject_optimized_kernels(projection)
    assert [site.op for site in report.patched] == ["caption"]
    with torch.no_grad():
        first, second = projection(caption), projection(caption)
        assert first.data_ptr() == second.data_ptr() and torch.equal(first, stock)
        first.add_(1)  # somebody wrote into it
        assert torch.equal(projection(caption), stock)
    assert all_fused(report)
    report.restore()
    assert projection(caption).data_ptr() != caption.data_ptr() and not memory(projection)


def test_what_is_handed_out_is_not_what_is_kept(device: str) -> None:
    projection = randomise(PixArtAlphaTextProjection(16, 8)).to(device).requires_grad_(False)
    caption = torch.randn(1, 5, 16, device=device)
    stock = projection(caption)
    inject_optimized_kernels(projection)
    with torch.no_grad():
        projection(caption).requires_grad_()
        assert not projection(caption).requires_grad
        projection(caption).data = torch.zeros_like(stock)
        assert torch.equal(projection(caption), stock)
        with torch.inference_mode():
            projection(caption).add_(1)
            assert torch.equal(projection(caption), stock)
        assert not projection(caption).is_inference()
        projection(caption).data.mul_(1.5)  # not counted
        with pytest.warns(UserWarning, match="PyTorch does not count"):
            for _ in range(LATEST[device]):
                projection(caption)
            assert torch.equal(projection(caption), stock)
        first, second = projection(caption), projection(caption)  # who writes once may write again: nothing is kept
        assert first.data_ptr() != second.data_ptr() and torch.equal(first, second)


@pytest.mark.parametrize("change", ["class", "approximate", "order", "eps"])
def test_what_a_module_computes_decides_and_not_its_weights_alone(model: Any, device: str, change: str) -> None:
    inject_optimized_kernels(model)
    inputs = inputs_on(device)
    for _ in range(3):
        before = step(model, inputs)
    projection: Any = model.caption_projection
    if change == "class":
        projection.act_1 = nn.ReLU()
    elif change == "approximate":
        projection.act_1.approximate = "none"
    elif change == "order":
        projection.linear_1, projection.linear_2 = projection.linear_2, projection.linear_1
    else:
        for block in model.transformer_blocks:
            block.attn2.norm_k.eps = block.attn2.norm_q.eps = 0.5
    after = step(model, inputs)
    assert not torch.equal(after, before)
    assert_right(model, inputs, after)
    assert_right(model, inputs)


def test_transforms_and_modes_leave_nothing_behind(model: Any, device: str) -> None:
    inject_optimized_kernels(model)
    inputs = inputs_on(device)
    for _ in range(3):
        expected = step(model, inputs)
    text, projection = inputs["encoder_hidden_states"], model.caption_projection
    with torch.no_grad():
        projected = projection(text)
        with FlopCounterMode(display=False) as counter:
            torch.testing.assert_close(step(model, inputs), expected)
        assert counter.get_total_flops() > 0
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert step(model, inputs_on(device, 7)).shape == expected.shape
        _, tangent = torch.func.jvp(projection, (text,), (torch.ones_like(text),))
        assert tangent.abs().sum() > 0
        torch.testing.assert_close(torch.func.vmap(projection)(text[None])[0], projected)
        assert torch.equal(projection(text), projected)
    assert torch.equal(step(model, inputs), expected)


class Scaled(TorchFunctionMode):
    """Has functions of some names give a tenth more."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 1.1 if getattr(func, "__name__", "") in self.names else result


@pytest.mark.parametrize("names", [("linear",), ("cos", "sin")], ids=["text", "tables"])
def test_what_a_mode_of_functions_computes_is_not_kept(model: Any, device: str, names: tuple[str, ...]) -> None:
    stock = copy.deepcopy(model)
    inject_optimized_kernels(model, config=KernelConfig(measure=False))
    inputs = inputs_on(device)
    for _ in range(3):
        torch.testing.assert_close(step(model, inputs), step(stock, inputs), rtol=1e-4, atol=1e-5)
    for _ in range(2):
        with Scaled(*names):
            scaled = [step(each, inputs) for each in (model, stock)]
        torch.testing.assert_close(*scaled, rtol=1e-4, atol=1e-5)
    assert (scaled[1] - step(stock, inputs)).abs().max() > 1e-3
    torch.testing.assert_close(step(model, inputs), step(stock, inputs), rtol=1e-4, atol=1e-5)


def test_a_default_device_is_a_mode_that_changes_nothing(model: Any, device: str) -> None:
    inject_optimized_kernels(model)
    inputs = inputs_on(device)
    with torch.device(device):
        for _ in range(3):
            step(model, inputs)
        assert pairs(model)


@pytest.mark.parametrize("child", ["caption_projection", "rope"])
def test_a_hook_that_writes_into_the_result_takes_effect_every_time(model: Any, device: str, child: str) -> None:
    inputs = inputs_on(device)

    def doubled(module: nn.Module, args: Any, result: Any) -> None:
        (result if isinstance(result, Tensor) else result[0]).data.mul_(2)

    handle = model.get_submodule(child).register_forward_hook(doubled)
    stock = step(model, inputs)
    inject_optimized_kernels(model)
    for _ in range(4):
        torch.testing.assert_close(step(model, inputs), stock, rtol=1e-4, atol=1e-5)
    handle.remove()
    assert_right(model, inputs)


def test_an_adapter_that_is_merged_and_gone_has_its_effect_at_once(model: Any, device: str) -> None:
    inputs = warm(model, device)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_k"], init_lora_weights="gaussian"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.3)
    step(model, inputs)
    for block in model.transformer_blocks:
        for attention in (block.attn1, block.attn2):
            attention.to_k.merge()
            attention.to_k = attention.to_k.base_layer
    for _ in range(3):
        assert_right(model, inputs)


def test_weights_whose_writes_torch_does_not_count_are_read_every_time(device: str) -> None:
    with torch.inference_mode():
        model: Any = tiny_ltx(LAYERS).to(device)
    inject_optimized_kernels(model)
    inputs = inputs_on(device)
    for factor in (1.0, 1.0, -1.7, 1.3):
        with torch.inference_mode():
            model.transformer_blocks[0].attn2.to_v.weight.mul_(factor)
        with torch.inference_mode():
            exact = in_float64(model, inputs)
        assert relative_error(step(model, inputs), exact) < 2e-5


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("of", ["hidden_states", "encoder_hidden_states"])
def test_gradients_of_functions_over_latents_and_text_are_those_of_stock(
    model: Any, device: str, of: str, steps: int
) -> None:
    """What a transform of torch.func hands on has no memory to know a text by, or to keep tables in."""
    inputs = inputs_on(device)

    def gradient(x: Tensor) -> Tensor:
        found: Tensor = torch.func.grad(lambda x: model(**{**inputs, of: x})[0].square().mean())(x)
        return found

    stock = gradient(inputs[of])
    inject_optimized_kernels(model)
    for _ in range(steps):
        step(model, inputs)  # by which the text is kept, and the tables
    torch.testing.assert_close(gradient(inputs[of]), stock, rtol=1e-4, atol=1e-6)
