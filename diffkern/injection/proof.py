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

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from diffkern.blocks.norm import apply, declines
from diffkern.injection.report import Measurement
from diffkern.matching import NormSemantics
from diffkern.matching.semantics import full_name, sample_shape
from diffkern.providers import NoProviderError, use_provider

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
        self, module: nn.Module, semantics: NormSemantics, provider: str | None, device: torch.device, dtype: torch.dtype
    ) -> Measurement | None:
        """Proves a site on random input; None if such input would run stock anyway (a dtype mix, say)."""
        shape = sample_shape(semantics, module, self._rows(semantics, module))
        key = (full_name(module), semantics, shape, _parameter_dtypes(module), device, dtype, provider)
        if key in self._ledger:
            return self._ledger[key]
        stand_in = _stand_in(module, device)
        x = _random_input(shape, device, dtype)
        if declines(semantics, stand_in, x) is not None:
            return None
        reason = self._check_semantics(stand_in, semantics, shape)
        measurement = self._measure(stand_in, semantics, provider, x, reason)
        self._ledger[key] = measurement
        return measurement

    def prove_call(self, module: nn.Module, semantics: NormSemantics, provider: str | None, x: Tensor) -> Measurement:
        """Proves a site on random input and on the real input of its first call there."""
        with torch.no_grad():
            random = self.prove(module, semantics, provider, x.device, x.dtype)
            if random is not None and not random.passed:
                return random
            return self._measure(_stand_in(module, x.device), semantics, provider, x.detach(), None)

    def _rows(self, semantics: NormSemantics, module: nn.Module) -> int:
        if not self.exact:
            return ROWS
        shape = sample_shape(semantics, module, 1)
        return max(ROWS, EXACT_ELEMENTS // max(shape.numel(), 1))

    def _check_semantics(self, stand_in: nn.Module, semantics: NormSemantics, shape: torch.Size) -> str | None:
        key = (full_name(stand_in), semantics, shape)
        if key not in self._semantics:
            module = _stand_in(stand_in, torch.device("cpu"), torch.float32)
            x = _random_input(shape, torch.device("cpu"), torch.float32)
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
        chosen = provider or "auto"
        try:
            fused = apply(semantics, module, x, provider=provider)
            chosen = semantics.chosen_provider(module, x, provider)
        except NoProviderError as error:
            return Measurement(str(x.device), _name(x.dtype), chosen, float("nan"), float("nan"), False, False, str(error))
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


def _stock(module: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = type(module).forward(module, x)
    return result


def _reference(module: nn.Module, semantics: NormSemantics, x: Tensor) -> Tensor:
    with use_provider("eager"):
        return apply(semantics, _stand_in(module, x.device, torch.float64), x.double())


def _error(y: Tensor, reference: Tensor) -> float:
    """Relative error over the elements that are finite in both."""
    y = y.double()
    finite = torch.isfinite(y) & torch.isfinite(reference)
    difference = torch.where(finite, y - reference, 0.0)
    length = torch.linalg.vector_norm(torch.where(finite, reference, 0.0))
    return (torch.linalg.vector_norm(difference) / length.clamp_min(1e-30)).item()


def _stand_in(module: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy of ``module`` on ``device`` that shares nothing a run could change, and no hooks.

    A deep copy would drag hooks and their offload maps along. Weights on the meta device have no values;
    random ones take their place.
    """
    copy = type(module).__new__(type(module))
    skipped = ("forward", "_diffkern", "_old_forward", "_hf_hook", "_diffusers_hook")
    state: dict[str, Any] = {key: value for key, value in module.__dict__.items() if key not in skipped}
    for group in ("_parameters", "_buffers"):
        state[group] = {
            name: None if tensor is None else _materialise(tensor, device, dtype)
            for name, tensor in state[group].items()
        }
    state["_parameters"] = {
        name: None if tensor is None else nn.Parameter(tensor, requires_grad=False)
        for name, tensor in state["_parameters"].items()
    }
    copy.__dict__.update(state)
    return copy


def _materialise(tensor: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_meta:
        generator = torch.Generator().manual_seed(0)
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(torch.randn(tensor.shape, generator=generator) + 1)
    return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)


def _random_input(shape: torch.Size, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Rows of different scales around a mean that is not zero, drawn without touching the global state."""
    generator = torch.Generator().manual_seed(20)
    x = torch.randn(shape, generator=generator) + 0.3
    scale = torch.exp2(torch.empty(shape[0], *(1,) * (len(shape) - 1)).uniform_(-3, 3, generator=generator))
    return (x * scale).to(device=device, dtype=dtype)


def _parameter_dtypes(module: nn.Module) -> tuple[torch.dtype | None, ...]:
    return tuple(None if p is None else p.dtype for p in module._parameters.values())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
