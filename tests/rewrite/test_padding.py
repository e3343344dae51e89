"""Images and videos in channels last stay so where they are padded with pixels of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl_cogvideox import CogVideoXCausalConv3d
from diffusers.models.autoencoders.autoencoder_kl_cosmos import CosmosCausalConv3d
from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import HunyuanVideoCausalConv3d
from diffusers.models.autoencoders.autoencoder_kl_ltx2 import LTX2VideoCausalConv3d
from torch import Tensor, nn
from torch.autograd import forward_ad

from diffkern import inject_optimized_kernels
from diffkern.rewrite import Rewriter, padding
from diffkern.verify.measures import relative_error

LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
CONVOLUTIONS: dict[str, Any] = {
    "F.pad": lambda: HunyuanVideoCausalConv3d(8, 4),
    "F.pad in a helper": lambda: CogVideoXCausalConv3d(8, 4, 3, pad_mode="replicate"),
    "first frames": lambda: CosmosCausalConv3d(8, 4, 3, padding=1),
    "first frames, mirrored": lambda: LTX2VideoCausalConv3d(8, 4, 3, spatial_padding_mode="reflect"),
}


def _drawn(*shape: int) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return x.contiguous(memory_format=LAST[len(shape)])


@pytest.fixture
def reordering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding, "reorders", lambda x: True)  # as on a GPU


@pytest.mark.usefixtures("reordering")
@pytest.mark.parametrize("mode", ["replicate", "reflect", "circular"])
@pytest.mark.parametrize("layout", ["planes", "channels last", "channels last from an odd address"])
@pytest.mark.parametrize(
    ("shape", "sides"),
    [
        ((2, 3, 4, 5), (1, 2, 3, 0)),
        ((2, 8, 4, 5), (0, 4, 1, 1)),
        ((2, 3, 3, 4, 5), (1, 2, 0, 3, 1, 2)),
        ((1, 8, 1, 1, 1), (0, 0, 0, 0, 0, 0)),
    ],
)
def test_padding_has_the_pixels_of_torch_and_the_layout_of_its_input(
    mode: str, layout: str, shape: tuple[int, ...], sides: tuple[int, ...]
) -> None:
    x = _drawn(*shape)
    if layout == "planes":
        x = x.contiguous()
    elif "odd" in layout:
        x = torch.cat([x.new_zeros(1), x.movedim(1, -1).flatten()])[1:].view(x.movedim(1, -1).shape).movedim(-1, 1)
    y = padding.padded(x, sides, mode)
    assert torch.equal(y, F.pad(x, sides, mode))
    assert y.is_contiguous(memory_format=torch.contiguous_format if layout == "planes" else LAST[x.ndim])


@pytest.mark.usefixtures("reordering")
def test_padding_has_the_tangents_of_torch() -> None:
    x, tangent, sides = _drawn(2, 8, 4, 5), _drawn(2, 8, 4, 5).flip(0), (1, 2, 3, 0)
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        found = forward_ad.unpack_dual(padding.padded(dual, sides, "replicate")).tangent
    assert found is not None and torch.equal(found, F.pad(tangent, sides, "replicate"))
    _, found = torch.func.jvp(lambda x: padding.padded(x, sides, "reflect"), (x,), (tangent,))
    assert torch.equal(found, F.pad(tangent, sides, "reflect"))


@pytest.mark.usefixtures("reordering")
def test_padding_that_cannot_be_copied_is_that_of_torch() -> None:
    x = _drawn(2, 3, 4, 5)
    for sides, mode in (((1, 1, 2, 0), "constant"), ((-1, 1, 0, 0), "replicate"), ((9, 9, 9, 9), "replicate")):
        assert torch.equal(padding.padded(x, sides, mode), F.pad(x, sides, mode))
    for sides, mode in (((5, 0, 0, 0), "reflect"), ((0, 0, 5, 0), "circular"), ((1, 1), "reflected")):
        with pytest.raises((RuntimeError, NotImplementedError)) as stock:
            F.pad(x, sides, mode)
        with pytest.raises(type(stock.value), match=r"."):
            padding.padded(x, sides, mode)
    x.requires_grad_()
    with torch.enable_grad():
        made = [pad(x, (1, 1, 1, 1), "replicate").grad_fn for pad in (padding.padded, F.pad)]
    assert made[0].name() == made[1].name(), "gradients are those of torch"


@pytest.mark.usefixtures("reordering")
@pytest.mark.parametrize("spelling", CONVOLUTIONS)
@pytest.mark.parametrize("last", [True, False], ids=["channels last", "contiguous"])
def test_a_causal_convolution_reads_its_padding_in_the_order_of_its_input(
    spelling: str, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    conv, exact = (CONVOLUTIONS[spelling]().requires_grad_(False) for _ in range(2))
    exact.load_state_dict(conv.state_dict())
    x = _drawn(2, 8, 3, 5, 6) + 0.5
    x = x if last else x.contiguous()
    stock, reference = _first(conv(x)), _first(exact.double()(x.double()))
    report = inject_optimized_kernels(conv, config={"*": "eager"})
    conv(x)
    seen: list[Tensor] = []
    own = F.conv3d
    monkeypatch.setattr(F, "conv3d", lambda x, *given: (seen.append(x), own(x, *given))[1])
    fused = _first(conv(x))
    (read,) = seen
    assert read.is_contiguous(memory_format=LAST[5] if last else torch.contiguous_format)
    assert relative_error(fused, reference) <= 1.05 * relative_error(stock, reference) + 1e-6
    (counts,) = report.calls().values()
    assert counts["fused"] and not counts["stock"]


def _first(result: Any) -> Tensor:
    """The result of a convolution, which may return its cache, too."""
    found: Tensor = result[0] if isinstance(result, tuple) else result
    return found


def test_exact_numerics_keep_the_order_that_stock_has() -> None:
    conv = LTX2VideoCausalConv3d(8, 4, 3).requires_grad_(False)
    x = _drawn(2, 8, 3, 5, 6)
    stock = conv(x)
    inject_optimized_kernels(conv, numerics="exact")
    assert torch.equal(conv(x), stock)


@pytest.mark.usefixtures("reordering")
def test_a_convolution_with_a_hook_pads_by_itself() -> None:
    conv = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect")).requires_grad_(False)
    block = _Around(conv)
    x = _drawn(2, 3, 5, 6)
    report = inject_optimized_kernels(block, config={"*": "eager"})
    assert relative_error(block(x), conv(x)) < 1e-6
    conv[0].register_forward_hook(lambda module, args, output: 2 * output)
    torch.testing.assert_close(block(x), conv(x))
    (counts,) = report.calls().values()
    assert (counts["fused"], counts["stock"]) == (1, 1)


class _Around(nn.Module):
    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.conv = layers[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class _Frames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(2, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = y[:, :, :1].repeat(1, 1, 2, 1, 1)
        return torch.cat([first, x], dim=2)


class _Rows(_Frames):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = x[:, :, :1].repeat(1, 1, 2, 2, 1)
        return torch.cat([first, x], dim=2)


class _Bound(_Frames):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = x[:, :, :1].repeat(1, 1, 2, 1, 1)
        x = y
        return torch.cat([first, x], dim=2)


class _Sound(_Frames):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.pad(x, (2, y.shape[1]), mode="replicate")


@pytest.mark.parametrize("module", [_Frames, _Rows, _Bound, _Sound])
def test_frames_of_another_video_or_of_other_sizes_are_no_padding(
    module: type[nn.Module],
) -> None:
    assert isinstance(Rewriter().rewrite(module()), str)


@pytest.mark.gpu
@pytest.mark.parametrize("last", [True, False], ids=["channels last", "planes"])
@pytest.mark.parametrize("mode", ["replicate", "reflect"])
def test_a_gpu_pads_in_the_layout_of_the_input(mode: str, last: bool) -> None:
    x = _drawn(1, 64, 3, 20, 30).cuda().bfloat16()
    x = x if last else x.contiguous()
    y, stock = padding.padded(x, (1, 1, 1, 1, 1, 0), mode), F.pad(x, (1, 1, 1, 1, 1, 0), mode)
    assert torch.equal(y, stock)
    assert y.is_contiguous(memory_format=LAST[5] if last else torch.contiguous_format) and stock.is_contiguous()
