"""Proofs ahead of the first call, on leaves that are made up: a graph of ``torch.compile`` has no room for a proof."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from diffkern.rewrite.facts import LAST_DIM, child_of, norm_of
from diffkern.rewrite.reference import clone_for_verification
from diffkern.rewrite.rotation import streams_of
from diffkern.rewrite.site import FusedSite
from diffkern.rewrite.streams import HEADS_FIRST
from diffkern.verify.contract import ROWS
from diffkern.verify.samples import sample_shape

#: Samples that queries and keys are made up of.
_SAMPLES = 2
#: Size of the dimension that is normalised where no module says it.
_SIZE = 256

Shape = tuple[int, ...]


def serves_in_graphs(site: FusedSite) -> bool:
    """Whether a graph of ``torch.compile`` holds the op of a site that is proven: some run as written there."""
    return site.is_proven_ahead and not (site.plan.rule.is_left_to_compiler and site.provider is None)


def prove_ahead(site: FusedSite, module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Proves a site for the operands that a model of ``dtype`` will probably have; what is met besides waits."""
    if (device, dtype) in site.tried or not site.is_proven_ahead:
        return
    site.tried.add((device, dtype))
    if site.plan.rule.op == "rope":
        for rotated in _rotated(site, module, device, dtype):
            site.way(module, rotated, site.signature(module, rotated))
        return
    if site.plan.rule.op == "qk_norm_rope":
        _prove_attention(site, module, device, dtype)
        return
    for shape, modulations in _shapes(site, module):
        for modulation in dict.fromkeys((dtype, torch.float32)):
            leaves = _leaves(site, module, device, dtype, modulation, shape, modulations)
            if leaves is not None:
                site.way(module, leaves, site.signature(module, leaves))


def _shapes(site: FusedSite, module: nn.Module) -> Iterator[tuple[Shape, tuple[Shape, ...]]]:
    """The shapes that ``x`` may have, each with those that what is added and multiplied may have beside it."""
    size = _size(site, module)
    if site.over == LAST_DIM:
        yield (2, ROWS, size), ((2, 1, size), (2, size), (size,))
        return
    for positions in ((ROWS,), (8, 8), (2, 8, 8)):  # sound, images, videos
        yield (2, size, *positions), ((2, size, *(1,) * len(positions)),)


def _leaves(
    site: FusedSite,
    module: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    modulation: torch.dtype,
    shape: Shape,
    modulations: tuple[Shape, ...],
) -> tuple[Any, ...] | None:
    """The first leaves for which the expression of the source gives a result of the shape of ``x``."""
    copy = clone_for_verification(module, list(site.plan.modules.values()))
    modulates = site.plan.rule.op != "glu"
    generator = torch.Generator("cpu").manual_seed(3)
    x = torch.randn(shape, generator=generator, device="cpu").to(device, dtype)
    both = torch.randn((*shape[:-1], 2 * shape[-1]), generator=generator, device="cpu").to(device, dtype)
    halves = dict(zip(site.plan.halves, both.chunk(2, dim=-1), strict=False))  # a kernel may want them so

    def candidates(shape: Shape, beside: Any) -> Iterator[Any]:
        for role in site.plan.roles:
            if modulates and role in ("scale", "shift", "gate", "add"):
                yield torch.randn(shape, generator=generator, device="cpu").to(device, modulation)
            else:
                yield halves.get(role, x) if role else beside

    for own, beside in product(modulations, (x, dtype)):
        leaves = tuple(candidates(own, beside))
        try:
            with torch.no_grad():
                result = site.original(copy, *leaves)
        except Exception:  # of shapes that do not fit together, in whatever words
            continue
        result = result[-1] if isinstance(result, tuple) else result
        if isinstance(result, Tensor) and result.shape[:2] == x.shape[:2] and result.ndim == x.ndim:
            return leaves
    return None


