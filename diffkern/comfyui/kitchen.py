"""The functions of comfy-kitchen for modulated norms and rotary embeddings, computed by the ops of diffkern."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partialmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffkern.cache.rotary import rotary_tables, unfit_matrices
from diffkern.ops import norm_modulate, qk_norm_rope, rope
from diffkern.ops.modulate import Norm
from diffkern.providers import KERNEL_DTYPES

#: Function -> the op that computes it, and its tensors.
FUNCTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "rms_adaln": ("norm_modulate", ("x", "scale", "shift")),
    "adaln": ("norm_modulate", ("x", "scale", "shift")),
    "apply_rope": ("rope", ("xq", "xk", "freqs_cis")),
    "apply_rope1": ("rope", ("x", "freqs_cis")),
    "apply_rope_split_half": ("rope", ("xq", "xk", "freqs_cis")),
    "apply_rope_split_half1": ("rope", ("x", "freqs_cis")),
    "rms_rope": ("qk_norm_rope", ("q", "k", "freqs_cis", "q_scale", "k_scale")),
    "rms_rope1": ("qk_norm_rope", ("x", "freqs_cis", "scale")),
    "rms_rope_split_half": ("qk_norm_rope", ("q", "k", "freqs_cis", "q_scale", "k_scale")),
    "rms_rope_split_half1": ("qk_norm_rope", ("x", "freqs_cis", "scale")),
}
#: Those that write into what they rotate.
IN_PLACE = {f"{name}_": function for name, function in FUNCTIONS.items() if "freqs_cis" in function[1]}
FUNCTIONS |= IN_PLACE

#: The tensors that are normalised or rotated.
INPUTS = ("x", "q", "k", "xq", "xk")


@dataclass(frozen=True)
class KitchenBackend:
    """The functions, named and called as comfy-kitchen calls them.

    Args:
        exact: Whether torch computes the norms, whose sums no other kernel orders alike.
        provider: The provider that shall serve, or None to choose.
    """

    exact: bool = False
    provider: str | None = None

    def _adaln(self, x: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6, *, norm: Norm) -> Tensor:
        """``norm(x) * (1 + scale) + shift``."""
        if not self.exact:
            return norm_modulate(x, scale, shift, eps=eps, norm=norm, provider=self.provider)
        normed = (F.rms_norm if norm == "rms" else F.layer_norm)(x, x.shape[-1:], eps=eps)
        return norm_modulate(normed, scale, shift, norm=None, rounding="each", provider=self.provider)

    def _apply_rope1(self, x: Tensor, freqs_cis: Tensor, *, pairing: str, rotary_dim: int | None = None) -> Tensor:
        """Rotates pairs of elements."""
        cos, sin = rotary_tables(_trimmed(freqs_cis, x), pairing)
        return rope(x, cos, sin, pairing=pairing, rotary_dim=rotary_dim, provider=self.provider)

    def _apply_rope(self, xq: Tensor, xk: Tensor, freqs_cis: Tensor, *, pairing: str) -> tuple[Tensor, Tensor]:
        """Rotates queries and keys."""
        return self._apply_rope1(xq, freqs_cis, pairing=pairing), self._apply_rope1(xk, freqs_cis, pairing=pairing)

    def _rms_rope(
        self, q: Tensor, k: Tensor, freqs_cis: Tensor, q_scale: Tensor, k_scale: Tensor | None = None,
        epsilon: float = 1e-6, rot_dim: int = 0, *, pairing: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Normalises each head of queries and keys, and rotates pairs of the first ``rot_dim`` elements; 0 for all."""
        k_scale, rotary_dim = q_scale if k_scale is None else k_scale, rot_dim or None
        if self.exact:
            normed = (F.rms_norm(x, x.shape[-1:], scale, epsilon) for x, scale in ((q, q_scale), (k, k_scale)))
            q, k = (self._apply_rope1(x, freqs_cis, pairing=pairing, rotary_dim=rotary_dim) for x in normed)
            return q, k
        (cos, sin), (cos_k, sin_k) = (rotary_tables(_trimmed(freqs_cis, x), pairing) for x in (q, k))
        return qk_norm_rope(
            q, k, q_scale, k_scale, cos, sin, epsilon,
            cos_k=cos_k, sin_k=sin_k, pairing=pairing, rotary_dim=rotary_dim, provider=self.provider,
        )  # fmt: skip

    def _rms_rope1(self, x: Tensor, freqs_cis: Tensor, scale: Tensor, epsilon: float = 1e-6, *, pairing: str) -> Tensor:
        """Normalises each head of queries or keys, and rotates them."""
        if self.exact:
            return self._apply_rope1(F.rms_norm(x, x.shape[-1:], scale, epsilon), freqs_cis, pairing=pairing)
        cos, sin = rotary_tables(_trimmed(freqs_cis, x), pairing)
        # The op takes queries and keys: here the keys are none.
        y, _ = qk_norm_rope(
            x, x[:0], scale, scale, cos, sin, epsilon,
            cos_k=cos[:0], sin_k=sin[:0], pairing=pairing, provider=self.provider,
        )  # fmt: skip
        return y

    rms_adaln = partialmethod(_adaln, norm="rms")
    adaln = partialmethod(_adaln, norm="layer")
    # Neighbouring elements are pairs, or those of the two halves.
    apply_rope = partialmethod(_apply_rope, pairing="interleaved")
    apply_rope1 = partialmethod(_apply_rope1, pairing="interleaved")
    rms_rope = partialmethod(_rms_rope, pairing="interleaved")
    rms_rope1 = partialmethod(_rms_rope1, pairing="interleaved")
    apply_rope_split_half = partialmethod(_apply_rope, pairing="half")
    apply_rope_split_half1 = partialmethod(_apply_rope1, pairing="half")
    rms_rope_split_half = partialmethod(_rms_rope, pairing="half")
    rms_rope_split_half1 = partialmethod(_rms_rope1, pairing="half")


