"""One call of an op with everything checked that must hold for any call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from diffkern import ops
from tests.ops import reference
from tests.ops.layouts import storage_of


def check_call(
    op: str,
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    provider: str,
    memory_format: torch.memory_format = torch.contiguous_format,
    **options: Any,
) -> Tensor:
    """Calls ``ops.<op>`` over the last dimension; returns the result.

    Asserts its values against float64, its shape, dtype, device and strides, that no element was left
    unwritten, and that the buffers behind the inputs are what they were, byte for byte.
    """
    inputs = [tensor for tensor in (x, weight, bias) if tensor is not None]
    with leaves_alone(*inputs):
        y = getattr(ops, op)(x, weight, bias, eps, memory_format=memory_format, provider=provider, **options)
    assert y.shape == x.shape
    assert y.device == x.device
    assert y.dtype == (options.get("out_dtype") or x.dtype)
    assert strides_that_matter(y) == strides_that_matter(torch.empty_like(x, memory_format=memory_format))
    reference.assert_within(y, getattr(reference, op)(x, weight, bias, eps, **options))
    return y


@contextlib.contextmanager
def leaves_alone(*inputs: Tensor) -> Iterator[None]:
    """Fills new tensors with NaN within; asserts that the buffers behind the inputs stay the same, byte for byte."""
    before = [storage_of(x) for x in inputs]
    with reference.poisoned_allocations():
        yield
    for x, contents in zip(inputs, before, strict=True):
        assert torch.equal(storage_of(x), contents), "the op wrote into an input"


def strides_that_matter(x: Tensor) -> list[int]:
    """The strides of the dimensions along which one can step."""
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1 and x.numel()]
