"""Backends on a GPU: whatever is there is right or refused, and nothing raises in the middle of a run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from diffkern import inject_optimized_kernels
from diffkern.attention import BACKENDS, AttentionCall, Route, accuracy, cudnn_fp8
from diffkern.attention.accuracy import peak_bytes, seconds
from diffkern.bench import attention
from diffkern.providers.eager import attention_fp8 as eager_fp8
from tests.injection.models import ltx_inputs, tiny_ltx
from tests.ops.test_attention_fp8 import unrotated

pytestmark = pytest.mark.gpu

Make = Callable[..., AttentionCall]

stock = BACKENDS["native"].compute

_HERE = [name for name, backend in BACKENDS.items() if backend.missing() is None and not backend.downloads]


@pytest.mark.parametrize("name", _HERE)
@pytest.mark.parametrize(
    "arguments",
    [
        *({"head_dim": head_dim} for head_dim in (40, 64, 72, 96, 128, 160, 192, 256, 512)),
        {"queries": 1, "keys": 300, "head_dim": 64},
        {"head_dim": 64, "dtype": torch.float32},
        {"head_dim": 64, "gradients": True},
        {"head_dim": 64, "dropout": 0.2, "gradients": True},
        {"head_dim": 64, "mask": "bool"},
        {"head_dim": 64, "mask": "additive"},
        {"head_dim": 64, "queries": 12, "causal": True},
        {"head_dim": 64, "causal": True},
    ],
    ids=str,
)
def test_every_backend_is_right_or_refused(name: str, arguments: dict[str, object], make_call: Make) -> None:
    call = make_call(**{"dtype": torch.bfloat16, "device": "cuda", "queries": 80, "keys": 130, **arguments})
    route = Route([BACKENDS[name]])
    y = route(call, stock)
    assert y.shape == (*call.query.shape[:3], call.value.shape[3])
    assert route.fused_calls + sum(route.stock_calls.values()) == 1
    if call.dropout == 0:
        error, own = accuracy.errors(call, (lambda call: route(call, stock), stock))
        assert BACKENDS[name].lossy or error <= 1.06 * own + 1e-6


@pytest.mark.parametrize("name", ["_native_cudnn", "_native_efficient", "_native_flash"])
def test_pytorchs_kernels_serve_plain_calls(name: str, make_call: Make) -> None:
    call = make_call(dtype=torch.bfloat16, device="cuda", head_dim=64, kv_heads=4, queries=256, keys=256)
    route = Route([BACKENDS[name]])
    route(call, stock)
    if torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 0):
        assert route.fused_calls == 1, route.stock_calls


def test_auto_on_a_model() -> None:
    model = tiny_ltx().to("cuda", torch.bfloat16)
    inputs = {
        name: value.to("cuda") if isinstance(value, torch.Tensor) else value
        for name, value in ltx_inputs(dtype=torch.bfloat16).items()
    }
    with torch.no_grad():
        expected = model(**inputs)[0]
        report = inject_optimized_kernels(model, attention="auto", config={"*": "eager"})
        torch.testing.assert_close(model(**inputs)[0], expected, rtol=5e-2, atol=5e-2)
        site = next(site for site in report.patched if site.op == "attention")
        assert "fastest by measurement" in site.reason and site.measurements
        report.restore()
        assert torch.equal(model(**inputs)[0], expected)


def test_nothing_is_tried_while_a_graph_is_captured(make_call: Make) -> None:
    route = Route([BACKENDS["_native_math"]])
    call = make_call(device="cuda", dtype=torch.bfloat16, head_dim=64)
    with torch.no_grad():
        stock(call)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = route(call, stock)
        graph.replay()
        torch.testing.assert_close(y, stock(call))
        assert route.fused_calls == 0 and "while a CUDA graph is captured" in next(iter(route.stock_calls))
        route(call, stock)
        assert route.fused_calls == 1


def test_time_and_memory(make_call: Make) -> None:
    call = make_call(device="cuda", dtype=torch.bfloat16, head_dim=64, queries=512, keys=512)
    scores = call.query.shape[0] * call.query.shape[2] * 512 * 512 * 2
    assert 0 < seconds(stock, call) < 1
    assert (peak_bytes(BACKENDS["_native_math"].compute, call) or 0) >= scores
    shape = attention.Shape.parse("1x512x8x64")
    results = attention.run(shape.call(torch.device("cuda"), torch.bfloat16), str(shape))
    measured = [result for result in results if result.milliseconds is not None]
    assert {"native", "_native_math"} <= {result.backend for result in measured}
    assert all(result.peak_bytes is not None and result.error is not None for result in measured)


def _cudnn_fp8(*shape: int) -> AttentionCall:
    """A call with means in keys and values; skips where the backend cannot run."""
    backend = BACKENDS["cudnn_fp8"]
    batch, queries, keys, heads, kv_heads = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def random(length: int, heads: int) -> torch.Tensor:
        return torch.randn(batch, length, heads, 128, generator=generator, device="cuda").bfloat16()

    call = AttentionCall(random(queries, heads), random(keys, kv_heads) + 2, random(keys, kv_heads) + 1)
    reason = backend.missing() or backend.refusal(call.signature())
    if reason is not None:
        pytest.skip(reason)
    return call


@pytest.mark.parametrize("shape", [(1, 1024, 1024, 4, 4), (2, 300, 77, 4, 2), (1, 4608, 4608, 24, 24)], ids=str)
def test_cudnn_fp8_computes_what_plain_pytorch_computes_in_fp8(shape: tuple[int, ...]) -> None:
    call = _cudnn_fp8(*shape)
    with torch.no_grad():
        y = BACKENDS["cudnn_fp8"].compute(call)
        rows = accuracy.spread(call)
        exact = accuracy.reference(call, rows)
        assert accuracy.distance(y[:, rows], exact) < 0.03
        if call.query.shape[1] <= 1024:
            quantized = eager_fp8.quantize(call.query, call.key, call.value)
            emulated = eager_fp8.dequantize(eager_fp8.attend(quantized, 128**-0.5), quantized, torch.bfloat16)
            assert accuracy.distance(y[:, rows], exact) < 1.2 * accuracy.distance(emulated[:, rows], exact)


def test_cudnn_fp8_in_a_graph_on_a_stream_and_compiled() -> None:
    call = _cudnn_fp8(1, 512, 512, 4, 4)
    compute = BACKENDS["cudnn_fp8"].compute
    with torch.no_grad():
        compute(call)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = compute(call)
        call.query.copy_(call.query.flip(1))
        call.value.mul_(2)
        graph.replay()
        expected = compute(call)
        assert torch.equal(y, expected)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            aside = compute(call)
        stream.synchronize()
        assert torch.equal(aside, expected)
        compiled = torch.compile(lambda q, k, v: compute(AttentionCall(q, k, v)), fullgraph=True)
        assert torch.equal(compiled(call.query, call.key, call.value), expected)


def test_cudnn_fp8_begins_before_the_rotation_in_a_graph_too() -> None:
    _cudnn_fp8(1, 512, 512, 4, 4)  # skips where the backend cannot run
    x, value = unrotated("cuda", (100, 412), 128)
    with torch.no_grad():
        query, key = (side.bfloat16() for side in x.rotated())
        exact = accuracy.reference(AttentionCall(query, key, value))
        y = cudnn_fp8.attend_unrotated(x, value, None)
        quantized = eager_fp8.quantize_unrotated(x, value)
        emulated = eager_fp8.dequantize(eager_fp8.attend(quantized, 128**-0.5), quantized, torch.bfloat16)
        assert accuracy.distance(y, exact) < 1.2 * accuracy.distance(emulated, exact) < 0.1
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = cudnn_fp8.attend_unrotated(x, value, None)
        x.queries[1].copy_(x.queries[1].flip(1))
        graph.replay()
        assert torch.equal(captured, cudnn_fp8.attend_unrotated(x, value, None))
        assert not torch.equal(captured, y)
