"""plan -> prove -> patch -> report, for a model or a VAE of ComfyUI."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from copy import copy
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from diffkern.comfyui import fp8, kitchen_backend, patcher
from diffkern.comfyui.patcher import conflict, own_modules, patches_of
from diffkern.comfyui.rewrites import FAMILIES, ComfyRewriter, Patch
from diffkern.injection import InjectionError, InjectionReport
from diffkern.injection.report import Site
from diffkern.matching import full_name
from diffkern.providers import KERNEL_DTYPES

#: Where a model of ComfyUI keeps what denoises.
DENOISER = "diffusion_model"

NUMERICS = ("fast", "exact", "fp8")


class Report(InjectionReport):
    """What was done to a model, and what to do next with nodes."""

    @override
    def next_step(self) -> str:
        if not self.active or not self.advises:
            return ""
        if any(site.fused_calls or site.stock_calls for site in self.active):
            return "Benchmark (diffkern) times it against the stock model"
        return "sample; Report (diffkern) behind the sampler then says what ran fused, and so does ComfyUI's log"


def optimize(
    model: Any,
    *,
    numerics: str = "fast",
    families: Iterable[str] = FAMILIES,
    provider: str | None = None,
    blocks: str = "",
    kitchen: str = "auto",
    strict: bool = False,
) -> tuple[Any, InjectionReport]:
    """Returns a clone of a model that runs on fused kernels, and what was done. The model itself stays as it is.

    Args:
        model: A model patcher, as nodes hand them on.
        numerics: ``"fast"`` keeps the error against float64 within 1.05 times that of the stock module; ``"exact"``
            fuses only what is bit-identical to it on the device of the model; ``"fp8"`` is ``"fast"`` with the large
            linear layers in fp8, see :mod:`~diffkern.comfyui.fp8`.
        families: What to fuse, of :data:`~diffkern.comfyui.rewrites.FAMILIES`.
        provider: The provider that shall serve, or None to choose.
        blocks: Which modules, see :func:`selects`.
        kitchen: When to serve comfy-kitchen, of :data:`~diffkern.comfyui.kitchen_backend.CHOICES`.
        strict: Whether anything that is left alone or fails raises.

    Raises:
        ValueError: an argument has none of its values; ``blocks`` fits no module.
        InjectionError: ``strict``, and something is left alone or fails.
    """
    chosen, rest = _checked(numerics, families), "exact" if numerics == "exact" else "fast"
    if kitchen not in kitchen_backend.CHOICES:
        raise ValueError(f"kitchen={kitchen!r}: choose one of {', '.join(kitchen_backend.CHOICES)}")
    started = time.perf_counter()
    report = Report(type(model.model.diffusion_model).__name__, numerics)
    if not chosen:
        report.notes.append("every family is switched off")
    device = torch.device(model.load_device)
    # What it computes in, which need not be the dtype of its weights.
    dtype: torch.dtype = model.get_model_object("manual_cast_dtype") or model.model.get_dtype()
    modules = own_modules(model, DENOISER, model.model.diffusion_model)
    patches = _plan(model, modules, chosen, provider, blocks, report, dtype, device)
    service = None
    if dtype in KERNEL_DTYPES:
        if strict:
            _refuse(report)
        if kitchen_backend.service_of(model) is not None:
            report.notes.append("comfy-kitchen is left as the Optimize Model before this one has set it")
            kitchen = "off"
        service = kitchen_backend.prepare(kitchen, device, dtype, rest, provider, report)
    if numerics == "fp8":
        denoiser = model.model.diffusion_model
        chosen_modules = (one for one in own_modules(model, DENOISER, denoiser) if selects(blocks, one[0]))
        patches |= fp8.plan(denoiser, chosen_modules, provider, report, dtype, device, partial(conflict, model))
        if strict and report.caveat:
            raise InjectionError(report.caveat)
    clone = model.clone()
    clone.set_attachments(patcher.KEY, (*reports_of(model), report))
    if patches:
        patcher.install(clone, patches)
    if service is not None:
        kitchen_backend.install(clone, service)
    _name_providers(report)
    report.seconds = time.perf_counter() - started
    return clone, report


def optimize_vae(
    vae: Any,
    *,
    numerics: str = "fast",
    families: Iterable[str] = FAMILIES,
    provider: str | None = None,
    strict: bool = False,
) -> tuple[Any, InjectionReport]:
    """Returns a copy of a VAE, with the same weights, that decodes and encodes on fused kernels, and what was done.

    The VAE itself, as nodes hand it on, stays as it is. Options and errors are those of :func:`optimize`.
    """
    chosen = _checked(numerics, families)
    numerics = "exact" if numerics == "exact" else "fast"  # fp8 is for what runs in every step
    started = time.perf_counter()
    vae.throw_exception_if_invalid()
    model = vae.patcher
    report = Report(type(model.model).__name__, numerics)
    report.advises = False
    modules = (one for name, child in model.model.named_children() for one in own_modules(model, name, child))
    device = torch.device(model.load_device)
    patches = _plan(model, modules, chosen, provider, "", report, vae.vae_dtype, device)
    if strict:
        _refuse(report)
    optimized = copy(vae)
    optimized.patcher = model.clone()
    if patches:
        patcher.install(optimized.patcher, patches)
    _name_providers(report)
    report.seconds = time.perf_counter() - started
    return optimized, report


def without_diffkern(model: Any) -> Any:
    """Returns a clone of a model without anything of ours."""
    clone = model.clone()
    patcher.remove(clone)
    kitchen_backend.remove(clone)
    clone.remove_attachments(patcher.KEY)
    return clone


def reports_of(model: Any) -> tuple[InjectionReport, ...]:
    """Returns the reports of a model's optimizations, the first one first; none if it is not optimized."""
    reports: tuple[InjectionReport, ...] = tuple(model.get_attachment(patcher.KEY) or ())
    for report in reports:
        _name_providers(report)
    return reports


