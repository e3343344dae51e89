r"""Rotary embeddings that are no tables yet, angles or one 2x2 matrix per pair, as those of :func:`diffkern.ops.rope`.

Matrices are not assumed to be rotations. With a cosine and a sine for each element of a pair the op computes
:math:`y_a = x_a c_a - x_b s_a,\ y_b = x_b c_b + x_a s_b`, which is any matrix for
:math:`c_a, s_a, c_b, s_b = m_{00}, -m_{01}, m_{11}, m_{10}`, and the products and sums are those of the matrix.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from diffkern.cache.derived import version
from diffkern.providers import KERNEL_DTYPES

Tables = tuple[Tensor, Tensor]

_FORMS = ("interleaved", "half")
#: In the place of a pairing: what is given are angles, not matrices.
ANGLES = "angles"

#: Tables by the identity of what they are from: all blocks of a step share one tensor. An entry dies with it,
#: and is valid in one call of the model, as long as PyTorch counts no write into the matrices.
_tables: dict[tuple[int, str], tuple[weakref.ref[Tensor], object, Tables]] = {}

#: Stands for the call of a model that is running in this context.
_call: ContextVar[object | None] = ContextVar("_call", default=None)


@contextmanager
def one_model_call() -> Iterator[None]:
    """Keeps tables until the call of a model that runs inside is over."""
    token = _call.set(object())
    try:
        yield
    finally:
        _call.reset(token)


def rotary_tables(matrices: Tensor, pairing: str) -> Tables:
    """Returns cosines and sines ``[..., D]`` for matrices ``[..., D/2, 2, 2]``, or for angles ``[..., D]``.

    They are kept for the other blocks inside of :func:`one_model_call`, and no longer: between two calls the matrices
    may be written in a way that PyTorch does not count. It counts no writes into inference tensors at all.

    Args:
        matrices: On the device of what they will rotate.
        pairing: ``"interleaved"`` or ``"half"``, as in :func:`diffkern.ops.rope`; :data:`ANGLES` for angles.
    """
    if torch.compiler.is_compiling():  # a graph computes them once anyway
        return _compute(matrices, pairing)
    call = _call.get()
    if call is None:
        return _compute(matrices, pairing)
    state = call, version(matrices), _is_capturing(matrices.device)  # a replay makes what its capture made
    key = id(matrices), pairing
    known = _tables.get(key)
    if known is not None and known[0]() is matrices and known[1] == state:
        return known[2]
    tables = _compute(matrices, pairing)
    _tables[key] = weakref.ref(matrices, lambda gone: _forget(key, gone)), state, tables
    return tables


def unfit_matrices(matrices: Any, device: torch.device, *lead: int) -> str | None:
    """Says why matrices cannot be turned into tables for inputs on ``device``, or None.

    Args:
        matrices: What a caller calls the rotary embedding.
        device: Device of the inputs.
        lead: The leading dimensions of what is rotated, to which those of the matrices must broadcast.
    """
    if type(matrices) is not Tensor or matrices.layout is not torch.strided:
        return "its rotary matrices are not a plain tensor"
    if matrices.ndim != len(lead) + 3 or matrices.shape[-2:] != (2, 2):
        return "its rotary matrices are not one 2x2 matrix for each pair"
    if any(own not in (1, size) for own, size in zip(matrices.shape, lead, strict=False)):
        return "its rotary matrices are not those of its tokens"
    if matrices.dtype not in KERNEL_DTYPES or matrices.device != device:
        return "its rotary matrices are on another device, or of a dtype that kernels do not read"
    return None


def _compute(matrices: Tensor, pairing: str) -> Tables:
    if pairing == ANGLES:
        angles = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
        return angles.cos(), angles.sin()
    first, second = (matrices[..., 0, 0], -matrices[..., 0, 1]), (matrices[..., 1, 1], matrices[..., 1, 0])
    if pairing == _FORMS[1]:
        cos, sin = (torch.cat(pair, dim=-1) for pair in zip(first, second, strict=True))
    else:
        cos, sin = (torch.stack(pair, dim=-1).flatten(-2) for pair in zip(first, second, strict=True))
    return cos, sin


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _forget(key: tuple[int, str], gone: weakref.ref[Tensor]) -> None:
    known = _tables.get(key)
    if known is not None and known[0] is gone:
        del _tables[key]
