"""The Triton kernel of modulation, compiled for GPUs that this machine need not have."""

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

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler in this process", allow_module_level=True)


@pytest.fixture
def launches(
    triton: ModuleType, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> list[Launch]:
    """Launches for typical inputs, which compute nothing here."""
    from diffkern.providers.eager.modulate import LAYER, NO_NORM, RMS, SIGMOID, TANH
    from diffkern.providers.triton import norm

    recorded = record_launches(monkeypatch, tmp_path_factory, norm)
    x = torch.empty(2, 64, 2048, dtype=torch.bfloat16)
    table = torch.empty(2, 64, 6, 2048, dtype=torch.bfloat16)
    shift, scale, gate, *_ = table.unbind(2)
    row = torch.empty(2, 1, 2048)
    norm.norm_modulate(x, scale, shift, None, None, 1e-6, RMS, 1.0, True, None)
    norm.norm_modulate(x, row, row, row[0, 0], row[0, 0], 1e-6, LAYER, 0.0, False, torch.bfloat16)
    norm.norm_modulate(x, scale[..., ::2].repeat(1, 1, 2), None, None, None, 1e-6, NO_NORM, 1.0, False, None)
    norm.gate_residual(x, x, gate, TANH, True, None)
    norm.gate_residual_norm_modulate(x, x, row, row, row, None, None, 1e-6, RMS, SIGMOID, 1.0, False, None, None)
    long = torch.empty(2, 4, 40000, dtype=torch.float16)
    norm.gate_residual_norm_modulate(
        long, long, None, long[:, :1], None, None, None, 1e-6, LAYER, 0, 1.0, False, None, None
    )
    return recorded


@pytest.mark.parametrize("target", MAIN_TARGETS, ids=name_of)
def test_every_launch_compiles_for_both_vendors(target: Target, launches: list[Launch]) -> None:
    assert len(launches) == 6
    for launch in launches:
        assert compiles(launch, target)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", OTHER_TARGETS, ids=name_of)
def test_the_kernel_compiles_for_every_architecture(target: Target, launches: list[Launch]) -> None:
    assert compiles(launches[-2], target)  # the one that does all that the others do


def test_aligned_inputs_are_read_in_16_byte_vectors_and_nothing_is_fused(launches: list[Launch]) -> None:
    for launch in launches:
        ptx = compile_launch(launch, ("cuda", 90, 32)).asm["ptx"]
        assert "ld.global.v4.b32" in ptx
        assert "fma.rn.f32" not in ptx
