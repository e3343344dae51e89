"""Products by a measured algorithm of cublasLt: the bits of torch's own, on every stream and in graphs."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from diffkern import ops
from diffkern.providers import cublaslt, select
from diffkern.providers.cublaslt import choice, layers, library, product
from diffkern.providers.eager.fp8 import fp8_unavailable_reason, linear_fp8

#: Rows, columns and depth, enough of them to be measured.
SIZES = (2688, 2048, 2048)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A product by the algorithm that is chosen for it."""
    return choice.multiply(x, weight, bias, None, None, False, lambda x, w, b, out, scales: F.linear(x, w, b))


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    choice._plans.clear()
    yield
    choice._plans.clear()


def _operands(rows: int, columns: int, depth: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    return random(rows, depth), random(columns, depth) / depth**0.5, random(columns)


def test_the_structures_have_the_sizes_that_the_library_expects() -> None:
    assert ctypes.sizeof(library.Algorithm) == 64
    assert ctypes.sizeof(library.Proposal) == 96
    assert library.Proposal.workspace.offset == 64 and library.Proposal.status.offset == 72


def test_without_cuda_there_is_a_reason_and_torch_computes() -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch is built for CUDA")
    assert library.find() == "cublasLt is NVIDIA's, and this torch is not built for CUDA"
    assert not cublaslt.serves("cuda", torch.bfloat16)
    x, weight = torch.randn(4, 8), torch.randn(6, 8)
    y = cublaslt.multiply(x, weight, None, None, None, False, lambda x, weight, *rest: F.linear(x, weight))
    assert torch.equal(y, F.linear(x, weight)) and not choice._plans


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_call_gives_the_bits_of_torch(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    state = torch.cuda.get_rng_state()
    for rows, columns, depth in (SIZES, (5376, 8192, 2048), (1000, 4096, 4096), (4099, 2048, 2056)):
        x, weight, bias = _operands(rows, columns, depth, dtype)
        gelu = torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
        plain, without = F.linear(x, weight, bias), F.linear(x, weight)
        with caplog.at_level(logging.INFO):
            for _ in range(3):
                assert torch.equal(ops.linear_gelu(x, weight, bias), gelu)
                assert torch.equal(_linear(x, weight, bias), plain)
                assert torch.equal(_linear(x, weight, None), without)
    assert sum("torch's algorithm takes" in record.message for record in caplog.records) >= 12
    assert torch.equal(torch.cuda.get_rng_state(), state)


def _rows(rows: int, depth: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return ops.activation_fp8(torch.randn(rows, depth, generator=generator, device="cuda").bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("with_bias", [True, False])
def test_rows_of_8_bits_give_the_bits_of_torch(with_bias: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the scales are, also where they lie elsewhere the next time."""
    if fp8_unavailable_reason(torch.device("cuda")):
        pytest.skip("no products in fp8")
    for rows, columns, depth in (SIZES, (5376, 6144, 2048), (5376, 2048, 8192), (1000, 4096, 4096), (77, 48, 64)):
        bias = torch.randn(columns, device="cuda").bfloat16() if with_bias else None
        kept = []
        with caplog.at_level(logging.INFO):
            for seed in range(4):
                x, weight = _rows(rows, depth, seed), _rows(columns, depth, seed + 9)
                kept.append((x, weight))
                y = layers.linear_rows(*x, *weight, bias, torch.bfloat16)
                expected = linear_fp8(*x, *weight, bias, torch.bfloat16)
                assert y.dtype == torch.bfloat16 and torch.equal(y, expected)
                deep = x[0].view(1, rows, depth), x[1].view(1, rows, 1)
                assert torch.equal(layers.linear_rows(*deep, *weight, bias, torch.bfloat16), expected[None])
    assert sum("float8_e4m3fn" in record.message for record in caplog.records) == 8


@pytest.mark.gpu
def test_biases_that_change_are_read_anew() -> None:
    x, weight, bias = _operands(*SIZES)
    for index in range(5):
        own = bias + index
        assert torch.equal(ops.linear_gelu(x, weight, own), torch._addmm_activation(own, x, weight.t(), use_gelu=True))


@pytest.mark.gpu
def test_more_biases_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "_MOST_ADDRESSES", 2)
    x, weight, bias = _operands(*SIZES)
    biases = [bias + index for index in range(7)]
    for own in biases * 3:
        assert torch.equal(ops.linear_gelu(x, weight, own), torch._addmm_activation(own, x, weight.t(), use_gelu=True))


@pytest.mark.gpu
def test_the_current_stream_is_taken() -> None:
    x, weight, bias = _operands(*SIZES)
    for _ in range(3):
        ops.linear_gelu(x, weight, bias)
    expected = torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = x.clone()
        y = ops.linear_gelu(late, weight, bias)
    stream.synchronize()
    assert torch.equal(y, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("calls", [0, 1, 3])
def test_a_cuda_graph_may_hold_it_measured_or_not(calls: int) -> None:
    x, weight, bias = _operands(*SIZES)
    for _ in range(calls):
        ops.linear_gelu(x, weight, bias)
    torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.linear_gelu(x, weight, bias)
    x.copy_(x.flip(0))
    graph.replay()
    assert torch.equal(y, torch._addmm_activation(bias, x, weight.t(), use_gelu=True))


@pytest.mark.gpu
def test_inductor_holds_the_op() -> None:
    x, weight, bias = _operands(*SIZES)
    expected = torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
    compiled = torch.compile(lambda x: ops.linear_gelu(x, weight, bias), fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(compiled(x), expected)


@pytest.mark.gpu
def test_operands_that_cublaslt_cannot_take_are_left_to_torch() -> None:
    x, weight, bias = _operands(64, 64, 72)
    for x_, weight_ in ((x[:, 1:65], weight[:, :64]), (x[:, :63], weight[:, :63]), (x[:0], weight)):
        expected = torch._addmm_activation(bias, x_, weight_.t(), use_gelu=True)
        if x_.shape[1] % 8:  # of which torch rounds the sum before the activation, or not
            expected = F.gelu(F.linear(x_, weight_, bias), approximate="tanh")
        for _ in range(3):
            assert torch.equal(ops.linear_gelu(x_, weight_, bias), expected)
    assert choice._plans and all(plan.kind is None or plan.product is None for plan in choice._plans.values())


@pytest.mark.gpu
def test_what_torch_is_allowed_is_part_of_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = _operands(*SIZES, torch.float16)
    for allowed in (False, True, False):
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", allowed)
        for _ in range(3):
            assert torch.equal(_linear(x, weight, bias), F.linear(x, weight, bias))


def test_plain_pytorch_gains_where_its_library_computes_a_product_with_its_activation() -> None:
    gpu, half = torch.device("cuda", 0), (torch.bfloat16,)
    assert select("linear_gelu", gpu, half, "eager").gains
    assert not select("linear_gelu", gpu, (torch.float32,), "eager").gains
    assert not select("linear_gelu", torch.device("cpu"), half, "eager").gains
    assert not select("rms_norm", gpu, half, "eager").gains
