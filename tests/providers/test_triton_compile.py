"""The Triton kernels compiled for GPUs that this machine need not have."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType

import pytest
import torch
from torch import Tensor

from diffkern.providers.eager.modulate import LAYER, NO_NORM, RMS, SIGMOID, TANH
from diffkern.providers.eager.rope import FLOAT32, FLOAT64, INPUT
from tests.ops.layouts import make, make_parameter
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

#: NVIDIA's with fp8 numbers, and those for which norms are compiled besides the others.
FP8_TARGETS: list[Target] = [("cuda", 89, 32), ("cuda", 90, 32), ("cuda", 120, 32)]
NORM_TARGETS: list[Target] = [("cuda", 70, 32), ("cuda", 100, 32)]

_half = torch.bfloat16


def _channels_last(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=_half).to(memory_format=torch.channels_last)


#: What inputs of norms are like: (layout, batch, rows, row length).
NORM_INPUTS = {
    "whole rows": ("matrix", 1, 64, 2048),
    "heads": ("heads_first", 2, 64, 128),
    "long rows": ("matrix", 1, 4, 131072),
    "channels in front": ("channel_first", 2, 64, 96),
}


def _call_norm(name: str, norm: ModuleType) -> None:
    layout = NORM_INPUTS[name]
    x = make(*layout, _half, "cpu")
    weight, bias = (make_parameter("plain", layout[-1], torch.float32, "cpu") for _ in range(2))
    norm.rms_norm(x, weight, bias, 1e-6, 1.0, _half, None, False, True)
    norm.rms_norm(x, weight, bias, 1e-6, 1.0, None, None, False, True)
    norm.layer_norm(x, weight, bias, 1e-6, None, True)


def _call_clamped_norm(norm: ModuleType) -> None:
    x, weight = make(*NORM_INPUTS["channels in front"], torch.float32, "cpu"), torch.empty(96)
    norm.rms_norm(x, weight, weight, 1e-12, 1.0, None, None, True, True)


def _call_activation(activation: ModuleType) -> None:
    x = torch.empty(8, 4096, dtype=_half)
    for function in ("gelu", "gelu_tanh", "silu", "quick_gelu"):
        activation.activation(x, function)
    value, gate = x.chunk(2, -1)
    activation.glu(value, gate, "gelu", True)
    activation.glu(value, gate.float(), "silu", False)
    bias = torch.empty(256, dtype=_half)
    for image in (_channels_last(1, 256, 64, 64), torch.empty(1, 256, 64, 64, dtype=_half)):
        activation.channel_glu(image, bias, "silu", False)
    activation.channel_glu(image, None, "gelu", True)


def _call_group_norm(group_norm: ModuleType) -> None:
    weight = torch.empty(320)
    add = torch.empty(1, 256, dtype=_half)
    for x, more in ((torch.empty(1, 320, 64, 64, dtype=_half), None), (_channels_last(1, 256, 64, 64), add)):
        group_norm.group_norm_silu(x, 32, weight[: x.shape[1]], weight[: x.shape[1]], more, 1e-5, True, False, True)
    group_norm.group_norm_silu(_channels_last(1, 320, 64, 64).half(), 32, weight, weight, None, 1e-5, True, False, True)
    video = torch.empty(1, 320, 3, 64, 64, dtype=torch.float16)
    group_norm.group_norm_silu(video[..., ::2], 32, None, None, None, 1e-5, False, True, False)


def _call_channel_rms(norm: ModuleType) -> None:
    weight, scale = torch.empty(96), torch.empty(1, 1).expand(1, 96)
    for x in (torch.empty(1, 96, 64, 64, dtype=_half), _channels_last(1, 96, 64, 64)):
        norm.channel_rms_norm_silu(x, weight, weight, scale, scale, 1e-6, False, True, None)
        norm.channel_rms_norm_silu(x, weight, weight, None, None, 1e-12, True, False, _half)
    norm.channel_rms_norm_silu(torch.empty(1, 2048, 5, 7), None, None, None, None, 1e-6, False, True, None)


def _call_linear_attention(linear_attention: ModuleType) -> None:
    q, k, v = torch.empty(1, 64, 3 * 4 * 112, dtype=_half).view(1, 64, 3, 4, 112).unbind(2)
    linear_attention.linear_attention(q, k, v, k, q, 1e-15, False)
    wide = torch.empty(2, 64, 4, 32, dtype=_half)
    linear_attention.linear_attention(wide, wide, wide, None, None, 1e-15, True)


def _call_modulate(norm: ModuleType) -> None:
    x = torch.empty(2, 64, 2048, dtype=_half)
    table = torch.empty(2, 64, 6, 2048, dtype=_half)
    shift, scale, gate, *_ = table.unbind(2)
    row = torch.empty(2, 1, 2048)
    norm.norm_modulate(x, scale, shift, None, None, 1e-6, RMS, 1.0, True, None)
    norm.norm_modulate(x, row, row, row[0, 0], row[0, 0], 1e-6, LAYER, 0.0, False, _half)
    norm.norm_modulate(x, scale[..., ::2].repeat(1, 1, 2), None, None, None, 1e-6, NO_NORM, 1.0, False, None)
    norm.gate_residual(x, x, gate, TANH, True, None)
    norm.gate_residual_norm_modulate(x, x, row, row, row, None, None, 1e-6, RMS, SIGMOID, 1.0, False, None, None)
    long = torch.empty(2, 4, 40000, dtype=torch.float16)
    norm.gate_residual_norm_modulate(
        long, long, None, long[:, :1], None, None, None, 1e-6, LAYER, 0, 1.0, False, None, None
    )


def _call_rope(rope: ModuleType) -> None:
    none = (None, None, None, None)
    x = torch.empty(1, 256, 24, 128, dtype=_half)
    cos, sin = torch.empty(2, 256, 1, 128)
    rope.rope(x, cos, sin, False, FLOAT32, 0, 0, 0, -1)
    rope.rope(x.transpose(1, 2), cos[:, 0, ::2], sin[:, 0, ::2], False, FLOAT64, 0, 0, 0, -1)
    rope.rope(x, cos[:100], sin[:100], True, INPUT, 0, 1, 156, 100)
    packed = torch.empty(2, 64, 3 * 2048, dtype=_half)
    q, k, _ = packed.chunk(3, -1)
    weight = torch.empty(2048, dtype=_half)
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


def _call_norm_fp8(norm: ModuleType) -> None:
    x, row = torch.empty(2, 64, 2048, dtype=_half), torch.empty(2, 1, 2048, dtype=_half)
    norm.norm_modulate_fp8(x, row, row, None, None, 1e-6, RMS)
    norm.gate_residual_norm_modulate_fp8(x, x, row, row, row, row[0, 0], row[0, 0], 1e-6, LAYER)


def _call_fp8(fp8: ModuleType) -> None:
    mlp = torch.empty(2, 64, 8192, dtype=_half)
    fp8.activation_fp8(mlp, mlp[..., :2048], "gelu_tanh")
    fp8.activation_fp8(torch.empty(64, 40000), None, "identity")
    fp8.glu_and_fp8(mlp[..., :4096], mlp[..., 4096:], "silu", False)


#: Typical calls, their module and how many launches they make.
FAMILIES: dict[str, tuple[Callable[[ModuleType], None], str, int]] = {
    **{name: (partial(_call_norm, name), "norm", 3) for name in NORM_INPUTS},
    "clamped": (_call_clamped_norm, "norm", 1),
    "activation": (_call_activation, "activation", 9),
    "group_norm": (_call_group_norm, "group_norm", 8),
    "channel_rms_norm": (_call_channel_rms, "norm", 5),
    "linear_attention": (_call_linear_attention, "linear_attention", 4),
    "modulate": (_call_modulate, "norm", 6),
    "rope": (_call_rope, "rope", 7),
    "norm_fp8": (_call_norm_fp8, "norm", 2),
    "fp8": (_call_fp8, "fp8", 3),
}
#: Of kernels with many forms, the launch that stands for all: the one that does all that the others do.
MOST = {"modulate": -2, "rope": 3}
NORMS = (*NORM_INPUTS, "clamped")


@pytest.fixture
def launches(
    family: str, triton: ModuleType, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> list[Launch]:
    """The launches of the calls of a family, which compute nothing here."""
    call, name, count = FAMILIES[family]
    module = import_module(f"diffkern.providers.triton.{name}")
    recorded = record_launches(monkeypatch, tmp_path_factory, module)
    call(module)
    assert len(recorded) == count
    return recorded


def _targets(norms: list[Target], fp8: list[Target], others: list[Target]) -> pytest.MarkDecorator:
    """Families and targets: those of norms, of fp8, and of all other families."""
    pairs = [(f, target) for f in FAMILIES for target in (norms if f in NORMS else fp8 if "fp8" in f else others)]
    ids = [f"{family}-{name_of(target)}" for family, target in pairs]
    return pytest.mark.parametrize(("family", "target"), pairs, ids=ids)


@_targets(MAIN_TARGETS, FP8_TARGETS, MAIN_TARGETS)
def test_every_launch_compiles(family: str, target: Target, launches: list[Launch]) -> None:
    for launch in launches:
        assert compiles(launch, target)


@pytest.mark.exhaustive
@_targets([*OTHER_TARGETS, *NORM_TARGETS], [], OTHER_TARGETS)
def test_every_kernel_compiles_for_every_architecture(family: str, target: Target, launches: list[Launch]) -> None:
    if family in MOST:
        launches = [launches[MOST[family]]]
    elif family not in NORMS:
        launches = list({launch[0].__name__: launch for launch in reversed(launches)}.values())
    for launch in launches:
        assert compiles(launch, target)


def _reads_vectors(launch: Launch) -> bool:
    """Whether nothing but a long, dense tensor of a half dtype is read."""
    x = next(arg for arg in launch[1] if isinstance(arg, Tensor))
    odd = x.shape[-1] == 7 or x.stride(-1) == 2 or x.dtype != _half
    return not odd and launch[0].__name__ != "group_normalise_kernel"  # which reads parameters as well


@pytest.mark.parametrize("family", ["activation", "group_norm", "channel_rms_norm", "linear_attention"])
def test_aligned_inputs_are_read_in_16_byte_vectors(family: str, launches: list[Launch]) -> None:
    for launch in filter(_reads_vectors, launches):
        assert "ld.global.v4.b32" in compile_launch(launch, ("cuda", 90, 32)).asm["ptx"], launch[0].__name__


@pytest.mark.parametrize("family", ["modulate", "rope"])
def test_vectors_of_16_bytes_are_read_and_nothing_is_fused(family: str, launches: list[Launch]) -> None:
    for launch in launches[:4] if family == "rope" else launches:
        ptx = compile_launch(launch, ("cuda", 90, 32)).asm["ptx"]
        assert "ld.global.v4.b32" in ptx
        assert "st.global.v4.b32" in ptx or family == "modulate"
        assert "fma.rn.f32" not in ptx
        assert "fma.rn.f64" not in ptx


@pytest.mark.parametrize("family", NORM_INPUTS)
def test_aligned_inputs_are_read_and_written_in_16_byte_vectors(family: str, launches: list[Launch]) -> None:
    for launch in launches:
        ptx = compile_launch(launch, ("cuda", 90, 32)).asm["ptx"]
        assert "ld.global.v4.b32" in ptx
        assert "st.global.v4.b32" in ptx
        assert "ld.global.b16" not in ptx, "some of the input is read one element at a time"
