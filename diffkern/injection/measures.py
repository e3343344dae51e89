"""How far a result is from its reference."""

from __future__ import annotations

import torch
from torch import Tensor


def relative_error(y: Tensor, reference: Tensor) -> float:
    """Returns ``‖y − reference‖₂ / ‖reference‖₂`` over the elements that are finite in both."""
    y = y.double()
    finite = torch.isfinite(y) & torch.isfinite(reference)
    difference = torch.where(finite, y - reference, 0.0)
    length = torch.linalg.vector_norm(torch.where(finite, reference, 0.0))
    return float(torch.linalg.vector_norm(difference) / length.clamp_min(1e-30))
