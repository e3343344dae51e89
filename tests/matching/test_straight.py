"""Only forwards that are a straight line are probed: what they do elsewhere could not be seen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from diffkern import inject_optimized_kernels
from diffkern.matching import match


class _Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24))
        self.eps = 1e-6
        self.factor = 1.0
        self.enabled = True

    def normed(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)


class StraightNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        return (self.normed(x) * self.weight).to(x.dtype)


class OptionalNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        y = self.normed(x)
        if self.weight is not None:
            y = y * self.weight
        return y.to(x.dtype)


class InheritingNorm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).type_as(input)


class TrainingNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return x * self.weight
        return (self.normed(x) * self.weight).to(x.dtype)


class FactorNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        return (self.normed(x) * self.weight * self.factor).to(x.dtype)


class DetachingNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        return (x * torch.rsqrt(x.detach().float().pow(2).mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


class ManyRowsNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        y = (self.normed(x) * self.weight).to(x.dtype)
        return y * 2 if x.shape[0] > 1000 else y


class ClampingNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        return (self.normed(x.clamp(-1000, 1000)) * self.weight).to(x.dtype)


@pytest.mark.parametrize("module", [StraightNorm(), OptionalNorm(), InheritingNorm(24)], ids=lambda m: type(m).__name__)
def test_straight_forwards_are_probed(module: nn.Module) -> None:
    report = inject_optimized_kernels(module)
    assert [site.how for site in report.patched] == ["probe"]


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (TrainingNorm(), "branches on self.training"),
        (FactorNorm(), "reads self.factor"),
        (DetachingNorm(), "calls detach"),
        (ManyRowsNorm(), "branches on x.shape[0] > 1000"),
        (ClampingNorm(), "calls clamp"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_probe_could_not_see_is_left_alone(module: nn.Module, reason: str) -> None:
    matched = match(module)
    assert matched is not None and matched.semantics is None
    assert matched.reason is not None and reason in matched.reason
