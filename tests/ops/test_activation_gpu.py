"""What only a GPU can show of activations, gated units and group norms: bits of eager, graphs, huge tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from diffkern import ops
from tests.ops.checks import strides_that_matter
from tests.ops.reference import relative_error

pytestmark = pytest.mark.gpu

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

#: Our call and the stock chain, which the compiled kernels follow formula by formula.
SAME_BITS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "gelu": (lambda x: ops.gelu(x, provider="compiled"), F.gelu),
    "gelu_tanh": (lambda x: ops.gelu(x, "tanh", provider="compiled"), lambda x: F.gelu(x, approximate="tanh")),
    "silu": (lambda x: ops.silu(x, provider="compiled"), F.silu),
    "geglu": (
        lambda x: ops.geglu(x, round_activation=True, provider="compiled"),
        lambda x: x.chunk(2, -1)[0] * F.gelu(x.chunk(2, -1)[1]),
    ),
    "geglu_tanh": (
        lambda x: ops.geglu(x, "tanh", round_activation=True, provider="compiled"),
        lambda x: x.chunk(2, -1)[0] * F.gelu(x.chunk(2, -1)[1], approximate="tanh"),
    ),
    "swiglu": (
        lambda x: ops.swiglu(x, round_activation=True, provider="compiled"),
        lambda x: x.chunk(2, -1)[0] * F.silu(x.chunk(2, -1)[1]),
    ),
    "lumina": (
        lambda x: ops.swiglu(x, round_activation=True, gate_first=True, provider="compiled"),
        lambda x: F.silu(x.chunk(2, -1)[0].float()).to(x.dtype) * x.chunk(2, -1)[1],
    ),
}


@pytest.mark.parametrize("name", SAME_BITS)
def test_the_compiled_kernels_round_as_eager_does(name: str, device: str) -> None:
    ours, stock = SAME_BITS[name]
    for dtype in _DTYPES:
        x = (4 * torch.randn(512, 4096, generator=torch.Generator().manual_seed(0))).to(device, dtype)
        different = (ours(x) != stock(x)).float().mean().item()
        assert different == 0, f"{different:.2%} of the elements differ in {dtype}"


def test_the_epilogue_of_the_product_is_as_accurate_as_the_chain(device: str) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        x, weight, bias = (
            torch.randn(*shape, device=device).to(dtype) for shape in ((2, 500, 512), (2048, 512), (2048,))
        )
        y = ops.linear_gelu(x, weight / 16, bias)
        truth = F.gelu(F.linear(x.double(), (weight / 16).double(), bias.double()), approximate="tanh")
        stock = F.gelu(F.linear(x, weight / 16, bias), approximate="tanh")
        assert relative_error(y, truth) <= 1.05 * relative_error(stock, truth) + 1e-6


def test_the_layout_is_that_of_eager_on_the_gpu(provider: str, device: str) -> None:
    image, video = torch.randn(2, 32, 16, 12, device=device), torch.randn(2, 32, 3, 8, 6, device=device)
    for x, last in ((image, torch.channels_last), (video, torch.channels_last_3d)):
        for view in (x, x.contiguous(memory_format=last), x.transpose(-1, -2)):
            y = ops.group_norm_silu(view, 8, provider=provider)
            stock = F.silu(F.group_norm(view, 8))
            assert strides_that_matter(y) == strides_that_matter(stock)
            torch.testing.assert_close(y, stock, rtol=1e-5, atol=1e-5)


def test_a_captured_graph_computes_fresh_inputs_on_replay(provider: str, device: str) -> None:
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 64, 48, 40, device=device).to(memory_format=memory_format)

        def block(x: Tensor) -> Tensor:
            y = ops.group_norm_silu(x, 8, memory_format=torch.preserve_format, provider=provider)
            y = ops.channel_rms_norm_silu(y, provider=provider)
            return ops.swiglu(ops.gelu(y, "tanh", provider=provider), dim=1, provider=provider)

        block(x)  # what is compiled at first use, is compiled here
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = block(x)
        for seed in range(3):
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
            y.fill_(torch.nan)
            graph.replay()
            assert torch.equal(y, block(x))


def test_a_call_does_not_wait_for_the_gpu(provider: str, device: str) -> None:
    x = torch.randn(2, 64, 48, 40, device=device)
    calls: list[Callable[[], Tensor]] = [
        lambda: ops.group_norm_silu(x, 8, provider=provider),
        lambda: ops.channel_rms_norm_silu(x, provider=provider),
        lambda: ops.geglu(x, provider=provider),
        lambda: ops.linear_gelu(x, torch.ones(8, 40, device=device), torch.ones(8, device=device)),
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


def test_more_than_two_to_the_31_elements(provider: str, device: str) -> None:
    if provider == "eager":
        pytest.skip("plain PyTorch holds several float32 copies of 8 GiB, and is not what this is about")
    rows, length = 2**20 + 3, 2056
    if torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() < 5 * rows * length * 2:
        pytest.skip("the GPU has less than 20 GiB free")
    x = torch.randn(64, length, device=device, dtype=torch.float16).repeat(-(-rows // 64), 1)[:rows]
    parts = slice(0, 64), slice(2**31 // length - 32, 2**31 // length + 32), slice(rows - 64, rows)
    y = ops.gelu(x, provider=provider)
    z = ops.swiglu(x, provider=provider)
    for part in parts:
        torch.testing.assert_close(y[part].double(), F.gelu(x[part].double()), rtol=1e-3, atol=1e-5)
        first, second = x[part].double().chunk(2, -1)
        torch.testing.assert_close(z[part].double(), first * F.silu(second), rtol=1e-3, atol=1e-5)
    del y, z
    image = x[: 2**20].view(1, 8, 2**17, length)
    y = ops.group_norm_silu(image, 8, activation=None, provider=provider)
    for channel in (0, 7):
        row = image[0, channel].double()
        normed = (row[-1] - row.mean()) * (row.var(unbiased=False) + 1e-5).rsqrt()
        torch.testing.assert_close(y[0, channel, -1].double(), normed, rtol=1e-3, atol=1e-3)
        del row
    z = ops.channel_rms_norm_silu(image, activation=None, provider=provider)
    column = image[0, :, -1].double()
    expected = column * (column.square().mean(0, keepdim=True) + 1e-6).rsqrt()
    torch.testing.assert_close(z[0, :, -1].double(), expected, rtol=1e-3, atol=1e-3)
    torch.cuda.empty_cache()
