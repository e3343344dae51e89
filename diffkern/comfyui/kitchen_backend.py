"""A backend of comfy-kitchen that holds what is proven, and is in force while a model that asked for it runs.

It serves every model of ComfyUI that calls comfy-kitchen, whatever its blocks look like. It is chosen by a setting of
the running thread, so no other model sees it, and a call that it cannot take goes to comfy-kitchen's own backends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from diffkern.comfyui.kitchen import FUNCTIONS, Kitchen, unfit
from diffkern.comfyui.kitchen_fusion import KitchenFusion
from diffkern.injection import InjectionReport
from diffkern.injection.proof import Verifier
from diffkern.injection.report import Site
from diffkern.providers import KERNEL_DTYPES, NoProviderError, select

#: When to serve: where comfy-kitchen has nothing but plain torch, always, never.
CHOICES = ("auto", "on", "off")

PACKAGE = "comfy_kitchen"

#: Under which the wrapper is known to the model patcher.
KEY = "diffkern"
# Name of ComfyUI's WrappersMP.
_APPLY_MODEL = "apply_model"


def prepare(
    choice: str, device: torch.device, dtype: torch.dtype, numerics: str, provider: str | None, report: InjectionReport
) -> str | None:
    """Proves the functions on ``device`` and registers those that hold; returns the name of the backend, or None.

    Args:
        choice: One of :data:`CHOICES`.
        device: Where the model runs.
        dtype: The dtype it runs in.
        numerics: ``"fast"`` or ``"exact"``.
        provider: The provider that shall serve, or None to choose.
        report: Hears of every function.
    """
    if choice == "off":
        return None
    try:
        from comfy_kitchen.constraints import FunctionConstraints, ParamConstraint, ValidationResult
        from comfy_kitchen.registry import registry
    except ImportError as error:
        report.notes.append(f"comfy-kitchen cannot be served: {error}")
        return None
    kitchen = Kitchen(numerics == "exact", provider)
    verifier = Verifier(numerics)
    served = [
        name for name in FUNCTIONS if _is_served(name, kitchen, verifier, choice, device, dtype, registry, report)
    ]
    if not served:
        return None

    def rule(name: str) -> Callable[[Mapping[str, Any]], Any]:
        def check(arguments: Mapping[str, Any]) -> Any:
            reason = unfit(name, arguments)
            return ValidationResult.ok() if reason is None else ValidationResult.fail(*reason)

        return check

    plain = ParamConstraint(dtypes=KERNEL_DTYPES)
    backend = f"diffkern {numerics} {choice} {provider or 'auto'} {device}"
    registry.register(
        backend,
        kitchen,
        {
            name: FunctionConstraints(
                params=dict.fromkeys(FUNCTIONS[name][1], plain),
                default_devices=frozenset({device.type}),
                call_rules=(rule(name),),
            )
            for name in served
        },
    )
    return backend


def install(model: Any, backend: str) -> None:
    """Puts the backend in force around every call of a clone of a model, and of its clones."""
    from comfy_kitchen.registry import registry

    def run(executor: Any, *args: Any, **kwargs: Any) -> Any:
        with registry.use_backend(backend):
            return executor(*args, **kwargs)

    remove(model)
    model.add_wrapper_with_key(_APPLY_MODEL, KEY, run)


def remove(model: Any) -> None:
    """Takes the backend from a clone of a model."""
    model.remove_wrappers_with_key(_APPLY_MODEL, KEY)


def _is_served(
    name: str,
    kitchen: Kitchen,
    verifier: Verifier,
    choice: str,
    device: torch.device,
    dtype: torch.dtype,
    registry: Any,
    report: InjectionReport,
) -> bool:
    """Whether a function shall be served and keeps the contract; the report gets a line for it."""
    fusion = KitchenFusion(name, kitchen)
    owner = fusion.owner(registry, device, dtype)
    if owner is None or (choice == "auto" and owner != "eager"):
        why = "this comfy-kitchen does not have it" if owner is None else f"its own {owner} backend serves it"
        report.notes.append(f"{PACKAGE}.{name} stays as it is: {why}")
        return False
    site = Site(f"{PACKAGE}.{name}", f"{PACKAGE}.function", op=fusion.op, how="table")
    try:
        choice_of_provider = select(fusion.op, device, (dtype,), kitchen.provider)
    except NoProviderError as error:
        site.reason = str(error)
        report._rejected.append(site)
        return False
    site.provider, site.reason = choice_of_provider.provider, choice_of_provider.describe_declined()
    dtypes = {dtype, torch.float32} if verifier.exact else {dtype}
    proofs = [verifier.prove(nn.Identity(), fusion, kitchen.provider, device, each) for each in dtypes]
    site.measurements = [proof for proof in proofs if proof is not None]
    failed = next((proof for proof in site.measurements if not proof.passed), None)
    if failed is not None:
        site.reason = failed.reason
    (report._accepted if failed is None else report._rejected).append(site)
    return failed is None
