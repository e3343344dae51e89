"""The steps between the matrix products of a block with modulated RMS norms, in the three numerics there are."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from diffkern.blocks.fp8 import RowwiseFp8
from diffkern.ops import (
    gate_residual,
    gate_residual_norm_modulate,
    gate_residual_norm_modulate_fp8,
    norm_modulate,
    norm_modulate_fp8,
)

_Operand = Tensor | None


class FastSteps:
    """Each step in float32 and rounded once, as the contracts of the ops say; a sum and the next norm in one pass.

    Attributes:
        rounding: As the ops take it.
        fuses_norms: Whether a norm may be computed elsewhere than by the steps of the stock forward.
        in_fp8: Whether matrix products may be computed in fp8.
    """

    rounding: ClassVar[Any] = "once"
    fuses_norms: ClassVar[bool] = True
    in_fp8: ClassVar[bool] = False

    def modulate(self, x: Tensor, scale: _Operand, shift: _Operand, provider: str | None) -> Tensor:
        """``x * (1 + scale) + shift``."""
        return norm_modulate(x, scale, shift, norm=None, rounding=self.rounding, provider=provider)

    def norm_modulate(self, norm: Any, x: Tensor, scale: _Operand, shift: _Operand, provider: str | None) -> Tensor:
        """``norm(x) * (1 + scale) + shift``, for an RMS norm without weight."""
        return norm_modulate(x, scale, shift, eps=norm.eps, provider=provider)

    def gate_residual(self, residual: Tensor, x: Tensor, gate: _Operand, provider: str | None) -> Tensor:
        """``residual + gate * x``."""
        return gate_residual(residual, x, gate, rounding=self.rounding, provider=provider)

    def gate_residual_norm_modulate(
        self, norm: Any, residual: Tensor, x: Tensor, gate: _Operand, scale: _Operand, shift: _Operand,
        provider: str | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The new residual, and the modulated norm of that."""
        return gate_residual_norm_modulate(residual, x, gate, scale, shift, eps=norm.eps, provider=provider)


class ExactSteps(FastSteps):
    """Each step rounded where the stock chain of torch ops rounds.

    The sum of a norm is torch's own, whose order no other kernel has; what follows it is elementwise and fused.
    """

    rounding: ClassVar[Any] = "each"
    fuses_norms: ClassVar[bool] = False

    @override
    def norm_modulate(self, norm: Any, x: Tensor, scale: _Operand, shift: _Operand, provider: str | None) -> Tensor:
        factor = torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + norm.eps)
        y = norm_modulate(x, factor, norm=None, scale_offset=0.0, out_dtype=x.dtype, provider=provider)
        return self.modulate(y, scale, shift, provider)

    @override
    def gate_residual_norm_modulate(
        self, norm: Any, residual: Tensor, x: Tensor, gate: _Operand, scale: _Operand, shift: _Operand,
        provider: str | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x = self.gate_residual(residual, x, gate, provider)
        return x, self.norm_modulate(norm, x, scale, shift, provider)


class Fp8Steps(FastSteps):
    """The steps before a product in fp8 hand over rows of fp8; all others are as fast."""

    in_fp8: ClassVar[bool] = True

    def norm_modulate_rows(
        self, norm: Any, x: Tensor, scale: _Operand, shift: _Operand, provider: str | None
    ) -> RowwiseFp8:
        """As :meth:`norm_modulate`."""
        return RowwiseFp8(*norm_modulate_fp8(x, scale, shift, eps=norm.eps, provider=provider))

    def gate_residual_norm_modulate_rows(
        self, norm: Any, residual: Tensor, x: Tensor, gate: _Operand, scale: _Operand, shift: _Operand,
        provider: str | None,
    ) -> tuple[Tensor, RowwiseFp8]:  # fmt: skip
        """As :meth:`gate_residual_norm_modulate`."""
        new, *rows = gate_residual_norm_modulate_fp8(residual, x, gate, scale, shift, eps=norm.eps, provider=provider)
        return new, RowwiseFp8(*rows)


FAST, EXACT, FP8 = FastSteps(), ExactSteps(), Fp8Steps()
