"""The Triton kernel of the rotary ops, compiled for GPUs that this machine need not have."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler in this process", allow_module_level=True)

from tests.ops.test_activation_triton_compile import _TARGETS, _Recorder

_POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
}


def _specialise(value: Any, path: tuple[int, ...], constexprs: dict[Any, Any], attributes: dict[Any, Any]) -> Any:
    """The type of an argument as a launch sees it, tuples included."""
    if isinstance(value, tuple):
        return tuple(_specialise(item, (*path, i), constexprs, attributes) for i, item in enumerate(value))
    if isinstance(value, Tensor):
        attributes[path] = [["tt.divisibility", 16]]
        return _POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    if value is None or value == 1:
        constexprs[path] = value
        return "constexpr"
    if value % 16 == 0:
        attributes[path] = [["tt.divisibility", 16]]
    return "i32" if value < 2**31 else "i64"


def _compile(kernel: Any, args: tuple[Any, ...], options: dict[str, Any], target: tuple[Any, ...]) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, Any] = {}
    constexprs: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}
    for position, (parameter, value) in enumerate(zip(kernel.params, args, strict=True)):
        if parameter.is_constexpr:
            signature[parameter.name], constexprs[(position,)] = "constexpr", value
        elif parameter.do_not_specialize:
            signature[parameter.name] = "i32"
        else:
            signature[parameter.name] = _specialise(value, (position,), constexprs, attributes)
    source = ASTSource(kernel, signature, constexprs, attributes)
    return triton.compile(source, target=GPUTarget(*target), options=options)


@pytest.fixture
def launches(triton: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Launches for typical inputs, which compute nothing here."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from diffkern.providers.eager.modulate import LAYER, RMS
    from diffkern.providers.eager.rope import FLOAT32, FLOAT64, INPUT
    from diffkern.providers.triton import rope

    recorded: list[Any] = []
    monkeypatch.setattr(rope, "rope_kernel", _Recorder(rope.rope_kernel, recorded))
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
        assert "st.global.v4.b32" in ptx
        assert "fma.rn.f32" not in ptx
        assert "fma.rn.f64" not in ptx