def _name_providers(report: InjectionReport) -> None:
    """Writes down who serves a module, which its first proof knows."""
    for site in report._accepted:
        site.provider = site.measurements[-1].provider if site.measurements else None


def not_optimized(model: Any) -> str:
    """Says that there is nothing to compare in a model, and why; "" for an optimized one."""
    if patches_of(model) or kitchen_backend.service_of(model) is not None:
        return ""
    if reports := reports_of(model):
        return f"nothing of this model is optimized: {'; '.join(reports[-1].notes) or reports[-1].summary()}"
    return "this model is not optimized: Optimize Model (diffkern) is bypassed, off, or not connected"


def selects(blocks: str, path: str) -> bool:
    """Whether ``blocks`` means the module at ``path``.

    It is a list, separated by commas, of numbers of blocks (``3``), ranges of them (``0-9``), and patterns on the path
    from the denoiser on with the wildcards of :mod:`fnmatch` (``double_blocks.*``). An empty list means every module.

    Raises:
        ValueError: a part is none of those.
    """
    parts = [part.strip() for part in blocks.split(",") if part.strip()]
    if not parts:
        return True
    number = next((int(part) for part in path.split(".") if part.isdigit()), None)
    return any([_matches(part, number, path.removeprefix(f"{DENOISER}.")) for part in parts])


def _matches(part: str, number: int | None, inside: str) -> bool:
    """Whether one part of such a list means the module at ``inside``, in the block of this number."""
    limits = re.fullmatch(r"(\d+)(?:\s*-\s*(\d+))?", part)
    if limits is not None:
        return number is not None and int(limits[1]) <= number <= int(limits[2] or limits[1])
    if not re.search(r"[A-Za-z*]", part):
        raise ValueError(f"blocks: {part!r} is no number, no range such as 0-9, and no pattern on paths")
    return fnmatchcase(inside, part)


def _checked(numerics: str, families: Iterable[str]) -> frozenset[str]:
    if numerics not in NUMERICS:
        raise ValueError(f"numerics={numerics!r}: choose one of {', '.join(NUMERICS)}")
    chosen = frozenset(families)
    if not chosen <= frozenset(FAMILIES):
        raise ValueError(f"families={sorted(chosen)}: choose from {', '.join(FAMILIES)}")
    return chosen


def _plan(
    model: Any,
    modules: Iterator[tuple[str, nn.Module]],
    families: frozenset[str],
    provider: str | None,
    blocks: str,
    report: InjectionReport,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Patch]:
    if dtype not in KERNEL_DTYPES:
        report.notes.append(f"the model computes in {dtype}; float32, float16 and bfloat16 are served")
        return {}
    exact = report.numerics == "exact"
    rewriter = ComfyRewriter("exact" if exact else "fast", provider, families)
    patches: dict[str, Patch] = {}
    earlier = patches_of(model).items()  # of a node in front of this one
    absorbed = {".".join((path, *inside)) for path, patch in earlier for inside in patch.absorbed}
    known = selected = 0
    for path, module in modules:
        patch = rewriter.patch(module) if path not in absorbed else None
        if patch is None:
            continue
        known += 1
        if not selects(blocks, path):
            continue
        selected += 1
        site = Site(path, full_name(type(module)), how="source", op=patch.op, measurements=patch.measurements)
        site.reason = conflict(model, path, module, patch.stock) or ""
        refusal = "" if site.reason else rewriter.prove_ahead(patch, device, dtype)
        if site.reason:
            report.skipped.append(site)
        elif not refusal:
            site._state = patch.counts
            patches[path] = patch
            absorbed |= {".".join((path, *inside)) for inside in patch.absorbed}
            report._accepted.append(site)
        elif exact:
            site.reason = "nothing of it can be fused without changing a bit"
            report.skipped.append(site)
        else:
            site.reason = refusal
            report._rejected.append(site)
    if known and not selected:
        raise ValueError(f"blocks={blocks!r} fits none of the {known} modules that could be optimized")
    if not known:
        report.notes.append(f"{report.target} has no module that diffkern knows, and no rule finds anything in one")
    return patches


def _refuse(report: InjectionReport) -> None:
    troubles = [*report.skipped, *report.failed]
    if troubles:
        first = troubles[0]
        raise InjectionError(f"{len(troubles)} modules stay stock; {first.path}: {first.reason}")
    if not report.patched:
        raise InjectionError("; ".join(report.notes) or f"nothing of {report.target} is optimized")
