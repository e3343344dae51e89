"""A backend of comfy-kitchen that holds what is proven, and is in force while a model that asked for it runs.

It serves every model of ComfyUI that calls comfy-kitchen, whatever its blocks look like. It is chosen by a setting of
the running thread, so no other model sees it, and a call that it cannot take goes to comfy-kitchen's own backends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from diffkern.comfyui.kitchen import FUNCTIONS, INPUTS, Kitchen, unfit
from diffkern.comfyui.kitchen_fusion import KitchenFusion
from diffkern.comfyui.patcher import APPLY_MODEL
from diffkern.comfyui.rope import one_model_call
from diffkern.injection import InjectionReport
from diffkern.providers import KERNEL_DTYPES, NoProviderError, select
from diffkern.verify.proof import Verifier

#: When to serve: where comfy-kitchen has nothing but plain torch, always, never.
CHOICES = ("auto", "on", "off")

#: Under which the wrapper is known to the model patcher.
KEY = "diffkern.kitchen"


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
        report: Its notes say what is served, and why not the rest.
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
    refusals = {name: _refusal(name, kitchen, verifier, choice, device, dtype, registry) for name in FUNCTIONS}
    served = [name for name, reason in refusals.items() if reason is None]
    for reason in dict.fromkeys(filter(None, refusals.values())):
        names = ", ".join(name for name, own in refusals.items() if own == reason)
        report.notes.append(f"comfy-kitchen keeps {names}: {reason}")
    if not served:
        return None
    report.notes.append(f"comfy-kitchen is served while this model runs: {', '.join(served)}")

    def rule(name: str) -> Callable[[Mapping[str, Any]], Any]:
        def check(arguments: Mapping[str, Any]) -> Any:
            reason = unfit(name, arguments)
            return ValidationResult.ok() if reason is None else ValidationResult.fail(*reason)

        return check

    def parameters(name: str) -> dict[str, Any]:
        return {
            parameter: ParamConstraint(dtypes=_dtypes(parameter, dtype, kitchen.exact))
            for parameter in FUNCTIONS[name][1]
        }

    backend = f"diffkern {numerics} {choice} {provider or 'auto'} {device} {dtype}"
    registry.register(
        backend,
        kitchen,
        {
            name: FunctionConstraints(
                params=parameters(name),
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
        with one_model_call(), registry.use_backend(backend):
            return executor(*args, **kwargs)

    model.add_wrapper_with_key(APPLY_MODEL, KEY, run)


def is_installed(model: Any) -> bool:
    """Whether a clone of a model has a backend of ours."""
    return bool(model.get_wrappers(APPLY_MODEL, KEY))


def remove(model: Any) -> None:
    """Takes the backend from a clone of a model."""
    model.remove_wrappers_with_key(APPLY_MODEL, KEY)


def _dtypes(parameter: str, dtype: torch.dtype, exact: bool) -> frozenset[torch.dtype]:
    """The dtypes that are served, of which the proof has spoken."""
    if parameter == "freqs_cis":
        # The package rotates in the dtype of the matrices; exactly, only float32 is the same.
        return frozenset({torch.float32}) if exact else frozenset({torch.float32, dtype})
    return frozenset({dtype}) if exact or parameter in INPUTS else KERNEL_DTYPES


def _refusal(
    name: str,
    kitchen: Kitchen,
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
        return "this comfy-kitchen does not have it"
    if choice == "auto" and owner != "eager":
        return f"its own {owner} backend is there"
    try:
        provider = select(fusion.op, device, (dtype,), kitchen.provider).provider
    except NoProviderError as error:
        return str(error)
    if choice == "auto" and provider == "eager" and kitchen.provider is None:
        return "diffkern has nothing but plain PyTorch here, either"
    # Half dtypes are rounded float32: what is equal there bit for bit need not be so for other inputs.
    dtypes = {dtype, torch.float32} if verifier.exact else {dtype}
    proofs = [verifier.prove(nn.Identity(), fusion, kitchen.provider, device, each) for each in dtypes]
    failed = [proof for proof in proofs if proof is not None and not proof.passed]
    if not failed:
        return None
    return "not bit-identical on this device" if verifier.exact else failed[0].reason
