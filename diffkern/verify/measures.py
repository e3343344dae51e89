"""How far a result is from its reference, and what a proof says of it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Measurement:
    """One proof: how far the fused and the stock forward, or their gradients, are from a float64 reference.

    Errors are relative, ``‖y − y_ref‖₂ / ‖y_ref‖₂``, over at least 64 random rows.

    Attributes:
        device: Device the proof ran on.
        dtype: Dtype of the input.
        provider: Who computed the fused result.
        fused: Error of the fused forward.
        stock: Error of the stock forward.
        bit_identical: Whether both results were equal bit for bit.
        passed: Whether the fused forward kept the contract.
        reason: Why it did not, or "".
        gradients: Whether these are the errors of a call with its backward: of the result or the one of its gradients
            that breaks the contract, or else is furthest above stock.
    """

    device: str
    dtype: str
    provider: str
    fused: float
    stock: float
    bit_identical: bool
    passed: bool
    reason: str = ""
    gradients: bool = False

    @classmethod
    def of(
        cls, x: Tensor, provider: str, fused: float, stock: float, identical: bool, reason: str, gradients: bool = False
    ) -> Measurement:
        """A proof on the device and in the dtype of an input; one without a reason has passed."""
        dtype = str(x.dtype).removeprefix("torch.")
        return cls(str(x.device), dtype, provider, fused, stock, identical, not reason, reason, gradients)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain data; an error that is no number, which JSON does not have, is None."""
        data = asdict(self)
        return data | {name: data[name] if math.isfinite(data[name]) else None for name in ("fused", "stock")}


def relative_error(y: Tensor, reference: Tensor) -> float:
    """Returns ``‖y − reference‖₂ / ‖reference‖₂`` over the elements that are finite in both."""
    y = y.double()
    finite = torch.isfinite(y) & torch.isfinite(reference)
    difference = torch.where(finite, y - reference, 0.0)
    length = torch.linalg.vector_norm(torch.where(finite, reference, 0.0))
    return float(torch.linalg.vector_norm(difference) / length.clamp_min(1e-30))


def error_beside(y: Tensor, stock: Tensor, reference: Tensor) -> float:
    """The relative error of a result; infinite if it is finite elsewhere than that of stock."""
    alike = torch.equal(torch.isfinite(y), torch.isfinite(stock))
    return relative_error(y, reference) if alike else float("inf")


def as_one(result: Any) -> Tensor:
    """The elements of several results, in any containers, as one tensor, of rows of a single element."""
    if isinstance(result, Tensor):
        return result
    return torch.cat([part.reshape(-1, 1) for part in pytree.tree_leaves(result) if isinstance(part, Tensor)])