def _rotated(site: FusedSite, module: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Queries, keys and tables, with tokens before heads in memory as projections give them, and dense."""
    generator = torch.Generator("cpu").manual_seed(4)
    tokens, head_dim = ROWS // 2, _head_dim(module)
    heads_first = site.plan.options["unsqueeze_dim"] == 1

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(device, dtype)

    for dense in (False, True) if heads_first else (True,):
        q, k = random(2, tokens, 3, head_dim), random(2, tokens, 3, head_dim)
        if heads_first:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        found = {"q": q.contiguous() if dense else q, "k": k.contiguous() if dense else k}
        found |= {"cos": random(2, tokens, head_dim), "sin": random(2, tokens, head_dim)}
        yield tuple([found[role] for role in site.plan.roles])


def _head_dim(module: nn.Module) -> int:
    found = getattr(module, "head_dim", None)
    return found if type(found) is int else 64


class _Tables(NamedTuple):
    """How models make rotary tables.

    Attributes:
        lead: Their dimensions before the last one: batch, tokens, or 1.
        columns: Columns of a head for each of the table; 0 where the table has the columns of all heads.
        is_complex: Whether they are complex numbers.
        in_pair: Whether cosines and sines are one argument.
    """

    lead: str
    columns: int
    is_complex: bool
    in_pair: bool


_TABLES = (
    _Tables("S", 1, False, True),
    _Tables("S", 2, True, False),
    _Tables("BS", 2, True, False),
    _Tables("1S1", 1, False, True),
    _Tables("1S1", 1, False, False),
    _Tables("BS", 0, False, True),
    _Tables("11S", 2, True, False),
)


def _prove_attention(site: FusedSite, module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Proves queries, keys and tables for which the expression of the source gives results of as many elements.

    With tokens before heads; and with heads before tokens, views of the former, where the expression cannot tell.
    """
    size, roles = _head_dim(module), site.plan.roles
    if "k0" not in site.plan.names:  # a concatenation of streams
        layout = "heads first" if site.plan.options["stream_dim"] in HEADS_FIRST else "tokens first"
        leaves = _drawn(site, module, size, layout, _TABLES[0], device, dtype)
        site.way(module, leaves, site.signature(module, leaves))
        return
    copy = clone_for_verification(module, list(site.plan.modules.values()))
    norm = child_of(module, next(iter(site.plan.modules.values()), ()))
    if site.plan.modules and (norm is None or not site.norms):
        return
    if site.norms and norm is not None:
        size = sample_shape(next(iter(site.norms.values())), norm, 1)[-1]
    tells = "stream_dim" in site.plan.options or any("table" in name for name in site.plan.names)
    for layout in ("heads together", "tokens first", "heads first")[0 if site.norms else 1 :]:
        for tables in _TABLES:
            leaves = _drawn(site, module, size, layout, tables, device, dtype)
            try:
                with torch.no_grad():
                    results = site.original(copy, *leaves)
            except Exception:  # of shapes that do not fit together, in whatever words
                continue
            expected = sum(x.numel() for x, role in zip(leaves, roles, strict=True) if role in ("q0", "q1"))
            # Tables that have a dimension more than heads that lie together put one in front of the samples.
            if not isinstance(results, tuple) or any(
                not isinstance(y, Tensor) or y.numel() != expected or len(y) != _SAMPLES for y in results
            ):
                continue
            signature = site.signature(module, leaves)
            found = site.way(module, leaves, signature)
            if tells and site.norms:
                return
            if found is not None or site.norms:
                break
            for known in (site.ways, site.reasons, site.proofs):  # drawn for tables of another form
                known.pop(signature, None)


def _drawn(
    site: FusedSite,
    module: nn.Module,
    size: int,
    layout: str,
    tables: _Tables,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Any, ...]:
    """Random leaves of a layout, whose norms take rows of ``size``, with tables of a form."""
    generator = torch.Generator("cpu").manual_seed(4)
    roles = site.plan.roles
    heads = getattr(module, "heads", None) or getattr(module, "num_heads", None)
    heads = heads if type(heads) is int else 3
    tokens = [ROWS // 8 + i for i in range(streams_of(site.plan.names))]
    whole = len(tokens) > 1 and "q0" not in roles  # both streams are parts of one leaf, of which the other is as long

    def stream(count: int) -> Tensor:
        middle = () if layout == "heads together" else (heads,)
        x = torch.randn((_SAMPLES, count, *middle, size), generator=generator, device="cpu").to(device, dtype)
        return x.transpose(1, 2) if layout == "heads first" else x

    def table(of: str) -> Any:
        count = tokens[int(of)] if of else sum(tokens)
        width = size if layout != "heads together" or not tables.columns else size // heads
        lead = [{"S": count, "B": _SAMPLES}.get(name, 1) for name in tables.lead]
        angles = torch.rand((*lead, width // max(tables.columns, 1)), generator=generator, device="cpu")
        if tables.is_complex:
            return torch.polar(torch.ones_like(angles), angles).to(device)
        cos, sin = angles.cos().to(device), angles.sin().to(device)
        return (cos, sin) if tables.in_pair else cos

    made = [
        tokens[0]
        if "_length" in role
        else table(role[1 : role.index("_table")])
        if "_table" in role
        else stream(sum(tokens) if whole and role else tokens[int(role[1:] or 0) if role else -1])
        for role in roles
    ]
    return tuple(made)


def _size(site: FusedSite, module: nn.Module) -> int:
    """The size of the dimension that a module of the site says it of."""
    norm = child_of(module, site.plan.modules["norm"]) if "norm" in site.plan.modules else None
    found = None if norm is None else norm_of(norm)
    if norm is not None and found is not None:
        over, semantics = found
        parameter = next(norm.parameters(), None)
        if over == LAST_DIM:
            return sample_shape(semantics, norm, 1)[-1]
        return int(getattr(norm, "num_channels", _SIZE if parameter is None else parameter.shape[0]))
    linear = child_of(module, site.plan.modules["linear"]) if "linear" in site.plan.modules else None
    return int(getattr(linear, "in_features", _SIZE))
