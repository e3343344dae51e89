"""The Triton kernels of activations, group norms and linear attention, compiled for GPUs that need not be here."""

from __future__ import annotations

import os
from types import ModuleType

import pytest
import torch
from torch import Tensor

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


def _channels_last(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).to(memory_format=torch.channels_last)


def _call_activation(activation: ModuleType) -> None:
    x = torch.empty(8, 4096, dtype=torch.bfloat16)
    for function in ("gelu", "gelu_tanh", "silu", "quick_gelu"):
        activation.activation(x, function)
    value, gate = x.chunk(2, -1)
    activation.glu(value, gate, "gelu", True)
    activation.glu(value, gate.float(), "silu", False)
    bias = torch.empty(256, dtype=torch.bfloat16)
    for image in (_channels_last(1, 256, 64, 64), torch.empty(1, 256, 64, 64, dtype=torch.bfloat16)):
        activation.channel_glu(image, bias, "silu", False)
    activation.channel_glu(image, None, "gelu", True)


def _call_group_norm(group_norm: ModuleType) -> None:
    weight = torch.empty(320)
    add = torch.empty(1, 256, dtype=torch.bfloat16)
    for x, more in ((torch.empty(1, 320, 64, 64, dtype=torch.bfloat16), None), (_channels_last(1, 256, 64, 64), add)):
        group_norm.group_norm_silu(x, 32, weight[: x.shape[1]], weight[: x.shape[1]], more, 1e-5, True, False, True)
    group_norm.group_norm_silu(_channels_last(1, 320, 64, 64).half(), 32, weight, weight, None, 1e-5, True, False, True)
    video = torch.empty(1, 320, 3, 64, 64, dtype=torch.float16)
    group_norm.group_norm_silu(video[..., ::2], 32, None, None, None, 1e-5, False, True, False)


def _call_channel_rms(norm: ModuleType) -> None:
    weight, scale = torch.empty(96), torch.empty(1, 1).expand(1, 96)
    for x in (torch.empty(1, 96, 64, 64, dtype=torch.bfloat16), _channels_last(1, 96, 64, 64)):
        norm.channel_rms_norm_silu(x, weight, weight, scale, scale, 1e-6, False, True, None)
        norm.channel_rms_norm_silu(x, weight, weight, None, None, 1e-12, True, False, torch.bfloat16)
    norm.channel_rms_norm_silu(torch.empty(1, 2048, 5, 7), None, None, None, None, 1e-6, False, True, None)


def _call_linear_attention(linear_attention: ModuleType) -> None:
    q, k, v = torch.empty(1, 64, 3 * 4 * 112, dtype=torch.bfloat16).view(1, 64, 3, 4, 112).unbind(2)
    linear_attention.linear_attention(q, k, v, k, q, 1e-15, False)
    wide = torch.empty(2, 64, 4, 32, dtype=torch.bfloat16)
    linear_attention.linear_attention(wide, wide, wide, None, None, 1e-15, True)


@pytest.fixture
def launches(
    triton: ModuleType, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> list[Launch]:
    """All launches of the calls above, which compute nothing here."""
    from diffkern.providers.triton import activation, group_norm, linear_attention, norm

    recorded = record_launches(monkeypatch, tmp_path_factory, activation, group_norm, linear_attention, norm)
    _call_activation(activation)
    _call_group_norm(group_norm)
    _call_channel_rms(norm)
    _call_linear_attention(linear_attention)
    return recorded


@pytest.mark.parametrize("target", MAIN_TARGETS, ids=name_of)
def test_every_launch_compiles_for_both_vendors(target: Target, launches: list[Launch]) -> None:
    for launch in launches:
        assert compiles(launch, target)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", OTHER_TARGETS, ids=name_of)
def test_every_kernel_compiles_for_every_architecture(target: Target, launches: list[Launch]) -> None:
    first = {launch[0].__name__: launch for launch in reversed(launches)}
    assert len(first) == 7
    for launch in first.values():
        assert compiles(launch, target)


def test_aligned_inputs_are_read_in_16_byte_vectors(launches: list[Launch]) -> None:
    for launch in launches:
        name, x = launch[0].__name__, next(arg for arg in launch[1] if isinstance(arg, Tensor))
        if name == "group_normalise_kernel" or 2048 in x.shape or x.stride(-1) == 2 or x.dtype != torch.bfloat16:
            continue  # reads parameters as well, or cannot be read in vectors
        assert "ld.global.v4.b32" in compile_launch(launch, ("cuda", 90, 32)).asm["ptx"], name
