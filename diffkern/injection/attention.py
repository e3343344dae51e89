"""Attention as the injection sees it: one site, and one route, for each model that chooses its attention by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from diffkern.attention import (
    BACKENDS,
    Backend,
    Route,
    UnavailableError,
    backend_of,
    find_backend,
    in_diffusers,
    in_transformers,
)
from diffkern.hub import KernelConfig
from diffkern.hub.policy import Policy
from diffkern.hub.reference import is_reference
from diffkern.injection.components import likely_device
from diffkern.injection.report import InjectionReport, Site
from diffkern.injection.state import StrictModeError

AUTO = "auto"
OP = "attention"


@dataclass(frozen=True)
class Plan:
    """A model whose attention can be routed: its line in the report, its route, and how that is put into place."""

    site: Site  # the line in the report
    route: Route  # where the calls will go
    install: Callable[[Route], Callable[[], int]]  # puts the route into place and returns what takes it out again


def plan_attention(
    modules: Mapping[str, nn.Module],
    wish: str | Sequence[str] | None,
    config: KernelConfig,
    report: InjectionReport,
    *,
    verify: bool,
    strict: bool,
) -> list[Plan]:
    """Finds the models whose attention can be routed; what cannot goes into the report.

    A wish names a backend, a kernel on the Hub, or ``"auto"``; or several, of which the first that can serves, or with
    ``"auto"`` the fastest. None plans nothing. The report gets a site for whatever is left alone, and one that failed
    if the backend cannot be loaded.

    Raises:
        ValueError: there is no such backend.
    """
    if wish is None:
        return []
    policy = Policy(config.trust_remote_code, config.lock, strict)
    wishes = tuple(wish) if isinstance(wish, (list, tuple)) else (wish,)
    if not wishes:
        raise ValueError("attention names no backend: name one, or 'auto', or leave it None")
    for name in wishes:
        if not isinstance(name, str) or (name != AUTO and not is_reference(name)):
            backend_of(name)
    plans: list[Plan] = []
    models = _models(modules, report)
    if not models:
        report.notes.append(f"attention={wish!r}: no model here lets its attention be chosen")
    for path, model, put in models:
        site = Site.of(path, model, op=OP, provider=" or ".join(wishes))
        backends: list[Backend] = []
        for name in wishes:
            try:
                backends += _backends(name, likely_device([model]), policy)
            except UnavailableError as error:
                site.reason = f"{name}: {error}"
        if site.reason:
            report._rejected.append(site)
            continue
        route = Route(backends, AUTO in wishes, report.numerics == "exact", verify, strict, StrictModeError)
        route.owner, route.measurements = site.class_name, site.measurements
        route.on_choice = partial(setattr, site, "reason")
        plans.append(Plan(site, route, partial(put, model)))
    return plans


def install(plans: Sequence[Plan]) -> None:
    """Puts the routes into place; none of them if one fails."""
    try:
        for plan in plans:
            plan.route.undo = plan.install(plan.route)
            plan.site._state = plan.route
    except BaseException:
        for plan in plans:
            plan.route.undo()  # does nothing for those that were not put there yet
        raise


def restore_attention(modules: Mapping[str, nn.Module]) -> int:
    """Takes every route out of the models; returns how many models had one."""
    count = 0
    for root in modules.values():
        count += in_diffusers.restore(processor for _, _, processor in in_diffusers.processors(root))
        count += sum(in_transformers.restore_config(model.config) for _, model in in_transformers.models(root))
    return count


def _backends(wish: str, device: torch.device, policy: Policy) -> list[Backend]:
    """Those that a wish allows.

    Raises:
        ValueError: there is no such backend.
        UnavailableError: it cannot be used here.
    """
    if wish == AUTO:
        return [backend for backend in BACKENDS.values() if backend.candidate and backend.missing() is None]
    backend = find_backend(wish, device, policy)
    missing = backend.missing()
    if missing is None and backend.device_types is not None and device.type not in backend.device_types:
        missing = f"runs on {' and '.join(sorted(backend.device_types))} only, and the model on {device.type}"
    if missing is not None:
        raise UnavailableError(missing)
    backend.load()
    return [backend]


#: Puts a model on a route, and returns what takes it off.
_Install = Callable[[Any, Route], Callable[[], int]]


def _models(modules: Mapping[str, nn.Module], report: InjectionReport) -> list[tuple[str, nn.Module, _Install]]:
    """The models of diffusers and transformers that can be routed, by path, and what puts a route into them."""
    found: list[tuple[str, nn.Module, _Install]] = []
    for name, root in modules.items():
        ready = False
        for path, module, processor in in_diffusers.processors(root):
            reason = in_diffusers.refusal(processor)
            ready |= reason is None
            if reason is not None:
                report.skipped.append(Site.of(_join(name, path), module, op=OP, reason=reason))
        if ready:
            found.append((name, root, in_diffusers.install))
        for path, model in in_transformers.models(root):
            reason = in_transformers.refusal(model)
            if reason is None:
                found.append((_join(name, path), model, in_transformers.install))
            else:
                report.skipped.append(Site.of(_join(name, path), model, op=OP, reason=reason))
    return found


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
