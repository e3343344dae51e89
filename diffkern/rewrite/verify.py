"""The proof of one site: what the op computes is what the source says, and it is as exact as stock or bit-equal.

1. In float64 the op agrees with the expression of the source to 1e-10, or the match is refused. This needs no copy of
   any spelling, and finds out which activation a method computes.
2. ``numerics="fast"``: error(fused) <= 1.05 error(stock) + 1e-6 against that reference. ``numerics="exact"``: fused and
   stock are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from diffkern.providers.eager.activation import FUNCTIONS
from diffkern.rewrite.match import ANY_ACTIVATION
from diffkern.rewrite.reference import CastsLifted, float64_twin, to_float64
from diffkern.rewrite.site import FusedSite, Way, signature_of
from diffkern.verify.measures import relative_error
from diffkern.verify.proof import RATIO, SLACK

#: Relative error up to which two float64 results compute the same.
AGREEMENT = 1e-10
#: Elements of a random leaf at most: a proof must not cost what a step costs.
_LARGEST = 1 << 22


class SiteVerifier:
    """Proves sites on random leaves like those of a call; the answer goes into the site.

    Args:
        numerics: ``"fast"`` or ``"exact"``.
    """

    def __init__(self, numerics: str = "fast") -> None:
        self.numerics = numerics

    def __call__(self, site: FusedSite, module: nn.Module, leaves: tuple[Any, ...]) -> Way | None:
        """Proves a site for leaves of one signature, and remembers how its op is called for them."""
        signature = signature_of(leaves)
        with torch.no_grad():
            found = self._prove(site, module, leaves)
        site.ways[signature] = found if isinstance(found, Way) else None
        if isinstance(found, str):
            site.reasons[signature] = found
        return site.ways[signature]

    def _prove(self, site: FusedSite, module: nn.Module, leaves: tuple[Any, ...]) -> Way | str:
        unfit = _unfit(leaves)
        if unfit is not None:
            return unfit
        leaves = random_like(leaves)
        try:
            stock = _as_tuple(site.original(module, *leaves))
        except Exception as error:
            return f"the expression does not run on random input: {type(error).__name__}: {error}"
        if not all(isinstance(result, Tensor) for result in stock):
            return "its result is not a tensor"
        dtypes = [result.dtype for result in stock]
        twin = float64_twin(module, list(site.plan.modules.values()))
        wide = tuple([to_float64(leaf) for leaf in leaves])
        with CastsLifted():
            reference = _as_tuple(site.original(twin, *wide))
        activation = _agreeing(site, twin, wide, reference)
        if activation is None:
            return "in float64 its op does not compute what the source says"
        reason = ""
        for way in self._ways(site, dtypes, activation):
            reason = self._refused(site, module, leaves, way, stock, reference)
            if not reason:
                return way
        return reason or "no op gives the dtype of the source"

    def _ways(self, site: FusedSite, dtypes: list[torch.dtype], options: dict[str, Any]) -> Iterator[Way]:
        norm = site.plan.modules.get("norm")
        roundings = ("each", "once") if self.numerics == "exact" else ("once", "each")
        for rounding in roundings:
            way = Way(_dtype_options(site, options, dtypes, rounding))
            yield way
            if norm is not None:
                yield replace(way, calls_norm="same")
                yield replace(way, calls_norm=torch.float32)

    def _refused(
        self,
        site: FusedSite,
        module: nn.Module,
        leaves: tuple[Any, ...],
        way: Way,
        stock: tuple[Tensor, ...],
        reference: tuple[Tensor, ...],
    ) -> str:
        """Why a way does not keep the contract; empty if it does."""
        try:
            fused = _as_tuple(site.compute(module, leaves, way, site.provider))
        except Exception as error:
            return f"failed: {type(error).__name__}: {error}"
        for one, other, exact in zip(fused, stock, reference, strict=True):
            if one.dtype != other.dtype or one.shape != other.shape:
                return f"gives {one.dtype} {tuple(one.shape)} instead of {other.dtype} {tuple(other.shape)}"
            if torch.equal(one, other):
                continue
            if self.numerics == "exact":
                return "not bit-identical to stock on this device"
            one, other = one[..., : exact.shape[-1]], other[..., : exact.shape[-1]]  # the twin of a layer is smaller
            error, allowed = relative_error(one, exact), relative_error(other, exact)
            if not error <= RATIO * allowed + SLACK:
                return f"error {error:.2e} against stock's {allowed:.2e}"
        return ""


def random_like(leaves: tuple[Any, ...]) -> tuple[Any, ...]:
    """Random leaves of the same dtypes and of like shapes, smaller where they are large."""
    largest = max([leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)], default=0)
    limit = next((limit for limit in (1 << 30, 1024, 128, 16, 4) if _shrunk_size(leaves, limit) <= _LARGEST), 2)
    if any(type(leaf) is int for leaf in leaves) and largest <= 8 * _LARGEST:
        limit = 1 << 30  # a size that the expression names
    generator = torch.Generator().manual_seed(6)
    return tuple([_random(leaf, limit, generator) if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def _random(leaf: Tensor, limit: int, generator: torch.Generator) -> Tensor:
    shape = _shrunk(leaf, limit)
    if not leaf.is_floating_point():
        return torch.zeros(shape, dtype=leaf.dtype, device=leaf.device)
    y = torch.randn(shape, generator=generator) + 0.3
    return y.to(leaf.device, leaf.dtype)


def _shrunk(leaf: Tensor, limit: int) -> list[int]:
    return [min(size, limit) for size in leaf.shape[:-1]] + list(leaf.shape[-1:])


def _shrunk_size(leaves: tuple[Any, ...], limit: int) -> int:
    sizes = [torch.Size(_shrunk(leaf, limit)).numel() for leaf in leaves if isinstance(leaf, Tensor)]
    return max(sizes, default=0)


def _agreeing(
    site: FusedSite, twin: nn.Module, wide: tuple[Any, ...], reference: tuple[Tensor, ...]
) -> dict[str, Any] | None:
    """The options with which the op computes what the source says, in float64; None if there are none."""
    found = site.plan.options
    names = [name for name, value in found.items() if value == ANY_ACTIVATION]
    choices = [dict(found)]
    if names:
        choices = [{**found, names[0]: function} for function in (*FUNCTIONS, "sigmoid", "tanh")]
    for choice in choices:
        options = _options_of_op(site, choice)
        if options is None:
            continue
        way = Way(_dtype_options(site, options, [torch.float64] * len(reference), "once"))
        try:
            with CastsLifted():
                fused = _as_tuple(site.compute(twin, wide, way, "eager"))
        except (TypeError, ValueError, RuntimeError):
            continue
        if all(
            one.shape == other.shape and relative_error(one, other) <= AGREEMENT
            for one, other in zip(fused, reference, strict=True)
        ):
            return options
    return None


def _options_of_op(site: FusedSite, found: dict[str, object]) -> dict[str, Any] | None:
    """Findings of the match as arguments of the op; None if it cannot compute them."""
    options = dict(found)
    op = site.plan.rule.op
    if op == "glu":
        options["activation"] = options.pop("gate_activation")
        return options if options["activation"] in FUNCTIONS else None
    if op == "linear_gelu":
        name = options.pop("linear_activation")
        return {"approximate": "tanh" if name == "gelu_tanh" else "none"} if name in ("gelu", "gelu_tanh") else None
    if options.get("gate_activation") not in (None, "tanh", "sigmoid"):
        return None
    return options


def _dtype_options(site: FusedSite, options: dict[str, Any], dtypes: list[torch.dtype], rounding: str) -> dict[str, Any]:
    op = site.plan.rule.op
    if op == "glu":
        return {**options, "round_activation": rounding == "each"}
    if op == "linear_gelu":
        return options
    options = {**options, "rounding": rounding, "out_dtype": dtypes[-1]}
    if op == "gate_residual_norm_modulate":
        options["residual_dtype"] = dtypes[0] if len(dtypes) > 1 else None
    return options


def _unfit(leaves: tuple[Any, ...]) -> str | None:
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors:
        return "no operand is a tensor"
    for leaf in tensors:
        if type(leaf) not in (Tensor, nn.Parameter):
            return f"an operand is a {type(leaf).__name__}, not a plain tensor"
        if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_meta or leaf.is_complex():
            return "an operand is not an ordinary dense tensor"
    if tensors[0].dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"an operand is {str(tensors[0].dtype).removeprefix('torch.')}"
    return None


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
