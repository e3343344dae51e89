"""Proves, on the device and with the weights at hand, that a fused forward keeps the numerical contract.

The reference is computed in float64 from the module's semantics. Three things must hold:

1. In float32 the stock forward agrees with that reference to a few float32 roundings. This proves the
   semantics: a class that changed its meaning upstream fails here.
2. ``numerics="fast"``: error(fused) <= 1.05 error(stock) + 1e-6 against the reference, over at least 64
   random rows in the dtype of the call. ``numerics="exact"``: fused and stock are equal bit for bit.
3. On the first real input of a device and dtype that injection could not see, the same again; with fewer
   rows than 64 the ratio is a matter of luck, and one rounding of the output dtype is allowed instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable

import torch
from torch import Tensor, nn

from diffkern.injection.report import Measurement
from diffkern.injection.samples import random_input, sample_shape, stand_in
from diffkern.matching import NormSemantics, apply, declines, full_name
from diffkern.providers import KERNEL_DTYPES, Choice, NoProviderError, select, use_provider

#: error(fused) may be this much of error(stock), ...
RATIO = 1.05
#: ... plus this much, relative.
SLACK = 1e-6
#: Rows of the random proofs.
ROWS = 64
#: Elements of the random proofs of bit identity, where one differing element decides.
EXACT_ELEMENTS = 1 << 18
#: How far the stock forward may be from the semantics in float32, relative.
SEMANTIC_TOLERANCE = 1e-5


class Verifier:
    """Runs proofs and remembers them: sites of one class, shape, dtype and provider share one.

    Args:
        numerics: ``"fast"`` or ``"exact"``.
    """

    def __init__(self, numerics: str) -> None:
        self.exact = numerics == "exact"
        self._ledger: dict[Hashable, Measurement] = {}
        self._semantics: dict[Hashable, str | None] = {}

    def prove(
        self,
        module: nn.Module,
        semantics: NormSemantics,
        provider: str | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Measurement | None:
        """Proves a site on random input; None if such input would run stock anyway (a dtype mix, say)."""
        shape = sample_shape(semantics, module, self._rows(semantics, module))
        key = (full_name(type(module)), semantics, shape, _parameter_dtypes(module), device, dtype, provider)
        if key in self._ledger:
            return self._ledger[key]
        copy = stand_in(module, device)
        x = random_input(shape, device, dtype)
        if declines(semantics, copy, x) is not None:
            return None
        reason = self._check_semantics(copy, semantics, shape)
        measurement = self._measure(copy, semantics, provider, x, reason)
        self._ledger[key] = measurement
        return measurement

    def prove_call(self, module: nn.Module, semantics: NormSemantics, provider: str | None, x: Tensor) -> Measurement:
        """Proves a site on random input and on the real input of its first call there."""
        with torch.no_grad():
            random = self.prove(module, semantics, provider, x.device, x.dtype)
            if random is not None and not random.passed:
                return random
            return self._measure(stand_in(module, x.device), semantics, provider, x.detach(), None)

    def _rows(self, semantics: NormSemantics, module: nn.Module) -> int:
        if not self.exact:
            return ROWS
        shape = sample_shape(semantics, module, 1)
        return max(ROWS, EXACT_ELEMENTS // max(shape.numel(), 1))

    def _check_semantics(self, module: nn.Module, semantics: NormSemantics, shape: torch.Size) -> str | None:
        key = (full_name(type(module)), semantics, shape)
        if key not in self._semantics:
            module = stand_in(module, torch.device("cpu"), torch.float32)
            x = random_input(shape, torch.device("cpu"), torch.float32)
            error = _error(_stock(module, x), _reference(module, semantics, x))
            self._semantics[key] = (
                None
                if error <= SEMANTIC_TOLERANCE
                else f"the stock forward is {error:.1e} away from what its class is known to compute"
            )
        return self._semantics[key]

    def _measure(
        self, module: nn.Module, semantics: NormSemantics, provider: str | None, x: Tensor, reason: str | None
    ) -> Measurement:
        stock = _stock(module, x)
        reference = _reference(module, semantics, x)
        try:
            chosen = choose_provider(module, semantics, provider, x.device, x.dtype).provider
            fused = apply(semantics, module, x, provider=provider)
        except NoProviderError as error:
            none = float("nan")
            return Measurement(str(x.device), _name(x.dtype), provider or "auto", none, none, False, False, str(error))
        fused_error, stock_error = _error(fused, reference), _error(stock, reference)
        identical = fused.dtype == stock.dtype and torch.equal(fused, stock)
        reason = reason or self._verdict(fused, stock, fused_error, stock_error, identical)
        return Measurement(
            str(x.device), _name(x.dtype), chosen, fused_error, stock_error, identical, reason is None, reason or ""
        )

    def _verdict(
        self, fused: Tensor, stock: Tensor, fused_error: float, stock_error: float, identical: bool
    ) -> str | None:
        if fused.dtype != stock.dtype or fused.shape != stock.shape:
            return f"gives {fused.dtype} {tuple(fused.shape)} instead of {stock.dtype} {tuple(stock.shape)}"
        if identical:
            return None
        if self.exact:
            share = (fused != stock).double().mean().item()
            return f"not bit-identical to stock on this device: {share:.2%} of the elements differ"
        slack = SLACK if fused.numel() >= ROWS * fused.shape[-1] else SLACK + torch.finfo(fused.dtype).eps
        if not torch.equal(torch.isfinite(fused), torch.isfinite(stock)):
            return "infinite or NaN where stock is finite, or the reverse"
        if not fused_error <= RATIO * stock_error + slack:
            return f"error {fused_error:.2e} against stock's {stock_error:.2e}"
        return None


def choose_provider(
    module: nn.Module, semantics: NormSemantics, provider: str | None, device: torch.device, dtype: torch.dtype
) -> Choice:
    """Says who will compute the module for inputs of ``dtype`` on ``device``.

    Raises:
        NoProviderError: nobody can, or the one asked for cannot.
    """
    parameters = (parameter.dtype for parameter in module.parameters() if parameter.dtype in KERNEL_DTYPES)
    return select(semantics.op, device, tuple(dict.fromkeys((dtype, *parameters))), provider)


def _stock(module: nn.Module, x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        # torch warns where a mix of dtypes is slow; the user did not ask for this call.
        warnings.simplefilter("ignore")
        result: Tensor = type(module).forward(module, x)
    return result


def _reference(module: nn.Module, semantics: NormSemantics, x: Tensor) -> Tensor:
    with use_provider("eager"):
        return apply(semantics, stand_in(module, x.device, torch.float64), x.double())


def _error(y: Tensor, reference: Tensor) -> float:
    """Relative error over the elements that are finite in both."""
    y = y.double()
    finite = torch.isfinite(y) & torch.isfinite(reference)
    difference = torch.where(finite, y - reference, 0.0)
    length = torch.linalg.vector_norm(torch.where(finite, reference, 0.0))
    return float(torch.linalg.vector_norm(difference) / length.clamp_min(1e-30))


def _parameter_dtypes(module: nn.Module) -> tuple[torch.dtype | None, ...]:
    return tuple(None if p is None else p.dtype for p in module._parameters.values())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
