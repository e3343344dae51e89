"""Proves, on the device and with the weights at hand, that a fused forward keeps the numerical contract.

The reference is computed in float64: for a norm from its semantics, for a block by its stock forward. Three
things must hold:

1. In float32 the stock forward of a norm agrees with that reference to a few float32 roundings. This proves
   the semantics: a class that changed its meaning upstream fails here.
2. ``numerics="fast"``: error(fused) <= 1.05 error(stock) + 1e-6 against the reference, over at least 64
   random rows in the dtype of the call. ``numerics="exact"``: fused and stock are equal bit for bit.
   ``numerics="fp8"``: as "fast", with an allowance that the recipe of a block states for its products in 8 bits.
3. On the first real input that a norm meets on a device and in a dtype that injection could not see, the same
   again; with fewer rows than 64 the ratio is a matter of luck, and one rounding of the output dtype is allowed
   instead. A block is proven on random input then, too: its cost in float64 grows with the square of the tokens.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from diffkern.providers import NoProviderError
from diffkern.providers.hub import public_name, refusals_raise
from diffkern.verify import gradients
from diffkern.verify.gradients import TrainingErrors
from diffkern.verify.measures import Measurement, relative_error

if TYPE_CHECKING:
    from diffkern.injection.fusion import Fusion

#: error(fused) may be this much of error(stock), ...
RATIO = 1.05
#: ... plus this much, relative.
SLACK = 1e-6
#: Rows from which on the ratio means something.
ROWS = 64


class Verifier:
    """Runs proofs and remembers them: modules of one kind, dtype, device and provider share one.

    Args:
        numerics: ``"fast"``, ``"exact"`` or ``"fp8"``.
    """

    def __init__(self, numerics: str) -> None:
        self.exact = numerics == "exact"
        self._ledger: dict[Hashable, Measurement | None] = {}
        self._semantics: dict[Hashable, str | None] = {}
        self._gradients: dict[Hashable, Measurement | None] = {}

    def prove(
        self, module: nn.Module, fusion: Fusion, provider: str | None, device: torch.device, dtype: torch.dtype
    ) -> Measurement | None:
        """Proves a site on random input; None if such input would run stock, or raise, anyway (a dtype mix, say)."""
        kind = fusion.kind(module)
        key = (kind, device, dtype, provider)
        if key not in self._ledger:
            copy = fusion.clone_for_verification(module, device)
            calls = fusion.samples(copy, device, dtype, self.exact)
            if not calls or any(fusion.declines(copy, call) is not None for call in calls):
                return None
            if kind not in self._semantics:
                self._semantics[kind] = fusion.check_semantics(copy)
            proofs = [self._measure(copy, fusion, provider, call, self._semantics[kind]) for call in calls]
            self._ledger[key] = min(proofs, key=_margin)
        return self._ledger[key]

    def prove_gradients(
        self, module: nn.Module, fusion: Fusion, provider: str | None, device: torch.device, dtype: torch.dtype
    ) -> Measurement | None:
        """Proves on random input that calls with a backward keep the contract.

        None if there was nothing to prove: no sample, or a fusion whose gradients are not proven apart.
        """
        key = ("gradients", fusion.kind(module), device, dtype, provider)
        if key not in self._gradients:
            copy = fusion.clone_for_verification(module, device)
            calls = fusion.samples(copy, device, dtype, self.exact)
            calls = [call for call in calls if fusion.declines(copy, call) is None]
            proofs = [self._measure_gradients(copy, fusion, provider, call) for call in calls]
            self._gradients[key] = min((proof for proof in proofs if proof is not None), key=_margin, default=None)
        return self._gradients[key]

    def _measure_gradients(
        self, module: nn.Module, fusion: Fusion, provider: str | None, call: Any
    ) -> Measurement | None:
        x = fusion.primary_input(call)
        device, dtype, chosen = str(x.device), _name(x.dtype), public_name(provider or "auto")
        try:
            chosen = fusion.choose(module, provider, x.device, (x.dtype,)).provider
            errors = gradients.measure(fusion, module, provider, call, RATIO)
        except Exception as error:
            none = float("nan")
            return Measurement(device, dtype, chosen, none, none, False, False, _said(error), True)
        if errors is None:
            return None
        reason, (fused, stock) = self._refuse(errors), (errors.fused, errors.stock)
        return Measurement(device, dtype, chosen, fused, stock, errors.identical, reason is None, reason or "", True)

    def _refuse(self, errors: TrainingErrors) -> str | None:
        if errors.identical:
            return None
        if self.exact:
            return "with its gradients it is not bit-identical to stock"
        if errors.alien:
            return f"the stock gradients are {errors.stock:.1e} away from those of what its class is known to compute"
        if not errors.margin >= -SLACK:
            return f"with its gradients it has an error of {errors.fused:.2e} against stock's {errors.stock:.2e}"
        return None

    def prove_call(self, module: nn.Module, fusion: Fusion, provider: str | None, call: Any) -> Measurement | None:
        """Proves a site on random input and on what can be tried of its first real call there.

        None if there was nothing to prove it on.
        """
        x = fusion.primary_input(call)
        with torch.no_grad():
            random = self.prove(module, fusion, provider, x.device, x.dtype)
            sample = fusion.first_call_sample(call)
            if sample is None or (random is not None and not random.passed):
                return random
            return self._measure(fusion.clone_for_verification(module, x.device), fusion, provider, sample, None)

    def _measure(
        self, module: nn.Module, fusion: Fusion, provider: str | None, call: Any, reason: str | None
    ) -> Measurement:
        x = fusion.primary_input(call)
        stock = _as_one(fusion.stock(module, call))
        reference = _as_one(fusion.reference(module, call))
        try:
            with refusals_raise():
                chosen = fusion.choose(module, provider, x.device, (x.dtype,)).provider
                fused = _as_one(fusion.compute(module, call, provider, fusion.stock_pieces(module, call)))
        except Exception as error:  # kernels of other packages come without a word on what they cannot do
            none, name = float("nan"), public_name(provider or "auto")
            return Measurement(str(x.device), _name(x.dtype), name, none, none, False, False, _said(error))
        fused_error, stock_error = relative_error(fused, reference), relative_error(stock, reference)
        identical = fused.dtype == stock.dtype and torch.equal(fused, stock)
        reason = reason or self._verdict(fused, stock, fused_error, stock_error, identical, fusion.allowance)
        return Measurement(
            str(x.device), _name(x.dtype), chosen, fused_error, stock_error, identical, reason is None, reason or ""
        )

    def _verdict(
        self,
        fused: Tensor,
        stock: Tensor,
        fused_error: float,
        stock_error: float,
        identical: bool,
        allowance: float,
    ) -> str | None:
        if fused.dtype != stock.dtype or fused.shape != stock.shape:
            return f"gives {fused.dtype} {tuple(fused.shape)} instead of {stock.dtype} {tuple(stock.shape)}"
        if identical:
            return None
        if self.exact:
            share = (fused != stock).double().mean().item()
            return f"not bit-identical to stock on this device: {share:.2%} of the elements differ"
        slack = allowance
        slack += SLACK if fused.numel() >= ROWS * fused.shape[-1] else SLACK + torch.finfo(fused.dtype).eps
        if not torch.equal(torch.isfinite(fused), torch.isfinite(stock)):
            return "infinite or NaN where stock is finite, or the reverse"
        if not fused_error <= RATIO * stock_error + slack:
            return f"error {fused_error:.2e} against stock's {stock_error:.2e}"
        return None


def _as_one(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The elements of several results as one tensor, of rows of a single element."""
    if isinstance(result, Tensor):
        return result
    return torch.cat([part.reshape(-1, 1) for part in result])


def _said(error: Exception) -> str:
    """Why a provider refused, or what its kernel raised, in one line."""
    if isinstance(error, NoProviderError):
        return str(error)
    lines = str(error).strip().splitlines() or [""]
    return f"failed: {type(error).__name__}: {lines[0]}"


def _margin(proof: Measurement) -> tuple[bool, float]:
    """How much room a proof has left; failures have least."""
    return proof.passed, RATIO * proof.stock - proof.fused


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
