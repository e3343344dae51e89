"""The Triton kernels of rows of fp8, compiled for GPUs that this machine need not have."""

from __future__ import annotations

import os
from types import ModuleType

import pytest
import torch

from tests.ops.triton_compile import Launch, Target, compiles, name_of, record_launches

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler in this process", allow_module_level=True)

#: NVIDIA's with fp8 numbers.
TARGETS: list[Target] = [("cuda", 89, 32), ("cuda", 90, 32), ("cuda", 120, 32)]


@pytest.fixture
def launches(
    triton: ModuleType, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> list[Launch]:
    """Launches for typical inputs, which compute nothing here."""
    from diffkern.providers.eager.modulate import LAYER, RMS
    from diffkern.providers.triton import fp8, norm

    recorded = record_launches(monkeypatch, tmp_path_factory, norm, fp8)
    x, row = torch.empty(2, 64, 2048, dtype=torch.bfloat16), torch.empty(2, 1, 2048, dtype=torch.bfloat16)
    norm.norm_modulate_fp8(x, row, row, None, None, 1e-6, RMS)
    norm.gate_residual_norm_modulate_fp8(x, x, row, row, row, row[0, 0], row[0, 0], 1e-6, LAYER)
    mlp = torch.empty(2, 64, 8192, dtype=torch.bfloat16)
    fp8.activation_fp8(mlp, mlp[..., :2048], "gelu_tanh")
    fp8.activation_fp8(torch.empty(64, 40000), None, "identity")
    fp8.glu_and_fp8(mlp[..., :4096], mlp[..., 4096:], "silu", False)
    return recorded


@pytest.mark.parametrize("target", TARGETS, ids=name_of)
def test_every_launch_compiles(target: Target, launches: list[Launch]) -> None:
    assert len(launches) == 5
    for launch in launches:
        assert compiles(launch, target)
