"""How far an attention is from the exact result, against float64, on some of the queries of a real call; what it takes.

The whole of a long attention in float64 does not fit any memory, but a query needs no other query: a few dozen
of them, spread over the sequence, show how accurate a kernel is. Gradients do need each other, so they are
compared on the first positions of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from diffkern.attention.call import AttentionCall, Compute
from diffkern.providers.foreign import MisconductError, copy_of, same_bits
from diffkern.verify.gain import costs
from diffkern.verify.gradients import unobserved, with_gradients
from diffkern.verify.samples import Draws

#: Queries that are compared, at most, and scores that may be in memory for them.
QUERIES, SCORES = 64, 1 << 24
#: Positions whose gradients are compared.
POSITIONS = 128


def spread(call: AttentionCall) -> Tensor:
    """Indices of the queries to compare: the first, the last, and some between."""
    batch, length, heads, _ = call.query.shape
    count = min(length, QUERIES, max(2, SCORES // max(1, batch * heads * call.key.shape[1])))
    rows: Tensor = torch.linspace(0, length - 1, count, device=call.query.device).round().long().unique()
    return rows


def reference(call: AttentionCall, rows: Tensor | None = None) -> Tensor:
    """Computes the attention of some or all queries without dropout in float64, ``[B, rows, H, E]``; differentiable."""
    batch, length, heads, head_dim = call.query.shape
    keys, groups = call.key.shape[1], heads // call.key.shape[2]
    rows = torch.arange(length, device=call.query.device) if rows is None else rows
    scale = head_dim**-0.5 if call.scale is None else call.scale
    visible = torch.arange(keys, device=rows.device) <= rows[:, None] if call.causal else None
    mask = None if call.mask is None else call.mask.expand(batch, heads, length, keys)[:, :, rows]
    results = []
    for head in range(heads):
        query = call.query[:, rows, head].double()
        key, value = (x[:, :, head // groups].double() for x in (call.key, call.value))
        scores = scale * (query @ key.mT)
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf)
        if mask is not None:
            part = mask[:, head]
            scores = scores.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else scores + part
        results.append(scores.softmax(-1) @ value)
    return torch.stack(results, dim=2)


def errors(call: AttentionCall, computes: tuple[Compute, ...]) -> list[float]:
    """Relative errors of several implementations of one call without dropout."""
    call = without_dropout(call)
    rows = spread(call)
    with torch.no_grad():
        exact = reference(call, rows)
        return [distance(compute(call)[:, rows], exact) for compute in computes]


def without_dropout(call: AttentionCall) -> AttentionCall:
    """The call without dropout and outside of any graph of autograd."""
    query, key, value = (x.detach() for x in (call.query, call.key, call.value))
    return replace(call, query=query, key=key, value=value, dropout=0.0)


def short_sample(call: AttentionCall) -> AttentionCall:
    """A random call of the same signature with a few queries and keys, of which one query is NaN."""
    queries, keys = call.query.shape[1], call.key.shape[1]
    fewer, more = (queries, keys) if queries < keys else (keys, queries)
    fewer, more = min(fewer, 5), min(more, 7 if fewer < more else 5)
    length, keys = (fewer, more) if queries < keys else (more, fewer)
    short = _cut(call, length, keys)
    random = Draws(call.query.device, call.query.dtype, seed=0)
    query, key, value = (random(*x.shape) for x in (short.query, short.key, short.value))
    if length > 1:
        query[:, length // 2] = torch.nan
    mask = short.mask
    if mask is not None:
        mask = mask.clone()
        mask[..., 0] = True if mask.dtype == torch.bool else 0.0  # every query sees a key
    return replace(short, query=query, key=key, value=value, mask=mask)


def gradient_errors(call: AttentionCall, computes: tuple[Compute, ...]) -> list[float]:
    """Relative errors of the gradients of queries, keys and values together, over the first positions.

    Raises:
        MisconductError: an implementation changed its input.
    """
    call = first_positions(call)
    exact: Tensor | None = None
    results = []
    for compute in (reference, *computes):
        dtype = torch.float64 if compute is reference else call.query.dtype
        inputs = [x.detach().to(dtype) for x in (call.query, call.key, call.value)]
        leaves = query, key, value = tuple(map(copy_of, inputs))
        own = replace(call, query=query, key=key, value=value)
        _, *gradients = with_gradients(partial(compute, own), leaves)
        if not all(same_bits(x, leaf) for x, leaf in zip(inputs, leaves, strict=True)):
            raise MisconductError("it changed its input")
        flat = torch.cat([gradient.flatten().double() for gradient in gradients])
        if exact is None:
            exact = flat
        else:
            results.append(distance(flat, exact))
    return results


def first_positions(call: AttentionCall) -> AttentionCall:
    """The call cut to its first positions, without dropout."""
    return _cut(call, POSITIONS, POSITIONS)


def _cut(call: AttentionCall, length: int, keys: int) -> AttentionCall:
    mask = call.mask
    if mask is not None:
        if mask.ndim > 1 and mask.shape[-2] > length:
            mask = mask[..., :length, :]
        mask = mask[..., :keys] if mask.shape[-1] > keys else mask
    return replace(
        call, query=call.query[:, :length], key=call.key[:, :keys], value=call.value[:, :keys], mask=mask, dropout=0.0
    )


def distance(y: Tensor, exact: Tensor) -> float:
    """``‖y − exact‖₂ / ‖exact‖₂`` where exact is finite; queries that see no key have no right answer."""
    known = torch.isfinite(exact)
    difference = torch.where(known, y.double() - exact, 0.0)
    length = torch.linalg.vector_norm(torch.where(known, exact, 0.0))
    return float(torch.linalg.vector_norm(difference) / length.clamp_min(1e-30))


# --- time, and memory where torch counts it ------------------------------------------------------------


def seconds(compute: Compute, call: AttentionCall) -> float:
    """Returns the time of a call on its device in seconds, with its backward if gradients are wanted.

    The first run, which loads and compiles, is not counted; of the others the fastest.
    """
    (cost,) = costs((runner(compute, call),), call.query.device)
    return cost.device / 1e6


def peak_bytes(compute: Compute, call: AttentionCall) -> int | None:
    """Returns the bytes that a call has allocated at its peak, besides its arguments; None if not counted."""
    device = call.query.device
    if device.type != "cuda":
        return None
    run = runner(compute, call)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def runner(compute: Compute, call: AttentionCall) -> Callable[[], None]:
    """Returns a function that runs a copy of a call, with its backward if gradients are wanted."""
    gradients = call.signature().gradients
    leaves = [copy_of(x) for x in (call.query, call.key, call.value)]

    def run() -> None:
        with torch.set_grad_enabled(gradients), unobserved():
            tensors = [leaf.detach().requires_grad_() for leaf in leaves] if gradients else leaves
            y = compute(replace(call, query=tensors[0], key=tensors[1], value=tensors[2]))
            if gradients:
                torch.autograd.grad(y, tensors, torch.ones_like(y))

    return run
