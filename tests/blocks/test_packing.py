"""The projections of self-attention as one product: the same values, and nobody finds weights changed or missing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import LTXVideoTransformer3DModel
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn

from diffkern import inject_optimized_kernels, restore
from diffkern.bench.measure import relative_error
from diffkern.blocks import packing
from diffkern.providers.cublaslt.layers import together
from tests.blocks.test_ltx import block, in_float64, inputs
from tests.injection.models import run, tiny_ltx


def weights(layer: Any, name: str = "weight") -> list[nn.Parameter]:
    return [getattr(getattr(layer.attn1, projection), name) for projection in packing.NAMES]


def patched(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A patched block whose weights lie together, as they do on a GPU from its injection on."""
    layer = block(dtype, **options)
    inject_optimized_kernels(layer)
    assert packing.pack(layer, "attn1")
    return layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_packed_block_is_as_accurate_as_the_stock_one(dtype: torch.dtype, bias: bool) -> None:
    layer, given = patched(dtype, attention_bias=bias), inputs(dtype)
    assert together(weights(layer)) is not None
    stock = copy.deepcopy(layer)
    restore(stock)
    with torch.no_grad():
        y, expected = layer(**given), stock(**given)
        truth = stock.double()(**{name: in_float64(value) for name, value in given.items()})
    assert relative_error(y, truth) <= 1.05 * relative_error(expected, truth) + 1e-6


def test_one_product_is_computed_where_weights_lie_together_and_three_where_not() -> None:
    layer = patched()
    x = inputs()["hidden_states"]
    assert packing.projection(layer, "attn1", x) is None  # a gradient could be wanted
    with torch.no_grad():
        project = packing.projection(layer, "attn1", x)
        assert project is not None
        parts = project(layer.attn1._modules, x, x)
        for name, part in zip(packing.NAMES, parts, strict=True):
            torch.testing.assert_close(part, getattr(layer.attn1, name)(x))
            assert part.stride() == (45 * 96, 96, 1)
        assert packing.projection(layer, "attn1", x.double()) is None
        layer.attn1.to_k.register_forward_hook(lambda *given: None)
        assert packing.projection(layer, "attn1", x) is None
    layer = patched()
    layer.double().float()  # parts them
    with torch.no_grad():
        assert packing.projection(layer, "attn1", x) is None


