"""A backend of comfy-kitchen that holds what is proven, and is in force while a model that asked for it runs.

It serves every model of ComfyUI that calls comfy-kitchen, whatever its blocks look like. It is chosen by a setting of
the running thread, so no other model sees it, and a call that it cannot take goes to comfy-kitchen's own backends.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from diffkern.cache.in_call import one_model_call
from diffkern.comfyui.kitchen import FUNCTIONS, KitchenBackend, unfit
from diffkern.comfyui.kitchen_fusion import KitchenFusion
from diffkern.comfyui.patcher import APPLY_MODEL, ON_CLEANUP
from diffkern.injection import InjectionReport
from diffkern.injection.counts import CallCounts
from diffkern.providers import NoProviderError, select
from diffkern.verify.proof import Verifier

#: When to serve: where comfy-kitchen has nothing but plain torch, always, never.
CHOICES = ("auto", "on", "off")

#: Under which the wrapper is known to the model patcher.
KEY = "diffkern.kitchen"

_NOT_THERE, _ITS_OWN = "this comfy-kitchen does not have it", "a backend of its own serves it"
_OTHER_BITS = "not bit-identical on this device"
_NO_KERNEL = "diffkern has nothing but plain PyTorch here, either"
#: Reasons that ask nothing of a user who left the choice to diffkern.
_EXPECTED = {_NOT_THERE, _ITS_OWN, _NO_KERNEL, _OTHER_BITS}

_log = logging.getLogger("diffkern")

#: The counts of the model that runs in this context.
_counts: ContextVar[CallCounts | None] = ContextVar("_counts", default=None)


def prepare(
    choice: str, device: torch.device, dtype: torch.dtype, numerics: str, provider: str | None, report: InjectionReport
) -> KitchenService | None:
    """Proves the functions on ``device`` and registers those that hold; returns what puts them in force, or None.

    ``choice`` is one of :data:`CHOICES`, ``numerics`` ``"fast"`` or ``"exact"``. The notes of the report say why a
    function is not served, and how many calls were, up to the last one of the model.
    """
    if choice == "off":
        return None
    try:
        from comfy_kitchen.constraints import FunctionConstraints, ValidationResult
        from comfy_kitchen.registry import registry
    except ImportError as error:
        if choice == "on":
            report.notes.append(f"comfy-kitchen cannot be served: {error}")
        return None
    kitchen = KitchenBackend(numerics == "exact", provider)
    verifier = Verifier(numerics)
    refusals = {name: _refusal(name, kitchen, verifier, choice, device, dtype, registry) for name in FUNCTIONS}
    served = [name for name, reason in refusals.items() if reason is None]
    told = set(refusals.values()) - (_EXPECTED if choice == "auto" else set()) - {None}
    for reason in sorted(told, key=str):
        names = ", ".join(name for name, own in refusals.items() if own == reason)
        report.notes.append(f"comfy-kitchen keeps {names}: {reason}")
    if not served:
        return None

    def rule(name: str) -> Callable[[Mapping[str, Any]], Any]:
        def check(arguments: Mapping[str, Any]) -> Any:
            reason = unfit(name, arguments, device, dtype, kitchen.exact)
            counts = _counts.get()
            if counts is not None and reason is None:
                counts.add_fused()
            elif counts is not None and reason is not None:
                counts.add_stock(f"{name}: {reason[0]} is {reason[1]}")
            return ValidationResult.ok() if reason is None else ValidationResult.fail(*reason)

        return check

    backend = f"diffkern {numerics} {choice} {provider or 'auto'} {device} {dtype}"
    registry.register(backend, kitchen, {name: FunctionConstraints(call_rules=(rule(name),)) for name in served})
    return KitchenService(backend, report)


class KitchenService:
    """The backend in force around every call of one model and its clones.

    Attributes:
        counts: Calls of functions that are served: those that were, and those that went to comfy-kitchen, by reason.
    """

    def __init__(self, backend: str, report: InjectionReport) -> None:
        self.counts = CallCounts()
        self._backend = backend
        self._note = ""
        self._report = weakref.ref(report)  # it knows the modules of one model, and the service goes on to its clones

    def run(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the model; the note in the report says afterwards what was served."""
        from comfy_kitchen.registry import registry

        token = _counts.set(self.counts)
        try:
            with one_model_call(), registry.use_backend(self._backend):
                return executor(*args, **kwargs)
        finally:
            _counts.reset(token)
            self._update_report()

    def tell(self, model: Any) -> None:
        """Called by ComfyUI after sampling: one line in its log."""
        if said := str(self):
            _log.info("diffkern: %s", said)

    def __str__(self) -> str:
        served, reasons = self.counts.fused_calls, self.counts.stock_calls
        if not served and not reasons:  # as with most models
            return ""
        stock = f", {reasons.total()} not: {reasons.most_common(1)[0][0]}" if reasons else ""
        return f"comfy-kitchen: {served} calls served so far{stock}"

    def _update_report(self) -> None:
        report, note = self._report(), str(self)
        if report is not None and note:
            report.notes[:] = [*(other for other in report.notes if other != self._note), note]
        self._note = note


def install(model: Any, service: KitchenService) -> None:
    """Puts the backend in force around every call of a clone of a model, and of its clones."""
    model.add_wrapper_with_key(APPLY_MODEL, KEY, service.run)
    model.add_callback_with_key(ON_CLEANUP, KEY, service.tell)


def service_of(model: Any) -> KitchenService | None:
    """The service that is installed on a clone of a model, or None."""
    wrappers = model.get_wrappers(APPLY_MODEL, KEY)
    service: KitchenService | None = wrappers[0].__self__ if wrappers else None
    return service


def remove(model: Any) -> None:
    """Takes the backend from a clone of a model."""
    model.remove_wrappers_with_key(APPLY_MODEL, KEY)
    model.remove_callbacks_with_key(ON_CLEANUP, KEY)


def _refusal(
    name: str,
    kitchen: KitchenBackend,
    verifier: Verifier,
    choice: str,
    device: torch.device,
    dtype: torch.dtype,
    registry: Any,
) -> str | None:
    """Says why a function is not served, or None if it shall be and keeps the contract."""
    fusion = KitchenFusion(name, kitchen)
    owner = fusion.owner(registry, device, dtype)
    if owner is None:
        return _NOT_THERE
    if choice == "auto" and owner != "eager":
        return _ITS_OWN
    try:
        provider = select(fusion.op, device, (dtype,), kitchen.provider).provider
    except NoProviderError as error:
        return str(error)
    if choice == "auto" and provider == "eager" and kitchen.provider is None:
        return _NO_KERNEL
    # Half dtypes are rounded float32: what is equal there bit for bit need not be so for other inputs.
    dtypes = {dtype, torch.float32} if verifier.exact else {dtype}
    proofs = [verifier.prove(nn.Identity(), fusion, kitchen.provider, device, each) for each in dtypes]
    failed = [proof for proof in proofs if proof is not None and not proof.passed]
    if not failed:
        return None
    return _OTHER_BITS if verifier.exact else failed[0].reason
