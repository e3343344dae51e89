"""Queries and keys of ComfyUI's attention: normalised by its norms and rotated by its matrices, in one pass."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from diffkern.cache.rotary import Tables
from diffkern.comfyui.norms import norm_kind, readable
from diffkern.ops import qk_norm_rope


def norms_fuse(q_norm: Any, k_norm: Any) -> bool:
    """Whether two norms can be computed together: of one kind, with one eps, without hooks."""
    kind = norm_kind(q_norm)
    return kind is not None and norm_kind(k_norm) == kind and q_norm.eps == k_norm.eps


def norm_and_rotate(
    q: Tensor,
    k: Tensor,
    q_norm: Any,
    k_norm: Any,
    q_tables: Tables | None,
    k_tables: Tables | None,
    *,
    fuse_norms: bool,
    across_heads: int | None,
    pairing: str,
    provider: str | None,
) -> tuple[Tensor, Tensor]:
    """Normalises and rotates ``q`` and ``k``.

    Args:
        q: Queries: heads apart ``[..., D]``, or a flat row ``[B, S, H·D]`` if the norm spans all heads.
        k: Keys, likewise.
        q_norm: Norm of the queries, called as a module if it is not fused.
        k_norm: Norm of the keys.
        q_tables: Rotary tables of the queries, or None.
        k_tables: Those of the keys; both or neither are None.
        fuse_norms: What :func:`norms_fuse` said, unless the norms shall go through their modules anyway.
        across_heads: Number of heads in a flat row, or None.
        pairing: As in :func:`diffkern.ops.rope`.
        provider: As in :func:`diffkern.ops.qk_norm_rope`.
    """
    q_parameters, k_parameters = (readable(q_norm, q), readable(k_norm, k)) if fuse_norms else (None, None)
    cos, sin = (None, None) if q_tables is None else q_tables
    cos_k, sin_k = (None, None) if k_tables is None or k_tables is q_tables else k_tables
    rotation: dict[str, Any] = {
        "cos": cos, "sin": sin, "cos_k": cos_k, "sin_k": sin_k,
        "pairing": pairing, "across_heads": across_heads, "provider": provider,
    }  # fmt: skip
    if q_parameters is None or k_parameters is None:
        q, k = q_norm(q), k_norm(k)
        return (q, k) if cos is None else qk_norm_rope(q, k, norm=None, **rotation)
    (q_weight, q_bias), (k_weight, k_bias) = q_parameters, k_parameters
    return qk_norm_rope(
        q, k, q_weight, k_weight, eps=q_norm.eps, norm=norm_kind(q_norm), q_bias=q_bias, k_bias=k_bias, **rotation
    )
