"""Linear layers whose weights another library holds in fp8: these are used as they are, without a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffkern import KernelConfig, inject_optimized_kernels, restore
from diffkern.blocks.fp8 import stored_weight
from diffkern.cache import memory
from diffkern.injection import fp8_fusion
from diffkern.ops import activation_fp8
from diffkern.verify.measures import relative_error

EMULATED = {"linear_fp8": "eager"}


class Float8Tensor(Tensor):
    """A weight laid out as that of torchao: e4m3 and scales, which claims the dtype that it was made from."""

    qdata: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, qdata: Tensor, scale: Tensor) -> Float8Tensor:
        made: Float8Tensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, qdata.shape, dtype=torch.bfloat16, device=qdata.device
        )
        made.qdata, made.scale = qdata, scale
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Float8Tensor{tuple(self.shape)}"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, bias = args
            wide = (weight.qdata.float() * weight.scale).bfloat16()
            return F.linear(x, wide, bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.alias.default):
            return cls(args[0].qdata, args[0].scale)
        if func is aten.clone.default:
            return cls(args[0].qdata.clone(), args[0].scale.clone())
        raise TypeError(f"a Float8Tensor has no {func}")


Float8Tensor.__module__ = "torchao.quantization"


def _in_its_layout(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(Float8Tensor(*activation_fp8(layer.weight)), requires_grad=False)


def _by_torchao(layer: nn.Linear) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(layer, quantization.Float8WeightOnlyConfig())


QUANTIZE = {"laid out so": _in_its_layout, "torchao": _by_torchao}


@pytest.fixture(autouse=True)
def _small_layers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_fusion, "LEAST_FEATURES", 32)
    monkeypatch.setattr(fp8_fusion, "LEAST_ROWS", 8)


def _layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 48).bfloat16().requires_grad_(False)


def _x() -> Tensor:
    return torch.randn(3, 20, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("quantize", QUANTIZE.values(), ids=QUANTIZE)
def test_a_product_is_that_of_the_bytes_that_are_there(quantize: Callable[[nn.Linear], None]) -> None:
    layer, x = _layer(), _x()
    quantize(layer)
    stored, stock = stored_weight(layer.weight), layer(x)
    assert stored is not None
    report = inject_optimized_kernels(layer, numerics="fp8", config=EMULATED)
    y, rows = layer(x), activation_fp8(x)
    wide = [values.double() * scales.double() for values, scales in (rows, stored)]
    assert layer.bias is not None
    torch.testing.assert_close(y.double(), wide[0] @ wide[1].t() + layer.bias.double(), rtol=2**-8, atol=1e-3)
    (counts,) = report.calls().values()
    assert (counts["fused"], counts["stock"]) == (1, 0)
    assert "layers whose weights are in fp8 already: 1; their bytes are used as they are" in report.notes
    assert not memory(layer)["fp8"].entries()
    restore(layer)
    assert torch.equal(layer(x), stock)


def test_a_proof_compares_with_the_numbers_that_the_bytes_stand_for() -> None:
    layer = _layer()
    original = layer.weight.double()
    _in_its_layout(layer)
    report = inject_optimized_kernels(layer, numerics="fp8", config=EMULATED)
    layer(_x())
    (site,) = report.patched
    (measured,) = site.measurements
    assert measured.stock < 0.004 < relative_error(stored_weight(layer.weight).values, original)  # type: ignore[union-attr]
    assert 0.01 < measured.fused < 0.04, "the input alone is rounded"


def test_nothing_takes_the_place_of_a_weight_that_is_in_fp8_already() -> None:
    layer, x = _layer(), _x()
    _in_its_layout(layer)
    weight = layer.weight
    config = KernelConfig(EMULATED, fp8_weights="replace")
    inject_optimized_kernels(layer, numerics="fp8", config=config)
    layer(x)
    assert layer.weight is weight and weight.qdata.device == x.device  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "change",
    [
        lambda q, s: (q, s.mean().expand(48, 1)),  # not one for each row in memory
        lambda q, s: (q, s.bfloat16()),
        lambda q, s: (q.float().to(torch.float8_e5m2), s),
        lambda q, s: (q.t().contiguous().t(), s),
        lambda q, s: (q, s.mean().reshape(1, 1)),  # of the whole tensor
    ],
)
def test_weights_of_another_form_are_left_to_their_library(change: Callable[[Tensor, Tensor], Any]) -> None:
    layer, x = _layer(), _x()
    layer.weight = nn.Parameter(Float8Tensor(*change(*activation_fp8(layer.weight))), requires_grad=False)
    stock = layer(x)
    report = inject_optimized_kernels(layer, numerics="fp8", config=EMULATED)
    assert torch.equal(layer(x), stock)
    (site,) = report.skipped
    assert site.reason == "its weight is a Float8Tensor, which its own library computes with"


def test_a_weight_of_another_dtype_than_the_input_is_computed_by_its_library() -> None:
    layer, x = _layer(), _x()
    layer.bias = None  # which would be of another dtype, too
    _in_its_layout(layer)
    report = inject_optimized_kernels(layer, numerics="fp8", config=EMULATED, verify=False)  # no proof finds it out
    with pytest.raises(RuntimeError):  # as stock
        layer(x.half())
    (counts,) = report.calls().values()
    assert counts["stock"] == 1
