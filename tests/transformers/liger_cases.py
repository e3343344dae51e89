"""Cases of Liger's kernels, to be run in Triton's interpreter or on a GPU; not collected by name.

The interpreter knows no rms_norm and no swiglu of Liger: their kernels convert Python numbers, which stay what they
are there.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from diffkern import StrictModeError, inject_optimized_kernels
from diffkern.bench.measure import relative_error
from diffkern.ops import rope
from diffkern.providers import liger
from tests.transformers.models import all_is_fused, build, in_float64, inputs, logits, step

DEVICE = os.environ.get("LIGER_DEVICE", "cpu")
INTERPRETED = DEVICE == "cpu"

#: Flags that the interpreter can run.
ROPE = {"rope": True, "swiglu": False, "rms_norm": False, "fused_linear_cross_entropy": False}
LINEAR = ROPE | {"rope": False, "fused_linear_cross_entropy": True}
LOSS = ROPE | {"rope": False, "cross_entropy": True}

#: End to end.
RATIO, SLACK = 1.2, 1e-6

dtypes = pytest.mark.parametrize("dtype", [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16])


def model_of(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Tensor]]:
    return build(name, dtype, DEVICE).train(), inputs(name, "right", DEVICE)


def test_liger_is_there() -> None:
    assert liger.unavailable_reason(torch.device(DEVICE)) is None


def test_rotation_writes_over_nothing() -> None:
    q, k = (torch.randn(2, 5, heads, 8, device=DEVICE).transpose(1, 2).requires_grad_() for heads in (4, 2))
    angles = torch.rand(2, 5, 4, device=DEVICE) * 9
    cos, sin = (torch.cat([table, table], -1) for table in (angles.cos(), angles.sin()))
    before = q.detach().clone()
    fused = liger.rope(q, k, cos, sin)
    stock = tuple(rope(x, cos[:, None], sin[:, None], pairing="half", provider="eager") for x in (q, k))
    assert torch.equal(q, before)
    torch.testing.assert_close(fused, stock)
    cotangents = tuple(torch.randn_like(y) for y in fused)
    kept = tuple(y.clone() for y in cotangents)
    expected = torch.autograd.grad(stock, (q, k), cotangents)
    for _ in range(2):  # a second backward over the same graph
        torch.testing.assert_close(torch.autograd.grad(fused, (q, k), cotangents, retain_graph=True), expected)
    torch.testing.assert_close(cotangents, kept, rtol=0, atol=0)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter cannot run these kernels")
@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_gated_units_write_over_nothing(name: str) -> None:
    gate, up = (torch.randn(3, 70, device=DEVICE, requires_grad=True) for _ in range(2))
    before = (gate.detach().clone(), up.detach().clone())
    fused = liger.glu(gate, up, name)
    activation = F.silu if name == "silu" else lambda x: F.gelu(x, approximate="tanh")
    stock = activation(gate) * up
    torch.testing.assert_close(fused, stock)
    cotangent = torch.randn_like(fused)
    expected = torch.autograd.grad(stock, (gate, up), cotangent)
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(fused, (gate, up), cotangent, retain_graph=True), expected)
    torch.testing.assert_close((gate.detach(), up.detach()), before, rtol=0, atol=0)


@pytest.mark.parametrize("ignored", [0, 2, 6])
def test_losses(ignored: int) -> None:
    logits_, target = torch.randn(6, 11, device=DEVICE, requires_grad=True), torch.arange(6, device=DEVICE)
    target[:ignored] = -100
    before = logits_.detach().clone()
    if ignored == 6:
        assert torch.isnan(F.cross_entropy(logits_, target))
        return  # nothing to learn from, and nothing to compare
    fused, stock = liger.cross_entropy(logits_, target, -100), F.cross_entropy(logits_, target)
    torch.testing.assert_close(fused, stock)
    torch.testing.assert_close(
        torch.autograd.grad(3 * fused, logits_), torch.autograd.grad(3 * stock, logits_), rtol=1e-4, atol=1e-6
    )
    assert torch.equal(logits_, before)

    x, weight = (torch.randn(size, 8, device=DEVICE, requires_grad=True) for size in (6, 11))
    fused, stock = liger.fused_linear_cross_entropy(x, weight, target, -100), F.cross_entropy(x @ weight.T, target)
    torch.testing.assert_close(fused, stock)
    torch.testing.assert_close(
        torch.autograd.grad(3 * fused, (x, weight), retain_graph=True),
        torch.autograd.grad(3 * stock, (x, weight)),
        rtol=1e-4,
        atol=1e-6,
    )
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(fused, (x, weight))


_ALL = [(name, flags) for name in ("llama", "gemma", "qwen3") for flags in (ROPE, LINEAR, LOSS, True)]
_FEW = [("llama", ROPE), ("llama", LINEAR), ("llama", LOSS), ("gemma", LINEAR)]  # the interpreter takes its time


#: The interpreter cuts float32 to bfloat16, where a GPU rounds.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16])])
def test_the_contract_of_the_loss_without_logits(dtype: torch.dtype) -> None:
    """Scaled, its gradients in half precision have one rounding more than stock's; the report has what that costs."""
    model, batch = model_of("llama", dtype)
    report = inject_optimized_kernels(model, liger=LINEAR)
    model(**batch, labels=batch["input_ids"], num_items_in_batch=7).loss.backward()
    assert report.calls()[""]["fused"] == 1 and not report.calls()[""]["stock"]
    (site,) = [site for site in report.patched if site.path == ""]
    (proof,) = [proof for proof in site.measurements if proof.gradients]
    assert proof.passed and proof.dtype == str(dtype).removeprefix("torch.")
    if dtype == torch.float32:
        assert proof.fused <= 1.05 * proof.stock + SLACK
    else:
        assert 1.05 * proof.stock < proof.fused <= liger.LINEAR_LOSS_GRADIENT_RATIO * proof.stock


