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
from diffkern.rewrite.site import FusedSite, Way
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
    prover = _Prover(site, module, device, dtype)
    if site.plan.rule.op == "rope":
        for leaves in prover.rotated():
            prover.prove(leaves)
    elif site.plan.rule.op == "qk_norm_rope":
        prover.prove_attention()
    else:
        for shapes, modulation in product(prover.shapes(), dict.fromkeys((dtype, torch.float32))):
            made = prover.leaves(modulation, *shapes)
            if made is not None:
                prover.prove(made)


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


class _Prover(NamedTuple):
    """Proves a site for leaves that it makes up."""

    site: FusedSite
    module: nn.Module
    device: torch.device
    dtype: torch.dtype

    def prove(self, leaves: tuple[Any, ...]) -> Way | None:
        return self.site.way(self.module, leaves, self.site.signature(self.module, leaves))

    def copy(self) -> nn.Module:
        return clone_for_verification(self.module, list(self.site.plan.modules.values()))

    def random(self, shape: Shape, generator: torch.Generator, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(self.device, dtype or self.dtype)

    def shapes(self) -> Iterator[tuple[Shape, tuple[Shape, ...]]]:
        """The shapes that ``x`` may have, each with those that what is added and multiplied may have beside it."""
        size = self._size()
        if self.site.over == LAST_DIM:
            yield (2, ROWS, size), ((2, 1, size), (2, size), (size,))
            return
        for positions in ((ROWS,), (8, 8), (2, 8, 8)):  # sound, images, videos
            yield (2, size, *positions), ((2, size, *(1,) * len(positions)),)

    def leaves(self, modulation: torch.dtype, shape: Shape, modulations: tuple[Shape, ...]) -> tuple[Any, ...] | None:
        """The first leaves for which the expression of the source gives a result of the shape of ``x``."""
        copy, plan, generator = self.copy(), self.site.plan, torch.Generator("cpu").manual_seed(3)
        x = self.random(shape, generator)
        both = self.random((*shape[:-1], 2 * shape[-1]), generator)
        halves = dict(zip(plan.halves, both.chunk(2, dim=-1), strict=False))  # a kernel may want them so

        def candidates(shape: Shape, beside: Any) -> Iterator[Any]:
            for role in plan.roles:
                if plan.rule.op != "glu" and role in ("scale", "shift", "gate", "add"):
                    yield self.random(shape, generator, modulation)
                else:
                    yield halves.get(role, x) if role else beside

        for own, beside in product(modulations, (x, self.dtype)):
            leaves = tuple(candidates(own, beside))
            try:
                with torch.no_grad():
                    result = self.site.original(copy, *leaves)
            except Exception:  # of shapes that do not fit together, in whatever words
                continue
            result = result[-1] if isinstance(result, tuple) else result
            if isinstance(result, Tensor) and result.shape[:2] == x.shape[:2] and result.ndim == x.ndim:
                return leaves
        return None

    def rotated(self) -> Iterator[tuple[Any, ...]]:
        """Queries, keys and tables, with tokens before heads in memory as projections give them, and dense."""
        generator = torch.Generator("cpu").manual_seed(4)
        tokens, head_dim = ROWS // 2, self._head_dim()
        heads_first = self.site.plan.options["unsqueeze_dim"] == 1
        for dense in (False, True) if heads_first else (True,):
            q, k = [self.random((2, tokens, 3, head_dim), generator) for _ in "qk"]
            if heads_first:
                q, k = q.transpose(1, 2), k.transpose(1, 2)
            found = {"q": q.contiguous() if dense else q, "k": k.contiguous() if dense else k}
            found |= {table: self.random((2, tokens, head_dim), generator) for table in ("cos", "sin")}
            yield tuple([found[role] for role in self.site.plan.roles])

    def prove_attention(self) -> None:
        """Proves queries, keys and tables for which the expression of the source gives results of as many elements.

        With tokens before heads; and with heads before tokens, views of the former, where the expression cannot tell.
        """
        site, size, roles = self.site, self._head_dim(), self.site.plan.roles
        if "k0" not in site.plan.names:  # a concatenation of streams
            layout = "heads first" if site.plan.options["stream_dim"] in HEADS_FIRST else "tokens first"
            self.prove(self._drawn(size, layout, _TABLES[0]))
            return
        copy = self.copy()
        norm = child_of(self.module, next(iter(site.plan.modules.values()), ()))
        if site.plan.modules and (norm is None or not site.norms):
            return
        if site.norms and norm is not None:
            size = sample_shape(next(iter(site.norms.values())), norm, 1)[-1]
        tells = "stream_dim" in site.plan.options or any("table" in name for name in site.plan.names)
        for layout in ("heads together", "tokens first", "heads first")[0 if site.norms else 1 :]:
            for tables in _TABLES:
                leaves = self._drawn(size, layout, tables)
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
                found = self.prove(leaves)
                if tells and site.norms:
                    return
                if found is not None or site.norms:
                    break
                for known in (site.ways, site.reasons, site.proofs):  # drawn for tables of another form
                    known.pop(site.signature(self.module, leaves), None)

    def _drawn(self, size: int, layout: str, tables: _Tables) -> tuple[Any, ...]:
        """Random leaves of a layout, whose norms take rows of ``size``, with tables of a form."""
        generator, module, plan = torch.Generator("cpu").manual_seed(4), self.module, self.site.plan
        heads = getattr(module, "heads", None) or getattr(module, "num_heads", None)
        heads = heads if type(heads) is int else 3
        tokens = [ROWS // 8 + i for i in range(streams_of(plan.names))]
        whole = len(tokens) > 1 and "q0" not in plan.roles  # both streams are parts of one leaf; the other is as long

        def stream(count: int) -> Tensor:
            middle = () if layout == "heads together" else (heads,)
            x = self.random((_SAMPLES, count, *middle, size), generator)
            return x.transpose(1, 2) if layout == "heads first" else x

        def table(of: str) -> Any:
            count = tokens[int(of)] if of else sum(tokens)
            width = size if layout != "heads together" or not tables.columns else size // heads
            lead = [{"S": count, "B": _SAMPLES}.get(name, 1) for name in tables.lead]
            angles = torch.rand((*lead, width // max(tables.columns, 1)), generator=generator, device="cpu")
            if tables.is_complex:
                return torch.polar(torch.ones_like(angles), angles).to(self.device)
            cos, sin = angles.cos().to(self.device), angles.sin().to(self.device)
            return (cos, sin) if tables.in_pair else cos

        def drawn(role: str) -> Any:
            if "_length" in role:
                return tokens[0]
            if "_table" in role:
                return table(role[1 : role.index("_table")])
            return stream(sum(tokens) if whole and role else tokens[int(role[1:] or 0) if role else -1])

        return tuple(map(drawn, plan.roles))

    def _head_dim(self) -> int:
        found = getattr(self.module, "head_dim", None)
        return found if type(found) is int else 64

    def _size(self) -> int:
        """The size of the dimension that a module of the site says it of."""
        modules = {name: child_of(self.module, path) for name, path in self.site.plan.modules.items()}
        norm = modules.get("norm")
        found = None if norm is None else norm_of(norm)
        if norm is not None and found is not None:
            over, semantics = found
            parameter = next(norm.parameters(), None)
            if over == LAST_DIM:
                return sample_shape(semantics, norm, 1)[-1]
            return int(getattr(norm, "num_channels", _SIZE if parameter is None else parameter.shape[0]))
        return int(getattr(modules.get("linear"), "in_features", _SIZE))
