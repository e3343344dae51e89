"""Finds out what an unknown norm class computes, by comparing its forward with the candidates.

Only forwards that :mod:`diffkern.matching.probe_eligibility` lets through are run: they read parameters, eps and shapes
and write nothing. They run on twins whose parameters are random (with weights of one, ``w`` and ``1 + w`` or two
rounding orders could not be told apart), on inputs of several ranks, scales and dtypes. What is found is
proven for these only; the guard of every call, and the proof at injection, come on top.
"""

from __future__ import annotations

import inspect
import itertools
import math
import warnings
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from diffkern.matching.forward import apply, declines
from diffkern.matching.semantics import Match, NormSemantics
from diffkern.providers import KERNEL_DTYPES

#: How far float32 results may be apart: a few roundings, relative to the value or the mean square.
_TOLERANCE = 1e-5
#: The same in half precision, in units of the dtype's epsilon: a class may round after each of its steps.
_HALF_ROUNDINGS = 4
#: Size of the normalised dimension where the module does not say it. Not a power of 4: multiplying by the
#: root of one is exact, which hides a rounding.
_SIZE = 24
#: From where the usual eps has no influence down to where it decides; that of ordinary inputs comes first.
_SCALES = (1.0, 100.0, 1e-3, 1e-6, 1e-13)
#: Values of eps to try for a class that has no attribute for it.
_EPS = (1e-5, 1e-6, 1e-7, torch.finfo(torch.float32).eps, 1e-8, 1e-10, 1e-12)
#: In a twin eps takes this value too, which proves that the attribute is read and how it enters.
_OTHER_EPS = 0.03
_WEIGHTS = ("weight", "gamma", "scale", "g")
_BIASES = ("bias", "beta", "shift")
#: Names that a norm has for its parameters, be they there or not.
PARAMETERS = (*_WEIGHTS, *_BIASES)
_NOT_COPIED = ("forward", "_old_forward", "_hf_hook", "_diffusers_hook", "_diffkern")
#: What nn.Module itself keeps in every instance; ``training`` is the one that a forward may read.
_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_HALF = (torch.bfloat16, torch.float16)

_found: WeakKeyDictionary[type, dict[Hashable, Match]] = WeakKeyDictionary()


class _Unknown(Exception):
    """The module cannot be probed, or is no norm that is known. The message says why."""


class _StockRaises(_Unknown):
    """The stock forward does not take an input."""


class _Run(NamedTuple):
    """One call of the stock forward: of which twin, with what, to what result."""

    module: nn.Module
    x: Tensor
    y: Tensor
    ordinary: bool = True


def probe(module: nn.Module) -> Match:
    """Compares the forward of a leaf module with every semantics that :class:`NormSemantics` can state.

    Modules of one class, with equal attributes and equal shapes of parameters, share one answer. It has no semantics if
    the module cannot be tried, raises, computes something else, or two answers fit: the reason names the nearest
    candidate and its error.
    """
    answers = _found.setdefault(type(module), {})
    key = _key(module)
    if key not in answers:
        try:
            answers[key] = Match(_find(module), "probe")
        except _Unknown as error:
            answers[key] = Match(None, "probe", str(error))
    return answers[key]


def _key(module: nn.Module) -> Hashable:
    ignored = _INTERNAL.union(_NOT_COPIED)
    attributes = tuple(sorted((k, repr(v)) for k, v in vars(module).items() if k not in ignored))
    parameters = tuple((k, None if p is None else (p.shape, p.dtype, p.device)) for k, p in module._parameters.items())
    forward = type(module).forward
    # The code, not the function, which would keep its class alive.
    return getattr(forward, "__code__", forward), attributes, parameters


