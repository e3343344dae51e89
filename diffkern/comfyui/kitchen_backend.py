"""A backend of comfy-kitchen that holds what is proven, and is in force while a model that asked for it runs.

It serves every model of ComfyUI that calls comfy-kitchen, whatever its blocks look like. It is chosen by a setting of
the running thread, so no other model sees it, and a call that it cannot take goes to comfy-kitchen's own backends.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from diffkern.cache.in_call import one_model_call
from diffkern.comfyui.kitchen import FUNCTIONS, INPUTS, KitchenBackend, unfit
from diffkern.comfyui.patcher import APPLY_MODEL, ON_CLEANUP
from diffkern.injection import InjectionReport
from diffkern.providers import Choice, NoProviderError, select
from diffkern.verify.counts import CallCounts
from diffkern.verify.fusion import Fusion
from diffkern.verify.proof import Verifier
from diffkern.verify.samples import Draws

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
    fusions = [KitchenFusion(name, kitchen) for name in FUNCTIONS]
    refusals = {fusion.name: _refusal(fusion, verifier, choice, device, dtype, registry) for fusion in fusions}
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
    fusion: KitchenFusion, verifier: Verifier, choice: str, device: torch.device, dtype: torch.dtype, registry: Any
) -> str | None:
    """Says why a function is not served, or None if it shall be and keeps the contract."""
    kitchen = fusion.kitchen
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


# --- functions as the proofs see them ------------------------------------------------------------------------

_BATCH, _HEADS, _TOKENS, _SIZE = 2, 6, 45, 128
#: Tokens where one differing bit decides.
_EXACT_TOKENS = 400


class Samples(Draws):
    """Random tensors for sample calls."""

    def rotations(self, *shape: int) -> Tensor:
        """Draws rotation matrices ``[..., 2, 2]``."""
        angles = torch.randn(shape, generator=self._generator, device="cpu") * 3
        cos, sin = angles.cos(), angles.sin()
        matrices: Tensor = torch.stack((cos, -sin, sin, cos), dim=-1).unflatten(-1, (2, 2))
        return matrices.to(device=self.device, dtype=self.dtype)


@dataclass(frozen=True)
class KitchenFusion(Fusion):
    """One function. A call is the tuple of its arguments; there is no module."""

    name: str
    kitchen: KitchenBackend

    @property
    @override
    def op(self) -> str:
        return FUNCTIONS[self.name][0]

    def owner(self, registry: Any, device: torch.device, dtype: torch.dtype) -> str | None:
        """Returns the backend that comfy-kitchen itself would choose, or None if it does not have the function."""
        from comfy_kitchen.exceptions import NoCapableBackendError

        call = self.samples(nn.Identity(), device, dtype, False)[0]
        try:
            backend: str = registry.get_capable_backend(self.name, self._named(call))
        except NoCapableBackendError:
            return None
        return backend

    def _named(self, call: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return dict(zip(FUNCTIONS[self.name][1], call, strict=True))

    @override
    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return args

    @override
    def primary_input(self, call: tuple[Tensor, ...]) -> Tensor:
        return call[0]

    @override
    def compute(self, module: nn.Module, call: tuple[Tensor, ...], provider: str | None, stock: tuple[str, ...]) -> Any:
        return getattr(self.kitchen, self.name)(**self._named(call))

    @override
    def kind(self, module: nn.Module) -> Hashable:
        # A variant that writes its result into its input needs no proof of its own: the numbers are the same.
        return self.name.removesuffix("_"), self.kitchen

    @override
    def choose(self, module: nn.Module, provider: str | None, device: torch.device, dtype: torch.dtype) -> Choice:
        return select(self.op, device, (dtype,), provider)

    @override
    def samples(
        self, module: nn.Module, device: torch.device, dtype: torch.dtype, exact: bool
    ) -> Sequence[tuple[Tensor, ...]]:
        random, tokens = Samples(device, dtype), _EXACT_TOKENS if exact else _TOKENS
        if self.op == "norm_modulate":
            x = random(_BATCH, tokens, _SIZE)
            return [(x, *(random(_BATCH, rows, _SIZE, scale=0.5) for _ in range(2))) for rows in (1, tokens)]
        kinds = (torch.float32,) if exact else dict.fromkeys((torch.float32, dtype))
        calls = []
        for kind in kinds:
            matrices = Samples(device, kind).rotations(1, 1, tokens, _SIZE // 2)
            heads = [random(_BATCH, _HEADS, tokens, _SIZE) for name in FUNCTIONS[self.name][1] if name in INPUTS]
            scales = [random(_SIZE, scale=0.2) + 1 for name in FUNCTIONS[self.name][1] if name.endswith("scale")]
            calls.append((*heads, matrices, *scales))
        return calls

    @override
    def stock(self, module: nn.Module, call: tuple[Tensor, ...]) -> Any:
        import comfy_kitchen

        return getattr(comfy_kitchen, self.name)(*call)

    @override
    def reference(self, module: nn.Module, call: tuple[Tensor, ...]) -> Any:
        """Runs comfy-kitchen's plain torch, without its check of dtypes."""
        from comfy_kitchen.backends import eager

        return getattr(eager, self.name)(*(tensor.double() for tensor in call))
