"""LTX-Video in fp8: its error as stated, and copies of weights that are never out of date."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from diffkern import cache, inject_optimized_kernels
from diffkern.bench.measure import relative_error
from diffkern.blocks import fp8
from diffkern.cache import derived, memory
from diffkern.injection import fp8_fusion, planning
from diffkern.verify.contract import FP8_ALLOWANCE_OF_TWO
from tests.injection.models import ltx_inputs, tiny_ltx

#: The sites in fp8 of one block, of which a feed-forward holds two.
IN_FP8 = {f"attn{i}.{name}" for i in (1, 2) for name in ("to_q", "to_k", "to_v", "to_out.0")}
IN_FP8 |= {"ff", "ff.net.0.proj", "ff.net.2"}


@pytest.fixture(autouse=True)
def _hardware(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, or the CPU taken for one: there the numbers behind fp8 are multiplied. Small layers count."""
    monkeypatch.setattr(fp8_fusion, "LEAST_FEATURES", 16)
    monkeypatch.setattr(fp8_fusion, "LEAST_ROWS", 8)
    if request.node.get_closest_marker("gpu"):
        if torch.cuda.get_device_capability() < (8, 9):
            pytest.skip("this GPU has no fp8 numbers")
    elif "device" in request.fixturenames:
        monkeypatch.setattr(planning, "fp8_unavailable_reason", lambda device: None)


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="diffkern: a tensor was written")
        yield


def model_on(device: str, layers: int = 3) -> Any:
    return tiny_ltx(layers).to(device, torch.bfloat16)


def output(model: Any, device: str) -> Tensor:
    inputs = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in ltx_inputs(batch=2, frames=5, dtype=torch.bfloat16).items()
    }
    with torch.no_grad():
        result: Tensor = model(**inputs)[0]
    return result


def in_float64(model: Any, device: str) -> Tensor:
    inputs = {
        name: value.to(device, torch.float64 if value.is_floating_point() else value.dtype)
        if isinstance(value, Tensor)
        else value
        for name, value in ltx_inputs(batch=2, frames=5, dtype=torch.bfloat16).items()
    }
    exact = copy.deepcopy(model).double()
    exact.rope.double_precision = True
    with torch.no_grad():
        result: Tensor = exact(**inputs)[0]
    return result


def test_the_error_is_the_stated_one_and_everything_runs_in_8_bits(device: str) -> None:
    model = model_on(device)
    stock, exact = output(model, device), in_float64(model, device)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    report = inject_optimized_kernels(model, numerics="fp8")
    layers = {site.path: site for site in report.patched if site.op in fp8_fusion.OPS}
    assert {path.partition(".")[2].partition(".")[2] for path in layers} == IN_FP8 and not report.failed
    for site in layers.values():
        assert all(0 < m.fused <= 1.05 * m.stock + FP8_ALLOWANCE_OF_TWO for m in site.measurements)
    first, second = output(model, device), output(model, device)
    assert not any(count["stock"] for count in report.calls().values())
    assert torch.equal(first, second)
    error = relative_error(first, exact)
    assert relative_error(stock, exact) < error <= 0.08
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert sum("fp8" in memory(module) for module in model.modules()) == 3 * len(IN_FP8 - {"ff"})
    report.restore()
    assert torch.equal(output(model, device), stock)
    assert not any(memory(module) for module in model.modules())


@pytest.mark.parametrize("target", ["attn1.to_k", "attn1.to_out.0", "ff.net.2", "attn2.to_q"])
def test_a_layer_with_an_adapter_is_called_and_its_piece_runs_as_fast(device: str, target: str) -> None:
    model = model_on(device, layers=1)
    inject_optimized_kernels(model, numerics="fp8")
    plain = output(model, device)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=[target], init_lora_weights="gaussian"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    exact = in_float64(model, device)
    with_adapter = output(model, device)
    assert relative_error(with_adapter, exact) <= 0.06 and not torch.equal(with_adapter, plain)
    model.disable_adapters()
    assert relative_error(output(model, device), plain.double()) <= 0.06


def test_changed_weights_are_copied_anew_at_once(device: str) -> None:
    model = model_on(device, layers=1)
    inject_optimized_kernels(model, numerics="fp8")
    block, before = model.transformer_blocks[0], output(model, device)
    with torch.no_grad():
        block.ff.net[2].weight.mul_(-1.5)  # in place: its version counts
        block.attn1.to_v.weight = torch.nn.Parameter(-block.attn1.to_v.weight, requires_grad=False)
        block.attn1.to_q.weight.data = block.attn1.to_q.weight.data.flip(0).contiguous()  # another address
    changed, exact = output(model, device), in_float64(model, device)
    assert relative_error(changed, exact) <= 0.06 < relative_error(before, exact)


def test_a_merged_adapter_is_noticed_though_it_leaves_no_sign(device: str) -> None:
    model = model_on(device)
    report = inject_optimized_kernels(model, numerics="fp8")
    output(model, device)
    for block in model.transformer_blocks:
        version, address = block.ff.net[2].weight._version, block.ff.net[2].weight.data_ptr()
        block.ff.net[2].weight.data += 0.3  # what peft's merge does
        assert (block.ff.net[2].weight._version, block.ff.net[2].weight.data_ptr()) == (version, address)
    exact = in_float64(model, device)
    with pytest.warns(UserWarning, match="PyTorch does not count"):
        for _ in range(20 if device == "cuda" else 1):
            output(model, device)
    assert relative_error(output(model, device), exact) <= 0.06
    report.restore()


