"""Proofs ahead of the first call, on leaves that are made up: a graph of ``torch.compile`` has no room for a proof."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from diffkern.rewrite.facts import child_of, last_dim_norm
from diffkern.rewrite.reference import clone_for_verification
from diffkern.rewrite.site import FusedSite
from diffkern.verify.contract import ROWS
from diffkern.verify.samples import sample_shape

#: Size of the last dimension where no module says it.
_SIZE = 256


def prove_ahead(site: FusedSite, module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Proves a site for the operands that a model of ``dtype`` will probably have; what is met besides waits."""
    if (device, dtype) in site.tried:
        return
    site.tried.add((device, dtype))
    for modulation in dict.fromkeys((dtype, torch.float32)):
        leaves = _leaves(site, module, device, dtype, modulation)
        if leaves is not None:
            site.way(module, leaves, site.signature(module, leaves))


def _leaves(
    site: FusedSite, module: nn.Module, device: torch.device, dtype: torch.dtype, modulation: torch.dtype
) -> tuple[Any, ...] | None:
    """The first leaves for which the expression of the source gives a result of the shape of ``x``."""
    copy = clone_for_verification(module, list(site.plan.modules.values()))
    size = _last_dim(site, module)
    modulates = site.plan.rule.op != "glu"
    generator = torch.Generator("cpu").manual_seed(3)
    x = torch.randn(2, ROWS, size, generator=generator, device="cpu").to(device, dtype)

    def candidates(shape: tuple[int, ...], beside: Any) -> Iterator[Any]:
        for role in site.plan.roles:
            if modulates and role in ("scale", "shift", "gate"):
                yield torch.randn(shape, generator=generator, device="cpu").to(device, modulation)
            else:
                yield x if role else beside

    for shape, beside in product(((2, 1, size), (2, size), (size,)), (x, dtype)):
        leaves = tuple(candidates(shape, beside))
        try:
            with torch.no_grad():
                result = site.original(copy, *leaves)
        except Exception:  # of shapes that do not fit together, in whatever words
            continue
        result = result[-1] if isinstance(result, tuple) else result
        if isinstance(result, Tensor) and result.shape[:2] == x.shape[:2] and result.ndim == x.ndim:
            return leaves
    return None


def _last_dim(site: FusedSite, module: nn.Module) -> int:
    norm = child_of(module, site.plan.modules["norm"]) if "norm" in site.plan.modules else None
    semantics = None if norm is None else last_dim_norm(norm)
    if norm is not None and semantics is not None:
        return sample_shape(semantics, norm, 1)[-1]
    linear = child_of(module, site.plan.modules["linear"]) if "linear" in site.plan.modules else None
    return int(getattr(linear, "in_features", _SIZE))
