"""Every path through the rotary kernels once, small: for compute-sanitizer, ``pytest -m "gpu and sanitize"``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffkern.ops import qk_norm_rope, rope, rope_3d
from tests.ops.reference import EXACT_HALF
from tests.ops.rotation import angles, axis_tables, chain, random
from tests.ops.test_rope_qk_norm_values import check, packed, parameters_of

pytestmark = pytest.mark.sanitize

DTYPES = (torch.float32, *EXACT_HALF)


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_heads_in_packets_narrow_packets_and_single_elements(pairing: str, provider: str, device: str) -> None:
    for dtype in DTYPES:
        for head_dim in (64, 72, 128, 30):
            q, k = packed(5, 5, head_dim, dtype, device)
            for kind in ("none", "both"):
                parameters = parameters_of(head_dim, kind, dtype, device)
                table = angles(5, 1, head_dim, device=device)
                check(q, k[:, :, :2], parameters, *table, pairing=pairing, provider=provider)


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize("heads", [2, 5, 40])
def test_tokens_in_one_launch_together_and_apart(heads: int, pairing: str, provider: str, device: str) -> None:
    for dtype in DTYPES:
        q, k = packed(4, heads, 128, dtype, device, flat=True)
        options: dict[str, Any] = {"across_heads": heads, "pairing": pairing, "provider": provider}
        for kind in ("none", "both"):
            parameters = parameters_of(heads * 128, kind, dtype, device)
            for norm in ("rms", "layer"):
                table = angles(4, 1, 128, device=device)
                check(q, k, parameters, *table, norm=norm, **options)
                other = angles(3, heads, 64, device=device)
                check(q, k[:, :3], parameters, *table, cos_k=other[0], sin_k=other[1], norm=norm, **options)


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize(
    ("heads", "head_dim", "across"),
    [(24, 128, False), (5, 64, False), (3, 72, False), (12, 128, True), (40, 128, True)],
)
def test_weights_of_the_dtype_of_the_input(
    heads: int, head_dim: int, across: bool, pairing: str, provider: str, device: str
) -> None:
    for dtype in DTYPES:
        q, k = packed(5, heads, head_dim, dtype, device, flat=across)
        size = heads * head_dim if across else head_dim
        weights = [
            weight if weight is None else weight.to(dtype) for weight in parameters_of(size, "weights", dtype, device)
        ]
        options: dict[str, Any] = {"across_heads": heads if across else None, "pairing": pairing, "provider": provider}
        for shape in ((5, 1, head_dim), (5, 1, head_dim // 2), (5, heads, head_dim)):
            check(q, k, weights, *angles(*shape, device=device), **options)
        check(q, k[:, :2], weights, **options)


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_one_long_head(pairing: str, provider: str, device: str) -> None:
    for dtype in DTYPES:
        for head_dim in (576, 2048, 5120):
            q, k = packed(3, 1, head_dim, dtype, device, flat=True)
            for kind, norm in (("weights", "rms"), ("both", "layer")):
                parameters = parameters_of(head_dim, kind, dtype, device)
                check(
                    q, k, parameters, *angles(3, head_dim, device=device), norm=norm, pairing=pairing, provider=provider
                )
                check(q, k[:, :2], parameters, norm=norm, provider=provider)


def test_rows_too_wide_for_registers(provider: str, device: str) -> None:
    q, k = packed(2, 128, 128, torch.float16, device, flat=True, batch=1)
    table = angles(2, 1, 128, device=device)
    check(q, k, parameters_of(16384, "weights", torch.float16, device), *table, across_heads=128, provider=provider)
    x = random(1, 2, 4096, device=device, dtype=torch.float16)
    cos, sin = angles(2, 4096, device=device)
    assert torch.equal(rope(x, cos, sin, provider=provider), chain(x, cos, sin))


def test_float64_and_tables_of_axes(provider: str, device: str) -> None:
    for dtype in (*DTYPES, torch.float64):
        x = random(2, 6, 3, 32, device=device, dtype=dtype)
        for arithmetic in ("float32", "float64", "input"):
            cos, sin = angles(6, 1, 32, device=device, dtype=torch.float64)
            assert torch.equal(
                rope(x, cos, sin, arithmetic=arithmetic, provider=provider), chain(x, cos, sin, arithmetic=arithmetic)
            )
        for tables in (
            axis_tables((1, 2, 3), (6, 5, 5), device),
            axis_tables((1, 2, 3), (6, 5, 5), device, torch.float64),
        ):
            y = rope_3d(x, *tables, grid=(1, 2, 3), provider=provider)
            if dtype != torch.float64:
                z, _ = qk_norm_rope(x, x, None, None, *tables, grid=(1, 2, 3), norm=None, provider="eager")
                assert torch.equal(y, z)
