"""Writes that PyTorch does not count, through tensor.data, NumPy, DLPack or an EMA swap: no call uses old values.

Every call is compared with the same call of a stock twin whose tensors were written alike.
"""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_ltx import LTXVideoAttnProcessor
from diffusers.training_utils import EMAModel
from torch import Tensor, nn

import diffkern
from diffkern import cache, inject_optimized_kernels
from diffkern.cache import derived, memory
from diffkern.cache.rotary import by_axis
from tests.injection.models import ltx_inputs, tiny_ltx

TIERS = ("fast", "exact")
UNCOUNTED = "PyTorch does not count"


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="diffkern: a tensor was written")
        yield


def twins(numerics: str, layers: int = 2) -> tuple[Any, Any]:
    """A patched model and a stock one with the same weights."""
    model, stock = tiny_ltx(layers), tiny_ltx(layers)
    inject_optimized_kernels(model, numerics=numerics)
    return model, stock


def step(model: Any, inputs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(**inputs)[0]
    return result


def kept_value(model: Any) -> Tensor:
    """The values of the text that the first block keeps."""
    result: Tensor = memory(model.transformer_blocks[0].attn2)["texts"]["to_v"].texts[0].result
    return result


def assert_alike(actual: Tensor, expected: Tensor, numerics: str) -> None:
    if numerics == "exact":
        assert torch.equal(actual, expected)
    else:
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def assert_steps_alike(model: Any, stock: Any, inputs: dict[str, Any], numerics: str, steps: int) -> None:
    for i in range(steps):
        inputs["timestep"] = torch.full_like(inputs["timestep"], 900.0 - 50 * i)
        assert_alike(step(model, inputs), step(stock, inputs), numerics)


@contextmanager
def found(numerics: str) -> Iterator[None]:
    """``fast`` warns once of a write that it found; ``exact`` keeps nothing, and has nothing to find."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert [UNCOUNTED in str(warning.message) for warning in caught].count(True) == (numerics == "fast")


def _data(weight: Tensor) -> None:
    weight.data[1:] *= 3  # rows 1 to the last: a sample of rows may not see it


def _one_element(weight: Tensor) -> None:
    weight.data[-1, 7] += 2


def _permuted(weight: Tensor) -> None:
    weight.data.copy_(weight.data.flip(0).clone())


def _numpy(weight: Tensor) -> None:
    weight.detach().numpy()[:] *= -1


def _dlpack(weight: Tensor) -> None:
    torch.from_dlpack(weight.detach()).mul_(-2)


def _counted(weight: Tensor) -> None:
    with torch.no_grad():
        weight.copy_(weight * 0.5)


@pytest.mark.parametrize("numerics", TIERS)
@pytest.mark.parametrize("write", [_data, _one_element, _permuted, _numpy, _dlpack, _counted])
def test_no_call_uses_keys_and_values_of_weights_as_they_were(numerics: str, write: Callable[[Tensor], None]) -> None:
    model, stock = twins(numerics)
    inputs = ltx_inputs(batch=2)
    assert_steps_alike(model, stock, inputs, numerics, 4)
    before = step(stock, inputs)
    for net in (model, stock):
        for block in net.transformer_blocks:
            write(block.attn2.to_v.weight)
    assert not torch.allclose(step(stock, inputs), before, rtol=1e-3, atol=1e-3), "the write would not show"
    with found("exact" if write is _counted else numerics):
        assert_steps_alike(model, stock, inputs, numerics, 12)


@pytest.mark.parametrize("numerics", TIERS)
@pytest.mark.parametrize("foreach", [False, True])
def test_no_call_uses_weights_from_before_an_ema_swap(numerics: str, foreach: bool) -> None:
    model, stock = twins(numerics)
    inputs = ltx_inputs(batch=2)
    assert_steps_alike(model, stock, inputs, numerics, 3)
    average = [nn.Parameter(parameter.detach() * 0.7) for parameter in stock.parameters()]
    for net in (model, stock):
        EMAModel(average, foreach=foreach).copy_to(net.parameters())
    with found(numerics):
        assert_steps_alike(model, stock, inputs, numerics, 10)


@pytest.mark.parametrize("numerics", TIERS)
def test_a_prompt_in_the_memory_of_a_numpy_array_may_be_overwritten_there(numerics: str) -> None:
    model, stock = twins(numerics)
    inputs: dict[str, Any] = ltx_inputs(batch=2)
    prompt = inputs["encoder_hidden_states"].numpy().copy()
    inputs["encoder_hidden_states"] = torch.from_numpy(prompt)
    assert_steps_alike(model, stock, inputs, numerics, 3)
    prompt[:] = ltx_inputs(batch=2, seed=9)["encoder_hidden_states"]
    with found(numerics):
        assert_steps_alike(model, stock, inputs, numerics, 10)


def with_coordinates(batch: int = 2) -> dict[str, Any]:
    inputs: dict[str, Any] = ltx_inputs(batch=batch)
    grid = torch.meshgrid(torch.arange(2.0), torch.arange(4.0), torch.arange(4.0), indexing="ij")
    inputs["video_coords"] = torch.stack([axis.flatten() * 7 for axis in grid]).repeat(batch, 1, 1)
    return inputs


@pytest.mark.parametrize("numerics", TIERS)
@pytest.mark.parametrize("through", ["numpy", "data"])
def test_rotary_tables_follow_coordinates_that_are_written(numerics: str, through: str) -> None:
    model, stock = twins(numerics)
    inputs = with_coordinates()
    coordinates = inputs["video_coords"].numpy()
    assert_steps_alike(model, stock, inputs, numerics, 3)
    if through == "numpy":
        coordinates *= 2
    else:
        inputs["video_coords"].data.mul_(2)
    with found(numerics):
        assert_steps_alike(model, stock, inputs, numerics, 10)


class Unrotating(LTXVideoAttnProcessor):
    """Does not rotate the first three tokens of the second sample, nor do the blocks after it."""

    through_data = False

    def __call__(
        self, attn: Any, hidden_states: Any, encoder_hidden_states: Any = None, attention_mask: Any = None,
        image_rotary_emb: Any = None,
    ) -> Tensor:  # fmt: skip
        for table, value in zip(image_rotary_emb, (1, 0), strict=True):
            (table.data if self.through_data else table)[1, :3] = value
        arguments = hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
        result: Tensor = super().__call__(attn, *arguments)
        return result


@pytest.mark.parametrize("numerics", TIERS)
@pytest.mark.parametrize("coordinates", [False, True])
def test_a_processor_that_writes_into_the_tables_of_one_sample_leaves_the_other_alone(
    numerics: str, coordinates: bool
) -> None:
    model, stock = twins(numerics)
    for net in (model, stock):
        net.transformer_blocks[0].attn1.set_processor(Unrotating())
    inputs = with_coordinates() if coordinates else ltx_inputs(batch=2)
    assert_steps_alike(model, stock, inputs, numerics, 6)


@pytest.mark.parametrize("numerics", TIERS)
def test_a_processor_that_writes_tables_through_data_at_every_step_is_found_and_served_stock_tables(
    numerics: str,
) -> None:
    """``fast`` finds it at the next call. From then on no table is shared between steps, and each call is right."""
    model, stock = twins(numerics)
    inputs = ltx_inputs(batch=2)
    assert_steps_alike(model, stock, inputs, numerics, 2)
    for net in (model, stock):
        net.transformer_blocks[0].attn1.set_processor(Unrotating())
        net.transformer_blocks[0].attn1.processor.through_data = True
    if numerics == "fast":
        step(model, inputs)
    with found(numerics):
        assert_steps_alike(model, stock, inputs, numerics, 6)


def test_an_attention_function_that_writes_into_values_gets_new_ones_at_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from diffusers.models.transformers import transformer_ltx

    model, stock = twins("fast")
    dispatch = transformer_ltx.dispatch_attention_fn

    def doubling(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        result: Tensor = dispatch(query, key, value.mul_(2), **options)
        return result

    monkeypatch.setattr(transformer_ltx, "dispatch_attention_fn", doubling)
    assert_steps_alike(model, stock, ltx_inputs(batch=2), "fast", 6)


@pytest.mark.parametrize("where", ["hook on the block", "between the blocks"])
def test_a_run_that_stops_half_way_keeps_no_activation(where: str) -> None:
    model = tiny_ltx(layers=3)
    inject_optimized_kernels(model)
    for _ in range(2):
        step(model, ltx_inputs())
    block, seen = model.transformer_blocks[1], []

    def stop(result: Tensor) -> None:
        seen.append(weakref.ref(result))
        raise StopIteration

    if where == "hook on the block":
        block.register_forward_hook(lambda *call: stop(call[-1]))
    else:
        model.transformer_blocks[2].register_forward_pre_hook(
            lambda _, args, kwargs: stop(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]),
            with_kwargs=True,
        )
    with pytest.raises(StopIteration):
        step(model, ltx_inputs())
    gc.collect()
    assert seen[0]() is None
    assert not any("norm1" in memory(layer) for layer in model.transformer_blocks)


@pytest.mark.parametrize("through_data", [False, True])
def test_a_hook_that_writes_into_the_result_of_a_block_reaches_the_next_block(through_data: bool) -> None:
    def scale(module: nn.Module, args: Any, result: Tensor) -> None:
        (result.data if through_data else result)[..., :5] += 1.5

    model, stock = twins("fast", layers=3)
    assert_steps_alike(model, stock, ltx_inputs(), "fast", 2)
    for net in (model, stock):
        net.transformer_blocks[0].register_forward_hook(scale)
    assert_steps_alike(model, stock, ltx_inputs(), "fast", 3)


@pytest.mark.parametrize("coordinates", [False, True])
def test_a_model_that_ran_in_inference_mode_trains_and_runs_as_the_stock_one(coordinates: bool) -> None:
    model, stock = twins("fast")
    inputs = with_coordinates() if coordinates else ltx_inputs(batch=2)
    gradients = []
    for net in (model, stock):
        for _ in range(2):
            with torch.inference_mode():
                net(**inputs)
        net.train().requires_grad_()
        net(**inputs)[0].square().sum().backward()
        gradients.append([parameter.grad for parameter in net.parameters()])
        net.eval()
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    assert_steps_alike(model, stock, inputs, "fast", 3)
    with torch.inference_mode():
        assert_alike(model(**inputs)[0], stock(**inputs)[0], "fast")


def test_tables_that_are_written_in_inference_mode_are_not_used_again() -> None:
    model = tiny_ltx()
    inject_optimized_kernels(model)
    x = torch.zeros(2, 32, 32)
    with torch.inference_mode():
        tables = model.rope(x, 2, 4, 4)
        assert by_axis(tables) is not None
        tables[0][1, :3] = 5
        assert by_axis(tables) is None
        again = model.rope(x, 2, 4, 4)
    assert again[0].max() <= 1


def test_exact_keeps_nothing() -> None:
    model, _ = twins("exact")
    for _ in range(3):
        step(model, ltx_inputs(batch=2))
    kept = {name for module in model.modules() for name in memory(module)}
    assert kept == {"frequencies"}, "which follow from settings alone"


# --- forget ---------------------------------------------------------------------------------------------


def test_forget_drops_what_is_kept_and_leaves_the_patches() -> None:
    model, stock = twins("fast")
    inputs = ltx_inputs(batch=2)
    for _ in range(3):
        step(model, inputs)
    kept = [weakref.ref(kept_value(model))]
    tables = weakref.ref(memory(model.rope)["tables"].kept.tables[0])
    for net in (model, stock):
        net.transformer_blocks[0].attn2.to_v.weight.data.mul_(-2)
    assert diffkern.forget(model) == 5  # the caption projection, two embeddings (rotary, timesteps) and two blocks
    gc.collect()
    assert tables() is None and all(part() is None for part in kept)
    assert diffkern.forget(model) == 0
    assert_steps_alike(model, stock, inputs, "fast", 4)  # and without a warning
    assert diffkern.forget(model) == 5


def test_forget_takes_a_pipeline_and_refuses_what_is_none() -> None:
    class Pipeline:
        def __init__(self, **components: Any) -> None:
            self.components = components

    model, _ = twins("fast")
    step(model, ltx_inputs())
    assert diffkern.forget(Pipeline(transformer=model, scheduler=None)) > 0
    with pytest.raises(TypeError, match="expected a diffusers pipeline"):
        diffkern.forget("transformer")  # type: ignore[arg-type]


def test_what_a_graph_reads_stays_in_memory_when_the_caches_replace_it() -> None:
    model, _ = twins("fast")
    inputs = ltx_inputs(batch=2)
    for _ in range(3):
        step(model, inputs)
    held = [entry for module in model.modules() for entry in cache.entries_of(module)]
    kept = [weakref.ref(table) for table in memory(model.rope)["tables"].kept.tables]
    kept += [weakref.ref(kept_value(model))]
    for seed in (2, 3, 4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0)  # counted, so everything is computed again
        inputs = ltx_inputs(batch=2, seed=seed, frames=3)
        for _ in range(2):
            step(model, inputs)
    gc.collect()
    assert all(part() is not None for part in kept)
    del held
    step(model, ltx_inputs(batch=2, seed=5))
    gc.collect()
    assert all(part() is None for part in kept)


def test_nothing_that_is_kept_outlives_the_model_or_enters_its_state() -> None:
    model, stock = twins("fast")
    inputs = ltx_inputs(batch=2)
    for _ in range(3):
        step(model, inputs)
    assert list(model.state_dict()) == list(stock.state_dict())
    kept = [weakref.ref(kept_value(model))]
    kept += map(weakref.ref, memory(model.rope)["tables"].kept.tables)
    other = copy.deepcopy(model)
    assert not any(memory(module) for module in other.modules())
    del model
    gc.collect()
    assert all(part() is None for part in kept)


# --- checksums and rounds -------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "one element": lambda x: x.index_put((torch.tensor(3), torch.tensor(5)), x[3, 5] * 1.01),
    "rows permuted": lambda x: x.flip(0),
    "columns permuted": lambda x: x.roll(1, 1),
    "transposed": lambda x: x.T.contiguous(),
    "all signs": lambda x: -x,
    "scaled": lambda x: x * 2,
    "two elements exchanged": lambda x: x.index_put(
        (torch.tensor([0, 7]), torch.tensor([1, 6])), torch.stack((x[7, 6], x[0, 1]))
    ),
    "zero of the other sign": lambda x: torch.where(x == 0, -torch.zeros_like(x), x),
    "another NaN": lambda x: torch.where(torch.isnan(x), torch.full_like(x, torch.inf), x),
    "two signs of a row": lambda x: x * torch.ones_like(x).index_fill(1, torch.tensor([1, 3]), -1.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("change", CHANGES)
def test_a_checksum_sees_any_change_and_nan_is_none(change: str, dtype: torch.dtype) -> None:
    x = torch.randn(24, 24, generator=torch.Generator().manual_seed(3))
    x[2, 2], x[9, 4] = 0, torch.nan
    before, after = x.to(dtype), CHANGES[change](x).to(dtype)

    def equal(one: Tensor, other: Tensor) -> bool:
        return all(map(torch.equal, derived.checksum(one), derived.checksum(other)))

    assert equal(before, before.clone()) and equal(before.T, before.clone().T)
    if change != "one element" or dtype in (torch.float32, torch.float64):
        assert not equal(before, after)
        assert not torch.equal(derived.row_hashes(before), derived.row_hashes(after))
    assert torch.equal(derived.row_hashes(before), derived.row_hashes(before.clone()))


def test_hashes_of_rows_are_exact_sums_of_their_bytes() -> None:
    """The longest rows do not overflow: their bytes and factors are the largest there are."""
    matrix = torch.full((17, derived._LONGEST_HASHED // 8 * 8), -128, dtype=torch.int8)
    factors = derived._factors(matrix.shape[1], matrix.device)
    assert ((factors % 2 == 1) & (factors > 0)).all() and len(factors[:, :64].unique(dim=1)[0]) == 64
    assert torch.equal(derived.row_hashes(matrix).long(), matrix.long() @ factors.long().t())
    assert torch.iinfo(torch.int32).min <= -128 * 127 * matrix.shape[1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_weight_on_a_gpu_is_hashed_as_on_the_cpu(dtype: torch.dtype) -> None:
    weight = torch.randn(40, 72, generator=torch.Generator().manual_seed(5)).to(dtype)
    (hashes,) = derived.checksum(weight.cuda())
    assert torch.equal(hashes.cpu(), derived.row_hashes(weight).flatten())


@pytest.mark.parametrize("shape", [(), (5,), (4, 0), (2, 3, 4), (2, 3, 4, 5)])
def test_a_checksum_is_of_tensors_of_every_rank(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    fingerprint = derived.TensorFingerprint.of(x)
    assert fingerprint.matches(x) and not fingerprint.was_overwritten()
    x.data.add_(1)
    assert fingerprint.matches(x) and fingerprint.was_overwritten() == (x.numel() > 0)
    x.add_(1)
    assert not fingerprint.matches(x) and not fingerprint.pairs()


class Kept(cache.DerivedCache):
    """Keeps the fingerprints of some tensors."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        self.kept = [derived.TensorFingerprint.of(tensor, rotates=True) for tensor in tensors]

    def fingerprints(self) -> list[derived.TensorFingerprint]:
        return self.kept

    def entries(self) -> list[object]:
        return []


@pytest.mark.parametrize(("shape", "latest"), [((8,), 2), ((8, 8), derived.ROUNDS + 1)])
def test_rounds_find_a_vector_at_once_and_every_matrix_in_time(shape: tuple[int, ...], latest: int) -> None:
    """A GPU has one round in each step, the CPU only those that are asked for here."""
    tensors = [torch.randn(shape) for _ in range(2 * derived.ROUNDS)]
    kept, device = Kept(*tensors), torch.device("cpu")
    cache.start_round(device)
    for tensor in tensors[:: derived.ROUNDS // 4]:
        kept.kept = [derived.TensorFingerprint.of(tensor, rotates=True) for tensor in tensors]
        known, rounds = cache.generation(), 0
        tensor.data[-1] += 1
        with pytest.warns(UserWarning, match=UNCOUNTED):
            while cache.generation() == known and rounds < 99:
                cache.start_round(device)
                rounds += 1
        assert rounds <= latest < 20


def test_a_round_compares_what_is_in_use_and_every_matrix_of_it_in_time() -> None:
    """However seldom a model runs: a matrix has its turn among the rounds of its own cache."""
    tensors, device = [torch.randn(8, 8) for _ in range(2 * derived.ROUNDS)], torch.device("cpu")
    idle, used = Kept(*tensors[:1]), Kept(*tensors[1:])
    cache.start_round(device)
    tensors[0].data[0] += 1
    known = cache.generation()
    for _ in range(2 * derived.ROUNDS):
        cache.start_round(device, [used])
    assert cache.generation() == known
    with pytest.warns(UserWarning, match=UNCOUNTED):
        for _ in range(derived.ROUNDS + 1):
            cache.start_round(device, [idle])
            for _ in range(derived.ROUNDS - 1):
                cache.start_round(device, [used])
    assert cache.generation() == known + 1


def test_rounds_compare_equal_shares_of_the_matrices() -> None:
    turns = [fingerprint.turn for fingerprint in Kept(*[torch.zeros(2, 2)] * (2 * derived.ROUNDS)).kept]
    assert sorted(turns) == sorted([*range(derived.ROUNDS)] * 2)  # type: ignore[type-var]


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["prompt", "bias", "tables", "weight"])
def test_a_gpu_uses_old_values_for_two_steps_at_most_and_those_of_weights_for_20(what: str) -> None:
    model, stock = (net.to("cuda") for net in twins("fast"))
    inputs = {k: v.to("cuda") if isinstance(v, Tensor) else v for k, v in with_coordinates().items()}
    for _ in range(5):
        step(model, inputs)
    weights = {"bias": "to_v.bias", "weight": "to_v.weight"}
    if what in weights:
        for net in (model, stock):
            net.transformer_blocks[1].attn2.get_parameter(weights[what]).data[1:] *= 3
    else:
        inputs["encoder_hidden_states" if what == "prompt" else "video_coords"].data.mul_(2)
    with found("fast"):
        for _ in range(20 if what == "weight" else 2):
            step(model, inputs)
        for _ in range(3):
            torch.testing.assert_close(step(model, inputs), step(stock, inputs), rtol=1e-4, atol=1e-5)


def test_a_proof_is_not_told_of_a_write_and_the_next_step_is() -> None:
    model, _ = twins("fast")
    inputs = ltx_inputs()
    for _ in range(3):
        step(model, inputs)
    kept = memory(model.transformer_blocks[0].attn2)["texts"]["to_v"]
    with torch.no_grad():
        model.transformer_blocks[0].attn2.to_v.weight.data[1:64] *= 3
    state = model.transformer_blocks[0]._diffkern
    block = model.transformer_blocks[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning inside of a proof would fail it
        proofs = state.fusion.prove_ahead(block, None, torch.device("cpu"), torch.float16)
        with cache.checks_paused():
            kept.on_call(torch.device("cpu"))
    assert proofs and all(proof.passed for proof in proofs)
    with pytest.warns(UserWarning, match="PyTorch does not count"):
        step(model, inputs)
