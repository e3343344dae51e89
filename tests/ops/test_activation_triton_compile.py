"""The Triton kernels of activations and group norms, compiled for GPUs that this machine need not have."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler in this process", allow_module_level=True)

_TARGETS = [
    ("cuda", 75, 32),
    ("cuda", 90, 32),
    ("cuda", 120, 32),
    ("hip", "gfx942", 64),
    ("hip", "gfx1100", 32),
]

_POINTER = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}


class _Recorder:
    """Stands in for a kernel and keeps the arguments of its launches."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self._launches.append((self._kernel, args, options))


def _compile(kernel: Any, args: tuple[Any, ...], options: dict[str, Any], target: tuple[Any, ...]) -> Any:
    """Compiles ``kernel`` as a launch with these arguments would specialise it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for position, (parameter, value) in enumerate(zip(kernel.params, args, strict=True)):
        name = parameter.name
        if isinstance(value, Tensor):
            signature[name] = _POINTER[value.dtype]
        elif parameter.is_constexpr or value is None or (value == 1 and not parameter.do_not_specialize):
            signature[name] = "constexpr"
            constexprs[name] = value
            continue
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if value < 2**31 else "i64"
        whole = isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize
        if isinstance(value, Tensor) or whole:
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs, attributes)
    return triton.compile(source, target=GPUTarget(*target), options=options)


def _channels_last(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).to(memory_format=torch.channels_last)


def _call_activation(activation: ModuleType) -> None:
    x = torch.empty(8, 4096, dtype=torch.bfloat16)
    for function in ("gelu", "gelu_tanh", "silu", "quick_gelu"):
        activation.activation(x, function)
    value, gate = x.chunk(2, -1)
    activation.glu(value, gate, "gelu", True)
    activation.glu(value, gate.float(), "silu", False)


def _call_group_norm(group_norm: ModuleType) -> None:
    weight = torch.empty(320)
    for x in (torch.empty(1, 320, 64, 64, dtype=torch.bfloat16), _channels_last(1, 256, 64, 64)):
        group_norm.group_norm_silu(x, 32, weight[: x.shape[1]], weight[: x.shape[1]], 1e-5, True, False, True)
    group_norm.group_norm_silu(_channels_last(1, 320, 64, 64).half(), 32, weight, weight, 1e-5, True, False, True)
    video = torch.empty(1, 320, 3, 64, 64, dtype=torch.float16)
    group_norm.group_norm_silu(video[..., ::2], 32, None, None, 1e-5, False, True, False)


def _call_channel_rms(group_norm: ModuleType) -> None:
    weight, scale = torch.empty(96), torch.empty(1, 1).expand(1, 96)
    for x in (torch.empty(1, 96, 64, 64, dtype=torch.bfloat16), _channels_last(1, 96, 64, 64)):
        group_norm.channel_rms_norm_silu(x, weight, weight, scale, scale, 1e-6, False, True, None)
        group_norm.channel_rms_norm_silu(x, weight, weight, None, None, 1e-12, True, False, torch.bfloat16)
    group_norm.channel_rms_norm_silu(torch.empty(1, 2048, 5, 7), None, None, None, None, 1e-6, False, True, None)


@pytest.fixture
def launches(triton: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All launches of the calls above, which compute nothing here."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from diffkern.providers.triton import activation, group_norm

    recorded: list[Any] = []
    for module in (activation, group_norm):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, _Recorder(getattr(module, name), recorded))
    _call_activation(activation)
    _call_group_norm(group_norm)
    _call_channel_rms(group_norm)
    return recorded


@pytest.mark.parametrize("target", _TARGETS, ids=lambda target: f"{target[0]}-{target[1]}")
def test_every_kernel_compiles_for_every_architecture(target: tuple[Any, ...], launches: list[Any]) -> None:
    binary = "cubin" if target[0] == "cuda" else "hsaco"
    for kernel, args, options in launches:
        assert _compile(kernel, args, options, target).asm[binary]


def test_aligned_inputs_are_read_in_16_byte_vectors(launches: list[Any]) -> None:
    for kernel, args, options in launches:
        name, x = kernel.__name__, args[0]
        if name == "group_normalise_kernel" or x.shape[1] == 2048 or x.stride(-1) == 2 or x.dtype != torch.bfloat16:
            continue  # reads parameters as well, or cannot be read in vectors
        ptx = _compile(kernel, args, options, ("cuda", 90, 32)).asm["ptx"]
        assert "ld.global.v4.b32" in ptx, name
