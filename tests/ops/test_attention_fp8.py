"""Queries, keys and values into e4m3 and the output back, by Triton, against plain PyTorch and float64."""

from __future__ import annotations

import os
from types import ModuleType

import pytest
import torch
from torch import Tensor

from diffkern import ops
from diffkern.providers.eager import attention_fp8 as eager
from tests.ops.triton_compile import Launch, Target, compiles, name_of, record_launches

TARGETS: list[Target] = [("cuda", 90, 32), ("cuda", 120, 32)]
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def inputs(device: str, case: str) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values with what tells the formula from others: means, channels, groups, strides, NaN."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    query, key, value = random(2, 70, 2, 32), random(2, 1, 140, 32).transpose(1, 2), random(2, 140, 1, 32)
    key, value = key + 3 * random(32), value * torch.logspace(-3, 2, 32) + random(32)
    if case == "not finite":
        query[1, 3, 1, 5], key[0, 7, 0, 1], value[1, 139, 0, 9] = torch.nan, torch.inf, -torch.inf
    dtype = torch.float16 if case == "not finite" else torch.bfloat16
    query, key, value = (x.to(device, dtype) for x in (query, key, value))
    return query, key[:, :1] if case == "one key" else key, value[:, :1] if case == "one key" else value


def unrotated(device: str, lengths: tuple[int, ...], head_dim: int = 32) -> tuple[eager.Unrotated, Tensor]:
    """Queries and keys before their norm and rotation, of streams of such lengths, and values."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

    queries = tuple([random(2, length, 6, head_dim) for length in lengths])
    keys = tuple([random(2, 3, length, head_dim).transpose(1, 2) + 3 * random(head_dim) for length in lengths])
    q_weights, k_weights = (tuple([1 + random(head_dim) / 4 for _ in lengths]) for _ in "qk")
    angles = 9 * random(sum(lengths), head_dim // 2).float().repeat_interleave(2, 1)
    cos, sin = angles.cos().split(lengths), angles.sin().split(lengths)
    x = eager.Unrotated(queries, keys, q_weights, k_weights, tuple(cos), tuple(sin), 1e-6)
    return x, random(2, sum(lengths), 3, head_dim)


def assert_alike(x: eager.Quantized, expected: eager.Quantized) -> None:
    """That Triton made of queries, keys and values what plain PyTorch did, but for roundings near a tie."""
    torch.testing.assert_close(x.scalars, expected.scalars, rtol=3e-6, atol=0.0)
    torch.testing.assert_close(x.value_mean, expected.value_mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x.value_scale, expected.value_scale, rtol=1e-5, atol=1e-12)
    for name in ("query", "key", "value"):
        ours, theirs = getattr(x, name), getattr(expected, name)
        assert ours.is_contiguous() and (_INTERPRETED or torch.equal(ours.isnan(), theirs.isnan()))
        codes = theirs.view(torch.uint8).int()
        away = (ours.view(torch.uint8).int() - codes).abs()
        if _INTERPRETED:  # it loses the carry into the exponent, below normal numbers too, and NaN, and rounds ties up
            away = torch.where(((codes + 1) % 8 < 2) | (codes % 128 < 8) | theirs.isnan(), 0, away)
        assert away.max() <= 1 and away.count_nonzero() <= 1 + away.numel() // 200, name


@pytest.mark.parametrize("lengths", [(150,), (37, 120)], ids=str)
def test_triton_rotates_as_plain_pytorch_does(device: str, lengths: tuple[int, ...], triton: ModuleType) -> None:
    if device == "cpu" and not _INTERPRETED:
        pytest.skip("Triton compiles nothing for the CPU")
    from diffkern.providers.triton import attention_fp8

    x, value = unrotated(device, lengths)
    assert_alike(attention_fp8.quantize_unrotated(x, value), eager.quantize_unrotated(x, value))


def test_what_is_rotated_is_what_the_op_of_queries_and_keys_computes() -> None:
    x, _ = unrotated("cpu", (37, 120))
    tables = [tuple([table[:, None].double() for table in side]) for side in (x.cos, x.sin)]
    (q, q_2), (k, k_2) = ([y.double() for y in side] for side in (x.queries, x.keys))
    weights = [tuple([weight.double() for weight in side]) for side in (x.q_weights, x.k_weights)]
    expected = ops.joint_qk_norm_rope((q, q_2), (k, k_2), *weights, *tables, x.eps, provider="eager")
    for y, exact in zip(x.rotated(), expected, strict=True):
        torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["plain", "not finite", "one key"])
def test_triton_rounds_as_plain_pytorch_does(device: str, case: str, triton: ModuleType) -> None:
    if device == "cpu" and not _INTERPRETED:
        pytest.skip("Triton compiles nothing for the CPU")
    from diffkern.providers.triton import attention_fp8

    tensors = inputs(device, case)
    expected, x = eager.quantize(*tensors), attention_fp8.quantize(*tensors)
    assert_alike(x, expected)
    y = eager.attend(x, 0.1)
    torch.testing.assert_close(
        attention_fp8.dequantize(y, x, tensors[0].dtype), eager.dequantize(y, x, tensors[0].dtype), equal_nan=True
    )


@pytest.mark.parametrize("case", ["plain", "one key"])
def test_each_number_is_one_rounding_from_the_formula(case: str) -> None:
    tensors = inputs("cpu", case)
    x = eager.quantize(*tensors)
    query, key, value = (t.double() for t in tensors)
    some_keys = eager._sample(key)
    peaks = [eager._sample(query).abs().amax(), (some_keys.abs().amax(1) + some_keys.mean(1).abs()).amax()]
    torch.testing.assert_close(x.scalars[:2].double() * eager.SAMPLE_PEAK, torch.stack(peaks), rtol=1e-6, atol=0.0)
    key, value = key - some_keys.mean(1, keepdim=True), value - value.mean(1, keepdim=True)
    for number, scale, exact in (
        (x.query, x.scalars[0], query),
        (x.key, x.scalars[1], key),
        (x.value, x.value_scale[:, None], value),
    ):
        step = exact.abs() * (1 / 16 + 1e-6) + scale.double() * (2**-10 + 1e-6)
        assert (number.double() * scale.double() - exact).abs().le(step).all()
    assert x.scalars[2:].tolist() == [1.0, 1 / eager.WEIGHT_SCALE, eager.WEIGHT_SCALE, 1.0]


@pytest.mark.parametrize("length", [512, 4096, 4608, 32760])
def test_a_sample_is_spread_over_all_tokens_and_over_the_columns_of_an_image(length: int) -> None:
    tokens = eager._sample(torch.arange(length)[None, :, None, None]).flatten()
    assert tokens.unique().numel() == eager.SAMPLE
    assert tokens.min() < length / 64 and tokens.max() >= length - length / 64
    assert tokens.diff().max() <= 2 * length / eager.SAMPLE + 1
    if length > 4000:
        assert (tokens % 64).unique().numel() > 40


def test_what_a_sample_does_not_show_is_rounded_up_to_28_times_its_peak() -> None:
    tensor = torch.ones(1, 4096, 1, 16)
    outside = torch.ones(4096, dtype=torch.bool)
    outside[eager._sample(torch.arange(4096)[None, :, None, None]).flatten()] = False
    tensor[:, outside] = 28.0
    tensor[0, outside.nonzero()[0, 0]] = 40.0
    x = eager.quantize(tensor, tensor, tensor)
    given = (x.query.float() * x.scalars[0])[0, :, 0, 0]
    assert given.unique().tolist() == [1.0, 28.0]
    tensor[:, ~outside] = 0.0
    x = eager.quantize(tensor, tensor, tensor)
    for name, scale in (("query", x.scalars[0]), ("key", x.scalars[1])):
        assert (getattr(x, name).float() * scale)[0, :, 0, 0].unique().tolist() == [0.0, 28.0, 40.0], name


@pytest.fixture
def launches(
    triton: ModuleType, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> list[Launch]:
    """The launches around an attention, which compute nothing here."""
    from diffkern.providers.triton import attention_fp8

    recorded = record_launches(monkeypatch, tmp_path_factory, attention_fp8)
    query = torch.empty(1, 4608, 24, 128, dtype=torch.bfloat16)
    x = attention_fp8.quantize(query, query[:, :1], query[:, :1])
    attention_fp8.dequantize(x.query, x, query.dtype)
    for lengths in ((64,), (16, 32)):
        attention_fp8.quantize_unrotated(*unrotated("cpu", lengths, 128))
    return recorded


@pytest.mark.exhaustive
@pytest.mark.skipif(_INTERPRETED, reason="the interpreter replaces the compiler in this process")
@pytest.mark.parametrize("target", TARGETS, ids=name_of)
def test_every_launch_compiles(target: Target, launches: list[Launch]) -> None:
    assert len(launches) == 10
    for launch in launches:
        assert compiles(launch, target)
