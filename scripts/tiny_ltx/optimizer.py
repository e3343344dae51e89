"""The optimiser: matrices along their orthogonalised momentum (Muon), everything else by Adam."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

MOMENTUM = 0.95

#: Coefficients of a quintic iteration that drives all singular values towards 1, and how often it runs.
QUINTIC = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


class Optimizer:
    """Muon for the matrices of a model and Adam for its vectors, embeddings and outermost layers.

    Small models learn in two to three times fewer steps this way than by Adam alone.

    Args:
        matrices: Parameters of two or more dimensions; a convolution counts as the matrix [out, in x kernel].
        others: All other parameters.
        matrix_rate: Learning rate of the matrices.
        rate: Learning rate of the others.
    """

    def __init__(
        self, matrices: Iterable[nn.Parameter], others: Iterable[nn.Parameter], matrix_rate: float, rate: float
    ) -> None:
        by_shape: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            by_shape[(matrix.shape[0], matrix[0].numel())].append(matrix)
        self._matrices = list(by_shape.values())
        self._momenta = [_stack(group, lambda p: torch.zeros_like(p.data)) for group in self._matrices]
        self._matrix_rate = matrix_rate
        self._rate = rate
        self._adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)

    @torch.no_grad()
    def step(self, share: float) -> None:
        """Takes one step with ``share`` of the learning rates, and forgets the gradients."""
        for group, momentum in zip(self._matrices, self._momenta, strict=True):
            gradient = _stack(group, lambda p: p.grad)
            momentum.lerp_(gradient, 1 - MOMENTUM)
            update = orthogonalized(gradient.lerp(momentum, MOMENTUM))
            rows, columns = update.shape[1:]
            rate = share * self._matrix_rate * max(1.0, rows / columns) ** 0.5
            torch._foreach_add_(
                [p.data for p in group], [u.view_as(p) for u, p in zip(update, group, strict=True)], alpha=-rate
            )
            for parameter in group:
                parameter.grad = None
        for options in self._adam.param_groups:
            options["lr"] = share * self._rate
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)


def orthogonalized(matrices: Tensor) -> Tensor:
    """Brings the singular values of each matrix of ``[n, rows, columns]`` near 1 and keeps its singular vectors."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = QUINTIC
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


def _stack(group: list[nn.Parameter], of: Callable[[nn.Parameter], Tensor]) -> Tensor:
    """Stacks a tensor of every parameter as one matrix each."""
    return torch.stack([of(parameter).reshape(parameter.shape[0], -1).float() for parameter in group])