def _find(module: nn.Module) -> NormSemantics:
    argument = _argument(module)
    for name, parameter in module._parameters.items():
        if parameter is not None and (type(parameter) is not nn.Parameter or parameter.dtype not in KERNEL_DTYPES):
            raise _Unknown(f"its {name} is a {type(parameter).__name__} of {parameter.dtype}")
        if parameter is not None and parameter.is_meta:
            raise _Unknown(f"its {name} has no data (meta device), so it cannot be tried")
    stock = _twin(module, torch.float32)
    device = _device(stock)
    with torch.no_grad(), torch.autocast(device.type, enabled=False), warnings.catch_warnings():
        # torch warns where stock mixes dtypes, which is what is tried on purpose.
        warnings.simplefilter("ignore")
        runs = _runs_in_float32(stock)
        fits = _fit_formula(stock, argument, runs)
        shapes = list(dict.fromkeys(run.x.shape for run in runs if declines(fits[0], run.module, run.x) is None))
        fits = _fit_layout(stock, fits, shapes)
        if len(fits) > 1:
            raise _Unknown("two answers fit: " + " and ".join(_describe(candidate) for candidate in fits[:2]))
        return _fit_dtypes(stock, fits[0], shapes[0])


def _argument(module: nn.Module) -> str:
    """The name of the one tensor that the forward needs."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(needed) != 1 or parameters[0].name != needed[0]:
        raise _Unknown(f"its forward takes ({', '.join(needed)}), not one tensor")
    return needed[0]


# --- runs of the stock forward -------------------------------------------------------------------------


def _twin(module: nn.Module, dtype: torch.dtype, **attributes: object) -> nn.Module:
    """The module with random parameters of a dtype, and other attributes, without what wraps its forward."""
    twin = type(module).__new__(type(module))
    twin.__dict__.update({k: v for k, v in vars(module).items() if k not in _NOT_COPIED} | attributes)
    own = module._parameters.items()
    values = {name: None if p is None else (_random(p.shape, 0.8) * 0.5).to(p.device, dtype) for name, p in own}
    twin.__dict__["_parameters"] = {name: None if v is None else nn.Parameter(v, False) for name, v in values.items()}
    return twin


def _random(shape: Sequence[int], mean: float) -> Tensor:
    """The same numbers at each call; torch's own generators stay as they are."""
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu") + mean


def _device(module: nn.Module) -> torch.device:
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def _run(module: nn.Module, x: Tensor, ordinary: bool = True) -> _Run:
    """Calls the stock forward and holds it to what a norm may do."""
    x = x.to(_device(module))
    before = x.clone()
    try:
        y = type(module).forward(module, x)
    except Exception as error:  # Foreign code may raise anything; the report says what.
        given = f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
        raise _StockRaises(f"its forward raises {type(error).__name__} for {given}: {error}") from error
    if not isinstance(y, Tensor):
        raise _Unknown(f"its forward returns a {type(y).__name__}, not a tensor")
    if not torch.equal(x, before):
        raise _Unknown("its forward changes its input")
    return _Run(module, x, y, ordinary)


def _runs_in_float32(stock: nn.Module) -> list[_Run]:
    """Runs of all shapes and scales that it takes, with its own eps and another; ordinary ones first."""
    attributes = _eps_attributes(stock)
    twins = [stock, *(_twin(stock, torch.float32, **{name: _OTHER_EPS}) for name in attributes)]
    runs, refusals = [], []
    for scale, shape, twin in itertools.product(_SCALES, _shapes(stock), twins):
        try:
            runs.append(_run(twin, _random(shape, 0.5) * scale, twin is stock and scale == 1.0))
        except _StockRaises as error:
            refusals.append(error)
    if refusals and not any(run.ordinary for run in runs):
        raise refusals[0]
    return sorted(runs, key=lambda run: not run.ordinary)


def _shapes(module: nn.Module) -> Iterator[tuple[int, ...]]:
    """Shapes with the normalised dimension last, and with it second."""
    trailing = getattr(module, "normalized_shape", None)
    if not (isinstance(trailing, tuple) and trailing):
        sizes = [p.numel() for p in module._parameters.values() if p is not None]
        sizes += [
            v for k, v in vars(module).items() if k in ("dim", "hidden_size", "size") and type(v) is int and v > 4
        ]
        trailing = (sizes[0] if sizes else _SIZE,)
    for leading in ((6,), (2, 3), (2, 2, 3), (2, 2, 2, 3)):
        yield (*leading, *trailing)
    for positions in ((3,), (3, 2), (3, 2, 2)):
        yield (2, trailing[0], *positions)


