"""The attention of LTX-Video's block, normalised over all heads, and which of its children may be computed around."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from diffusers.models.normalization import RMSNorm
from torch import Tensor, nn

from diffkern.blocks.native_attention import is_native, native
from diffkern.blocks.pieces import plain, plain_linear, run_layer, untouched
from diffkern.cache.text import drop_layer_of_text, layer_of_text
from diffkern.ops import qk_norm_rope

#: Calls a child of an attention module: its name, the layer, its input.
Run = Callable[[str, nn.Module, Any], Tensor]

#: Computes queries, keys and values from the children of an attention module, what the queries are made of, and what
#: keys and values are made of.
Project = Callable[[Mapping[str, Any], Any, Any], tuple[Tensor, Tensor, Tensor]]

#: The tables of the rotation, as keywords of :func:`diffkern.ops.qk_norm_rope`; empty for none.
Rotation = Mapping[str, Any]


def run_named(name: str, layer: nn.Module, x: Tensor) -> Tensor:
    """Calls a layer as it is."""
    return run_layer(layer, x)


def project_each(children: Mapping[str, Any], x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Calls each projection as it is."""
    query = run_layer(children["to_q"], x)
    return query, run_layer(children["to_k"], context), run_layer(children["to_v"], context)


def attend(
    attention: Any, x: Any, context: Any, rotation: Rotation, mask: Tensor | None, stock_norms: bool,
    dispatch: Any, provider: str | None, project: Project = project_each,
) -> Tensor:  # fmt: skip
    """Attention of ``x`` to ``context`` as far as the projection of its result, ``[B, S, heads * D]``.

    The linear layers are called, so that adapters and quantisation stay in force.

    Args:
        attention: The attention module.
        x: What the queries are made of: a tensor, or what ``project`` takes.
        context: What keys and values are made of, likewise.
        rotation: The tables of the rotation.
        mask: Added to the scores: ``[B, 1, L]`` for all heads and queries, or what the module makes of another.
        stock_norms: Whether the norms of queries and keys are called.
        dispatch: Diffusers' ``dispatch_attention_fn``, as the module of the stock processor has it.
        provider: Who computes the norms and the rotation.
        project: Computes queries, keys and values.
    """
    heads, children = attention.heads, attention._modules
    query, key, value = project(children, x, context)
    norm_q, norm_k = children["norm_q"], children["norm_k"]
    if stock_norms:
        query, key = norm_q(query), norm_k(key)
        if rotation:
            query, key = qk_norm_rope(query, key, norm=None, across_heads=heads, provider=provider, **rotation)
    else:
        query, key = qk_norm_rope(
            query, key, norm_q._parameters["weight"], norm_k._parameters["weight"], eps=norm_q.eps,
            across_heads=heads, provider=provider, **rotation,
        )  # fmt: skip
    return _dispatched(attention, query, key, value, mask, dispatch)


def project_text(block: nn.Module, name: str) -> Project:
    """As :func:`project_each`, with what is made of a text kept beside ``block``, whose attention ``name`` is."""

    def project(children: Mapping[str, Any], x: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        def of_text(layer_name: str) -> Tensor:
            layer, kept = children[layer_name], None
            if plain_linear(layer, text.device, text.dtype):
                kept = layer_of_text(block, f"{name}.{layer_name}", layer, text, lambda: run_layer(layer, text))
            else:
                drop_layer_of_text(block, f"{name}.{layer_name}")
            return run_layer(layer, text) if kept is None else kept

        return run_layer(children["to_q"], x), of_text("to_k"), of_text("to_v")

    return project


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


def project_out(attention: Any, y: Any, run: Run = run_named) -> Tensor:
    """The projection of the result of attention, and its dropout."""
    for name, layer in attention._modules["to_out"]._modules.items():
        y = run(f"to_out.{name}", layer, y)
    return y  # type: ignore[no-any-return]


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
