"""The proof of one site: what the op computes is what the source says, and it is as exact as stock or bit-equal.

1. In float64 the op agrees with the expression of the source to 1e-10, or the match is refused. This needs no copy of
   any spelling, and finds out which activation a method computes.
2. ``numerics="fast"``: error(fused) <= 1.05 error(stock) + 1e-6 against that reference. ``numerics="exact"``: fused and
   stock are equal bit for bit.
3. Calls that a backward may follow keep the same contract with their gradients, at the first such call.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from diffkern.ops.rotary import PAIRINGS
from diffkern.providers import NoProviderError, requested, select
from diffkern.providers.eager.activation import FUNCTIONS
from diffkern.providers.foreign import preserved
from diffkern.providers.hub import refusals_raise
from diffkern.rewrite.draws import draws_of, random_like
from diffkern.rewrite.expressions import ANY_ACTIVATION
from diffkern.rewrite.facts import LAST_DIM, child_of
from diffkern.rewrite.functions import put_in_place
from diffkern.rewrite.guard import Guard
from diffkern.rewrite.reference import CastsLifted, clone_for_verification, float64_twin, to_float64
from diffkern.rewrite.rotation import FORMS, NORMS, columns_of, has_wide_tables
from diffkern.rewrite.site import BY_SUM, FusedSite, Way
from diffkern.rewrite.source import LOCK
from diffkern.verify.contract import ENOUGH, RATIO, SLACK
from diffkern.verify.gain import Cost, Shared, is_too_large, kept_costs, reason_without_gain, sharing
from diffkern.verify.gradients import with_gradients
from diffkern.verify.isolation import Copy, uncounted
from diffkern.verify.measures import Measurement, error_beside, relative_error

#: Learns of a proof: the module of the call, and what was measured.
Recorder = Callable[[nn.Module, Measurement], None]

#: Why a match is none: the shape alone says nothing of what a function of the model computes.
DISAGREES = "in float64 its op does not compute what the source says"
#: Operands that are no tensors: how much is padded, and how.
_SETTINGS = frozenset({"padding", "mode", "front", "back", "q0_length", "k0_length"})
#: Relative error up to which two float64 results compute the same.
AGREEMENT = 1e-10


class SiteVerifier:
    """Proves sites on random leaves like those of a call; the answer goes into the site.

    Args:
        numerics: ``"fast"`` or ``"exact"``.
        measure: Whether results are compared; without, only what the op must compute is found out.
        recorder: Learns of what is measured, and on which module.
        in_float64: Makes what the source calls take float64, while the reference is computed.
    """

    def __init__(
        self,
        numerics: str = "fast",
        measure: bool = True,
        recorder: Recorder | None = None,
        in_float64: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.numerics = numerics
        self.measure = measure
        self._recorder = recorder
        self._in_float64 = in_float64
        self._costs: Shared = {}

    def __call__(self, site: FusedSite, module: nn.Module, leaves: tuple[Any, ...]) -> Way | None:
        """Proves a site for leaves of one signature, and remembers how its op is called for them."""
        signature = site.signature(module, leaves)
        # In inference mode casts reach no dispatch mode as such, and the reference would have the casts of stock.
        with LOCK, torch.inference_mode(False), torch.no_grad(), refusals_raise(), uncounted():
            if signature not in site.ways:
                found = self._prove(site, module, leaves)
                if isinstance(found, str):
                    site.reasons[signature] = found
                    site.proofs.setdefault(signature, _refusal(site, leaves, found))
                elif site.rotates:
                    found = replace(found, columns=columns_of(site.operands(module, leaves), found.options))
                site.ways[signature] = found if isinstance(found, Way) else None
                self._record(module, site.proofs.get(signature))
        return site.ways[signature]

    def weigh(self, site: FusedSite, module: nn.Module, leaves: tuple[Any, ...], replayed: bool, guard: Guard) -> str:
        """Times calls of a proven site, and its expression, on copies of leaves; returns why it is not worth it, or "".

        On a CPU a site also pays its share of what the guard of its forward takes. A GPU works meanwhile.
        """
        if requested(site.provider) is not None:
            return ""  # it was asked for
        first = next(leaf for leaf in leaves if isinstance(leaf, Tensor))
        if is_too_large(sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor)), first.device):
            return ""
        key = _timed(site, module, first)
        copies = functools.cache(lambda: Copy(leaves).call)  # made only if there is something to time

        # As stock would: without patches on its children, and without their hooks.
        twin = functools.cache(lambda: clone_for_verification(module, list(site.plan.modules.values())))
        calls = site.fused_calls
        try:
            with LOCK, torch.no_grad(), preserved(first.device), sharing(self._costs):
                both = (lambda: site.front(module, *copies()), lambda: site.original(twin(), *copies()))
                found = kept_costs(both, first.device, *key)
                if first.device.type == "cpu":
                    asked = kept_costs((lambda: guard.enter(module),) * 2, first.device, "guard", *key[2:4])[0].host
                    share = asked / max(len(guard.sites) - len(guard.disabled), 1)
                    found[0] = Cost(found[0].host + share, found[0].device + share)
        except (RuntimeError, ValueError, TypeError):
            return ""  # want of memory, or operands that the op refuses: the call itself says so
        finally:
            site.fused_calls = calls
        reason = reason_without_gain(found[0], found[1], replayed)
        if not reason:
            site.cost = found[0], found[1]
        return reason

    def prove_gradients(self, site: FusedSite, module: nn.Module, leaves: tuple[Any, ...]) -> str:
        """Proves the gradients of what is proven without them; returns why they keep no contract, or ""."""
        signature = site.signature(module, leaves)
        with LOCK, torch.no_grad(), uncounted():
            if signature not in site.gradients:
                site.gradients[signature] = self._gradients_of(site, module, leaves) if self.measure else ""
        return site.gradients[signature]

    def _record(self, module: nn.Module, proof: Measurement | None) -> None:
        if proof is not None and self._recorder is not None:
            self._recorder(module, proof)

    def _gradients_of(self, site: FusedSite, module: nn.Module, leaves: tuple[Any, ...]) -> str:
        if "linear" in site.plan.modules:
            return "its gradients have no proof"
        if self.numerics == "exact" and site.norms:
            return "its backward adds in another order than stock's, which few samples show"
        known = replace(site.proofs[site.signature(module, leaves)], gradients=True)
        try:
            proof = self._gradients(site, module, leaves, known)
        except Exception as error:  # kernels of other packages raise what they like
            proof = replace(known, passed=False, reason=f"failed: {type(error).__name__}: {error}")
        self._record(module, proof)
        return proof.reason

    def _gradients(
        self, site: FusedSite, module: nn.Module, leaves: tuple[Any, ...], known: Measurement
    ) -> Measurement:
        way = site.ways[site.signature(module, leaves)]
        assert way is not None
        draw, paths = random_like(leaves, dim=_kept_dim(site)), list(site.plan.modules.values())
        # Kernels of other packages read half of a table, and have no gradients for it.
        fixed = [site.trained is not None and role in ("cos", "sin") for role in site.plan.roles]
        draw = tuple([_repeated(leaf) if table else leaf for table, leaf in zip(fixed, draw, strict=True)])
        twin = float64_twin(module, paths)
        copy = clone_for_verification(module, paths, lambda tensor: tensor.detach().clone())
        wide = tuple([to_float64(leaf) for leaf in draw])

        def run(compute: Any, on: nn.Module, given: tuple[Any, ...]) -> tuple[Tensor, ...]:
            children = [child for path in paths if (child := child_of(on, path)) is not None]
            weights = [value for child in children for value in child.parameters()]
            free = [leaf for table, leaf in zip(fixed, given, strict=True) if not table]
            inputs = [leaf for leaf in free if isinstance(leaf, Tensor) and leaf.is_floating_point()]
            return with_gradients(lambda: _as_tuple(compute(on, *given)), (*inputs, *weights))

        with CastsLifted(), self._in_float64():
            exact = run(site.original, twin, wide)
        stock = run(site.original, copy, draw)
        fused = run(lambda on, *given: site.compute(on, given, way, site.provider), copy, draw)
        identical, reason, worst = all(map(torch.equal, fused, stock)), "", (float("-inf"), 0.0, 0.0)
        for one, other, third in zip(fused, stock, exact, strict=True):
            error, allowed = error_beside(one, other, third), relative_error(other, third)
            luck = torch.finfo(one.dtype).eps if one.numel() < ENOUGH else 0.0
            over = error - RATIO * allowed - SLACK - luck
            worst = max(worst, (over, error, allowed))
        over, error, allowed = worst
        if self.numerics == "exact" and not identical:
            reason = "with its gradients it is not bit-identical to stock"
        elif not identical and over > 0:
            reason = f"with its gradients it has an error of {error:.2e} against stock's {allowed:.2e}"
        return replace(known, fused=error, stock=allowed, bit_identical=identical, passed=not reason, reason=reason)

    def _prove(self, site: FusedSite, module: nn.Module, leaves: tuple[Any, ...]) -> Way | str:
        unfit = put_in_place(site.plan.functions, site.original.__globals__) or _unfit(leaves)
        if unfit is not None:
            return unfit
        paths = list(site.plan.modules.values())
        twin = float64_twin(module, paths)
        module = clone_for_verification(module, paths)  # whose hooks are for real calls alone
        exact = self.numerics == "exact"
        draws = [random_like(leaves, seed, exact, _kept_dim(site)) for seed in range(draws_of(leaves, exact))]
        wide = [tuple([to_float64(leaf) for leaf in draw]) for draw in (draws[:1] if exact else draws)]
        try:
            stock = [_as_tuple(site.original(module, *site.unwritten(draw))) for draw in draws]
            with CastsLifted(), self._in_float64():
                reference = [_as_tuple(site.original(twin, *site.unwritten(draw))) for draw in wide]
        except Exception as error:
            return f"the expression does not run on random input: {type(error).__name__}: {error}"
        if not all(isinstance(result, Tensor) for result in stock[0]):
            return "its result is not a tensor"
        for name, operand in site.operands(module, draws[0]).items():
            if not isinstance(operand, Tensor) and "table" not in name and name not in _SETTINGS:
                return f"its {name} is a {type(operand).__name__}, not a tensor"
        options = _agreeing(site, twin, wide[0], reference[0])
        if options is None:
            return DISAGREES
        first = next(leaf for leaf in leaves if isinstance(leaf, Tensor))
        try:
            provider = select(site.plan.rule.op, first.device, (first.dtype,), site.provider).provider
        except NoProviderError as error:
            return str(error)
        reason = "no op keeps the bits of its norm" if exact else "its op has no form for it"
        if site.rotates and not exact and has_wide_tables(site.operands(module, draws[0])):
            options = {**options, "tables_in_float32": True}
        for tried, way in enumerate(self._ways(site, [result.dtype for result in stock[0]], options)):
            given = (site.unwritten(draw) for draw in draws)
            fused = (_as_tuple(site.compute(module, draw, way, site.provider)) for draw in given)
            try:
                if not self.measure:
                    next(iter(fused))
                    return way
                refused = _first_difference(fused, stock) if exact else _first_error(list(fused), stock, reference)
            except Exception as error:
                refused = f"failed: {type(error).__name__}: {error}"
            if not refused or tried == 0:
                errors = (float("nan"), float("nan"), False)
                if not refused:
                    draw = site.unwritten(draws[0])
                    result = _as_tuple(site.compute(module, draw, way, site.provider))
                    errors = _errors(result, stock[0], reference[0])
                dtype = str(first.dtype).removeprefix("torch.")
                proof = Measurement(str(first.device), dtype, provider, *errors, not refused, refused)
                site.proofs[site.signature(module, leaves)] = proof
            if not refused:
                return _without_dtypes(site, module, draws[0], way)
            reason = refused if tried == 0 else reason
        return reason

    def _ways(self, site: FusedSite, dtypes: list[torch.dtype], options: dict[str, Any]) -> Iterator[Way]:
        if site.plan.rule.op == "qk_norm_rope":
            yield from _ways_of_rotation(options, self.numerics == "exact" and self.measure)
            return
        if "in_place" in options:  # one kernel of torch in the place of two, whose product it does not round
            yield Way(options)
            return
        norm = site.plan.modules.get("norm") if site.over == LAST_DIM else None
        roundings = ("each", "once") if self.numerics == "exact" else ("once", "each")
        for rounding in roundings:
            way = Way(_dtype_options(site, options, dtypes, rounding))
            # No kernel sums in torch's order, and in half precision a million random numbers need not show it.
            sums = "norm" in site.plan.modules or site.plan.options.get("norm") is not None
            if not sums or self.numerics != "exact":
                yield way
            if norm is not None:
                if self.numerics == "exact":
                    yield replace(way, calls_norm=BY_SUM)
                yield replace(way, calls_norm="same")
                yield replace(way, calls_norm=torch.float32)


def _without_dtypes(site: FusedSite, module: nn.Module, draw: tuple[Any, ...], way: Way) -> Way:
    """The way without dtypes of results that the op chooses by itself: to pass them takes the host microseconds."""
    options = {name: value for name, value in way.options.items() if name not in ("out_dtype", "residual_dtype")}
    if len(options) == len(way.options):
        return way
    short = replace(way, options=options)
    try:
        results, expected = [_as_tuple(site.compute(module, draw, one, site.provider)) for one in (short, way)]
    except Exception:  # a call that needs them
        return way
    same = (one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(results, expected, strict=True))
    return short if all(same) else way


def _ways_of_rotation(options: dict[str, Any], exact: bool) -> Iterator[Way]:
    """``exact`` calls the norms as the modules that they are, and wants the layout of stock.

    For one stream without a rotation nothing is left then.
    """
    norms, joins = "same" if exact else None, "stream_dim" in options
    arithmetics: tuple[dict[str, Any], ...] = ({},) if joins or not exact else ()
    if options["form"].tables is not None:
        arithmetics = tuple([{"arithmetic": name} for name in ("float32", "float64", "input")])
    for in_order in (True, False) if exact and joins else (True,):
        for arithmetic in arithmetics:
            yield Way({**options, **arithmetic, "in_order": in_order}, norms)
    if options.pop("tables_in_float32", False):
        yield from _ways_of_rotation(options, exact)


def _timed(site: FusedSite, module: nn.Module, leaf: Tensor) -> tuple[Hashable, ...]:
    """What is timed: who computes which expression, on operands of about which size."""
    op = site.plan.rule.op
    provider = select(op, leaf.device, (leaf.dtype,), site.provider).provider
    text = hashlib.sha256(site.plan.text.encode()).hexdigest()[:16]
    size = f"2^{leaf.numel().bit_length() - 1} numbers" + ("" if leaf.is_contiguous() else ", strided")
    name = type(module).__qualname__
    return "call of a site", op, name, text, provider, str(leaf.dtype), size


def _refusal(site: FusedSite, leaves: tuple[Any, ...], reason: str) -> Measurement:
    """A proof that failed before anything was measured."""
    first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), torch.empty(0, device="cpu"))
    dtype, nan = str(first.dtype).removeprefix("torch."), float("nan")
    return Measurement(str(first.device), dtype, site.provider or "auto", nan, nan, False, False, reason)


def _first_difference(fused: Iterable[tuple[Tensor, ...]], stock: list[tuple[Tensor, ...]]) -> str:
    """Why results are not the bits of stock in the layout of stock; empty if they are."""
    for results, expected in zip(fused, stock, strict=True):
        for one, other in zip(results, expected, strict=True):
            if unlike := _unlike(one, other):
                return unlike
            if one.stride() != other.stride():
                return "its result is not laid out as stock's, and what reads it may round otherwise"
            if not torch.equal(one, other):
                return "not bit-identical to stock on this device"
    return ""


def _first_error(
    fused: list[tuple[Tensor, ...]], stock: list[tuple[Tensor, ...]], reference: list[tuple[Tensor, ...]]
) -> str:
    """Why one of the results, over all draws, is less exact than the contract allows; empty if none is."""
    for results, expected, exact in zip(*map(_transposed, (fused, stock, reference)), strict=True):
        if unlike := _unlike(results[0], expected[0]):
            return unlike
        if all(map(torch.equal, results, expected)):
            continue
        width = exact[0].shape[-1]  # the twin of a linear layer is smaller
        one, other, third = [_flat(some, width) for some in (results, expected, exact)]
        error, allowed = error_beside(one, other, third), relative_error(other, third)
        if not error <= RATIO * allowed + SLACK:
            return f"error {error:.2e} against stock's {allowed:.2e}"
    return ""


def _unlike(one: Tensor, other: Tensor) -> str:
    if one.dtype == other.dtype and one.shape == other.shape:
        return ""
    return f"gives {one.dtype} {tuple(one.shape)} instead of {other.dtype} {tuple(other.shape)}"


def _errors(
    fused: tuple[Tensor, ...], stock: tuple[Tensor, ...], reference: tuple[Tensor, ...]
) -> tuple[float, float, bool]:
    """The error that is largest beside stock's among the results of one draw, that of stock, and bit identity."""
    errors = []
    for one, other, exact in zip(fused, stock, reference, strict=True):
        width = exact.shape[-1]
        errors.append([relative_error(_flat([some], width), _flat([exact], width)) for some in (one, other)])
    error, allowed = max(errors, key=lambda pair: pair[0] - pair[1])
    return error, allowed, all(map(torch.equal, fused, stock))


