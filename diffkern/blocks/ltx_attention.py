"""The attention of LTX-Video's block, normalised over all heads, and which of its children may be computed around."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers import transformer_ltx as stock_module
from torch import Tensor, nn

from diffkern.blocks.fp8 import Fp8Weights, RowwiseFp8, quantize_rowwise
from diffkern.blocks.ltx_rope import axial_tables
from diffkern.blocks.native_attention import is_native, native
from diffkern.blocks.pieces import plain, plain_linear, run_layer, untouched
from diffkern.cache.text import drop_layer_of_text, layer_of_text
from diffkern.ops import qk_norm_rope

Tables = tuple[Tensor, Tensor]


def attend(
    attention: Any, x: Tensor | RowwiseFp8, context: Tensor | RowwiseFp8, tables: Tables | None, mask: Tensor | None,
    stock_norms: bool, provider: str | None, weights: Fp8Weights | None = None, text_of: nn.Module | None = None,
) -> Tensor:  # fmt: skip
    """``LTXVideoAttnProcessor``: attention of ``x`` to ``context``, ``[B, S, D]``.

    The linear layers are called, so that adapters and quantisation stay in force.

    Args:
        attention: The attention module.
        x: What the queries are made of.
        context: What keys and values are made of: ``x`` in self-attention.
        tables: The tables of the rotation, or None.
        mask: Added to the scores: ``[B, 1, L]`` for all heads and queries, or what the module makes of another.
        stock_norms: Whether the norms of queries and keys are called.
        provider: Who computes the norms and the rotation.
        weights: Weights in fp8, where self-attention has its products so.
        text_of: The block beside which keys and values are kept, where ``context`` is a text; None keeps none.
    """
    heads, children = attention.heads, attention._modules
    if weights is not None:
        rows = quantize_rowwise(x, provider)
        query, key, value = weights.project(children, rows, rows)
    else:
        assert isinstance(x, Tensor) and isinstance(context, Tensor)
        of_context = _run_layer if text_of is None else partial(_of_text, text_of)
        query = run_layer(children["to_q"], x)
        key, value = (of_context(name, children[name], context) for name in ("to_k", "to_v"))
    norm_q, norm_k, rotation = children["norm_q"], children["norm_k"], _rotation(tables, heads)
    if stock_norms:
        query, key = norm_q(query), norm_k(key)
        if rotation:
            query, key = qk_norm_rope(query, key, norm=None, across_heads=heads, provider=provider, **rotation)
    else:
        query, key = qk_norm_rope(
            query, key, norm_q._parameters["weight"], norm_k._parameters["weight"], eps=norm_q.eps,
            across_heads=heads, provider=provider, **rotation,
        )  # fmt: skip
    # Looked up in the module of the stock processor, where libraries for parallel attention put theirs.
    y = _dispatched(attention, query, key, value, mask, stock_module.dispatch_attention_fn)
    z: Any = y if weights is None else quantize_rowwise(y, provider)
    for name, layer in children["to_out"]._modules.items():
        z = run_layer(layer, z) if weights is None else weights.run(f"to_out.{name}", layer, z)
    return z  # type: ignore[no-any-return]


def _run_layer(name: str, layer: nn.Module, x: Tensor) -> Tensor:
    return run_layer(layer, x)


def _of_text(block: nn.Module, name: str, layer: nn.Module, text: Tensor) -> Tensor:
    """What a layer makes of a text, kept beside the block."""
    name, kept = f"attn2.{name}", None
    if plain_linear(layer, text.device, text.dtype):
        kept = layer_of_text(block, name, layer, text, lambda: run_layer(layer, text))
    else:
        drop_layer_of_text(block, name)
    return run_layer(layer, text) if kept is None else kept


def _rotation(tables: Tables | None, heads: int) -> Mapping[str, Any]:
    """The tables as keywords of :func:`diffkern.ops.qk_norm_rope`: by axis where that is known, else the full ones."""
    if tables is None:
        return {}
    axes = axial_tables(tables)
    if axes is None:
        cos, sin = (table.unflatten(-1, (heads, -1)) for table in tables)
        return {"cos": cos, "sin": sin}
    return {"cos": axes.cos, "sin": axes.sin, "grid": axes.grid, "order": axes.order, "front_pad": axes.front_pad}


def _dispatched(
    attention: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dispatch: Any
) -> Tensor:
    heads, processor = attention.heads, attention.processor
    if mask is not None:
        batch, length = key.shape[:2]
        if mask.shape == (batch, 1, length):
            mask = mask.unsqueeze(1)  # stock writes it out for every head
        else:
            mask = attention.prepare_attention_mask(mask, length, batch)
            mask = mask.view(batch, heads, -1, mask.shape[-1])
    if is_native(processor, dispatch):
        y = native(query, key, value, heads, mask)
    else:
        y = dispatch(
            _by_head(query, heads),
            _by_head(key, heads),
            _by_head(value, heads),
            attn_mask=mask,
            dropout_p=0.0,
            is_causal=False,
            backend=processor._attention_backend,
            parallel_config=processor._parallel_config,
        ).flatten(2, 3)
    return y if y.dtype == query.dtype else y.to(query.dtype)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """Views ``[B, S, heads * D]`` as ``[B, S, heads, D]``; unflatten, a Python function, takes four times as long."""
    batch, tokens, width = x.shape
    return x.view(batch, tokens, heads, width // heads)


# Parameters and children are read where nn.Module keeps them: its own __getattr__ takes five times as long.


def is_weightless(norm: Any) -> bool:
    """Whether a norm of the block is the RMS norm without weight that the shipped models have."""
    return untouched(norm, RMSNorm) and norm.weight is None and norm.bias is None and type(norm.eps) is float


def norms_are_plain(children: Mapping[str, Any], device: torch.device) -> bool:
    """Whether the norms of queries and keys can be computed from their weights."""
    norm_q, norm_k = children["norm_q"], children["norm_k"]
    return (
        untouched(norm_q, nn.RMSNorm)
        and untouched(norm_k, nn.RMSNorm)
        and norm_q.eps == norm_k.eps
        and plain(norm_q._parameters.get("weight"), device)
        and plain(norm_k._parameters.get("weight"), device)
        and not any("weight" in norm.__dict__ for norm in (norm_q, norm_k))  # which hides the parameter
    )


def is_gelu(feed_forward: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the feed-forward is diffusers' own, with a tanh GELU over a plain linear layer."""
    if not untouched(feed_forward, FeedForward):
        return False
    first = feed_forward._modules["net"]._modules["0"]
    return (
        untouched(first, GELU) and first.approximate == "tanh" and plain_linear(first._modules["proj"], device, dtype)
    )