# --- the formula, in float32 ---------------------------------------------------------------------------


def _fit_formula(stock: nn.Module, argument: str, runs: list[_Run]) -> list[NormSemantics]:
    """Finds op, dimension, eps and offset."""
    scores: dict[NormSemantics, tuple[int, float]] = {}
    for eps in (_eps_attributes(stock), _EPS):
        scores |= {candidate: _compare(candidate, runs) for candidate in _candidates(stock, argument, eps)}
        fits = {candidate: calls for candidate, (calls, deviation) in scores.items() if deviation <= _TOLERANCE}
        # On inputs of rank 2 the last dimension is also the second: what explains more inputs is the answer.
        if fits:
            return [candidate for candidate, calls in fits.items() if calls == max(fits.values())]
    if not scores:
        raise _Unknown(f"no candidate has its parameters ({', '.join(stock._parameters)})")
    nearest, (_, deviation) = min(scores.items(), key=lambda item: (-item[1][0], item[1][1]))
    raise _Unknown(f"it computes no norm that is known; the nearest is {_describe(nearest)}, off by {deviation:.1e}")


def _eps_attributes(module: nn.Module) -> list[str]:
    return [k for k, v in vars(module).items() if "eps" in k and (v is None or type(v) is float)]


def _candidates(module: nn.Module, argument: str, eps_values: Iterable[str | float]) -> Iterator[NormSemantics]:
    """Every formula that has a place for all parameters of the module."""
    names = [name for name, p in module._parameters.items() if p is not None]
    # An attribute that holds nothing now is named all the same: it may hold a parameter one day.
    there = [*names, *(name for name in PARAMETERS if name not in names and is_empty(module, name))]
    weight = next((name for name in there if name in _WEIGHTS), None)
    bias = next((name for name in there if name in _BIASES), None)
    if set(names) - {weight, bias}:
        return
    dims: list[int | str] = [-1, 1]
    layer_norms: list[dict[str, str]] = [{}]
    if isinstance(getattr(module, "normalized_shape", None), tuple):
        dims = ["normalized_shape", 1]
        layer_norms += [{"layout": "channels_last"}]
    rms_norms: list[dict[str, float]] = [
        {"weight_offset": offset, "clamp_eps": clamp}
        for offset in ((0.0, 1.0) if weight in names else (0.0,))
        for clamp in (False, True)
    ]
    for eps, dim in itertools.product(eps_values, dims):
        common = NormSemantics("layer_norm", argument, weight, bias, eps, dim=dim)
        for options in layer_norms if dim == dims[0] else layer_norms[:1]:
            yield replace(common, **options)  # type: ignore[arg-type]
        optional = isinstance(eps, str) and getattr(module, eps) is None
        for numbers in rms_norms:
            yield replace(common, op="rms_norm", optional_eps=optional, **numbers)  # type: ignore[arg-type]


def is_empty(module: nn.Module, name: str) -> bool:
    """Whether there is such an attribute, holding None or the number 0 in the place of a parameter."""
    value = getattr(module, name, "missing")
    return value is None or (type(value) is float and value == 0.0)


def _compare(candidate: NormSemantics, runs: list[_Run]) -> tuple[int, float]:
    """With how many calls a candidate was compared, and how far from stock it was at worst.

    The guard of each call sends those that it may not serve to stock. What fails ordinary ones is compared no further.
    """
    calls, worst = 0, 0.0
    for run in runs:
        if worst > _TOLERANCE and not run.ordinary:
            break
        if declines(candidate, run.module, run.x) is None:
            calls, worst = calls + 1, max(worst, _deviation(candidate, run))
    return calls, worst if calls else math.inf