def test_parameters_stay_the_same_objects_with_the_same_values() -> None:
    layer = block()
    inject_optimized_kernels(layer)
    objects = [*weights(layer), *weights(layer, "bias")]
    values = [parameter.detach().clone() for parameter in objects]
    versions = [parameter._version for parameter in objects]
    assert packing.pack(layer, "attn1")
    assert all(a is b for a, b in zip(objects, [*weights(layer), *weights(layer, "bias")], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(objects, values, strict=True))
    assert [parameter._version for parameter in objects] == versions


def test_restoring_gives_each_weight_its_own_memory_back() -> None:
    layer = patched()
    values = [parameter.detach().clone() for parameter in weights(layer)]
    restore(layer)
    for parameter, value in zip(weights(layer), values, strict=True):
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
        assert torch.equal(parameter, value)


def test_restoring_follows_weights_that_went_elsewhere() -> None:
    """As the weight of a layer does when an adapter takes its place."""
    layer = patched()
    first, second, third = weights(layer)
    layer.attn1.to_k = nn.Sequential(layer.attn1.to_k)
    buffer = torch.cat([third.detach(), third.detach()])
    third.data = buffer[: len(third)]  # what others packed stays packed
    restore(layer)
    assert all(parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in (first, second))
    assert third.data_ptr() == buffer.data_ptr()
    layer = patched()
    del layer.attn1
    restore(layer)


def test_weights_that_somebody_else_holds_stay_where_they_are() -> None:
    layer = block()
    inject_optimized_kernels(layer)
    held = layer.state_dict()
    before = [parameter.data_ptr() for parameter in weights(layer)]
    assert not packing.pack(layer, "attn1")
    assert [parameter.data_ptr() for parameter in weights(layer)] == before
    with torch.no_grad():
        held["attn1.to_q.weight"].zero_()
        assert not weights(layer)[0].any()
    del held
    assert packing.pack(layer, "attn1")


def test_tied_and_mixed_layers_stay_where_they_are() -> None:
    layer = block()
    inject_optimized_kernels(layer)
    layer.attn1.to_k.weight = layer.attn1.to_q.weight
    layer.attn1.to_v.weight = nn.Parameter(layer.attn1.to_q.weight.detach())
    assert not packing.pack(layer, "attn1")
    layer, given = block(), inputs()
    layer.attn1.to_k.bias = None
    assert not packing.pack(layer, "attn1")
    stock = copy.deepcopy(layer)
    inject_optimized_kernels(layer)
    with torch.no_grad():
        torch.testing.assert_close(layer(**given), stock(**given), rtol=1e-4, atol=1e-5)


def test_writes_in_place_are_seen() -> None:
    layer, given = patched(), inputs()
    with torch.no_grad():
        layer(**given)
        for parameter in weights(layer):
            parameter.data += 0.25  # as merging an adapter does
        y = layer(**given)
        stock = copy.deepcopy(layer)
        restore(stock)
        torch.testing.assert_close(y, stock(**given), rtol=1e-5, atol=1e-5)


def test_a_weight_that_is_replaced_is_seen() -> None:
    layer, given = patched(), inputs()
    with torch.no_grad():
        layer(**given)
        layer.attn1.to_k.weight.data = layer.attn1.to_k.weight.data * 2
        y = layer(**given)
        stock = copy.deepcopy(layer)
        restore(stock)
        torch.testing.assert_close(y, stock(**given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("save", "load"), [(save_file, load_file), (torch.save, torch.load)])
def test_weights_are_saved_as_ever(
    save: Callable[[dict[str, Tensor], Path], None], load: Callable[[Path], dict[str, Tensor]], tmp_path: Path
) -> None:
    layer, path = patched(), tmp_path / "weights"
    values = {name: value.detach().clone() for name, value in layer.named_parameters()}
    save(layer.state_dict(), path)
    assert path.stat().st_size < 1.5 * sum(value.nbytes for value in values.values()) + 50_000
    loaded = load(path)
    assert loaded.keys() == values.keys()
    assert all(torch.equal(loaded[name], value) for name, value in values.items())


def test_others_who_save_find_every_weight_in_memory_of_its_own(tmp_path: Path) -> None:
    accelerate, safetensors = pytest.importorskip("accelerate"), tmp_path / "weights.safetensors"
    layer = patched()
    values = {name: value.detach().clone() for name, value in layer.named_parameters()}
    twin = copy.deepcopy(layer)
    save_model(twin, str(safetensors))
    assert together(weights(twin)) is None and together(weights(layer)) is not None
    accelerate.Accelerator(cpu=True).save_model(layer, tmp_path)
    for path in (safetensors, tmp_path / "model.safetensors"):
        loaded = load_file(path)
        assert loaded.keys() == values.keys()
        assert all(torch.equal(loaded[name], value) for name, value in values.items())
    restore(layer)
    assert not layer._state_dict_pre_hooks


def test_a_model_is_saved_and_loaded_by_diffusers(tmp_path: Path) -> None:
    model = tiny_ltx()
    inject_optimized_kernels(model)
    assert all(packing.pack(layer, "attn1") for layer in model.transformer_blocks)
    expected = run(model)
    model.save_pretrained(tmp_path)
    loaded = LTXVideoTransformer3DModel.from_pretrained(tmp_path).eval()
    inject_optimized_kernels(loaded)
    torch.testing.assert_close(run(loaded), expected, rtol=1e-5, atol=1e-5)


def test_a_deep_copy_has_its_own_weights() -> None:
    layer, given = patched(), inputs()
    with torch.no_grad():
        expected = layer(**given)
        twin = copy.deepcopy(layer)
        for parameter in weights(twin):
            parameter.zero_()
        assert torch.equal(layer(**given), expected)


def test_parameters_stay_ordinary_tensors_under_inference_mode() -> None:
    layer = block()
    inject_optimized_kernels(layer)
    with torch.inference_mode():
        assert packing.pack(layer, "attn1")
    assert not any(parameter.is_inference() for parameter in weights(layer))
    with torch.inference_mode():
        restore(layer)
    assert not any(parameter.is_inference() for parameter in weights(layer))


def test_memory_of_another_library_stays_in_use() -> None:
    layer = block()
    inject_optimized_kernels(layer)
    layer.attn1.to_k.weight = nn.Parameter(torch.from_dlpack(layer.attn1.to_k.weight.detach().clone()))
    assert not packing.pack(layer, "attn1")


@pytest.mark.parametrize("packed", [False, True])
def test_the_graph_of_a_larger_module_holds_one_product(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def always(device_type: str, dtype: torch.dtype) -> bool:
        return True

    always._dynamo_marked_constant = True  # type: ignore[attr-defined]
    monkeypatch.setattr(packing, "_packs_in_graphs", always)
    layer, given, found = block(), inputs(), []
    inject_optimized_kernels(layer)
    assert not packed or packing.pack(layer, "attn1")

    def backend(graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes if "packed_linear" in str(node.target))
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        y = torch.compile(lambda **given: layer(**given) * 2, backend=backend, fullgraph=True)(**given)
        torch.testing.assert_close(y, layer(**given) * 2, rtol=1e-5, atol=1e-5)
    assert len(found) == 1


@pytest.mark.gpu
def test_weights_on_a_gpu_are_packed_by_the_injection_and_after_a_move() -> None:
    gpu = torch.device("cuda")
    layer = block(torch.bfloat16).to(gpu)
    report = inject_optimized_kernels(layer)
    assert together(weights(layer)) is not None and together(weights(layer, "bias")) is not None
    assert report.notes == [
        "1 LTXVideoTransformerBlock: weights of q, k and v moved to lie together in memory, for one product"
    ]
    given = {name: _to(value, gpu) for name, value in inputs(torch.bfloat16).items()}
    layer.to("cpu").to(gpu)
    assert together(weights(layer)) is None
    with torch.no_grad():
        results = [layer(**given) for _ in range(3)]
    assert together(weights(layer)) is not None
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-2, atol=1e-2)
    report.restore()
    assert all(parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in weights(layer))


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return tuple(part.to(device) for part in value) if isinstance(value, tuple) else value


def test_a_traced_block_holds_the_op_and_gives_what_the_layers_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "serves", lambda device_type, dtype: True)
    for layer in (patched(), block()):
        inject_optimized_kernels(layer)
        given, targets = inputs(), []

        def backend(graph: torch.fx.GraphModule, example_inputs: list[Tensor], targets: list[str] = targets) -> Any:
            targets.extend(str(node.target) for node in graph.graph.nodes)
            return graph.forward

        torch._dynamo.reset()
        with torch.no_grad():
            expected = layer(**given)
            traced = torch.compile(lambda layer=layer, given=given: layer(**given) * 2, backend=backend, fullgraph=True)
            torch.testing.assert_close(traced(), expected * 2, rtol=1e-5, atol=1e-5)
        assert sum("packed_linear" in target for target in targets) == 1
