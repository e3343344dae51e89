"""Rows are copied 16 bytes at a time where they lie so, and right in any case."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diffkern.ops.copying import copy_rows, in_words

DTYPES = [torch.bfloat16, torch.float32, torch.float64]


def _block(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_longer_rows_are_words_of_16_bytes(dtype: torch.dtype) -> None:
    part, words = _block(2, 5, 48, dtype=dtype)[..., 16:32], torch.zeros(2, 5, 48, dtype=dtype)[..., :16]
    x, into = in_words(part, words)
    assert x.dtype is into.dtype is torch.complex128
    assert x.shape == (2, 5, 16 * part.element_size() // 16)
    into.copy_(x)
    assert torch.equal(words, part)


@pytest.mark.parametrize(
    "x",
    [
        _block(2, 5, 12, dtype=torch.bfloat16),  # 24 bytes
        _block(2, 5, 32, dtype=torch.bfloat16)[..., 4:12],  # from the 8th byte
        _block(2, 5, 20, dtype=torch.bfloat16)[..., :8],  # 40 bytes from row to row
        _block(2, 8, 16, dtype=torch.bfloat16).mT,  # columns
        torch._neg_view(_block(2, 5, 16, dtype=torch.bfloat16)),  # which has the bytes of other numbers
        _block(2, 5, 16, dtype=torch.complex64).conj(),
    ],
)
def test_what_is_no_multiple_of_16_bytes_stays_as_it_is(x: Tensor) -> None:
    whole = torch.zeros(x.shape, dtype=x.dtype)
    assert all(one is other for one, other in zip(in_words(x, whole), (x, whole), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_copy_has_the_values_of_torch_in_any_layout_and_dtype(dtype: torch.dtype, device: str) -> None:
    x = _block(2, 6, 32, dtype=torch.bfloat16).to(device)
    for source in (x, x[..., 1:17], x[:1].expand(2, 6, 32), x[:, ::2]):
        into, expected = (torch.zeros(2, 8, 40, dtype=dtype, device=device) for _ in range(2))
        place = (slice(None), slice(source.shape[1]), slice(4, 4 + source.shape[2]))
        copy_rows(into[place], source)
        expected[place] = source.to(dtype)
        assert torch.equal(into, expected)


def test_a_copy_carries_gradients() -> None:
    x = torch.ones(2, 4, requires_grad=True)
    into = torch.zeros(2, 4)
    copy_rows(into, x)
    into.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.ones(2, 4))
