"""linear_attention against float64 and against the stock processors of Sana."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from diffkern import ops
from tests.ops.checks import leaves_alone
from tests.ops.reference import EXACT_HALF, relative_error

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def _served(request: pytest.FixtureRequest) -> None:
    if "provider" in request.fixturenames and request.getfixturevalue("provider") == "compiled":
        pytest.skip("Triton alone has a kernel of it")


def _drawn(layout: str, shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Heads ``[B, N, H, D]`` in memory of NaN."""
    batch, tokens, heads, size = shape
    buffer, view = {
        "tokens first": (shape, lambda t: t),
        "heads first": ((batch, heads, tokens, size), lambda t: t.transpose(1, 2)),
        "tokens last": ((batch, heads, size, tokens), lambda t: t.permute(0, 3, 1, 2)),
        "of a wider projection": ((batch, tokens, heads, 2 * size), lambda t: t[..., :size]),
    }[layout]
    x: Tensor = view(torch.full(buffer, torch.nan, dtype=dtype, device=device))
    return x.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.3)


def _sana(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As ``SanaLinearAttnProcessor2_0`` computes it, from heads ``[B, N, H, D]``."""
    query, key, value = q.permute(0, 2, 3, 1), k.permute(0, 2, 1, 3), v.permute(0, 2, 3, 1)
    wide = torch.promote_types(v.dtype, torch.float32)
    query, key, value = F.relu(query).to(wide), F.relu(key).to(wide), value.to(wide)
    value = F.pad(value, (0, 0, 0, 1), mode="constant", value=1.0)
    y = torch.matmul(torch.matmul(value, key), query)
    y = y[:, :, :-1] / (y[:, :, -1:] + 1e-15)
    return y.permute(0, 3, 1, 2).to(v.dtype)


def _sana_video(q: Tensor, k: Tensor, v: Tensor, q_rotated: Tensor, k_rotated: Tensor) -> Tensor:
    """As ``SanaLinearAttnProcessor3_0`` does, after its activation and rotation."""
    query, key, query_rotate, key_rotate, value = [x.permute(0, 2, 3, 1) for x in (q, k, q_rotated, k_rotated, v)]
    wide = torch.promote_types(v.dtype, torch.float32)
    query_rotate, key_rotate, value = query_rotate.to(wide), key_rotate.to(wide), value.to(wide)
    z = 1 / (key.sum(dim=-1, keepdim=True).transpose(-2, -1) @ query + 1e-15)
    y = torch.matmul(torch.matmul(value, key_rotate.transpose(-1, -2)), query_rotate) * z
    return y.permute(0, 3, 1, 2).to(v.dtype)


def _operands(case: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    count = 3 if case == "relu" else 5
    drawn = [_drawn("tokens first", shape, dtype, device, seed) for seed in range(count)]
    return tuple(drawn) if case == "relu" else (drawn[0].abs(), drawn[1].abs(), *drawn[2:])


CASES = {"relu": (_sana, True), "rotated": (_sana_video, False)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(2, 150, 3, 32), (1, 70, 2, 112), (2, 1, 1, 1)])
def test_the_error_is_at_most_that_of_the_stock_processor(
    case: str, shape: tuple[int, ...], provider: str, device: str
) -> None:
    chain, relu = CASES[case]
    for dtype in (torch.float32, *EXACT_HALF):
        operands = _operands(case, shape, dtype, device)
        y = ops.linear_attention(*operands, relu=relu, provider=provider)
        truth, stock = chain(*[x.double() for x in operands]), chain(*operands)
        assert (y.shape, y.dtype, y.is_contiguous()) == (stock.shape, dtype, True)
        assert relative_error(y, truth) <= 1.05 * relative_error(stock, truth) + 1e-6


@pytest.mark.parametrize("layout", ["tokens first", "heads first", "tokens last", "of a wider projection"])
@pytest.mark.parametrize("dtype", _DTYPES)
def test_any_layout_and_mix_of_dtypes_and_other_counts_of_keys(
    layout: str, dtype: torch.dtype, provider: str, device: str
) -> None:
    others = itertools.cycle(_DTYPES)
    q = _drawn(layout, (2, 19, 3, 24), dtype, device, 0)
    k, v = (_drawn(layout, (2, 45, 3, 24), next(others), device, seed) for seed in (1, 2))
    with leaves_alone(q):
        y = ops.linear_attention(q, k, v, provider=provider)
    truth = _sana(q.double(), k.double(), v.double())
    assert y.dtype == v.dtype and relative_error(y, truth) <= 2 * torch.finfo(v.dtype).eps


def test_the_positive_part_is_that_of_queries_and_keys_alone(provider: str, device: str) -> None:
    q, k, v, q_rotated, k_rotated = (_drawn("tokens first", (1, 9, 2, 8), torch.float32, device, i) for i in range(5))
    k = k.mT.contiguous().mT
    y = ops.linear_attention(q, k, v, q_rotated, k_rotated, provider=provider)
    positive = [x.double().clamp(min=0) for x in (q, k)]
    truth = _sana_video(*positive, v.double(), q_rotated.double(), k_rotated.double())
    assert relative_error(y, truth) < 1e-4
    y = ops.linear_attention(q, k, v, q_rotated, k_rotated, eps=50.0, relu=False, provider=provider)
    kq = (k.double().sum(1, keepdim=True) * q.double()).sum(-1, keepdim=True) + 50.0
    state = torch.einsum("bmhe,bmhd->bhed", v.double(), k_rotated.double())
    assert relative_error(y, torch.einsum("bhed,bnhd->bnhe", state, q_rotated.double()) / kq) < 1e-4


def test_what_is_no_number_stays_none(provider: str, device: str) -> None:
    q, k, v = _operands("relu", (1, 8, 2, 8), torch.float32, device)
    q[0, 3, 1, 5] = torch.nan
    y = ops.linear_attention(q, k, v, provider=provider)
    assert y[0, 3, 1].isnan().all() and y.isnan().sum() == 8


def test_opcheck_and_gradients(provider: str, device: str) -> None:
    q, k, v = [x.requires_grad_() for x in _operands("relu", (2, 4, 2, 4), torch.float32, device)]
    torch.library.opcheck(torch.ops.diffkern.linear_attention, (q, k, v, None, None, 1e-15, True, provider))
    torch.library.opcheck(torch.ops.diffkern.linear_attention, (q, k, v, q, k, 1e-3, False, provider))
    if provider == "eager":
        wide = [x.detach().double().abs().requires_grad_() for x in (q, k, v)]
        assert torch.autograd.gradcheck(ops.linear_attention, wide)
        assert torch.autograd.gradcheck(lambda q, k, v: ops.linear_attention(q, k, v, v, q, relu=False), wide)


def test_zero_size_inputs(provider: str, device: str) -> None:
    for shape in ((0, 8, 2, 4), (2, 0, 2, 4), (2, 8, 0, 4)):
        assert ops.linear_attention(*[torch.empty(shape, device=device)] * 3, provider=provider).shape == shape


def test_bad_arguments_are_named(device: str) -> None:
    x = torch.randn(2, 6, 3, 4, device=device)
    with pytest.raises(ValueError, match=r"queries have the shape \[B, N, H, D\], got \(2, 6, 12\)"):
        ops.linear_attention(x.flatten(2), x, x)
    with pytest.raises(ValueError, match=r"v of shape \(2, 5, 3, 4\) does not fit to queries of shape \(2, 6, 3, 4\)"):
        ops.linear_attention(x, x, x[:, :5])
    with pytest.raises(ValueError, match="queries and keys are rotated both, or none of them"):
        ops.linear_attention(x, x, x, x)
    with pytest.raises(TypeError, match=r"floating point operands, and k is torch\.int64"):
        ops.linear_attention(x, x.long(), x)
    with pytest.raises(ValueError, match="the v is on meta"):
        ops.linear_attention(x, x, x.to("meta"))