def _write(self: KitchenBackend, name: str, **call: Any) -> Any:
    """Copies the results of a function into what it rotates, as comfy-kitchen's own variants do."""
    inputs = [call[name] for name in INPUTS if name in call]
    results = getattr(self, name)(**call)
    for x, y in zip(inputs, results if len(inputs) > 1 else (results,), strict=True):
        x.copy_(y)
    return tuple(inputs) if len(inputs) > 1 else inputs[0]


for _variant in IN_PLACE:
    setattr(KitchenBackend, _variant, partialmethod(_write, _variant.removesuffix("_")))


def unfit(
    name: str, arguments: Mapping[str, Any], device: torch.device, dtype: torch.dtype, exact: bool = False
) -> tuple[str, str] | None:
    """Says which argument of a call :class:`KitchenBackend` cannot take, and why; None if it takes the call.

    Device and dtype are those that were proven; ``exact`` says whether the results must have the bits of the package.
    """
    for parameter in FUNCTIONS[name][1]:
        value = arguments.get(parameter)
        if value is None:
            continue
        # Norm weights that need no cast come as parameters.
        if type(value) is not Tensor and type(value) is not nn.Parameter:
            return parameter, f"a {type(value).__name__}, not a plain tensor"
        if value.device.type != device.type:
            return parameter, f"on {value.device}, not on {device}"
        if value.dtype not in _dtypes(parameter, dtype, exact):
            return parameter, f"of {value.dtype}, which is not what was proven"
    inputs = [arguments[parameter] for parameter in FUNCTIONS[name][1] if parameter in INPUTS]
    matrices = arguments.get("freqs_cis")
    if matrices is not None:
        for x in inputs:
            reason = unfit_matrices(_trimmed(matrices, x), x.device, *x.shape[:-1])
            if reason is not None:
                return "freqs_cis", reason
    return _overlap(name, arguments, inputs) if name in IN_PLACE else None


def _overlap(name: str, arguments: Mapping[str, Any], inputs: list[Tensor]) -> tuple[str, str] | None:
    """What the package refuses to write into goes to the package, whose error it is."""
    try:
        from comfy_kitchen._rope_utils import check_rope_inplace
    except ImportError:
        return "inputs", "written by a comfy-kitchen whose own check of them is not known"
    readonly = (arguments.get(parameter) for parameter in FUNCTIONS[name][1] if parameter not in INPUTS)
    try:
        check_rope_inplace(*inputs, readonly=tuple(tensor for tensor in readonly if tensor is not None))
    except (RuntimeError, ValueError) as error:
        return "inputs", str(error)
    return None


def _dtypes(parameter: str, dtype: torch.dtype, exact: bool) -> Collection[torch.dtype]:
    """The dtypes that are served, of which the proof has spoken."""
    if parameter == "freqs_cis":
        # The package rotates in the dtype of the matrices; exactly, only float32 is the same.
        return {torch.float32} if exact else {torch.float32, dtype}
    return {dtype} if exact or parameter in INPUTS else KERNEL_DTYPES


def _trimmed(matrices: Tensor, x: Tensor) -> Tensor:
    """The matrices of the tokens there are; there may be more."""
    tokens = x.shape[2] if x.ndim > 2 else 1
    too_many = tokens > 1 and matrices.ndim > 2 and matrices.shape[2] > tokens
    return matrices[:, :, :tokens] if too_many else matrices
