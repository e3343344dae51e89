"""What only a GPU can show of the rotary ops: device guard, streams, graphs, no synchronisation, large tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from diffkern.ops import expand_axes, qk_norm_rope, rope, rope_3d
from tests.ops.rotation import angles, axis_tables, chain

pytestmark = pytest.mark.gpu

GRID = (2, 4, 8)
Tables = tuple[list[Tensor], list[Tensor]]
Call = Callable[[Tensor, Tables, str], Tensor]


def _full(tables: Tables) -> tuple[Tensor, ...]:
    return tuple(table.unsqueeze(1) for table in expand_axes(*tables, grid=GRID))


#: Each of ``[batch, 64, heads, 128]`` and the tables of three axes; all give the rotation, ``norm`` that of the norm.
CALLS: dict[str, Call] = {
    "rope": lambda x, tables, provider: rope(x, *_full(tables), provider=provider),
    "rope_3d": lambda x, tables, provider: rope_3d(x, *tables, grid=GRID, provider=provider),
    "norm": lambda x, tables, provider: qk_norm_rope(x, x, None, None, *tables, grid=GRID, provider=provider)[0],
    "across": lambda x, tables, provider: qk_norm_rope(
        x.flatten(2), x.flatten(2), None, None, *tables, grid=GRID, across_heads=x.shape[2], provider=provider
    )[1].view_as(x),
}
every_call = pytest.mark.parametrize("name", CALLS)


def expected(name: str, x: Tensor, tables: Tables) -> Tensor:
    wide = x.double()
    dims = {"norm": (-1,), "across": (-2, -1)}.get(name)
    if dims is not None:
        wide = wide * torch.rsqrt(wide.square().mean(dims, keepdim=True) + 1e-6)
    return chain(wide, *_full(tables))


def inputs(device: str, batch: int = 2, heads: int = 8) -> tuple[Tensor, Tables]:
    return torch.randn(batch, 64, heads, 128, device=device), axis_tables(GRID, (22, 21, 21), device)


def assert_right(name: str, y: Tensor, x: Tensor, tables: Tables) -> None:
    torch.testing.assert_close(y.double(), expected(name, x, tables), rtol=1e-5, atol=1e-5)


@every_call
def test_a_tensor_on_the_second_gpu_is_computed_there(name: str, provider: str, device: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU")
    torch.cuda.set_device(0)
    x, tables = inputs("cuda:1")
    y = CALLS[name](x, tables, provider)
    assert torch.cuda.current_device() == 0
    assert y.device == x.device
    assert_right(name, y, x, tables)


@every_call
def test_a_captured_graph_computes_fresh_inputs_on_replay(name: str, provider: str, device: str) -> None:
    x, tables = inputs(device)
    CALLS[name](x, tables, provider)  # what is compiled at first use, is compiled here
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = CALLS[name](x, tables, provider)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        tables[0][1].neg_()
        y.fill_(torch.nan)
        graph.replay()
        assert_right(name, y, x, tables)


@every_call
def test_the_current_stream_is_the_one_used(name: str, provider: str, device: str) -> None:
    ready, tables = inputs(device, batch=32, heads=16)
    x = torch.full_like(ready, torch.nan)
    slow = torch.randn(4096, 4096, device=device)
    CALLS[name](ready, tables, provider)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(20):
            slow = slow @ slow / 64
        x.copy_(ready)  # not before the products are through: a kernel on another stream would read NaN
        y = CALLS[name](x, tables, provider)
    stream.synchronize()
    assert_right(name, y, ready, tables)


@every_call
def test_a_call_does_not_wait_for_the_gpu(name: str, provider: str, device: str) -> None:
    x, tables = inputs(device)
    coords = torch.cartesian_prod(*(torch.arange(size, device=device) for size in GRID))
    full = _full(tables)
    calls = [
        lambda: CALLS[name](x, tables, provider),
        lambda: rope_3d(x, *tables, coords=coords, provider=provider),
        lambda: rope(x, *(table[:40].bfloat16() for table in full), tokens=(8, 40), provider=provider),
    ]
    for call in calls:
        call()
        torch.cuda.synchronize()
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize("across", [None, 32])
def test_more_than_two_to_the_31_elements(across: int | None, provider: str, device: str) -> None:
    if provider == "eager":
        pytest.skip("plain PyTorch holds several float32 copies of 8 GiB, and is not what this is about")
    tokens = 2**19 + 64
    if torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() < 20 * 2**30:
        pytest.skip("the GPU has less than 20 GiB free")
    x = torch.randn(64, 4096, device=device, dtype=torch.bfloat16).repeat(tokens // 64, 1)[None]
    cos, sin = (table.repeat(tokens // 64, 1, 1) for table in angles(64, 1, 128, device=device))
    given = x if across else x.unflatten(-1, (32, 128))
    y, small = (
        qk_norm_rope(
            t, t[:, :64], None, None, c, s, cos_k=cos[:64], sin_k=sin[:64], across_heads=across, provider=provider
        )
        for t, c, s in ((given, cos, sin), (given[:, :64], cos[:64], sin[:64]))
    )
    for part in (slice(0, 64), slice(2**19, 2**19 + 64)):
        assert torch.equal(y[0][:, part], small[0])
    del x, y, given
    torch.cuda.empty_cache()


def test_strides_beyond_two_to_the_31_are_followed(provider: str, device: str) -> None:
    stride = 2**31 + 16
    if torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() < 6 * 2**30:
        pytest.skip("the GPU has less than 6 GiB free")
    x = torch.empty(stride + 512, device=device, dtype=torch.bfloat16).as_strided((2, 4, 128), (stride, 128, 1))
    x.copy_(torch.randn(2, 4, 128, device=device))
    cos, sin = angles(2, 1, 128, device=device)
    assert torch.equal(rope(x, cos, sin, provider=provider), chain(x.clone(), cos, sin))
    del x
    torch.cuda.empty_cache()


@pytest.mark.parametrize("outer", [65535, 65536, 70000])
def test_many_small_rows_pass_the_limits_of_a_grid(outer: int, provider: str, device: str) -> None:
    x = torch.randn(outer, 2, 3, 32, device=device, dtype=torch.float16)
    cos, sin = angles(outer, 2, 1, 32, device=device)
    assert torch.equal(rope(x, cos, sin, provider=provider), chain(x, cos, sin))
