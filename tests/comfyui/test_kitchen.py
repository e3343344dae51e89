"""The backend for comfy-kitchen, in the real package: chosen, proven, and in force only where it was asked for."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from diffkern.comfyui import kitchen_backend
from diffkern.comfyui.kitchen import FUNCTIONS, Kitchen, unfit
from diffkern.comfyui.kitchen_fusion import KitchenFusion
from diffkern.injection import InjectionReport
from tests.comfyui import double

ck = pytest.importorskip("comfy_kitchen", reason="comfy-kitchen is not installed")

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def sample(name: str, dtype: torch.dtype, exact: bool = False) -> tuple[Tensor, ...]:
    return KitchenFusion(name, Kitchen()).samples(torch.nn.Identity(), CPU, dtype, exact)[0]


def one(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else torch.stack(result)


def prepare(numerics: str = "fast", choice: str = "on", **options: Any) -> tuple[str | None, list[str]]:
    report = InjectionReport("model", numerics)
    settings = {"device": CPU, "dtype": torch.float32, "provider": None, **options}
    return kitchen_backend.prepare(choice, numerics=numerics, report=report, **settings), report.notes


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
    fusion, module = KitchenFusion(name, Kitchen()), torch.nn.Identity()
    arguments = sample(name, dtype)
    reference = one(fusion.reference(module, arguments))
    ours, theirs = one(getattr(Kitchen(), name)(*arguments)), one(getattr(ck, name)(*arguments))

    assert ours.dtype == theirs.dtype == dtype and ours.shape == theirs.shape
    assert (ours - reference).norm() <= 1.05 * (theirs - reference).norm() + 1e-6 * reference.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["rms_adaln", "adaln"])
def test_exact_functions_give_the_bits_of_the_package(name: str, dtype: torch.dtype) -> None:
    arguments = sample(name, dtype, exact=True)

    assert torch.equal(one(getattr(Kitchen(exact=True), name)(*arguments)), one(getattr(ck, name)(*arguments)))


def test_partial_rotation_leaves_the_rest_of_each_head() -> None:
    q, k, matrices, q_scale, k_scale = sample("rms_rope_split_half", torch.float32)
    matrices = matrices[..., :24, :, :]
    ours = Kitchen().rms_rope_split_half(q, k, matrices, q_scale, k_scale, 1e-6, 48)
    theirs = ck.rms_rope_split_half(q, k, matrices, q_scale, k_scale, 1e-6, 48)

    torch.testing.assert_close(ours, theirs)


def test_more_matrices_than_tokens_are_trimmed() -> None:
    q, k, matrices = sample("apply_rope", torch.float32)

    torch.testing.assert_close(
        Kitchen().apply_rope(q[:, :, :9], k[:, :, :9], matrices), ck.apply_rope(q[:, :, :9], k[:, :, :9], matrices)
    )


def test_the_backend_is_registered_with_what_is_proven() -> None:
    name, notes = prepare()
    exact, exact_notes = prepare("exact")

    assert set(ck.list_backends()[name]["capabilities"]) == set(FUNCTIONS)
    assert "comfy-kitchen is served" in notes[0]
    served = set(ck.list_backends()[exact]["capabilities"])
    assert {"rms_adaln", "adaln"} <= served
    assert any("not bit-identical" in note for note in exact_notes) or served == set(FUNCTIONS)


def test_it_is_in_force_inside_the_model_that_asked_and_nowhere_else(
    patcher: double.ModelPatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(Kitchen, "rms_adaln", lambda self, x, scale, shift, eps=1e-6: calls.append(x) or x.clone())
    monkeypatch.setattr(kitchen_backend, "_refusal", lambda name, *_: None)
    name, _ = prepare()
    optimized = patcher.clone()
    kitchen_backend.install(optimized, name)
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
    name, _ = prepare()
    kitchen_backend.install(patcher, name)
    x, scale, shift = sample("rms_adaln", torch.bfloat16)
    q, k, matrices = sample("apply_rope", torch.float32)

    # Another dtype than was proven, and matrices without the dimensions of the heads.
    assert torch.equal(call(patcher, ck.rms_adaln, x, scale, shift), ck.rms_adaln(x, scale, shift))
    flat = call(patcher, ck.apply_rope, q, k, matrices[0, 0])
    torch.testing.assert_close(flat, ck.apply_rope(q, k, matrices[0, 0]), rtol=0, atol=0)
    assert unfit("apply_rope", {"xq": q, "xk": k, "freqs_cis": matrices[0, 0]}) is not None


def test_auto_leaves_what_a_fast_backend_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KitchenFusion, "owner", lambda *_: "cuda")
    name, notes = prepare(choice="auto")

    assert name is None and "its own cuda backend is there" in notes[0]
    assert prepare(choice="on")[0] is not None
    assert prepare(choice="off") == (None, [])


def test_auto_does_not_put_plain_torch_in_place_of_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffkern.providers import use_provider

    with use_provider("eager"):
        name, notes = prepare(choice="auto")
    assert name is None and "nothing but plain PyTorch" in notes[0]


def test_without_the_package_a_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "comfy_kitchen.registry", None)
    name, notes = prepare()

    assert name is None and notes[0].startswith("comfy-kitchen cannot be served")


def test_under_compile_the_backend_is_the_one_of_the_running_model(patcher: double.ModelPatcher) -> None:
    name, _ = prepare()
    kitchen_backend.install(patcher, name)
    arguments = sample("rms_adaln", torch.float32)
    compiled = torch.compile(ck.rms_adaln, backend="aot_eager", fullgraph=True)

    assert torch.equal(call(patcher, compiled, *arguments), Kitchen().rms_adaln(*arguments))
    torch._dynamo.reset()
