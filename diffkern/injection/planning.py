"""select -> plan: which modules of a pipeline can run fused, how, and why the others are left alone."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from diffkern.blocks import OPS as BLOCK_OPS
from diffkern.blocks import fingerprint, recipe_for
from diffkern.blocks.fp8 import stored_weight
from diffkern.blocks.layout import is_convolutional
from diffkern.hub import KernelConfig
from diffkern.hub.rule import Rule
from diffkern.injection import hooks
from diffkern.injection.components import is_denoiser
from diffkern.injection.fp8_fusion import OP as LINEAR_FP8
from diffkern.injection.fp8_fusion import OPS as FP8_OPS
from diffkern.injection.fp8_fusion import Fp8Layers, is_linear
from diffkern.injection.graph_fusion import GraphFusion, hooks_inside
from diffkern.injection.kernel_selector import KernelSelector, Option, layer_name
from diffkern.injection.layout_fusion import LayoutFusion
from diffkern.injection.norm_fusion import NormFusion
from diffkern.injection.patching import patch_state, patches
from diffkern.injection.report import InjectionReport, Site
from diffkern.injection.rewrite_fusion import RewriteFusion, Rewriters
from diffkern.injection.state import STOCK, PatchState
from diffkern.injection.twin_fusion import OP as TWIN_OP
from diffkern.injection.twin_fusion import ModelCall, TwinFusion
from diffkern.matching import full_name, match
from diffkern.matching.genuine import replaced_function, replacement
from diffkern.providers import KERNEL_DTYPES
from diffkern.providers.eager.fp8 import fp8_unavailable_reason
from diffkern.rewrite import OPS as REWRITE_OPS
from diffkern.rewrite import Rewritten
from diffkern.rewrite.facts import child_of
from diffkern.rewrite.twins import with_twins
from diffkern.verify.fusion import Fusion

if TYPE_CHECKING:
    from diffkern.injection.liger import Liger

#: How the reason of a device ends on which a model stays stock that was to compute in fp8.
_NOT_FP8 = ": use numerics='fast' or 'exact' instead of 'fp8'"
#: What a report says of a denoiser whose steps may become CUDA graphs.
TIMED_AT_FIRST = "its first steps on the GPU are timed, and become CUDA graphs if the GPU waits for the host in them"
#: Reasons for which a module is left alone, and which ``strict`` accepts.
ALREADY_PATCHED, BY_CONFIG = "already patched by diffkern", "left alone by config"


@dataclass
class Candidate:
    """A module that can be patched: what it computes, who shall do it, where it may run, and whether it is a model."""

    module: nn.Module
    site: Site
    options: list[Option]
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[torch.device, ...]
    state: PatchState = field(init=False)
    choice_is_fallback: bool = False
    refused: list[str] = field(default_factory=list)
    is_model: bool = False

    @property
    def fusion(self) -> Fusion:
        """The best way that is left."""
        return self.options[0].fusion

    def provider(self, device: torch.device) -> str | None:
        """Who shall compute it on ``device``."""
        return self.options[0].rule.at(device, self.module.training)

    def refuse(self, reason: str) -> bool:
        """Gives up the best way; returns whether there is another."""
        if reason not in self.refused:
            self.refused.append(reason)
        if len(self.options) == 1:
            return False
        del self.options[0]
        self.choice_is_fallback = not self.options[0].names_kernel
        return True


def plan_modules(
    modules: Mapping[str, nn.Module],
    config: KernelConfig,
    selector: KernelSelector,
    liger: Liger | None,
    rewriters: Rewriters,
    report: InjectionReport,
) -> list[Candidate]:
    """The modules that can run fused; the report records why others are left alone.

    Raises:
        ValueError: ``config`` names something that is not there, or modules are patched with other numerics.
    """
    candidates: list[Candidate] = []
    seen: list[Site] = []
    blocks: list[str] = []
    parallel = [module for _, module in walk(modules) if isinstance(module, nn.DataParallel)]
    replicated = {id(part) for module in parallel for part in module.modules()}
    homes = {name: _device(component) for name, component in modules.items()}
    dtypes = {name: _dtype(component) for name, component in modules.items()}
    layers: set[str] = set()
    linears: dict[str, nn.Module] = {}
    has_fp8_form = False
    if report.numerics != "fp8":
        config.refuse_fp8(FP8_OPS, report.numerics)
    fp8 = Fp8Layers(modules, config, rewriters.replayed) if report.numerics == "fp8" else None
    # What runs once for an image becomes no graph, and waits for its host.
    called_once = replace(rewriters, replayed=False, _made={}) if rewriters.replayed else rewriters
    for path, module in walk(modules):
        name = "" if "" in modules else path.partition(".")[0]
        matched = _match(path, module, rewriters if is_denoiser(name) else called_once, report.numerics, liger, fp8)
        if fp8 is not None and matched is None:
            linears |= {path: module} if is_linear(module) else {}
            matched = _match_fp8(path, module, fp8)
        fusion, how = (None, None) if matched is None else (matched.fusion, matched.how)
        has_fp8_form |= fusion is not None and fusion.allowance > 0
        layer = layer_name(module, fusion)
        rule_of = partial(config.rule, path, type(module).__name__, layer_name=layer)
        rule = rule_of("") if fusion is None else fusion.configure(rule_of, selector.served)
        options = selector.options(rule, fusion, how)
        already = patch_state(module) is not None
        if matched is None and not options and not already:
            continue
        if fusion is not None and fusion.counts_itself and path.startswith(tuple(blocks)):
            continue  # which the block around it computes itself
        is_block = fusion is not None and fusion.is_block
        if is_block and options:
            blocks.append(f"{path}.".removeprefix("."))
        site = Site.of(path, module, op=None if fusion is None else fusion.op, how=how)
        seen.append(site)
        layers |= {layer} if layer else set()
        devices = _likely_devices(module, homes[name])
        if already:
            reason: str | None = ALREADY_PATCHED
        elif matched is not None and fusion is None and not options:
            reason = matched.reason
        else:
            reason = _reason_to_leave(module, options, report.numerics, devices[0])
        if reason is None and id(module) in replicated:
            reason = "inside nn.DataParallel, whose replicas would run on the original's weights"
        if reason is not None:
            site.reason = reason
            report.skipped.append(site)
            continue
        best = options[0].fusion
        if is_block or best.op in FP8_OPS:
            devices = devices[:1]  # the proof of a block takes seconds on a CPU, and waits until the block runs there
        candidates.append(Candidate(module, site, options, best.likely_dtypes(module, dtypes[name]), devices))
    candidates = _drop_covered(_apply_exclusions(candidates, report), report)
    # A module that has no op of its own is not left alone where the forward around it computes it.
    report.skipped = [
        site for site in report.skipped if site.op or not any(_computes(one, site.path) for one in candidates)
    ]
    class_names = (site.class_name.rpartition(".")[2] for site in seen)
    config.check((site.path for site in seen), class_names, (*BLOCK_OPS, *REWRITE_OPS, *FP8_OPS, TWIN_OP), layers)
    if fp8 is not None:
        fp8.check(list(linears))
        if not has_fp8_form:  # which is true on every device, and stands before the reasons of this one
            nothing = f"no module here has a form in fp8 ({fp8.why_none(linears)})"
            report.caveat = f"{nothing}: all compute as numerics='fast'"
            for site in report.skipped:
                site.reason = f"{nothing}; and {site.reason}" if site.reason.endswith(_NOT_FP8) else site.reason
        once = ", ".join(name for name in modules if name and not is_denoiser(name))
        report.notes += [f"{once}: in their dtype, since they run once for an image: fp8 is for denoisers"] * bool(once)
    weights = [next(c.module.parameters()) for c in candidates if c.fusion.op == LINEAR_FP8]
    copied = [weight for weight in weights if stored_weight(weight) is None]
    if stored := len(weights) - len(copied):
        report.notes.append(f"layers whose weights are in fp8 already: {stored}; their bytes are used as they are")
    if copied:
        size = sum(weight.numel() for weight in copied) / 2**30
        if config.fp8_weights == "replace":
            report.notes.append(_replaced(copied, size))
        else:
            report.notes.append(f"copies in fp8 will take {size:.2g} GiB beside the weights")
    _refuse_other_numerics(report)
    report.already = sum(site.reason == ALREADY_PATCHED for site in report.skipped)
    return candidates


def plan_graphs(
    modules: Mapping[str, nn.Module], report: InjectionReport, *, by_time: bool = False, memory: float | None = None
) -> list[Candidate]:
    """The denoisers whose steps can be captured into ``memory`` GiB, or at least may become so.

    If times shall decide, only those count that will run on a GPU; else the report records why others are left alone.
    """
    candidates = []
    option = Option(GraphFusion(by_time, memory), Rule(), "time" if by_time else "option")
    for name, module in modules.items():
        if not is_denoiser(name):
            continue
        site = Site.of(name, module, op=option.fusion.op, how=option.how, waiting=by_time)
        dtypes, devices = (_dtype(module),), _likely_devices(module)[:1]
        graphs = [state.fusion for state in patches(module) if isinstance(state.fusion, GraphFusion)]
        reason = ALREADY_PATCHED if any(by_time or not fusion.by_time for fusion in graphs) else None
        reason = reason or _reason_to_leave(module, [option], report.numerics, devices[0]) or hooks_inside(module)
        if by_time and (reason or devices[0].type != "cuda"):
            continue
        if reason is not None:
            site.reason = reason
            report.skipped.append(site)
            continue
        candidates.append(Candidate(module, site, [option], dtypes, devices))
        if by_time:
            report.notes.append(f"{name or site.class_name}: {TIMED_AT_FIRST}")
    return candidates


def plan_model_calls(modules: Mapping[str, nn.Module], candidates: Sequence[Candidate]) -> list[Candidate]:
    """The denoisers with blocks that share something in a call, and no patch of their own that says what a call is."""
    planned = []
    for name, module in modules.items():
        own = [candidate for candidate in candidates if candidate.module is module]
        if not is_denoiser(name) or any(candidate.fusion.is_model for candidate in own):
            continue
        inside = {id(part) for part in module.modules() if part is not module}
        fusions = [candidate.fusion for candidate in candidates if id(candidate.module) in inside]
        if not any(isinstance(fusion, RewriteFusion) and fusion.is_once_in_call for fusion in fusions):
            continue
        option = Option(ModelCall(), Rule(), "twin")
        if own:
            own[0].is_model = True
        elif not any(state.is_model for state in patches(module)):
            devices = _likely_devices(module)[:1]
            if _reason_to_leave(module, [option], "fast", devices[0]) is None:
                site = Site.of(name, module, op=option.fusion.op, how=option.how, waiting=True)
                planned.append(Candidate(module, site, [option], (_dtype(module),), devices))
    return planned


def plan_layouts(
    modules: Mapping[str, nn.Module], candidates: Sequence[Candidate], report: InjectionReport, replayed: bool
) -> list[Candidate]:
    """Convolutional models, and the halves of autoencoders, whose first call decides about channels last.

    What a block of a recipe lays out by itself is left alone.
    """
    planned = []
    blocks = [candidate.site.path for candidate in candidates if candidate.fusion.lays_out]
    for name, model in modules.items():
        halves = {half: model._modules.get(half) for half in ("encoder", "decoder")} if hasattr(model, "decode") else {}
        for half, module in {"": model, **halves}.items():
            path = ".".join(filter(None, (name, half)))
            inside = [block for block in blocks if f"{block}.".startswith(f"{path}." if path else "")]
            if module is None or inside or (halves and not half) or not is_convolutional(module):
                continue
            graphed = replayed and not halves and is_denoiser(name)  # nothing else becomes a graph
            option = Option(LayoutFusion(report.numerics, graphed), Rule(), "time")
            if any(isinstance(state.fusion, LayoutFusion) for state in patches(module)):
                continue
            devices = _likely_devices(module, _device(model))[:1]
            if _reason_to_leave(module, [option], report.numerics, devices[0]) is None:
                site = Site.of(path, module, op=option.fusion.op, how=option.how, waiting=True)
                planned.append(Candidate(module, site, [option], (_dtype(model),), devices))
    return planned


#: Packages whose forwards are not rewritten: adapters and quantised layers belong to their owners.
_NOT_READ = ("torch.", "transformers.", "peft.", "accelerate.", "torchao.", "bitsandbytes.")


@dataclass(frozen=True)
class _Match:
    """How a module can be computed, or why it is left alone."""

    fusion: Fusion | None
    how: str | None
    reason: str = ""


def _match(
    path: str, module: nn.Module, rewriters: Rewriters, numerics: str, liger: Liger | None, fp8: Fp8Layers | None
) -> _Match | None:
    """Looks a module up among the recipes and the norms, and reads its forward; None if nothing is found."""
    recipe = recipe_for(full_name(type(module)))
    replaced = replacement(type(module))
    if replaced is not None and (recipe or match(module)):
        return _Match(None, None, f"the forward of its class was replaced by {replaced}")
    if recipe is not None:
        replaced = replaced_function(recipe.sources())
        if replaced is not None:
            return _Match(None, "recipe", f"a function that its class calls was replaced by {replaced}")
    if recipe is not None and numerics != "exact":
        if fingerprint(recipe.sources()) in recipe.fingerprints:
            return _Match(recipe.matched(rewriters.replayed), "recipe")
        if not rewriters.verify:
            reason = f"its stock forward is not that of {recipe.versions}, and verify=False forbids to compare"
            return _Match(None, "probe", reason)
        return _Match(recipe.matched(rewriters.replayed), "probe")
    loss = None if liger is None else liger.loss(module)
    if loss is not None:
        return _Match(None, "recipe", loss) if isinstance(loss, str) else _Match(loss, "recipe")
    package = type(module).__module__
    is_read = package.startswith("transformers.models.") or not package.startswith(_NOT_READ)
    # What has no submodules may be an activation of diffusers, which is arithmetic, and no norm.
    if replaced is None and is_read and (module._modules or (package.startswith("diffusers.") and not match(module))):
        rewritten = rewriters.rewrite(module)
        if not isinstance(rewritten, str):
            calls_layer = fp8 is not None and _has_fp8_product(path, module, rewritten, fp8)
            stock: dict[str, str | None] = {"linear_gelu": STOCK} if calls_layer else {}
            if any(site.plan.rule.op not in stock for site in rewritten.sites):
                return _Match(RewriteFusion(rewriters, rewritten, stock), "source")
        elif (forward := with_twins(type(module).forward)) is not None:
            return _Match(TwinFusion(forward), "twin")
    if recipe is not None:
        reason = "numerics='exact' leaves it stock: its fused form has other bits, or keeps tensors between calls"
        return _Match(None, "recipe", reason)
    matched = match(module)
    if matched is None:
        return None
    if matched.semantics is None:
        return _Match(None, matched.how, matched.reason or "")
    fusion = NormFusion(matched.semantics, rewriters.replayed)
    return _Match(fusion if liger is None else liger.norm(fusion), matched.how)


def _match_fp8(path: str, module: nn.Module, fp8: Fp8Layers) -> _Match | None:
    """Looks a linear layer up among those that are in fp8, or two around a GELU; None where nothing is to be said."""
    if not is_linear(module):
        feed_forward = fp8.feed_forward(path, module)
        return None if feed_forward is None else _Match(feed_forward, "table")
    reason = fp8.reason(path, module)
    if reason == "":
        return None
    replaced = replacement(type(module))
    if reason is None and replaced is not None:
        reason = f"the forward of its class was replaced by {replaced}"
    return _Match(fp8.fusion(path), "table") if reason is None else _Match(None, "table", reason)


def _has_fp8_product(path: str, module: nn.Module, rewritten: Rewritten, fp8: Fp8Layers) -> bool:
    """Whether a site has a linear layer in it that is computed in fp8, and must be called for that."""
    layers = [site.plan.modules["linear"] for site in rewritten.sites if site.plan.rule.op == "linear_gelu"]
    children = [(".".join((path, *layer)).removeprefix("."), child_of(module, layer)) for layer in layers]
    return any(child is not None and fp8.reason(name, child) is None for name, child in children)


def _replaced(weights: list[nn.Parameter], size: float) -> str:
    """Says what becomes of weights whose place copies in fp8 take.

    Raises:
        ValueError: they are where nothing is gained by it.
    """
    elsewhere = next((weight.device for weight in weights if weight.device.type != "cuda"), None)
    if elsewhere is not None:
        raise ValueError(
            f"fp8_weights='replace' makes room on a GPU, and weights are on {elsewhere}: call pipe.to('cuda') before, "
            "and do not offload"
        )
    return (
        f"copies in fp8 take {size:.2g} GiB in the place of weights of {2 * size:.2g} GiB, which go to the memory of "
        "the host: restore() brings them back, save_pretrained() writes them"
    )


def _refuse_other_numerics(report: InjectionReport) -> None:
    """Refuses to leave modules patched under another contract than the one that the report will state."""
    states = _patched_before(report)
    other = {path: state.numerics for path, state in states.items() if state.numerics != report.numerics}
    if other:
        path, held = next(iter(other.items()))
        raise ValueError(
            f"numerics={report.numerics!r}, but {len(other)} modules, such as {path or 'the model itself'}, are "
            f"already patched with numerics={held!r}: call restore() first, or inject with numerics={held!r}"
        )


def _patched_before(report: InjectionReport) -> dict[str, PatchState]:
    already = ((site.path, site.module) for site in report.skipped if site.reason == ALREADY_PATCHED)
    return {path: state for path, module in already if module is not None and (state := patch_state(module))}


def _apply_exclusions(candidates: list[Candidate], report: InjectionReport) -> list[Candidate]:
    """Leaves a block alone if config says of a part of it what the block, which computes it as well, would not do."""
    spared = {site.path: "leaves it alone" for site in report.skipped if site.reason == BY_CONFIG}
    spared |= {c.site.path: "names a kernel for it" for c in candidates if c.options[0].names_kernel}
    kept = []
    for candidate in candidates:
        inside = next((path for path in spared if _computes(candidate, path)), None)
        if inside is None or candidate.options[0].names_kernel:
            kept.append(candidate)
        else:
            part = inside.removeprefix(f"{candidate.site.path}.")
            candidate.site.reason = f"{part} is inside, and config {spared[inside]}"
            report.skipped.append(candidate.site)
    return kept


def _computes(candidate: Candidate, path: str) -> bool:
    """Whether a fused forward does itself what the module at another path does."""
    prefix = f"{candidate.site.path}." if candidate.site.path else ""
    return path.startswith(prefix) and candidate.fusion.computes(path.removeprefix(prefix))


def _drop_covered(candidates: list[Candidate], report: InjectionReport) -> list[Candidate]:
    """Drops what a block computes itself, and what would have a turn of its own only where the block runs stock."""
    fusions = {candidate.site.path: candidate.fusion for candidate in candidates}
    fusions |= {path: state.fusion for path, state in _patched_before(report).items()}
    covered = [(f"{path}." if path else "", fusion.covers) for path, fusion in fusions.items() if fusion.covers]
    return [
        candidate
        for candidate in candidates
        if candidate.options[0].names_kernel
        or not any(candidate.site.path.startswith(path) and candidate.fusion.op in ops for path, ops in covered)
    ]


def _reason_to_leave(module: nn.Module, options: Sequence[Option], numerics: str, device: torch.device) -> str | None:
    if not options:
        return BY_CONFIG
    if numerics == "fp8":
        reason = fp8_unavailable_reason(device)
        emulated = options[0].fusion.op in FP8_OPS and set(options[0].rule.choices()) == {"eager"}
        if reason is not None and not emulated:
            return f"{reason}{_NOT_FP8}"
    return None if patch_state(module) is not None else hooks.foreign_forward(module)


def walk(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yields every module once, with its path from the component's name on."""
    seen: set[int] = set()
    for name, root in modules.items():
        for path, module in root.named_modules():
            if id(module) not in seen:
                seen.add(id(module))
                yield ".".join(part for part in (name, path) if part), module


def _dtype(component: nn.Module) -> torch.dtype:
    """The dtype of most weights of a component: diffusers keeps some layers of models in float32, often the first."""
    elements: Counter[torch.dtype] = Counter()
    for parameter in component.parameters():
        if parameter.dtype in KERNEL_DTYPES:
            elements[parameter.dtype] += parameter.numel()
    return max(elements, key=elements.__getitem__, default=torch.float32)


def _device(module: nn.Module) -> torch.device | None:
    """Where its first tensor is that is anywhere."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return next((tensor.device for tensor in tensors if not tensor.is_meta), None)


def _likely_devices(module: nn.Module, default: torch.device | None = None) -> tuple[torch.device, ...]:
    """Devices the module will probably run on, the likeliest first; ``default`` is that of its component.

    Weights on the CPU or on meta may be offloaded, or not moved yet: then the GPU is likelier still.
    """
    home = _device(module) or default or torch.device("cpu")
    if home.type == "cpu" and torch.cuda.is_available():
        return (torch.device("cuda", torch.cuda.current_device()), home)
    return (home,)
