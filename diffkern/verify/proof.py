"""Proves, on the device and with the weights at hand, that a fused forward keeps the numerical contract.

The reference is computed in float64: for a norm from its semantics, for a block by its stock forward. The constants are
those of :mod:`~diffkern.verify.contract`. These things must hold:

1. In float32 the stock forward of a norm agrees with that reference to a few float32 roundings. This proves
   the semantics: a class that changed its meaning upstream fails here.
2. ``numerics="fast"``: error(fused) <= 1.05 error(stock) + 1e-6 against the reference, over at least 64
   random rows in the dtype of the call. ``numerics="exact"``: fused and stock are equal bit for bit.
   ``numerics="fp8"``: as "fast", with an allowance that a layer in fp8 states.
3. The same for a short call and for a second run, where the ratio is a matter of luck, and one rounding of the output
   dtype is allowed on top.
4. The fused forward writes neither into its inputs nor into its weights, and returns no memory of its inputs, unless
   the stock forward does the same. Both run on copies, the stock one first.
5. On the first real input that a norm meets on a device and in a dtype that injection could not see, 2 to 4 hold again.
   A block is proven on random input then, too: its cost in float64 grows with the square of the tokens.

A proof that raises has failed, for whatever reason. It leaves the global state of torch as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from diffkern.cache import checks_paused
from diffkern.providers import NoProviderError
from diffkern.providers.foreign import is_of_user, preserved, summary
from diffkern.providers.hub import public_name, refusals_raise
from diffkern.verify import gradients
from diffkern.verify.contract import FEW_ROWS, RATIO, ROWS, SLACK
from diffkern.verify.gain import Shared
from diffkern.verify.isolation import Copy, snapshot
from diffkern.verify.measures import Measurement, as_one, relative_error

if TYPE_CHECKING:
    from diffkern.verify.fusion import Fusion


class Verifier:
    """Runs proofs and remembers them: modules of one kind, dtype, device and provider share one."""

    def __init__(self, numerics: str) -> None:
        self.exact = numerics == "exact"
        self._ledger: dict[Hashable, Measurement | None] = {}
        self.costs: Shared = {}  # what calls of proven modules take, which modules of one kind share, too

    def prove(
        self, module: nn.Module, fusion: Fusion, provider: str | None, device: torch.device, dtype: torch.dtype
    ) -> Measurement | None:
        """Proves a site on random input; None if such input would run stock anyway (a dtype mix, say)."""

        def measure() -> Measurement | None:
            copy = fusion.clone_for_verification(module, device, dtype)
            calls = fusion.samples(copy, device, dtype, self.exact)
            if not calls or any(fusion.declines(copy, call) is not None for call in calls):
                return None
            reason = fusion.check_semantics(copy)
            proofs = [self._measure(copy, fusion, provider, call, reason) for call in calls]
            short = [call for call in fusion.short_samples(copy, device, dtype) if fusion.declines(copy, call) is None]
            lost = (proof for call in short if not (proof := self._measure(copy, fusion, provider, call, None)).passed)
            return next(lost, None) or min(proofs, key=_margin)

        return self._remembered(("result", fusion.kind(module), device, dtype, provider), measure)

    def prove_gradients(
        self,
        module: nn.Module,
        fusion: Fusion,
        provider: str | None,
        device: torch.device,
        dtype: torch.dtype,
        call: Any = None,
    ) -> Measurement | None:
        """Proves on random input, or on a sample of ``call`` as its variant asks, that a backward keeps the contract.

        None if there was nothing to prove: no sample, or a fusion whose gradients are not proven apart.
        """
        variant = None if call is None else fusion.variant(module, call)
        is_sampled = call is None or variant == fusion.variant(module, None)

        def measure() -> Measurement | None:
            copy = fusion.clone_for_verification(module, device, dtype)
            calls = fusion.samples(copy, device, dtype, self.exact) if is_sampled else ()
            if not calls and call is not None and variant is not None:
                calls = [Copy(fusion.first_call_sample(call)).call]
            calls = [call for call in calls if fusion.declines(copy, call) is None]
            proofs = [gradients.measure(fusion, copy, provider, call, self.exact) for call in calls]
            return min((proof for proof in proofs if proof is not None), key=_margin, default=None)

        return self._remembered(("gradients", (fusion.kind(module), variant), device, dtype, provider), measure)

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

            def measure() -> Measurement:
                copy = fusion.clone_for_verification(module, x.device, x.dtype)
                return self._measure(copy, fusion, provider, sample, None)

            return _guarded(measure, x.device, x.dtype, provider)

    def _remembered(self, key: tuple[Any, ...], measure: Callable[[], Measurement | None]) -> Measurement | None:
        what, _, device, dtype, provider = key
        if key not in self._ledger:
            proof = _guarded(measure, device, dtype, provider, what == "gradients")
            if proof is None and what == "result":
                return None  # what declined its samples may take them another time
            self._ledger[key] = proof
        return self._ledger[key]

    def _measure(
        self, module: nn.Module, fusion: Fusion, provider: str | None, call: Any, reason: str | None
    ) -> Measurement:
        x = fusion.primary_input(call)
        weights, by_stock = snapshot(module), Copy(call)
        result = fusion.stock(module, by_stock.call)
        shared, stock = by_stock.shared_with(result), as_one(result).clone()
        structure = pytree.tree_structure(result)
        reference = as_one(fusion.reference(module, Copy(call).call))
        stock_error = relative_error(stock, reference)

        def run() -> tuple[Tensor, float, bool, str | None]:
            copy = Copy(call)
            result = fusion.compute(module, copy.call, provider, fusion.stock_pieces(module, copy.call))
            fused = as_one(result)
            error = relative_error(fused, reference)
            identical = fused.dtype == stock.dtype and torch.equal(fused, stock)
            verdict = None if pytree.tree_structure(result) == structure else "returns another structure than stock"
            verdict = verdict or self._verdict(fused, stock, error, stock_error, identical, fusion.allowance)
            tolerance = 0.0 if self.exact else 2 * RATIO * stock_error + SLACK + fusion.allowance
            verdict = verdict or _side_effects(by_stock, copy, weights, shared, result, tolerance)
            return fused, error, identical, verdict

        with refusals_raise():
            chosen = fusion.choose(module, provider, x.device, x.dtype).provider
            fused, error, identical, verdict = run()
            kept = fused.clone()
            *_, again = run()
        reason = reason or verdict or (f"in its second run: {again}" if again else None)
        if reason is None and not torch.equal(_as_integers(kept), _as_integers(fused)):
            reason = "its second run writes into the result of the first"
        return Measurement.of(x, chosen, error, stock_error, identical, reason or "")

    def _verdict(
        self, fused: Tensor, stock: Tensor, fused_error: float, stock_error: float, identical: bool, allowance: float
    ) -> str | None:
        if fused.dtype != stock.dtype or fused.shape != stock.shape:
            return f"gives {fused.dtype} {tuple(fused.shape)} instead of {stock.dtype} {tuple(stock.shape)}"
        if identical:
            return None
        if self.exact:
            share = (fused != stock).double().mean().item()
            few = "fewer than 0.01%" if share < 1e-4 else f"{share:.2%}"
            return f"not bit-identical to stock on this device: {few} of the elements differ"
        slack = allowance + SLACK
        if fused.numel() < ROWS * fused.shape[-1]:  # an error over few numbers is partly luck
            slack += torch.finfo(fused.dtype).eps + FEW_ROWS * allowance
        if not torch.equal(torch.isfinite(fused), torch.isfinite(stock)):
            return "infinite or NaN where stock is finite, or the reverse"
        if not fused_error <= RATIO * stock_error + slack:
            return f"error {fused_error:.2e} against stock's {stock_error:.2e}"
        return None


def _guarded(
    measure: Callable[[], Measurement | None],
    device: torch.device,
    dtype: torch.dtype,
    provider: str | None,
    of_gradients: bool = False,
) -> Measurement | None:
    """Runs a proof; one that raises has failed.

    Kernels of other packages come without a word on what they cannot do, and what a user put into a model may not run
    on samples at all.
    """
    try:
        with preserved(device) as changed, checks_paused():
            proof = measure()
            if settings := changed():
                raise NoProviderError(f"it changes {settings}")
            return proof
    except BaseException as error:
        if is_of_user(error):
            raise
        none, name = float("nan"), public_name(provider or "auto")
        reason = str(error) if isinstance(error, NoProviderError) else f"failed: {summary(error)}"
        return Measurement(str(device), _name(dtype), name, none, none, False, False, reason, of_gradients)


def _side_effects(
    by_stock: Copy, by_fused: Copy, weights: Copy, shared: set[int], result: Any, tolerance: float
) -> str | None:
    """What a fused run did to its inputs and weights that a stock run does not do, or None."""
    if any(weights.written()):
        return "it writes into its weights"
    if by_stock.written() != by_fused.written():
        return "it writes into its inputs where stock does not, or the reverse"
    if not by_stock.difference(by_fused) <= tolerance:
        return "it writes something else into its inputs than stock does"
    if not by_fused.shared_with(result) <= shared:
        return "it returns the memory of an input, which stock does not"
    return None


def _as_integers(tensor: Tensor) -> Tensor:
    """The same bits, of which NaN is equal to itself."""
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def _margin(proof: Measurement) -> tuple[bool, float]:
    """How much room a proof has left; failures have least."""
    return proof.passed, RATIO * proof.stock - proof.fused


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
