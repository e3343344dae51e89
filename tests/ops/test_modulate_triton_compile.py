"""The Triton kernel of modulation, compiled for GPUs that this machine need not have."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.ops.test_activation_triton_compile import _TARGETS, _compile, _Recorder


@pytest.fixture
def launches(triton: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Launches for typical inputs, which compute nothing here."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from diffkern.providers.eager.modulate import LAYER, NO_NORM, RMS, SIGMOID, TANH
    from diffkern.providers.triton import modulate

    recorded: list[Any] = []
    monkeypatch.setattr(modulate, "modulate_kernel", _Recorder(modulate.modulate_kernel, recorded))
    x = torch.empty(2, 64, 2048, dtype=torch.bfloat16)
    table = torch.empty(2, 64, 6, 2048, dtype=torch.bfloat16)
    shift, scale, gate, *_ = table.unbind(2)
    row = torch.empty(2, 1, 2048)
    modulate.norm_modulate(x, scale, shift, None, None, 1e-6, RMS, 1.0, True, None)
    modulate.norm_modulate(x, row, row, row[0, 0], row[0, 0], 1e-6, LAYER, 0.0, False, torch.bfloat16)
    modulate.norm_modulate(x, scale[..., ::2].repeat(1, 1, 2), None, None, None, 1e-6, NO_NORM, 1.0, False, None)
    modulate.gate_residual(x, x, gate, TANH, True, None)
    modulate.gate_residual_norm_modulate(x, x, row, row, row, None, None, 1e-6, RMS, SIGMOID, 1.0, False, None, None)
    long = torch.empty(2, 4, 40000, dtype=torch.float16)
    modulate.gate_residual_norm_modulate(
        long, long, None, long[:, :1], None, None, None, 1e-6, LAYER, 0, 1.0, False, None, None
    )
    return recorded


@pytest.mark.parametrize("target", _TARGETS, ids=lambda target: f"{target[0]}-{target[1]}")
def test_the_kernel_compiles_for_every_architecture(target: tuple[Any, ...], launches: list[Any]) -> None:
    assert len(launches) == 6
    binary = "cubin" if target[0] == "cuda" else "hsaco"
    for kernel, args, options in launches:
        assert _compile(kernel, args, options, target).asm[binary]


def test_aligned_inputs_are_read_in_16_byte_vectors_and_nothing_is_fused(launches: list[Any]) -> None:
    for kernel, args, options in launches:
        ptx = _compile(kernel, args, options, ("cuda", 90, 32)).asm["ptx"]
        assert "ld.global.v4.b32" in ptx
        assert "fma.rn.f32" not in ptx
