"""Copies of rows that are no whole tensor: parts of a longer row, or rows of a larger block.

A GPU copies such tensors number by number. Where rows and what lies between them are a multiple of 16 bytes, torch does
the same with 16 bytes at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diffkern.providers.dispatch_modes import transforms_active

#: A dtype of 16 bytes; copies do not look at what they mean.
_WORD, _BYTES = torch.complex128, 16


def copy_rows(into: Tensor, x: Tensor) -> None:
    """``into.copy_(x)``."""
    plain = type(into) is type(x) is Tensor and into.dtype is x.dtype and into.shape == x.shape and x.ndim
    traced = torch.compiler.is_compiling() or (torch.is_grad_enabled() and x.requires_grad)
    if plain and x.is_cuda and into.is_cuda and not traced:
        into, x = in_words(into, x)
    into.copy_(x)


def in_words(*tensors: Tensor) -> list[Tensor]:
    """Views of tensors, 16 bytes of their last dimension as one number; the tensors themselves if one does not fit."""
    if transforms_active() or not all([_fits(x) for x in tensors]):
        return list(tensors)  # bytes have no tangents
    return [x.view(_WORD) for x in tensors]


def _fits(x: Tensor) -> bool:
    size = x.element_size()
    if x.is_neg() or x.is_conj():
        return False  # the bytes are not the numbers
    if x.stride(-1) != 1 or x.shape[-1] * size % _BYTES or x.data_ptr() % _BYTES or x.storage_offset() * size % _BYTES:
        return False
    return all([stride * size % _BYTES == 0 for stride in x.stride()[:-1]])
