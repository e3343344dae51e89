"""Compiles Triton kernels for GPUs that this machine need not have, as recorded launches would specialise them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

Target = tuple[str, int | str, int]
Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]

#: One of each vendor, for which every launch is compiled ...
MAIN_TARGETS: list[Target] = [("cuda", 90, 32), ("hip", "gfx942", 64)]
#: ... and those for which one launch of a kernel stands for all of them, since compiling takes its time.
OTHER_TARGETS: list[Target] = [
    ("cuda", 75, 32),
    ("cuda", 120, 32),
    ("hip", "gfx950", 64),
    ("hip", "gfx1100", 32),
    ("hip", "gfx1201", 32),
]

_POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
}


class Recorder:
    """Stands in for a kernel and keeps the arguments of its launches."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self._launches.append((self._kernel, args, options))


def record_launches(
    monkeypatch: pytest.MonkeyPatch, cache: pytest.TempPathFactory, *modules: ModuleType
) -> list[Launch]:
    """Has the kernels of modules compute nothing; returns the list to which their launches are added from here on."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache.getbasetemp() / "triton"))
    launches: list[Launch] = []
    for module in modules:
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Recorder(getattr(module, name), launches))
    return launches


def name_of(target: Target) -> str:
    """The target in the name of a test."""
    return f"{target[0]}-{target[1]}"


def compiles(launch: Launch, target: Target) -> bool:
    """Whether there is machine code in the end."""
    return bool(compile_launch(launch, target).asm["cubin" if target[0] == "cuda" else "hsaco"])


def compile_launch(launch: Launch, target: Target) -> Any:
    """Compiles the kernel of ``launch`` as its arguments would specialise it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, args, options = launch
    signature: dict[str, Any] = {}
    constexprs: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for position, (parameter, value) in enumerate(zip(kernel.params, args, strict=True)):
        if parameter.is_constexpr:
            signature[parameter.name], constexprs[(position,)] = "constexpr", value
        elif parameter.do_not_specialize:
            signature[parameter.name] = _integer(value)
        else:
            signature[parameter.name] = _specialise(value, (position,), constexprs, attributes)
    source = ASTSource(kernel, signature, constexprs, attributes)
    return triton.compile(source, target=GPUTarget(*target), options=options)


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
    return _integer(value)


def _integer(value: int) -> str:
    return "i32" if value < 2**31 else "i64"