def _flat(results: list[Tensor], width: int) -> Tensor:
    return torch.cat([result[..., :width].reshape(-1) for result in results])


def _transposed(draws: list[tuple[Tensor, ...]]) -> list[list[Tensor]]:
    return [list(results) for results in zip(*draws, strict=True)]


def _kept_dim(site: FusedSite) -> int:
    """The dimension that modules say the size of."""
    return -1 if site.over == LAST_DIM and not site.plan.modules.keys() & {"convolution", "patches"} else 1


def _repeated(table: Tensor) -> Tensor:
    first = table[..., : table.shape[-1] // 2]
    return torch.cat([first, first], dim=-1)


def _agreeing(
    site: FusedSite, twin: nn.Module, wide: tuple[Any, ...], reference: tuple[Tensor, ...]
) -> dict[str, Any] | None:
    """The options with which the op computes what the source says, in float64; None if there are none."""
    for choice in _choices(site):
        options = _options_of_op(site, choice)
        if options is None:
            continue
        way = Way(_dtype_options(site, options, [torch.float64] * len(reference), "once"))
        try:
            with CastsLifted():
                fused = _as_tuple(site.compute(twin, site.unwritten(wide), way, "eager"))
        except (TypeError, ValueError, RuntimeError, IndexError):
            continue
        pairs = zip(fused, reference, strict=True)
        if all(one.shape == other.shape and relative_error(one, other) <= AGREEMENT for one, other in pairs):
            return options
    return None


def _choices(site: FusedSite) -> list[dict[str, object]]:
    """What the findings of the match may mean: which activation a method computes, how a function rotates."""
    found = dict(site.plan.options)
    if site.plan.rule.op == "rope":
        return [{**found, "pairing": pairing, "per_pair": half} for half in (False, True) for pairing in PAIRINGS]
    if site.plan.rule.op == "qk_norm_rope":
        forms = FORMS if any("table" in name for name in site.plan.names) else NORMS
        return [{**found, "form": form} for form in forms]
    names = [name for name, value in found.items() if value == ANY_ACTIVATION]
    return [{**found, names[0]: function} for function in (*FUNCTIONS, "sigmoid", "tanh")] if names else [found]


def _options_of_op(site: FusedSite, found: dict[str, object]) -> dict[str, Any] | None:
    """Findings of the match as arguments of the op; None if it cannot compute them."""
    options = dict(found)
    op = site.plan.rule.op
    if op in ("glu", "channel_glu"):
        options["activation"] = options.pop("gate_activation")
        return options if options["activation"] in FUNCTIONS else None
    if op == "linear_gelu":
        name = options.pop("linear_activation")
        return {"approximate": "tanh" if name == "gelu_tanh" else "none"} if name in ("gelu", "gelu_tanh") else None
    if op in ("group_norm_silu", "channel_rms_norm_silu"):
        activation = options.get("norm_activation")
        return {"activation": activation} if activation in ("silu", None) else None
    activations = [options[name] for name in ("convolution_activation", "norm_activation") if name in options]
    if op == "add_norm_silu_pad" and activations:
        return {"activation": "silu"} if activations == ["silu"] else None
    if options.get("gate_activation") not in (None, "tanh", "sigmoid"):
        return None
    return options


def _dtype_options(
    site: FusedSite, options: dict[str, Any], dtypes: list[torch.dtype], rounding: str
) -> dict[str, Any]:
    op = site.plan.rule.op
    if op == "qk_norm_rope":
        return options
    if op == "glu":
        return {**options, "round_activation": rounding == "each"}
    if op == "channel_glu":
        return {**options, "round_each": rounding == "each"}
    if op in ("linear_attention", "linear_gelu", "group_norm_silu"):
        return options
    if op == "channel_rms_norm_silu":
        return {**options, "round_dtype": dtypes[0] if rounding == "each" else None}
    if op == "rope":
        return {**options, "arithmetic": "input" if rounding == "each" else "float32"}
    options = {**options, "rounding": rounding, "out_dtype": dtypes[-1]}
    if op == "gate_residual_norm_modulate":
        options["residual_dtype"] = dtypes[0] if len(dtypes) > 1 else None
    return options


def _unfit(leaves: tuple[Any, ...]) -> str | None:
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_complex()]
    if not tensors:
        return "no operand is a tensor"
    if not any(leaf.ndim for leaf in tensors):
        return "no operand has a dimension"
    for leaf in tensors:
        if type(leaf) not in (Tensor, nn.Parameter):
            return f"an operand is a {type(leaf).__name__}, not a plain tensor"
        if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_meta:
            return "an operand is not an ordinary dense tensor"
    if tensors[0].dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"an operand is {str(tensors[0].dtype).removeprefix('torch.')}"
    return None


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
