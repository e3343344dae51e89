"""The backend for comfy-kitchen, in the real package: chosen, proven, and in force only where it was asked for."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from diffkern.comfyui import kitchen_backend
from diffkern.comfyui.kitchen import FUNCTIONS, IN_PLACE, KitchenBackend, unfit
from diffkern.comfyui.kitchen_backend import KitchenFusion
from diffkern.injection import InjectionReport
from tests.comfyui import double

ck = pytest.importorskip("comfy_kitchen", reason="comfy-kitchen is not installed")

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def sample(name: str, dtype: torch.dtype, exact: bool = False) -> tuple[Tensor, ...]:
    return KitchenFusion(name, KitchenBackend()).samples(torch.nn.Identity(), CPU, dtype, exact)[0]


def copied(call: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.clone() for tensor in call)


def one(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else torch.stack(result)


def prepare(
    numerics: str = "fast", choice: str = "on", **options: Any
) -> tuple[kitchen_backend.KitchenService | None, InjectionReport]:
    report = InjectionReport("model", numerics)
    settings = {"device": CPU, "dtype": torch.float32, "provider": None, **options}
    return kitchen_backend.prepare(choice, numerics=numerics, report=report, **settings), report


def capabilities(service: kitchen_backend.KitchenService) -> set[str]:
    return set(ck.list_backends()[service._backend]["capabilities"])


@pytest.fixture
def patcher() -> double.ModelPatcher:
    return double.ModelPatcher(double.Model(torch.nn.Linear(2, 2)), CPU, CPU)


def call(patcher: double.ModelPatcher, function: Any, *arguments: Any) -> Any:
    """Runs a function as ComfyUI runs a model: inside the wrappers of the clone."""
    wrappers = patcher.get_wrappers("apply_model", kitchen_backend.KEY)
    return wrappers[0](function, *arguments) if wrappers else function(*arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_is_as_accurate_as_the_package(name: str, dtype: torch.dtype) -> None:
    fusion, module = KitchenFusion(name, KitchenBackend()), torch.nn.Identity()
    arguments = sample(name, dtype)
    reference = one(fusion.reference(module, arguments))
    theirs = one(fusion.stock(module, copied(arguments)))
    ours = one(fusion.compute(module, copied(arguments), None, ()))

    assert ours.dtype == theirs.dtype == dtype and ours.shape == theirs.shape
    assert (ours - reference).norm() <= 1.05 * (theirs - reference).norm() + 1e-6 * reference.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["rms_adaln", "adaln"])
def test_exact_functions_give_the_bits_of_the_package(name: str, dtype: torch.dtype) -> None:
    arguments = sample(name, dtype, exact=True)

    assert torch.equal(one(getattr(KitchenBackend(exact=True), name)(*arguments)), one(getattr(ck, name)(*arguments)))


def test_partial_rotation_leaves_the_rest_of_each_head() -> None:
    q, k, matrices, q_scale, k_scale = sample("rms_rope_split_half", torch.float32)
    matrices = matrices[..., :24, :, :]
    ours = KitchenBackend().rms_rope_split_half(q, k, matrices, q_scale, k_scale, 1e-6, 48)
    theirs = ck.rms_rope_split_half(q, k, matrices, q_scale, k_scale, 1e-6, 48)

    torch.testing.assert_close(ours, theirs)


def test_more_matrices_than_tokens_are_trimmed() -> None:
    q, k, matrices = sample("apply_rope", torch.float32)

    torch.testing.assert_close(
        KitchenBackend().apply_rope(q[:, :, :9], k[:, :, :9], matrices),
        ck.apply_rope(q[:, :, :9], k[:, :, :9], matrices),
    )


def test_the_backend_is_registered_with_what_is_proven() -> None:
    service, report = prepare()
    exact, exact_report = prepare("exact")

    assert service and capabilities(service) == set(FUNCTIONS)
    assert report.notes == []
    served = capabilities(exact)
    assert {"rms_adaln", "adaln"} <= served
    assert any("not bit-identical" in note for note in exact_report.notes) or served == set(FUNCTIONS)


def test_it_is_in_force_inside_the_model_that_asked_and_nowhere_else(
    patcher: double.ModelPatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(
        KitchenBackend, "rms_adaln", lambda self, x, scale, shift, eps=1e-6: calls.append(x) or x.clone()
    )
    monkeypatch.setattr(kitchen_backend, "_refusal", lambda name, *_: None)
    service, _ = prepare()
    optimized = patcher.clone()
    kitchen_backend.install(optimized, service)
    arguments = sample("rms_adaln", torch.float32)
    elsewhere: list[Tensor] = []

    def run() -> Tensor:
        thread = threading.Thread(target=lambda: elsewhere.append(ck.rms_adaln(*arguments)))
        thread.start()
        thread.join()
        return ck.rms_adaln(*arguments)

    assert torch.equal(call(optimized, run), arguments[0])
    assert len(calls) == 1 and not torch.equal(elsewhere[0], arguments[0])
    assert not torch.equal(call(patcher, run), arguments[0])
    with pytest.raises(RuntimeError, match="sampling"):
        call(optimized, lambda: (_ for _ in ()).throw(RuntimeError("sampling")))
    ck.rms_adaln(*arguments)
    assert len(calls) == 1


def test_a_call_that_does_not_fit_goes_to_the_package(patcher: double.ModelPatcher) -> None:
    service, report = prepare()
    kitchen_backend.install(patcher, service)
    x, scale, shift = sample("rms_adaln", torch.bfloat16)
    q, k, matrices = sample("apply_rope", torch.float32)

    # Another dtype than was proven, and matrices without the dimensions of the heads.
    assert torch.equal(call(patcher, ck.rms_adaln, x, scale, shift), ck.rms_adaln(x, scale, shift))
    flat = call(patcher, ck.apply_rope, q, k, matrices[0, 0])
    torch.testing.assert_close(flat, ck.apply_rope(q, k, matrices[0, 0]), rtol=0, atol=0)
    assert unfit("apply_rope", {"xq": q, "xk": k, "freqs_cis": matrices[0, 0]}, CPU, torch.float32) is not None
    assert service.counts.fused_calls == 0 and service.counts.stock_calls == {
        "rms_adaln: x is of torch.bfloat16, which is not what was proven": 1,
        "apply_rope: freqs_cis is its rotary matrices are not one 2x2 matrix for each pair": 1,
    }
    assert report.notes == [
        "comfy-kitchen: 0 calls served so far, 2 not: rms_adaln: x is of torch.bfloat16, which is not what was proven"
    ]


def test_auto_leaves_what_a_fast_backend_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KitchenFusion, "owner", lambda *_: "cuda")
    service, report = prepare(choice="auto")

    assert service is None and report.notes == [], "nothing that a user could do anything about"
    assert prepare(choice="on")[0] is not None
    off, report = prepare(choice="off")
    assert off is None and report.notes == []


def test_auto_does_not_put_plain_torch_in_place_of_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffkern.providers import use_provider

    with use_provider("eager"):
        service, report = prepare(choice="auto")
    assert service is None and report.notes == []


def test_without_the_package_a_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "comfy_kitchen.registry", None)
    service, report = prepare()

    assert service is None and report.notes[0].startswith("comfy-kitchen cannot be served")
    assert prepare(choice="auto")[1].notes == []


def test_under_compile_the_backend_is_the_one_of_the_running_model(patcher: double.ModelPatcher) -> None:
    service, _ = prepare()
    kitchen_backend.install(patcher, service)
    arguments = sample("rms_adaln", torch.float32)
    compiled = torch.compile(ck.rms_adaln, backend="aot_eager", fullgraph=True)

    assert torch.equal(call(patcher, compiled, *arguments), KitchenBackend().rms_adaln(*arguments))
    torch._dynamo.reset()


def test_norm_weights_that_need_no_cast_are_served_as_parameters(patcher: double.ModelPatcher) -> None:
    """Z-Image and Cosmos-Predict2 hand the parameter of a norm to the function when it has the dtype of the model."""
    service, report = prepare()
    kitchen_backend.install(patcher, service)
    q, k, matrices, *scales = sample("rms_rope", torch.float32)
    parameters = [torch.nn.Parameter(scale, requires_grad=False) for scale in scales]

    ours = call(patcher, ck.rms_rope, q, k, matrices, *parameters)
    reference = KitchenFusion("rms_rope", KitchenBackend()).reference(None, (q, k, matrices, *scales))
    assert (one(ours) - one(reference)).norm() <= 1e-6 * one(reference).norm()
    assert torch.equal(one(ours), one(KitchenBackend().rms_rope(q, k, matrices, *scales)))
    assert service.counts.fused_calls == 1 and not service.counts.stock_calls
    assert report.notes == ["comfy-kitchen: 1 calls served so far"]


def test_a_tensor_of_a_storage_format_is_left_to_the_package_and_counted(patcher: double.ModelPatcher) -> None:
    class Packed(Tensor):
        pass

    service, _ = prepare()
    kitchen_backend.install(patcher, service)
    x, matrices, scale = sample("rms_rope1", torch.float32)
    packed = scale.as_subclass(Packed)

    assert torch.equal(call(patcher, ck.rms_rope1, x, matrices, packed), ck.rms_rope1(x, matrices, scale))
    assert service.counts.stock_calls == {"rms_rope1: scale is a Packed, not a plain tensor": 1}


def test_norm_weights_that_are_cast_at_every_call_may_have_a_dtype_of_their_own(patcher: double.ModelPatcher) -> None:
    service, _ = prepare(dtype=torch.bfloat16)
    kitchen_backend.install(patcher, service)
    x, matrices, scale = sample("rms_rope1", torch.bfloat16)

    ours = call(patcher, ck.rms_rope1, x, matrices, scale.float())
    reference = KitchenFusion("rms_rope1", KitchenBackend()).reference(None, (x, matrices, scale))
    assert service.counts.fused_calls == 1 and not service.counts.stock_calls
    assert (ours - reference).norm() <= 4e-3 * reference.norm()


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["rms_rope1", "rms_rope_split_half1"])
def test_queries_alone_are_normalised_and_rotated_in_either_layout(name: str, batch: int) -> None:
    eager = pytest.importorskip("comfy_kitchen.backends.eager")
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 5, 3, 8, generator=generator)
    for shape in ((batch, 5, 1, 4, 2, 2), (batch, 1, 3, 4, 2, 2)):
        call = {"x": x, "freqs_cis": torch.randn(shape, generator=generator), "scale": torch.rand(8) + 0.5}
        wide = {key: value.double() for key, value in call.items()}
        torch.testing.assert_close(
            getattr(KitchenBackend(), name)(**call), getattr(eager, name)(**wide).float(), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_function_that_writes_writes_into_its_inputs_and_returns_them(
    patcher: double.ModelPatcher, name: str
) -> None:
    service, _ = prepare()
    kitchen_backend.install(patcher, service)
    arguments = sample(name, torch.float32)
    reference = one(KitchenFusion(name, KitchenBackend()).reference(None, arguments))
    results = call(patcher, getattr(ck, name), *arguments)
    inputs = arguments[: 1 if isinstance(results, Tensor) else 2]

    assert all(y is x for y, x in zip([results] if len(inputs) == 1 else results, inputs, strict=True))
    assert (one(inputs if len(inputs) > 1 else inputs[0]) - reference).norm() <= 1e-6 * reference.norm()
    assert service.counts.fused_calls == 1 and not service.counts.stock_calls


def test_inputs_that_the_package_does_not_write_into_are_its_error(patcher: double.ModelPatcher) -> None:
    service, _ = prepare()
    kitchen_backend.install(patcher, service)
    q, _, matrices = sample("apply_rope_", torch.float32)
    packed = torch.randn(2, 45, 2, 6, 128).unbind(2)

    with pytest.raises(ValueError, match="non-overlapping"):
        call(patcher, ck.apply_rope_, q, q, matrices)
    assert sum(service.counts.stock_calls.values()) == 1 and not service.counts.fused_calls
    call(patcher, ck.apply_rope_, *packed, matrices.transpose(1, 2))  # parts of one projection, side by side
    assert service.counts.fused_calls == 1


def test_a_model_that_calls_nothing_is_not_said_to_be_served(
    patcher: double.ModelPatcher, caplog: pytest.LogCaptureFixture
) -> None:
    """SD1.5, SDXL and SD3 call no function of comfy-kitchen."""
    service, report = prepare()
    kitchen_backend.install(patcher, service)
    call(patcher, torch.ones, 2)
    with caplog.at_level("INFO", "diffkern"):
        patcher.callbacks["on_cleanup"][kitchen_backend.KEY][0](patcher)

    assert report.notes == [] and caplog.messages == []


def test_the_report_counts_the_calls_of_a_model_and_of_its_clones_and_of_no_other(patcher: double.ModelPatcher) -> None:
    arguments = sample("rms_adaln", torch.float32)
    services, reports = zip(*(prepare() for _ in range(2)), strict=True)
    clones = [patcher.clone() for _ in services]
    for clone, service in zip(clones, services, strict=True):
        kitchen_backend.install(clone, service)
    for clone in (clones[0], clones[0].clone(), clones[1]):
        call(clone, ck.rms_adaln, *arguments)

    assert [service.counts.fused_calls for service in services] == [2, 1]
    assert [report.notes[-1] for report in reports] == [f"comfy-kitchen: {n} calls served so far" for n in (2, 1)]
    assert [kitchen_backend.service_of(clone) for clone in clones] == list(services)
    kitchen_backend.remove(clones[0])
    assert kitchen_backend.service_of(clones[0]) is None
