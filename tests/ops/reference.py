"""The norms in float64, written from their formulas alone, and how far a right result may be from them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

#: Dtypes in which results are rounded as IEEE says. Triton's interpreter truncates to bfloat16, GPUs do not.
EXACT_HALF = (torch.float16,) if INTERPRETED else (torch.float16, torch.bfloat16)

#: What float32 arithmetic may add to the one or two roundings, relative to the terms of the sum.
FLOAT32_SLACK = 2e-6


def half_unit(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding to ``dtype``."""
    unit = torch.finfo(dtype).eps / 2
    return 2 * unit if INTERPRETED and dtype == torch.bfloat16 else unit


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    clamp_eps: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns the unrounded result in float64 and the largest admissible error of each element."""
    out_dtype = out_dtype or x.dtype
    wide = x.double()
    if clamp_eps:
        normed = wide / wide.pow(2).sum(-1, keepdim=True).sqrt().clamp(min=eps) * x.shape[-1] ** 0.5
    else:
        normed = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    factor = torch.ones_like(wide) if weight is None else weight.double() + weight_offset
    error = FLOAT32_SLACK * normed.abs()
    if round_dtype is not None:
        error = error + half_unit(round_dtype) * normed.abs() + torch.finfo(round_dtype).smallest_normal
    product, error = normed * factor, error * factor.abs()
    if round_dtype is not None and bias is not None:
        error = error + half_unit(out_dtype) * (product.abs() + error)
    return _shift_and_round(product, error, bias, out_dtype)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the unrounded result in float64 and the largest admissible error of each element."""
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    scale = (centred.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    factor = torch.ones_like(wide) if weight is None else weight.double()
    # The mean is off by a rounding of the largest element; the division by the deviation magnifies that.
    cancellation = wide.abs().amax(-1, keepdim=True) * scale if x.shape[-1] else scale
    error = FLOAT32_SLACK * (centred.abs() * scale + cancellation) * factor.abs()
    return _shift_and_round(centred * scale * factor, error, bias, out_dtype or x.dtype)


def _shift_and_round(
    product: Tensor, error: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    result = product
    if bias is not None:
        result = result + bias.double()
        error = error + FLOAT32_SLACK * (product.abs() + bias.double().abs())
    error = error + half_unit(out_dtype) * (result.abs() + error) + torch.finfo(out_dtype).smallest_normal
    return result, error


def assert_within(y: Tensor, expected: tuple[Tensor, Tensor]) -> None:
    """Asserts that every element of ``y`` is finite and inside its bound."""
    truth, bound = expected
    excess = (y.double() - truth).abs() / bound
    worst = excess.max().item() if excess.numel() else 0.0
    assert not excess.isnan().any(), f"NaN or inf in {int(excess.isnan().sum())} of {y.numel()} elements"
    assert worst <= 1, f"an error of {worst:.3g} times the bound at {excess.argmax().item()} of {tuple(y.shape)}"


def relative_error(y: Tensor, truth: Tensor) -> float:
    """Root mean square of the error over that of the truth."""
    return ((y.double() - truth).norm() / truth.norm()).item()


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Fills every new tensor with NaN, so that an element nobody writes is seen."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
