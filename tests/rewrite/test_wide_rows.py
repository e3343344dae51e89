"""Norms of queries and keys over wide rows, of two streams that are joined behind them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from diffkern import inject_optimized_kernels
from diffkern.bench.measure import relative_error


class TwoStreams(nn.Module):
    """Queries and keys of a text and an image, whose norms have another epsilon each."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.norm_q, self.norm_k = nn.RMSNorm(columns, eps=1e-6), nn.RMSNorm(columns, eps=1e-6)
        self.norm_added_q, self.norm_added_k = nn.RMSNorm(columns, eps=0.5), nn.RMSNorm(columns, eps=0.5)

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        query = torch.cat([self.norm_added_q(text), self.norm_q(image)], dim=1)
        key = torch.cat([self.norm_added_k(text), self.norm_k(image)], dim=1)
        return query, key


@pytest.mark.parametrize("columns", [1024, 96])
def test_each_stream_is_normalised_over_its_own_rows(columns: int) -> None:
    torch.manual_seed(0)
    model = TwoStreams(columns).requires_grad_(False)
    image, text = torch.randn(2, 9, columns), torch.randn(2, 5, columns)
    exact = copy.deepcopy(model).double()(image.double(), text.double())
    report = inject_optimized_kernels(model)
    assert all(relative_error(y, x) < 1e-6 for y, x in zip(model(image, text), exact, strict=True))
    assert report.calls()[""]["fused"] == 1 and not report.calls()[""]["stock"]
