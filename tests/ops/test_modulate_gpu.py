"""What only a GPU can show of modulation: device guard, streams, graphs, no synchronisation, large tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from diffkern.ops import gate_residual, gate_residual_norm_modulate, norm_modulate
from tests.ops import modulation, reference
from tests.ops.modulation import make_modulation

pytestmark = pytest.mark.gpu

Call = Callable[[Tensor, Tensor, str], Tensor]

#: Each with an input and a modulation tensor.
CALLS: dict[str, Call] = {
    "norm_modulate": lambda x, m, p: norm_modulate(x, m, m, provider=p),
    "gate_residual": lambda x, m, p: gate_residual(x, x, m, provider=p),
    "both": lambda x, m, p: gate_residual_norm_modulate(x, x, m, m, m, norm="layer", provider=p)[1],
}
every_call = pytest.mark.parametrize("name", CALLS)


def expected(name: str, x: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    if name == "norm_modulate":
        return modulation.norm_modulate(x, m, m)
    if name == "gate_residual":
        return modulation.gate_residual(x, x, m)
    new = (x.double() + m.double() * x.double()).to(x.dtype)
    return modulation.norm_modulate(new, m, m, norm="layer")


@every_call
def test_a_tensor_on_the_second_gpu_is_computed_there(name: str, provider: str, device: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU")
    torch.cuda.set_device(0)
    x, m = torch.randn(2, 64, 512, device="cuda:1"), torch.randn(2, 1, 512, device="cuda:1")
    y = CALLS[name](x, m, provider)
    assert torch.cuda.current_device() == 0
    assert y.device == x.device
    reference.assert_within(y, expected(name, x, m))


@every_call
def test_a_captured_graph_computes_fresh_inputs_on_replay(name: str, provider: str, device: str) -> None:
    x, m = torch.randn(2, 33, 2048, device=device), torch.randn(2, 1, 2048, device=device)
    CALLS[name](x, m, provider)  # what is compiled at first use, is compiled here
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = CALLS[name](x, m, provider)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        m.copy_(torch.randn_like(m))
        y.fill_(torch.nan)
        graph.replay()
        reference.assert_within(y, expected(name, x, m))


@every_call
def test_the_current_stream_is_the_one_used(name: str, provider: str, device: str) -> None:
    x, m = torch.full((2, 128, 4096), torch.nan, device=device), torch.randn(2, 1, 4096, device=device)
    ready = torch.randn(2, 128, 4096, device=device)
    slow = torch.randn(4096, 4096, device=device)
    CALLS[name](ready, m, provider)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(20):
            slow = slow @ slow / 64
        x.copy_(ready)  # not before the products are through: a kernel on another stream would read NaN
        y = CALLS[name](x, m, provider)
    stream.synchronize()
    reference.assert_within(y, expected(name, ready, m))


@every_call
def test_a_call_does_not_wait_for_the_gpu(name: str, provider: str, device: str) -> None:
    tokens = torch.randn(2, 8, 6, 512, device=device).unbind(2)[3]
    for x in (torch.randn(2, 8, 512, device=device), torch.randn(2, 512, 8, device=device).transpose(1, 2)):
        for m in (torch.randn(2, 1, 512, device=device), tokens, torch.randn(2, 8, 1, device=device)):
            CALLS[name](x, m, provider)
            torch.cuda.synchronize()
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                CALLS[name](x, m, provider)
            finally:
                torch.cuda.set_sync_debug_mode(mode)


@every_call
@pytest.mark.parametrize(("rows", "length", "dtype"), [(2097153, 1024, torch.float16), (175000, 12288, torch.bfloat16)])
def test_more_than_two_to_the_31_elements(
    name: str, rows: int, length: int, dtype: torch.dtype, provider: str, device: str
) -> None:
    if provider == "eager":
        pytest.skip("plain PyTorch holds several float32 copies of 8 GiB, and is not what this is about")
    needed = 3.5 * rows * length * dtype.itemsize
    if torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() < 1.1 * needed:
        pytest.skip(f"the GPU has less than {needed / 2**30:.0f} GiB free")
    x = torch.randn(64, length, device=device, dtype=dtype).repeat(-(-rows // 64), 1)[:rows]
    m = make_modulation("row", x.shape, dtype, device, seed=1)
    assert m is not None
    y = CALLS[name](x, m, provider)
    for part in (slice(0, 64), slice(2**31 // length - 32, 2**31 // length + 32), slice(rows - 64, rows)):
        reference.assert_within(y[part], expected(name, x[part], m))
    del x, y
    torch.cuda.empty_cache()


def test_row_strides_beyond_two_to_the_31_are_followed(provider: str, device: str) -> None:
    stride = 2**31 + 16
    if torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() < 5 * 2**30:
        pytest.skip("the GPU has less than 5 GiB free")
    buffer = torch.empty(stride + 512, device=device, dtype=torch.bfloat16)
    x = buffer.as_strided((2, 512), (stride, 1))
    x.copy_(torch.randn(2, 512, device=device))
    m = torch.randn(512, device=device)
    y = norm_modulate(x, m, m, provider=provider)
    reference.assert_within(y, modulation.norm_modulate(x.clone(), m, m))
    y = norm_modulate(torch.randn(2, 512, device=device), x, x, norm=None, out_dtype=torch.float32, provider=provider)
    assert y.isfinite().all()
    del buffer, x
    torch.cuda.empty_cache()


@pytest.mark.parametrize("outer", [65535, 65536, 70000])
def test_many_small_groups_of_rows_pass_the_limits_of_a_grid(outer: int, provider: str, device: str) -> None:
    x = torch.randn(outer, 2, 256, device=device, dtype=torch.float16)
    m = torch.randn(outer, 1, 256, device=device, dtype=torch.float16)
    y = norm_modulate(x, m, m, provider=provider)
    for part in (slice(0, 8), slice(outer - 8, outer)):
        reference.assert_within(y[part], modulation.norm_modulate(x[part], m[part], m[part]))