@dtypes
@pytest.mark.parametrize(("name", "flags"), _FEW if INTERPRETED else _ALL)
def test_training(name: str, flags: Any, dtype: torch.dtype) -> None:
    model, batch = model_of(name, dtype)
    exact, stock = step(in_float64(model), batch), step(model, batch)
    report = inject_optimized_kernels(model, liger=flags)
    assert not report.failed
    fused = step(model, batch)
    own = flags in (True, LINEAR) and dtype != torch.float32
    ratio = liger.LINEAR_LOSS_GRADIENT_RATIO if own else RATIO
    assert relative_error(fused, exact) <= ratio * relative_error(stock, exact) + SLACK
    assert not [site.reason for site in report.patched if "runs stock" in site.reason]
    assert all_is_fused(name, report, joined=flags is not True)  # True: Liger computes the norms
    report.restore()
    assert torch.equal(step(model, batch), stock)


@pytest.mark.parametrize("flags", [LINEAR, LOSS])
def test_the_loss_is_that_of_the_library(flags: dict[str, bool]) -> None:
    model, batch = model_of("llama")
    labels = batch["input_ids"]
    given = [{}, {"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(7)}, {"shift_labels": labels.flip(1)}]
    stock = [model(**batch, labels=labels, **more) for more in given]
    report = inject_optimized_kernels(model, liger=flags)
    fused = [model(**batch, labels=labels, **more) for more in given]
    for ours, theirs in zip(fused, stock, strict=True):
        torch.testing.assert_close(ours.loss, theirs.loss)
        assert (ours.logits is None) == flags["fused_linear_cross_entropy"]
        if ours.logits is not None:
            before = ours.logits.detach().clone()
            ours.loss.backward()
            assert torch.equal(ours.logits, before)  # Liger's own loss leaves gradients there
    assert report.calls()[""]["fused"] == 4
    assert any("has no logits" in note for note in report.notes) == flags["fused_linear_cross_entropy"]


def test_evaluation_and_generation_have_logits() -> None:
    model, batch = model_of("llama")
    report = inject_optimized_kernels(model, liger=LINEAR, strict=True)
    model.eval()
    assert model(**batch, labels=batch["input_ids"]).logits is not None
    assert model.generate(**batch, max_new_tokens=3, do_sample=False).shape[1] == 13
    model.train()
    assert model(**batch, labels=batch["input_ids"]).logits is None
    assert model(**batch).logits is not None
    assert report.calls()[""]["fused"] == 1
    with pytest.raises(StrictModeError, match="its output is a tuple"):
        model(**batch, labels=batch["input_ids"], return_dict=False)


def test_an_adapter_on_the_head_is_not_lost() -> None:
    from peft import LoraConfig, get_peft_model

    model, batch = model_of("llama")
    wrapped = get_peft_model(model, LoraConfig(target_modules=["lm_head"], r=2, init_lora_weights=False))
    stock = step(wrapped, batch)
    report = inject_optimized_kernels(wrapped, liger=LINEAR)
    torch.testing.assert_close(step(wrapped, batch), stock, rtol=1e-4, atol=1e-6)
    (counts,) = [count for path, count in report.calls().items() if path.endswith("base_model.model")]
    assert counts["stock_reasons"] == {"its head is not a plain linear layer: an adapter there would be lost": 1}


def test_capped_logits_have_no_fused_head() -> None:
    model, batch = model_of("gemma2")
    stock = step(model, batch)
    report = inject_optimized_kernels(model, liger=LINEAR)
    (site,) = [site for site in report.skipped if site.path == ""]
    assert "does more with its logits than to compute a loss" in site.reason
    report.restore()
    inject_optimized_kernels(model, liger=LOSS, strict=True)
    torch.testing.assert_close(step(model, batch), stock, rtol=1e-4, atol=1e-5)


def test_another_loss_function_is_kept() -> None:
    model, batch = model_of("llama")
    model.loss_function = lambda logits, labels, **_: logits.float().square().mean()
    stock = step(model, batch)
    report = inject_optimized_kernels(model, liger=LINEAR)
    torch.testing.assert_close(step(model, batch), stock, rtol=1e-4, atol=1e-6)
    reason = "its loss function is not that of transformers for language models"
    assert report.calls()[""]["stock_reasons"] == {reason: 1}


def test_nothing_of_the_library_is_patched() -> None:
    """Another model, made before or after, trains as ever."""
    model, batch = model_of("llama")
    other = copy.deepcopy(model)
    stock = step(other, batch)
    inject_optimized_kernels(model, liger=LINEAR)
    step(model, batch)
    assert torch.equal(step(other, batch), stock)
    assert torch.equal(step(model_of("llama")[0], batch), stock)


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU every kernel runs")
def test_a_kernel_that_fails_is_a_reason_and_training_goes_on() -> None:
    model, batch = model_of("llama")
    stock = step(model, batch)
    report = inject_optimized_kernels(model, liger=ROPE | {"rope": False, "rms_norm": True})
    with pytest.warns(UserWarning, match="LlamaRMSNorm runs stock wherever gradients are wanted: failed"):
        torch.testing.assert_close(step(model, batch), stock, rtol=1e-4, atol=1e-6)
    logits(model, batch)
    counts = report.calls()["model.norm"]
    assert counts["fused"] == 1 and counts["stock"] == 1