def test_weights_with_nan_are_not_taken_for_changed_ones(device: str) -> None:
    model = model_on(device, layers=1)
    inject_optimized_kernels(model, numerics="fp8")
    with torch.no_grad():
        model.transformer_blocks[0].ff.net[2].weight[0, 0] = torch.nan
    before = cache.generation()
    for _ in range(20):
        output(model, device)
    assert cache.generation() == before


def test_a_restored_block_gives_the_memory_back_though_its_turn_to_be_compared_is_to_come(device: str) -> None:
    model = model_on(device)
    report = inject_optimized_kernels(model, numerics="fp8")
    for _ in range(32):
        output(model, device)
    stores = [weakref.ref(memory(block.ff.net[2])["fp8"]) for block in model.transformer_blocks]
    report.restore()
    gc.collect()
    assert [store() for store in stores] == [None] * 3


def test_a_replaced_weight_is_not_kept(device: str) -> None:
    model = model_on(device, layers=1)
    report = inject_optimized_kernels(model, numerics="fp8")
    before = output(model, device)
    weight = weakref.ref(model.transformer_blocks[0].ff.net[2].weight)
    model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()}, assign=True)
    gc.collect()
    assert weight() is None
    cache.start_round(torch.device(device))
    exact = in_float64(model, device)
    assert relative_error(output(model, device), exact) <= 0.06 < relative_error(before, exact)
    report.restore()


def test_copies_may_be_made_while_another_thread_compares_them(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_on(device, layers=1)
    report = inject_optimized_kernels(model, numerics="fp8")
    output(model, device)
    known: fp8.Fp8Weight = memory(model.transformer_blocks[0].ff.net[2])["fp8"]
    rows = fp8.quantize_rowwise(torch.ones(1, 16, device=device, dtype=torch.bfloat16), None)
    version, main = derived.version, threading.current_thread()
    names = iter(range(100))

    def interrupted(weight: Tensor) -> int | None:
        """Where the comparison asks for a version, another thread gets to run."""
        if threading.current_thread() is main:
            next(names)
            layer = torch.nn.Linear(16, 16, device=device, dtype=torch.bfloat16)  # as if the weight had been replaced
            thread = threading.Thread(target=known.run, args=(layer, rows))
            thread.start()
            thread.join()
        return version(weight)

    with monkeypatch.context() as within:
        within.setattr(derived, "version", interrupted)
        cache.start_round(torch.device(device))
    assert next(names) > 1
    report.restore()


def test_a_weight_written_while_it_is_copied_is_copied_anew(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_on(device, layers=1)
    report = inject_optimized_kernels(model, numerics="fp8")
    layer, round_rows = model.transformer_blocks[0].ff.net[2], fp8.activation_fp8

    def written_meanwhile(x: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        rows = round_rows(x, *args, **options)
        if x.data_ptr() == layer.weight.data_ptr():
            layer.weight.mul_(-1.5)
        return rows

    with monkeypatch.context() as within:
        within.setattr(fp8, "activation_fp8", written_meanwhile)
        output(model, device)
    exact = in_float64(model, device)
    assert relative_error(output(model, device), exact) <= 0.06
    report.restore()


def test_models_run_from_several_threads(device: str) -> None:
    models = [model_on(device, layers=2) for _ in range(3)]
    report = [inject_optimized_kernels(model, numerics="fp8") for model in models]
    expected = output(models[0], device)
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda model: [output(model, device) for _ in range(32)][-1], models))
    assert all(torch.equal(result, expected) for result in results)
    assert all(one.restore() for one in report)


@pytest.mark.gpu
def test_every_graph_notices_weights_that_were_written_in_place() -> None:
    model = model_on("cuda", layers=2)
    report = inject_optimized_kernels(model, numerics="fp8", cuda_graph=True)
    kinds = [
        {name: value.to("cuda") if isinstance(value, Tensor) else value for name, value in inputs.items()}
        for inputs in (ltx_inputs(batch=batch, frames=5, dtype=torch.bfloat16) for batch in (1, 2))
    ]

    def results() -> list[Tensor]:
        with torch.no_grad():
            return [model(**kind)[0] for kind in kinds]

    for _ in range(4):
        before = results()
    with torch.no_grad():
        for block in model.transformer_blocks:
            block.ff.net[2].weight.mul_(-1.5)
    after = results()
    for _ in range(4):
        assert all(map(torch.equal, results(), after))
    assert not any(map(torch.equal, before, after))
    report.restore()
    report = inject_optimized_kernels(model, numerics="fp8")
    assert all(map(torch.equal, results(), after))
    report.restore()


@pytest.mark.gpu
def test_replays_notice_changed_weights_too() -> None:
    gc.collect()  # what other models keep is compared in turn with this one's
    model = model_on("cuda", layers=2)
    report = inject_optimized_kernels(model, numerics="fp8", cuda_graph=True)
    for _ in range(4):
        captured = output(model, "cuda")
    for block in model.transformer_blocks:
        block.ff.net[2].weight.data += 0.3
    exact = in_float64(model, "cuda")
    assert relative_error(captured, exact) > 0.06
    with pytest.warns(UserWarning, match="PyTorch does not count"):
        for _ in range(20):
            output(model, "cuda")
    assert relative_error(output(model, "cuda"), exact) <= 0.06
    report.restore()
