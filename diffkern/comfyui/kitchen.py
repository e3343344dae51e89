"""The functions of comfy-kitchen for modulated norms and rotary embeddings, computed by the ops of diffkern."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from diffkern.comfyui.rope import rotary_tables, unfit_matrices
from diffkern.ops import norm_modulate, qk_norm_rope, rope

_INTERLEAVED, _HALF = "interleaved", "half"

#: Function -> the op that computes it, and its tensors.
FUNCTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "rms_adaln": ("norm_modulate", ("x", "scale", "shift")),
    "adaln": ("norm_modulate", ("x", "scale", "shift")),
    "apply_rope": ("rope", ("xq", "xk", "freqs_cis")),
    "apply_rope1": ("rope", ("x", "freqs_cis")),
    "apply_rope_split_half": ("rope", ("xq", "xk", "freqs_cis")),
    "apply_rope_split_half1": ("rope", ("x", "freqs_cis")),
    "rms_rope": ("qk_norm_rope", ("q", "k", "freqs_cis", "q_scale", "k_scale")),
    "rms_rope_split_half": ("qk_norm_rope", ("q", "k", "freqs_cis", "q_scale", "k_scale")),
}


#: The tensors that are normalised or rotated.
INPUTS = ("x", "q", "k", "xq", "xk")


@dataclass(frozen=True)
class Kitchen:
    """The functions, named and called as comfy-kitchen calls them.

    Args:
        exact: Whether torch computes the norms, whose sums no other kernel orders alike.
        provider: The provider that shall serve, or None to choose.
    """

    exact: bool = False
    provider: str | None = None

    def rms_adaln(self, x: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6) -> Tensor:
        """``rms_norm(x) * (1 + scale) + shift``."""
        if self.exact:
            return self._modulate(F.rms_norm(x, x.shape[-1:], eps=eps), scale, shift)
        return norm_modulate(x, scale, shift, eps=eps, provider=self.provider)

    def adaln(self, x: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6) -> Tensor:
        """``layer_norm(x) * (1 + scale) + shift``."""
        if self.exact:
            return self._modulate(F.layer_norm(x, x.shape[-1:], eps=eps), scale, shift)
        return norm_modulate(x, scale, shift, eps=eps, norm="layer", provider=self.provider)

    def apply_rope(self, xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
        """Rotates neighbouring elements of queries and keys."""
        return self._rotate(xq, freqs_cis, _INTERLEAVED), self._rotate(xk, freqs_cis, _INTERLEAVED)

    def apply_rope1(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        """Rotates neighbouring elements."""
        return self._rotate(x, freqs_cis, _INTERLEAVED)

    def apply_rope_split_half(self, xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
        """Rotates the halves of queries and keys."""
        return self._rotate(xq, freqs_cis, _HALF), self._rotate(xk, freqs_cis, _HALF)

    def apply_rope_split_half1(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        """Rotates the halves."""
        return self._rotate(x, freqs_cis, _HALF)

    def rms_rope(
        self,
        q: Tensor,
        k: Tensor,
        freqs_cis: Tensor,
        q_scale: Tensor,
        k_scale: Tensor | None = None,
        epsilon: float = 1e-6,
    ) -> tuple[Tensor, Tensor]:
        """Normalises each head of queries and keys, and rotates neighbouring elements."""
        return self._norm_and_rotate(q, k, freqs_cis, q_scale, k_scale, epsilon, _INTERLEAVED, None)

    def rms_rope_split_half(
        self,
        q: Tensor,
        k: Tensor,
        freqs_cis: Tensor,
        q_scale: Tensor,
        k_scale: Tensor | None = None,
        epsilon: float = 1e-6,
        rot_dim: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Normalises each head of queries and keys, and rotates the halves of the first ``rot_dim`` elements."""
        return self._norm_and_rotate(q, k, freqs_cis, q_scale, k_scale, epsilon, _HALF, rot_dim or None)

    def _modulate(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return norm_modulate(x, scale, shift, norm=None, rounding="each", provider=self.provider)

    def _rotate(self, x: Tensor, matrices: Tensor, pairing: str, rotary_dim: int | None = None) -> Tensor:
        cos, sin = rotary_tables(_trimmed(matrices, x), pairing)
        return rope(x, cos, sin, pairing=pairing, rotary_dim=rotary_dim, provider=self.provider)

    def _norm_and_rotate(
        self, q: Tensor, k: Tensor, matrices: Tensor, q_scale: Tensor, k_scale: Tensor | None, eps: float,
        pairing: str, rotary_dim: int | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        k_scale = q_scale if k_scale is None else k_scale
        if self.exact:
            q, k = (F.rms_norm(x, x.shape[-1:], scale, eps) for x, scale in ((q, q_scale), (k, k_scale)))
            return self._rotate(q, matrices, pairing, rotary_dim), self._rotate(k, matrices, pairing, rotary_dim)
        (cos, sin), (cos_k, sin_k) = (rotary_tables(_trimmed(matrices, x), pairing) for x in (q, k))
        return qk_norm_rope(
            q, k, q_scale, k_scale, cos, sin, eps,
            cos_k=cos_k, sin_k=sin_k, pairing=pairing, rotary_dim=rotary_dim, provider=self.provider,
        )  # fmt: skip


def unfit(name: str, arguments: Mapping[str, Any]) -> tuple[str, str] | None:
    """Says which argument of a call :class:`Kitchen` cannot take, and why; None if it takes the call."""
    for parameter in FUNCTIONS[name][1]:
        value = arguments.get(parameter)
        if value is not None and type(value) is not Tensor:
            return parameter, f"a {type(value).__name__}, not a plain tensor"
    matrices = arguments.get("freqs_cis")
    if matrices is None:
        return None
    for parameter in (parameter for parameter in FUNCTIONS[name][1] if parameter in INPUTS):
        x = arguments[parameter]
        reason = unfit_matrices(_trimmed(matrices, x), x.device, *x.shape[:-1])
        if reason is not None:
            return "freqs_cis", reason
    return None


def _trimmed(matrices: Tensor, x: Tensor) -> Tensor:
    """The matrices of the tokens there are; there may be more."""
    tokens = x.shape[2] if x.ndim > 2 else 1
    too_many = tokens > 1 and matrices.ndim > 2 and matrices.shape[2] > tokens
    return matrices[:, :, :tokens] if too_many else matrices