def _deviation(candidate: NormSemantics, run: _Run) -> float:
    """The largest difference of two elements, relative to the stock element and the root mean square."""
    y, stock = apply(candidate, run.module, run.x, provider="eager").double(), run.y.double()
    if y.shape != stock.shape:
        return math.inf
    size = stock.abs() + stock.square().mean().sqrt()
    deviation = ((y - stock).abs() / size.clamp_min(1e-300)).max().item()
    return math.inf if math.isnan(deviation) else deviation


def _describe(candidate: NormSemantics) -> str:
    weight = "no weight" if candidate.weight is None else candidate.weight
    offset = "1 + " if candidate.weight_offset else ""
    kind = "clamped by" if candidate.clamp_eps else "plus"
    return f"{candidate.op} over {candidate.dim} {kind} eps={candidate.eps} with {offset}{weight}"


# --- strides, rounding and dtype of the result ---------------------------------------------------------


def _fit_layout(stock: nn.Module, fits: list[NormSemantics], shapes: list[torch.Size]) -> list[NormSemantics]:
    """Finds which strides the class gives to the result for inputs that are not contiguous."""
    views = [_random(shape, 0.0) for shape in shapes if len(shape) > 2]
    views = [x.transpose(*order).contiguous().transpose(*order) for x in views for order in ((-1, 1), (0, 1))]
    runs = [_run(stock, x) for x in views]
    laid_out = [
        candidate if candidate.layout == "channels_last" else replace(candidate, layout=layout)
        for candidate in fits
        for layout in ("contiguous", "preserve")
    ]
    fits = [
        candidate
        for candidate in dict.fromkeys(laid_out)
        if all(apply(candidate, run.module, run.x, provider="eager").stride() == run.y.stride() for run in runs)
    ]
    if not fits:
        raise _Unknown("it lays out its result in memory as no candidate does")
    return fits


def _fit_dtypes(stock: nn.Module, candidate: NormSemantics, shape: torch.Size) -> NormSemantics:
    """Finds where the class rounds and which dtype it returns; of several that fit, the nearest."""
    variants = [candidate]
    if candidate.op == "rms_norm" and candidate.weight in stock._parameters:
        variants = [
            replace(candidate, rounding=rounding, output=output)
            for rounding in ("once", "weight", "input")
            for output in ("input", "weight", "promote")
        ]
    x = _random(shape, 0.5)
    uniform = [_run(_twin(stock, dtype), x.to(dtype)) for dtype in _HALF]
    mixes = ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16))
    fits: dict[NormSemantics, float] = {}
    try:
        mixed = [_run(_twin(stock, own), x.to(given)) for given, own in mixes if any(True for _ in stock.parameters())]
        fits = _fit_half(variants, uniform + mixed)
    except _StockRaises:
        pass
    fits = fits or _fit_half([replace(variant, mixed_dtypes=False) for variant in variants], uniform)
    if not fits:
        raise _Unknown("it computes a known norm in float32, but rounds otherwise in half precision")
    return min(fits, key=lambda variant: fits[variant])


def _fit_half(variants: list[NormSemantics], runs: list[_Run]) -> dict[NormSemantics, float]:
    """The variants that agree with stock within rounding and in the dtype, and their mean deviations from it."""
    fits = {}
    for variant in variants:
        total = 0.0
        for run in runs:
            if declines(variant, run.module, run.x) is not None:
                break
            y = apply(variant, run.module, run.x, provider="eager")
            dtypes = (run.x.dtype, *(p.dtype for p in run.module.parameters()))
            coarsest = torch.bfloat16 if torch.bfloat16 in dtypes else torch.float16
            rounding = torch.finfo(coarsest).eps
            if y.dtype != run.y.dtype or _deviation(variant, run) > _HALF_ROUNDINGS * rounding:
                break
            total += (y.double() - run.y.double()).abs().mean().item()
        else:
            fits[variant] = total
    return fits
