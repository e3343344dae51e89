"""What every launch of a Triton kernel needs, whatever the op."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

_NOTHING = contextlib.nullcontext()


@dataclass(frozen=True)
class Plan:
    """Everything of a launch but its tensors, which come first, and the kernel.

    Attributes:
        grid: Number of programs.
        rest: The arguments after the tensors.
        options: As Triton takes them.
        compiled: What Triton made of the kernel for tensors of one kind, ready to be called.
    """

    grid: tuple[int]
    rest: tuple[Any, ...]
    options: Mapping[str, Any]
    compiled: dict[Hashable, Callable[..., None]] = field(default_factory=dict)


def launch(plan: Plan, kernel: Any, tensors: tuple[Tensor | None, ...], device: torch.device) -> None:
    """Launches a kernel on ``device``, the current one; always the same kernel with the same plan.

    At every launch Triton finds out again of what kind each of the arguments is, which for fifty of them takes longer
    than the launch. With a plan only the tensors can be of another kind than the last time.
    """
    kind = (device, *[None if t is None else (t.dtype, t.data_ptr() % 16 == 0) for t in tensors])
    known = plan.compiled.get(kind)
    if known is not None:
        known(*tensors, *plan.rest)
        return
    compiled = kernel[plan.grid](*tensors, *plan.rest, **plan.options)
    if compiled is not None:  # the interpreter compiles nothing
        plan.compiled[kind] = compiled[plan.grid[0], 1, 1]


def device_guard(device: torch.device) -> AbstractContextManager[object]:
    """Makes ``device`` the current one, on which Triton launches whatever the tensors say."""
    if device.type == "cuda":
        # It almost always is, and the question is quick.
        return _NOTHING if device.index == torch.cuda.current_device() else torch.cuda.device(device)
    return torch.xpu.device(device) if device.type == "xpu" else _NOTHING


def for_rows(kernel: Any, row_length: int) -> Any:
    """The kernel as it should be compiled for rows of that length.

    Triton lays a tile out by what it knows of the alignment of its operands, and the order of a sum follows that
    layout. Rows of a multiple of 16 elements are aligned in a batch as they are alone. Of other rows the first of a
    tensor may be aligned and the next one not: nothing is assumed of them, so that a sample comes out the same to
    the bit whatever batch it is in.
    """
    return kernel if row_length % 16 == 0 else _unaligned(kernel)


@cache
def _unaligned(kernel: Any) -> Any:
    if not isinstance(kernel, triton.JITFunction):  # the interpreter, which has no layouts
        return kernel
    operands = [parameter.name for parameter in kernel.params if not parameter.is_constexpr]
    return triton.jit(kernel.fn, do_not_specialize=kernel.do_not_specialize, do_not_specialize_on_alignment=operands)
