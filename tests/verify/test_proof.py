"""What a proof asks of a fused path besides its error, and that it leaves everything as it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffkern import InjectionError, inject_optimized_kernels
from diffkern.injection.norm_fusion import NormFusion
from diffkern.matching import match
from diffkern.verify.isolation import Copy, map_tensors, tensors_of
from diffkern.verify.measures import Measurement
from diffkern.verify.proof import Verifier
from tests.injection.models import run, tiny_ltx

CPU = torch.device("cpu")


def norm() -> nn.LayerNorm:
    """A layer norm with weights that count."""
    layer = nn.LayerNorm(64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(64, generator=generator))
    return layer.requires_grad_(False)


def right(module: Any, x: Tensor) -> Tensor:
    """What the layer computes."""
    return F.layer_norm(x, (64,), module.weight, module.bias, module.eps)


def prove(compute: Callable[[Any, Tensor], Any], numerics: str = "fast") -> Measurement:
    """Proves a layer norm that is computed by a function of the module and its input."""
    layer = norm()
    found = match(layer)
    assert found is not None and found.semantics is not None

    class Fusion(NormFusion):
        def compute(self, module: nn.Module, call: Tensor, provider: str | None, stock: tuple[str, ...]) -> Tensor:
            result: Tensor = compute(module, call)
            return result

    proof = Verifier(numerics).prove(layer, Fusion(found.semantics), None, CPU, torch.float32)
    assert proof is not None
    return proof


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_what_stock_computes_passes(numerics: str) -> None:
    proof = prove(right, numerics)
    assert proof.passed and proof.bit_identical and proof.fused == proof.stock


def test_a_result_that_is_right_does_not_excuse_writing_into_the_input() -> None:
    def compute(module: Any, x: Tensor) -> Tensor:
        y = right(module, x)
        x.zero_()
        return y

    proof = prove(compute)
    assert not proof.passed and "writes into its inputs" in proof.reason


def test_an_input_zeroed_before_stock_could_read_it_makes_no_zero_right() -> None:
    """Stock runs first, on a copy of its own."""

    def compute(module: Any, x: Tensor) -> Tensor:
        x.zero_()
        return right(module, x)

    assert not prove(compute).passed


def test_writing_into_a_weight_is_refused_though_the_result_is_right() -> None:
    def compute(module: Any, x: Tensor) -> Tensor:
        y = right(module, x)
        module.bias.data.add_(1)
        return y

    proof = prove(compute)
    assert not proof.passed and "weights" in proof.reason


@pytest.mark.parametrize("stock_does", [True, False])
def test_a_result_in_the_memory_of_the_input_is_refused_unless_stock_does_that(stock_does: bool) -> None:
    layer = norm()
    found = match(layer)
    assert found is not None and found.semantics is not None

    class Nothing(NormFusion):
        """Computes its input."""

        def check_semantics(self, module: nn.Module) -> None:
            return None

        def stock(self, module: nn.Module, call: Tensor) -> Tensor:
            return call[:] if stock_does else call.clone()

        def reference(self, module: nn.Module, call: Tensor) -> Tensor:
            return call.double()

        def compute(self, module: nn.Module, call: Tensor, provider: str | None, stock: tuple[str, ...]) -> Tensor:
            return call

    proof = Verifier("fast").prove(layer, Nothing(found.semantics), None, CPU, torch.float32)
    assert proof is not None and proof.bit_identical and proof.passed == stock_does
    assert stock_does or "memory of an input" in proof.reason


def test_a_second_run_is_proven_too() -> None:
    calls = []

    def compute(module: Any, x: Tensor) -> Tensor:
        calls.append(x)
        return right(module, x) * (1 if len(calls) % 2 else 2)

    proof = prove(compute)
    assert not proof.passed and "second run" in proof.reason


def test_a_result_that_the_next_run_writes_over_is_refused() -> None:
    buffers: dict[torch.Size, Tensor] = {}

    def compute(module: Any, x: Tensor) -> Tensor:
        buffer = buffers.setdefault(x.shape, torch.empty_like(x))
        first = not hasattr(buffer, "used")
        buffer.used = True  # type: ignore[attr-defined]
        # The second run rounds otherwise, which the contract allows.
        return buffer.copy_(right(module, x) * (1 if first else 1 + 2**-23))

    proof = prove(compute)
    assert not proof.passed and "result of the first" in proof.reason


def test_a_kernel_that_is_wrong_for_a_single_row_is_refused() -> None:
    def compute(module: Any, x: Tensor) -> Tensor:
        return right(module, x) * (2 if len(x) == 1 else 1)

    proof = prove(compute)
    assert not proof.passed and proof.fused == pytest.approx(1.0, rel=1e-3)


def test_an_exception_is_a_reason_and_global_state_is_as_before() -> None:
    def compute(module: Any, x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.manual_seed(5)
        torch.set_grad_enabled(True)
        torch.set_autocast_enabled("cpu", True)
        torch.use_deterministic_algorithms(True)
        torch.set_float32_matmul_precision("medium")
        raise ValueError("no room\nfor this")

    random = torch.get_rng_state()
    with torch.no_grad():
        proof = prove(compute)
        assert not torch.is_grad_enabled()
    assert not proof.passed and proof.reason == "failed: ValueError: no room"
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.get_default_dtype() is torch.float32 and torch.get_default_device() == CPU
    assert not torch.is_autocast_enabled("cpu") and not torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_copy_of_a_call_has_its_strides_and_shares_nothing() -> None:
    table = torch.arange(24.0).view(2, 3, 4)
    call = (table.transpose(0, 2), {"a": table[:, 1]}, [table[:1].expand(5, 3, 4)], "text", None)
    copy = Copy(call)
    for x, y in zip(tensors_of(call), tensors_of(copy.call), strict=True):
        assert torch.equal(x, y) and x.stride() == y.stride() and x.data_ptr() != y.data_ptr()
    assert copy.call[3:] == ("text", None) and copy.written() == [False]
    copy.call[1]["a"][0, 0] = -1
    assert copy.written() == [True] and copy.call[0][0, 1, 0] == -1 and table[0, 1, 0] == 4
    assert copy.shared_with((torch.empty(1), copy.call[0][1:])) == {0} and copy.shared_with(table) == set()
    assert map_tensors(lambda x: x.ndim, call)[1:3] == ({"a": 2}, [3])


def test_a_proof_that_raises_leaves_the_module_stock_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user put into a block may not run on samples: neither the injection nor a step raises."""
    from diffkern.blocks import text

    def samples(*args: object) -> list[tuple[Any, ...]]:
        raise RuntimeError("no sample fits")

    stock, model = tiny_ltx(), tiny_ltx()
    with monkeypatch.context() as patch:
        patch.setattr(text.TextProjection, "samples", samples)
        report = inject_optimized_kernels(model)
        with pytest.raises(InjectionError, match="no sample fits"):
            inject_optimized_kernels(tiny_ltx(), strict=True)
    (failed,) = [site for site in report.failed if site.op == "caption"]
    assert "no sample fits" in failed.reason
    torch.testing.assert_close(run(model), run(stock), rtol=1e-4, atol=1e-5)


def test_a_proof_that_raises_in_a_step_runs_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffkern.blocks import text

    def samples(*args: object) -> list[tuple[Any, ...]]:
        raise RuntimeError("no sample fits")

    stock, model = tiny_ltx(), tiny_ltx()
    inject_optimized_kernels(model)
    stock.to(torch.bfloat16)
    model.to(torch.bfloat16)
    monkeypatch.setattr(text.TextProjection, "samples", samples)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        result = run(model, dtype=torch.bfloat16)
    assert any("no sample fits" in str(warning.message) for warning in heard)
    torch.testing.assert_close(result, run(stock, dtype=torch.bfloat16), rtol=0.05, atol=0.05)
