"""Linear layers of ComfyUI's models in fp8: our part with a double of the model patcher, and ComfyUI itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffkern.comfyui import fp8
from diffkern.comfyui.fp8 import Fp8Linear, Kind, is_stored, stored_weight
from diffkern.comfyui.optimize import optimize, optimize_vae
from diffkern.comfyui.patcher import patches_of
from diffkern.injection import InjectionError
from tests.comfyui import checkpoints, double, native, toy
from tests.comfyui.test_native import ADAPTED, adapted

CPU = torch.device("cpu")
#: What fp8 may add to a result, relative: three blocks, or a few steps of a tiny model.
LOSS = 0.08


@pytest.fixture(autouse=True)
def small_layers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffkern.injection.fp8_fusion.LEAST_FEATURES", 16)
    monkeypatch.setattr(fp8, "LEAST_ROWS", 2)


@pytest.fixture
def model() -> double.ModelPatcher:
    torch.manual_seed(0)
    return double.ModelPatcher(double.Model(toy.Denoiser().bfloat16()), CPU, CPU)


def run(patcher: Any, **options: Any) -> Tensor:
    """Loads a clone, samples a step, and tells it that the sampling has ended."""
    patcher.patch_model()
    try:
        with torch.no_grad():
            result: Tensor = patcher.model.diffusion_model(*[x.bfloat16() for x in toy.inputs()], **options)
        return result.float()
    finally:
        patcher.unpatch_model()


def tell(patcher: Any, event: str, *args: Any) -> None:
    for callback in [each for own in patcher.callbacks.get(event, {}).values() for each in own]:
        callback(patcher, *args)


def layers_of(patcher: Any) -> list[Fp8Linear]:
    return [patch for patch in patches_of(patcher).values() if isinstance(patch, Fp8Linear)]


def loss(a: Tensor, b: Tensor) -> float:
    assert a.isfinite().all()
    return float((a.float() - b.float()).norm() / b.float().norm())


def eager(model: Any, **options: Any) -> tuple[Any, Any]:
    return optimize(model, numerics="fp8", provider="eager", **options)


def test_linear_layers_run_in_fp8_and_the_report_says_what_that_means(model: double.ModelPatcher) -> None:
    expected = run(model)
    optimized, report = eager(model)

    assert 1e-3 < loss(run(optimized), expected) < LOSS
    assert torch.equal(run(model), expected)
    patches = layers_of(optimized)
    assert len(patches) == 3 and all(
        patch.counts.fused_calls == 1 and not patch.counts.stock_calls for patch in patches
    )
    sites = [site for site in report.patched if site.op == "linear_fp8"]
    assert [site.path for site in sites] == [f"diffusion_model.blocks.{i}.linear" for i in range(3)]
    assert all(0.01 < site.measurements[0].fused < 0.05 for site in sites)
    assert "of 3 linear layers 0 are stored in e4m3 and used as they are, 3 get copies, which take 3.2e-06 GiB" in str(
        report.notes
    )
    assert any("off by 3." in note and "stock by 0." in note for note in report.notes) and not report.caveat


def test_the_other_fusions_are_those_of_fast(model: double.ModelPatcher) -> None:
    fast, both = optimize(model, provider="eager")[0], eager(model)[0]
    assert patches_of(both).keys() - patches_of(fast).keys() == {f"diffusion_model.blocks.{i}.linear" for i in range(3)}
    assert len(layers_of(eager(model, blocks="1")[0])) == 1


def test_copies_live_as_long_as_a_sampling(model: double.ModelPatcher) -> None:
    optimized, _ = eager(model)
    assert all(patch._copy is None for patch in layers_of(optimized))
    run(optimized)
    copies = [patch._copy for patch in layers_of(optimized)]
    run(optimized)
    assert all(copy is not None for copy in copies)
    assert [patch._copy for patch in layers_of(optimized)] == copies
    tell(optimized, "on_cleanup")
    assert all(patch._copy is None for patch in layers_of(optimized))
    assert not any("fp8" in key for module in model.model.modules() for key in vars(module))


@pytest.mark.parametrize("event", ["on_load_after", "on_apply_hooks"])
def test_weights_that_comfyui_writes_are_quantised_again(model: double.ModelPatcher, event: str) -> None:
    optimized, _ = eager(model)
    before = run(optimized)
    with torch.no_grad():
        for patch in layers_of(optimized):
            patch.module.weight.mul_(3)
    tell(optimized, event, None)
    after = run(optimized)
    assert loss(after, run(model)) < LOSS < loss(after, before)


def test_a_weight_that_is_another_one_is_quantised_at_once(model: double.ModelPatcher) -> None:
    optimized, _ = eager(model)
    before = run(optimized)
    for patch in layers_of(optimized):
        patch.module.weight = nn.Parameter(patch.module.weight.detach() * 3)
    after = run(optimized)
    assert loss(after, run(model)) < LOSS < loss(after, before)


def test_a_clone_with_a_model_of_its_own_has_copies_of_its_own(model: double.ModelPatcher) -> None:
    optimized, _ = eager(model)
    clone = optimized.deep_clone()
    with torch.no_grad():
        for module in clone.model.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(2)
    first, second = run(optimized), run(clone)
    assert loss(first, run(model)) < LOSS < loss(first, second)
    assert {id(p.module) for p in layers_of(clone)}.isdisjoint(id(p.module) for p in layers_of(optimized))


def adapter(weight: Tensor) -> Tensor:
    return weight * 2


@pytest.mark.parametrize(
    ("change", "x", "reason"),
    [
        ({}, torch.ones(1, 4, 32), "its input is float32"),
        ({}, torch.ones(1, 1, 32, dtype=torch.bfloat16), "fewer than 2 rows"),
        ({}, torch.ones(1, 4, 32, dtype=torch.bfloat16, requires_grad=True), "gradients are wanted"),
        ({"weight_function": [adapter]}, torch.ones(1, 4, 32, dtype=torch.bfloat16), "an adapter computes its weight"),
        ({"pre_quant_scale": 1}, torch.ones(1, 4, 32, dtype=torch.bfloat16), "its input is scaled first"),
    ],
)
def test_what_cannot_be_in_fp8_runs_stock(
    model: double.ModelPatcher, change: dict[str, Any], x: Tensor, reason: str
) -> None:
    patch = layers_of(eager(model)[0])[0]
    vars(patch.module).update(change)
    module = patch.module.float() if x.dtype is torch.float32 else patch.module
    expected = nn.Linear.forward(module, x)  # type: ignore[arg-type]
    assert torch.equal(patch.forward(x), expected)
    assert patch.counts.fused_calls == 0 and [reason in said for said in patch.counts.stock_calls] == [True]


def test_training_runs_the_layer_as_it_is(model: double.ModelPatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    patch = layers_of(eager(model)[0])[0]
    management = ModuleType("comfy.model_management")
    management.in_training = True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, management.__name__, management)
    x = torch.randn(1, 4, 32, dtype=torch.bfloat16)
    assert torch.equal(patch.forward(x), nn.Linear.forward(patch.module, x))  # type: ignore[arg-type]
    assert list(patch.counts.stock_calls) == ["ComfyUI is training"]


def test_a_class_that_changes_is_called_as_it_is_now(
    model: double.ModelPatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = layers_of(eager(model)[0])[0]
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x + 1)
    x = torch.ones(1, 4, 32, dtype=torch.bfloat16)
    assert torch.equal(patch.forward(x), x + 1) and "another forward" in next(iter(patch.counts.stock_calls))


def test_graphs_of_compile_hold_the_product_as_it_is_written(model: double.ModelPatcher) -> None:
    patch = layers_of(eager(model)[0])[0]
    x = torch.randn(1, 4, 32, dtype=torch.bfloat16)
    compiled = torch.compile(patch.forward, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), nn.Linear.forward(patch.module, x))  # type: ignore[arg-type]
    assert patch.counts.fused_calls == 0 and not patch.counts.stock_calls


def test_a_layer_without_memory_for_a_copy_runs_stock(
    model: double.ModelPatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = layers_of(eager(model)[0])[0]

    def full(module: nn.Module, x: Tensor) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(fp8, "_weight_and_bias", full)
    x = torch.randn(1, 4, 32, dtype=torch.bfloat16)
    assert torch.equal(patch.forward(x), nn.Linear.forward(patch.module, x))  # type: ignore[arg-type]
    assert list(patch.counts.stock_calls) == ["there is no memory for a copy of its weight"] and patch._copy is None


def test_layers_whose_error_is_too_large_stay_stock(model: double.ModelPatcher) -> None:
    with torch.no_grad():  # one number hides all others of its row
        for block in model.model.diffusion_model.blocks:
            block.linear.weight.normal_(0, 1e-6)
            block.linear.weight[:, 0] = 1e-1
            block.linear.bias.zero_()
    optimized, report = eager(model)
    assert all(site.measurements[0].fused > 0 for site in report.patched if site.op == "linear_fp8")
    patch = next(iter(layers_of(optimized)))
    patch.kind.failed = "its error in fp8 is large"
    assert run(optimized).isfinite().all() and "its error in fp8 is large" in patch.counts.stock_calls


def test_without_such_a_gpu_the_rest_is_as_fast(model: double.ModelPatcher) -> None:
    optimized, report = optimize(model, numerics="fp8")
    assert "no layer is in fp8 (fp8 needs an NVIDIA GPU" in report.caveat and not layers_of(optimized)
    assert report.patched and "fp8 needs an NVIDIA GPU" in str(report)
    with pytest.raises(InjectionError, match="no layer is in fp8"):
        optimize(model, numerics="fp8", strict=True)
    wide = double.ModelPatcher(double.Model(toy.Denoiser()), CPU, CPU)
    assert "computes in torch.float32" in eager(wide)[1].caveat


def test_delicate_layers_and_those_of_other_libraries_stay(
    model: double.ModelPatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Linear4bit(nn.Linear):
        pass

    blocks: Any = model.model.diffusion_model.blocks
    blocks[0].linear.__class__ = Linear4bit
    blocks[1].time_embedding = nn.Linear(32, 32).bfloat16()
    blocks[2].linear.weight = nn.Parameter(blocks[2].linear.weight.detach().to(torch.float8_e5m2), requires_grad=False)
    _, report = eager(model)
    said = {site.path.removeprefix("diffusion_model.blocks."): site.reason for site in report.skipped}
    assert said["0.linear"] == "a Linear4bit is left to the library that it is of"
    assert said["1.time_embedding"] == "a layer of a modulation, an embedding or a norm"
    assert said["2.linear"] == "its weight is stored as float8_e5m2, which ComfyUI computes with"
    assert [site.path for site in report.patched if site.op == "linear_fp8"] == ["diffusion_model.blocks.1.linear"]


def test_a_quantised_tensor_is_read_as_its_bytes_and_one_scale_for_all_rows() -> None:
    kitchen = pytest.importorskip("comfy_kitchen.tensor")
    weight = torch.randn(48, 32, generator=torch.Generator().manual_seed(1), dtype=torch.bfloat16)
    quantised = kitchen.QuantizedTensor.from_float(weight, "TensorCoreFP8Layout")
    assert is_stored(quantised) and not is_stored(weight) and is_stored(nn.Parameter(quantised, requires_grad=False))
    values, scales = stored_weight(quantised)
    assert values.dtype is torch.float8_e4m3fn and scales.shape == (48, 1) and scales.is_contiguous()
    assert values.data_ptr() == quantised._qdata.data_ptr()
    torch.testing.assert_close(values.float() * scales, quantised.dequantize().float(), rtol=1e-2, atol=1e-2)
    assert not is_stored(weight.to(torch.float8_e5m2))
    raw = nn.Parameter(weight.to(torch.float8_e4m3fn), requires_grad=False)
    assert is_stored(raw) and stored_weight(raw).scales.unique().tolist() == [1.0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_gpu_multiplies_copies_and_bytes_that_are_stored(dtype: torch.dtype) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    layer = nn.Linear(1024, 2048).to(device, dtype).requires_grad_(False)
    patch = Fp8Linear(layer, Kind(), None)
    patch.prove(device, dtype)
    (proof,) = patch.kind.measurements
    assert proof.passed and 0.01 < proof.fused < 0.05 and patch._copy is None

    x = torch.randn(2, 100, 1024, device=device, dtype=dtype)
    layer.weight = nn.Parameter((layer.weight * 100).to(torch.float8_e4m3fn), requires_grad=False)
    exact = x.double() @ layer.weight.double().t() + layer.bias.double()
    y = patch.forward(x)
    assert y.dtype is dtype and y.shape == (2, 100, 2048) and loss(y, exact) < 0.05
    assert patch.counts.fused_calls == 1 and patch._copy is None


# --- in ComfyUI ----------------------------------------------------------------------------------------


@pytest.fixture
def inside_comfyui(comfyui: None) -> Iterator[None]:
    """As it runs nodes: in inference mode, from loading to unloading."""
    import comfy.model_management

    with torch.inference_mode():
        yield
        comfy.model_management.unload_all_models()


@pytest.fixture(scope="module")
def files(comfyui: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: checkpoints.write(kind, folder / f"{kind}.safetensors") for kind in ("flux", "wan", "ltx")}


def loaded(files: dict[str, Path], kind: str, storage: str, folder: Path) -> Any:
    """A model that computes in bfloat16, from a file in bfloat16, cast to e4m3 by the loader, or of a scaled format."""
    if storage == "scaled":
        path = checkpoints.quantise(files[kind], folder / "scaled.safetensors", torch.float8_e4m3fn)
        model = native.load(path)
    else:
        model = native.load(files[kind], dtype=torch.float8_e4m3fn if storage == "cast" else torch.bfloat16)
    model.set_model_compute_dtype(torch.bfloat16)
    return model


@pytest.mark.usefixtures("inside_comfyui")
@pytest.mark.parametrize("kind", ["flux", "wan", "ltx"])
@pytest.mark.parametrize("storage", ["dense", "cast", "scaled"])
def test_native_models_sample_in_fp8(files: dict[str, Path], kind: str, storage: str, tmp_path: Path) -> None:
    model = loaded(files, kind, storage, tmp_path)
    expected = native.sample(model, kind)
    optimized, report = eager(model)
    patches = layers_of(optimized)
    copies = {id(patch): patch for patch in patches if not is_stored(patch.module.weight)}
    found = native.sample(optimized, kind)

    assert loss(found, expected) < LOSS and not torch.equal(found, expected)
    assert patches and all(patch.counts.fused_calls == 2 and not patch.counts.stock_calls for patch in patches)
    assert all(patch._copy is None for patch in patches)
    assert bool(copies) == (storage == "dense")
    stored = 0 if storage == "dense" else len(patches)
    assert any(f"{stored} are stored in e4m3 and used as they are" in note for note in report.notes)
    assert torch.equal(native.sample(model, kind), expected)


@pytest.mark.usefixtures("inside_comfyui")
@pytest.mark.parametrize("storage", ["dense", "cast", "scaled"])
def test_an_adapter_is_in_force(files: dict[str, Path], storage: str, tmp_path: Path) -> None:
    """Before and behind the node; ComfyUI writes it into the weights when it loads the clone that has it."""
    model = loaded(files, "flux", storage, tmp_path)
    expected, plain = native.sample(adapted(model, "flux"), "flux"), native.sample(model, "flux")
    optimized = eager(model)[0]
    native.sample(optimized, "flux")
    behind = native.sample(adapted(optimized, "flux"), "flux")
    before = native.sample(eager(adapted(model, "flux"))[0], "flux")
    assert loss(behind, expected) < LOSS < loss(plain, expected)
    assert loss(before, expected) < LOSS
    assert ADAPTED["flux"][0] in {p.removeprefix("diffusion_model.") for p in patches_of(optimized)}


@pytest.mark.usefixtures("inside_comfyui")
@pytest.mark.parametrize("storage", ["dense", "cast", "scaled"])
def test_low_vram_mode_with_an_adapter(
    files: dict[str, Path], storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer whose weight the adapter computes at every call runs stock; the others are in fp8."""
    import comfy.model_management

    expected = native.sample(adapted(loaded(files, "flux", storage, tmp_path), "flux"), "flux")
    comfy.model_management.unload_all_models()
    optimized = adapted(eager(loaded(files, "flux", storage, tmp_path))[0], "flux")
    optimized.patch_model(CPU, lowvram_model_memory=1)
    with monkeypatch.context() as patch:
        patch.setattr(comfy.model_management, "load_models_gpu", lambda *_, **__: None)
        found = native.sample(optimized, "flux")
    optimized.unpatch_model()

    assert loss(found, expected) < LOSS
    calls = {tuple(patch.counts.stock_calls): patch.counts.fused_calls for patch in layers_of(optimized)}
    assert calls == {(): 2, ("an adapter computes its weight at every call",): 0}


@pytest.mark.usefixtures("inside_comfyui")
def test_the_names_of_events_are_those_of_comfyui() -> None:
    from comfy.patcher_extension import CallbacksMP

    from diffkern.comfyui import patcher

    assert patcher._ON_WRITES == (CallbacksMP.ON_LOAD, CallbacksMP.ON_APPLY_HOOKS)


@pytest.mark.usefixtures("inside_comfyui")
def test_the_layers_that_are_known_are_those_of_comfyui() -> None:
    import comfy.ops

    from diffkern.matching import full_name

    mixed = comfy.ops.mixed_precision_ops({}, torch.bfloat16)
    classes = [ops.Linear for ops in (comfy.ops.disable_weight_init, comfy.ops.manual_cast, comfy.ops.fp8_ops, mixed)]
    assert {full_name(cls) for cls in classes} == fp8._CLASSES - {"torch.nn.modules.linear.Linear"}


def test_a_vae_is_optimized_as_by_fast(model: double.ModelPatcher) -> None:
    class Vae:
        patcher, vae_dtype = model, torch.bfloat16

        def throw_exception_if_invalid(self) -> None:
            pass

    _, report = optimize_vae(Vae(), numerics="fp8", provider="eager")
    assert report.numerics == "fast" and not report.caveat
