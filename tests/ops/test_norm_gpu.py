"""What only a GPU can show: device guard, streams, graphs, no synchronisation, more than 2^31 elements."""

from __future__ import annotations

import pytest
import torch

from diffkern import ops
from tests.ops import reference
from tests.ops.layouts import make_parameter

pytestmark = pytest.mark.gpu

BOTH = pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])


@BOTH
def test_a_tensor_on_the_second_gpu_is_computed_there(op: str, provider: str, device: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU")
    torch.cuda.set_device(0)
    x = torch.randn(64, 512, device="cuda:1", requires_grad=True)
    weight = torch.randn(512, device="cuda:1", requires_grad=True)
    y = getattr(ops, op)(x, weight, eps=1e-6, provider=provider)
    y.square().sum().backward()
    assert torch.cuda.current_device() == 0
    assert y.device == x.device
    reference.assert_within(y.detach(), getattr(reference, op)(x.detach(), weight.detach(), None, 1e-6))
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    truth, _ = getattr(reference, op)(*wide, None, 1e-6)
    for leaf, expected in zip((x, weight), torch.autograd.grad(truth.square().sum(), wide), strict=True):
        assert leaf.grad is not None
        assert (leaf.grad - expected).abs().max() < 1e-3 * expected.abs().max()


@BOTH
def test_a_captured_graph_computes_fresh_inputs_on_replay(op: str, provider: str, device: str) -> None:
    function = getattr(ops, op)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(33, 7, 512, device=device, dtype=dtype)
        static = torch.empty(33, 512, 7, device=device, dtype=dtype).transpose(1, 2).copy_(x)
        weight = make_parameter("plain", 512, dtype, device)
        function(static, weight, eps=1e-6, provider=provider)  # what is compiled at first use, is compiled here
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = function(static, weight, eps=1e-6, provider=provider)
        for _ in range(3):
            static.copy_(torch.randn_like(x))
            y.fill_(torch.nan)
            graph.replay()
            reference.assert_within(y, getattr(reference, op)(static, weight, None, 1e-6))


@BOTH
def test_the_current_stream_is_the_one_used(op: str, provider: str, device: str) -> None:
    function = getattr(ops, op)
    weight = make_parameter("plain", 4096, torch.float32, device)
    x = torch.full((256, 4096), torch.nan, device=device)
    ready = torch.randn(256, 4096, device=device)
    slow = torch.randn(4096, 4096, device=device)
    function(ready, weight, eps=1e-6, provider=provider)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(20):
            slow = slow @ slow / 64
        x.copy_(ready)  # not before the products are through: a kernel on another stream would read NaN
        y = function(x, weight, eps=1e-6, provider=provider)
    stream.synchronize()
    reference.assert_within(y, getattr(reference, op)(ready, weight, None, 1e-6))


@BOTH
def test_a_call_does_not_wait_for_the_gpu(op: str, provider: str, device: str) -> None:
    function = getattr(ops, op)
    for layout in ((8, 512, 6), (8, 6, 512)):
        x = torch.randn(layout, device=device)
        x = x.transpose(1, 2) if layout[1] == 512 else x
        function(x, None, provider=provider)
        torch.cuda.synchronize()
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            function(x, None, provider=provider)
        finally:
            torch.cuda.set_sync_debug_mode(mode)


@BOTH
@pytest.mark.parametrize(("rows", "length", "dtype"), [(4194305, 512, torch.float16), (175000, 12288, torch.bfloat16)])
def test_more_than_two_to_the_31_elements(
    op: str, rows: int, length: int, dtype: torch.dtype, provider: str, device: str
) -> None:
    if provider == "eager":
        pytest.skip("plain PyTorch holds several float32 copies of 8 GiB, and is not what this is about")
    needed = 2 * rows * length * dtype.itemsize
    if torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() < 1.1 * needed:
        pytest.skip(f"the GPU has less than {needed / 2**30:.0f} GiB free")
    x = torch.randn(64, length, device=device, dtype=dtype).repeat(-(-rows // 64), 1)[:rows]
    y = getattr(ops, op)(x, None, eps=1e-6, provider=provider)
    for part in (slice(0, 64), slice(2**31 // length - 32, 2**31 // length + 32), slice(rows - 64, rows)):
        reference.assert_within(y[part], getattr(reference, op)(x[part], None, None, 1e-6))
    del x, y
    torch.cuda.empty_cache()
