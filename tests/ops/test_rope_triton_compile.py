"""The Triton kernel of the rotary ops, compiled for GPUs that this machine need not have."""

from __future__ import annotations

import os
from types import ModuleType

import pytest
import torch

from tests.ops.triton_compile import (
    MAIN_TARGETS,
    OTHER_TARGETS,
    Launch,
    Target,
    compile_launch,
    compiles,
    name_of,
    record_launches,
)

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler in this process", allow_module_level=True)


@pytest.fixture
def launches(
    triton: ModuleType, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> list[Launch]:
    """Launches for typical inputs, which compute nothing here."""
    from diffkern.providers.eager.modulate import LAYER, RMS
    from diffkern.providers.eager.rope import FLOAT32, FLOAT64, INPUT
    from diffkern.providers.triton import rope

    recorded = record_launches(monkeypatch, tmp_path_factory, rope)
    half, none = torch.bfloat16, (None, None, None, None)
    x = torch.empty(1, 256, 24, 128, dtype=half)
    cos, sin = torch.empty(2, 256, 1, 128)
    rope.rope(x, cos, sin, False, FLOAT32, 0, 0, 0, -1)
    rope.rope(x.transpose(1, 2), cos[:, 0, ::2], sin[:, 0, ::2], False, FLOAT64, 0, 0, 0, -1)
    rope.rope(x, cos[:100], sin[:100], True, INPUT, 0, 1, 156, 100)
    packed = torch.empty(2, 64, 3 * 2048, dtype=half)
    q, k, _ = packed.chunk(3, -1)
    weight = torch.empty(2048, dtype=half)
    axes = [torch.empty(4, 341) for _ in range(3)]
    tables = (axes, axes, axes, axes)
    tail = (0.0, None, False, False, FLOAT32, 0, 1, 0, -1)
    rope.qk_norm_rope(q, k, weight, weight, None, None, *tables, None, [4, 4, 4], True, 1, RMS, 1e-6, 32, *tail)
    coords = torch.empty(64, 3, dtype=torch.int64)
    narrow = [torch.empty(4, width) for width in (8, 12, 12)]
    heads = (q.unflatten(-1, (32, 64)), k.unflatten(-1, (32, 64)))
    tables = (narrow, narrow, narrow, narrow)
    rope.qk_norm_rope(*heads, None, None, None, None, *tables, coords, [], False, 0, LAYER, 1e-6, 0, *tail)
    rope.qk_norm_rope(*heads, *none, [], [], [], [], None, [], False, 0, RMS, 1e-6, 0, *tail)
    # One frame, and a head of which two thirds are rotated: a tile of 1 1/2 powers of two.
    rope.rope_3d(x[..., :96], narrow, narrow, None, [1, 1, 256], False, 0, False, FLOAT32, 64, 1, 0, -1)
    return recorded


@pytest.mark.parametrize("target", MAIN_TARGETS, ids=name_of)
def test_every_launch_compiles_for_both_vendors(target: Target, launches: list[Launch]) -> None:
    assert len(launches) == 7
    for launch in launches:
        assert launch[2]["num_warps"] in (1, 2, 4, 8, 16)
        assert compiles(launch, target)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", OTHER_TARGETS, ids=name_of)
def test_the_kernel_compiles_for_every_architecture(target: Target, launches: list[Launch]) -> None:
    assert compiles(launches[3], target)  # with a norm, and tables of axes


def test_aligned_inputs_are_read_in_16_byte_vectors_and_nothing_is_fused(launches: list[Launch]) -> None:
    for launch in launches[:4]:
        ptx = compile_launch(launch, ("cuda", 90, 32)).asm["ptx"]
        assert "ld.global.v4.b32" in ptx
        assert "st.global.v4.b32" in ptx
        assert "fma.rn.f32" not in ptx
        assert "fma.rn.f64" not in ptx
