"""What every launch of a Triton kernel needs, whatever the op."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
import triton


def device_guard(device: torch.device) -> AbstractContextManager[object]:
    """Makes ``device`` the current one, on which Triton launches whatever the tensors say."""
    if device.type == "cuda":
        return torch.cuda.device(device)
    return torch.xpu.device(device) if device.type == "xpu" else contextlib.nullcontext()


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
