"""Attention by diffusers' native backend, without the way there: on a slow host that takes longer than the launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import Tensor

from diffkern.blocks.recipe import fingerprint
from diffkern.providers.dispatch_modes import modes_active, transforms_active

#: Of ``dispatch_attention_fn`` and ``_native_attention``, in diffusers 0.42. Others are called.
_FINGERPRINTS = frozenset({"1990fdc5e082de71"})


def is_native(processor: Any, dispatch: Callable[..., Any]) -> bool:
    """Whether ``dispatch`` would do nothing but hand a call to torch, and no mode or hook observes it.

    Args:
        processor: The processor of an attention module.
        dispatch: What its module knows as ``dispatch_attention_fn``.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or modes_active() or transforms_active():
        return False
    if torch._C._is_tracing():
        return False  # strides would be numbers in the trace
    own = _own()
    if own is None or dispatch is not own[0] or processor._parallel_config is not None:
        return False
    registry, backend = _AttentionBackendRegistry, processor._attention_backend
    function = registry.get_active_backend()[1] if backend is None else registry._backends.get(backend)
    return function is own[1] and not registry._checks_enabled


def native(query: Tensor, key: Tensor, value: Tensor, heads: int, mask: Tensor | None) -> Tensor:
    """Attention of plain tensors whose heads are not split yet.

    Args:
        query: ``[B, S, heads * D]``, with any strides.
        key: ``[B, L, heads * D]``.
        value: Like ``key``.
        heads: The number of heads.
        mask: Added to the scores, as torch takes it, or None.

    Returns:
        ``[B, S, heads * D]``.
    """
    # By its name in torch, and with the keywords that diffusers gives: others put their own attention there.
    y = F.scaled_dot_product_attention(
        query=_by_head(query, heads), key=_by_head(key, heads), value=_by_head(value, heads), attn_mask=mask,
        dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False,
    )  # fmt: skip
    return y.transpose(1, 2).flatten(2)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """Views ``[B, S, heads * D]`` as ``[B, heads, S, D]``, in one step."""
    (batch, tokens, width), (of_batch, of_token, step) = x.shape, x.stride()
    size = width // heads
    return x.as_strided((batch, heads, tokens, size), (of_batch, size * step, of_token, step))


@cache
def _own() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Diffusers' dispatcher and native backend, if they are what this module stands for."""
    own = attention_dispatch.dispatch_attention_fn, attention_dispatch._native_attention
    if any(hasattr(function, "__wrapped__") for function in own) or fingerprint(own) not in _FINGERPRINTS:
        return None
    return own
