"""The kernels compiled by the real Triton for GPUs that this machine need not have."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.layouts import make, make_parameter

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler in this process", allow_module_level=True)

_TARGETS = [
    ("cuda", 75, 32),
    ("cuda", 90, 32),
    ("cuda", 100, 32),
    ("cuda", 120, 32),
    ("hip", "gfx942", 64),
    ("hip", "gfx950", 64),
    ("hip", "gfx1100", 32),
    ("hip", "gfx1201", 32),
]

# what it is like: (layout, batch, rows, row length)
_INPUTS = {
    "whole rows": ("matrix", 1, 64, 2048),
    "heads": ("heads_first", 2, 64, 128),
    "long rows": ("matrix", 1, 4, 131072),
    "channels in front": ("channel_first", 2, 64, 96),
}

_POINTER = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}


def _source(
    op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, y: Tensor, **constants: Any
) -> Any:
    """The kernel of ``op`` as a launch with these arguments would specialise it, and its number of warps."""
    from triton.compiler import ASTSource

    from diffkern.providers.triton import norm, norm_kernels

    launch = norm.launch_for(x.shape, x.stride(), y.stride())
    assert launch is not None
    kernel = getattr(norm_kernels, f"{op}_kernel")
    tile = {
        "NESTED": launch.nested,
        "ROWS": launch.tile.rows,
        "COLS": launch.tile.cols,
        "STEPS": launch.steps,
    }
    arguments = dict(zip(kernel.arg_names, (x, weight, bias, y, *launch.geometry, 1, 1), strict=False))
    arguments |= {"eps": 1e-6, "weight_offset": 1.0} | tile | constants
    signature, constexprs, attributes = {}, {}, {}
    for position, name in enumerate(kernel.arg_names):
        value = arguments[name]
        plain_count = name in ("size1", "tiles")
        if isinstance(value, Tensor):
            signature[name] = _POINTER[value.dtype]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif name.isupper() or value is None or (value == 1 and not plain_count):
            signature[name] = "constexpr"
            constexprs[name] = value
            continue
        else:
            signature[name] = "i32" if value < 2**31 else "i64"
        if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0 and not plain_count):
            attributes[(position,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constexprs, attributes), launch.tile.num_warps


def _compile(
    op: str, target: tuple[Any, ...], layout: tuple[Any, ...], dtype: torch.dtype, **constants: Any
) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    x = make(*layout, dtype, "cpu")
    weight, bias = (make_parameter("plain", layout[-1], torch.float32, "cpu") for _ in range(2))
    y = torch.empty_like(x, memory_format=torch.preserve_format)
    source, num_warps = _source(op, x, weight, bias, y, **constants)
    options = {"num_warps": num_warps, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget(*target), options=options)


@pytest.fixture(autouse=True)
def _fresh_cache(triton: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("target", _TARGETS, ids=lambda target: f"{target[0]}-{target[1]}")
def test_both_kernels_compile_for_every_architecture(target: tuple[Any, ...]) -> None:
    import triton.language as tl

    binary = "cubin" if target[0] == "cuda" else "hsaco"
    for layout in _INPUTS.values():
        rounded = {"ROUND": tl.bfloat16, "CLAMP": False}
        assert _compile("rms_norm", target, layout, torch.bfloat16, **rounded).asm[binary]
        assert _compile("layer_norm", target, layout, torch.bfloat16).asm[binary]
    clamped = {"ROUND": None, "CLAMP": True}
    assert _compile("rms_norm", target, _INPUTS["channels in front"], torch.float32, **clamped).asm[binary]


@pytest.mark.parametrize("name", _INPUTS)
def test_aligned_inputs_are_read_and_written_in_16_byte_vectors(name: str) -> None:
    for op, constants in (("rms_norm", {"ROUND": None, "CLAMP": False}), ("layer_norm", {})):
        ptx = _compile(op, ("cuda", 90, 32), _INPUTS[name], torch.bfloat16, **constants).asm["ptx"]
        assert "ld.global.v4.b32" in ptx
        assert "st.global.v4.b32" in ptx
        assert "ld.global.b16" not in ptx, "some of the input is read one element at a time"
