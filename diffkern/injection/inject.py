"""plan -> verify -> apply -> report, and the way back."""

from __future__ import annotations

import itertools
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from diffkern.attention import Route
from diffkern.blocks import OPS as BLOCK_OPS
from diffkern.blocks import fingerprint, inner_recipe_for, recipe_for
from diffkern.hub import KernelConfig
from diffkern.hub.policy import Policy
from diffkern.hub.rule import Rule
from diffkern.injection import hooks
from diffkern.injection.attention import Plan as AttentionPlan
from diffkern.injection.attention import install, plan_attention, restore_attention
from diffkern.injection.block_fusion import BlockFusion
from diffkern.injection.components import is_denoiser, select_components
from diffkern.injection.fusion import Fusion
from diffkern.injection.graph_fusion import GraphFusion, hooks_inside
from diffkern.injection.inner_fusion import InnerFusion
from diffkern.injection.liger import loss_fusion, usable, with_liger
from diffkern.injection.norm_fusion import NormFusion
from diffkern.injection.provision import Option, Provision, layer_name
from diffkern.injection.report import InjectionReport, Site
from diffkern.injection.state import LEFT_ALONE, PatchState, patch, patch_state, take_back, unpatch
from diffkern.matching import full_name, match
from diffkern.providers import KERNEL_DTYPES, NoProviderError
from diffkern.providers.eager.fp8 import fp8_unavailable_reason
from diffkern.providers.liger import Flags
from diffkern.verify.measures import Measurement
from diffkern.verify.proof import Verifier

NUMERICS = ("exact", "fast", "fp8")

#: The note of a report that asked for 8 bits in vain.
NO_FP8_FORM = "no module here has a form in 8 bits: all run as numerics='fast' has them"


class InjectionError(RuntimeError):
    """A strict injection met something it would have had to fall back from. Nothing was changed."""


@dataclass
class _Candidate:
    """A module that can be patched: what it computes, who shall do it, and where it may run."""

    module: nn.Module
    site: Site
    options: list[Option]
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[torch.device, ...]
    state: PatchState = field(init=False)
    choice_is_fallback: bool = False
    refused: list[str] = field(default_factory=list)

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


def inject_optimized_kernels(
    pipe_or_module: Any,
    *,
    components: Iterable[str] | None = None,
    numerics: str = "fast",
    config: KernelConfig | Mapping[str, Any] | None = None,
    attention: str | None = None,
    liger: bool | Mapping[str, bool] | None = None,
    cuda_graph: bool = False,
    verify: bool = True,
    strict: bool = False,
    dry_run: bool = False,
) -> InjectionReport:
    """Makes a pipeline or model run on fused kernels, in place, and says what it did.

    Works before or after offloading, LoRA loading and ``torch.compile``. Weights, buffers, state dict keys
    and what ``save_pretrained`` writes stay as they are. A module that was patched already is left as it is.
    If anything raises half-way, everything is taken back before the error reaches the caller.

    Args:
        pipe_or_module: A diffusers pipeline, a modular pipeline, or any module of diffusers or transformers.
        components: Names of the pipeline's components to touch; None takes denoisers, VAEs, encoders and
            ControlNets.
        numerics: ``"fast"`` keeps the error against float64 within 1.05 times that of the stock module;
            ``"exact"`` patches only what is bit-identical to the stock module on this device;
            ``"fp8"`` computes the large matrix products of the blocks that have such a form (see ``docs/ltx.md``)
            on 8 bits, and everything else as ``"fast"``; it needs a GPU of compute capability 8.9, and memory for a
            second copy of those weights, of half their size.
        config: Who serves what; see :class:`diffkern.KernelConfig`.
        attention: Who computes attention: the name of a backend of diffusers, a kernel on the Hub such as
            ``"org/repo@revision:function"``, or ``"auto"`` for the fastest of those installed, by measurement at
            first use. None leaves it as it is. A call that the backend cannot serve (a mask, dropout, the size of
            its heads) runs as before.
        liger: Whether, and for what, the kernels of the package ``liger-kernel`` serve wherever gradients are wanted:
            True, or a dict of its flags ``rope``, ``swiglu``, ``cross_entropy``, ``fused_linear_cross_entropy`` and
            ``rms_norm``, as its own functions take them. With ``fused_linear_cross_entropy``, one of the defaults,
            the output of a language model in training has no logits, and in half precision its gradients may have 1.5
            times the error of stock's.
        cuda_graph: Whether the steps of the denoisers are captured as CUDA graphs, one for each kind of call (shapes,
            dtypes, plain arguments), and replayed. A call of a new kind runs as it is, the second one is captured.
            Anything that changes what a step does, an adapter or a hook, say, is noticed. Steps run as they are while
            gradients are enabled, weights are offloaded, or hooks sit inside of the denoiser.
        verify: Whether every kind of site is proven before it is patched, and again at first use on a device
            or dtype that was not there yet. Without it nothing is measured.
        strict: Whether everything that would make a matched module run stock, or with another provider than
            the first choice, raises. Then nothing is changed.
        dry_run: Only plan: nothing is measured and nothing is changed.

    Returns:
        What was patched, left alone, and failed, with reasons; ``report.restore()`` takes it back.

    Raises:
        TypeError: the target is neither a pipeline nor a module.
        ValueError: an argument names something that does not exist; the message says what does.
        InjectionError: ``strict`` and something would fall back.
    """
    if numerics not in NUMERICS:
        raise ValueError(f"numerics={numerics!r}: choose one of {', '.join(NUMERICS)}")
    started = time.perf_counter()
    report = InjectionReport(type(pipe_or_module).__name__, numerics, dry_run)
    config = KernelConfig.of(config)
    provision = Provision(config, strict)
    candidates = _plan(pipe_or_module, components, config, provision, Flags.of(liger), verify, report)
    modules, _ = select_components(pipe_or_module, components)
    if cuda_graph:
        candidates += _plan_graphs(modules, report)
    candidates = [candidate for candidate in candidates if _choose(candidate, report)]
    routes = _plan_attention(modules, attention, config, report, verify=verify, strict=strict)
    verifier = Verifier(numerics) if verify else None
    for candidate in candidates:
        proven_by = None if isinstance(candidate.fusion, GraphFusion) else verifier
        candidate.state = PatchState(candidate.fusion, candidate.options[0].rule, proven_by, strict)
    if verifier is not None and not dry_run:
        candidates = _verify(candidates, verifier, report)
    if strict:
        _refuse_fallbacks(candidates, report)
    if not dry_run:
        report.notes += _apply(candidates, routes)
    report._accepted += [route.site for route in routes]
    for candidate in candidates:
        if not dry_run:
            candidate.site._state = candidate.state
            candidate.state.site = candidate.site
            candidate.state.report = report._key
        report._accepted.append(candidate.site)
    report.notes += provision.describe_kernels(candidate.site.provider for candidate in candidates)
    report._undo = _restore_sites
    report.seconds = time.perf_counter() - started
    return report


def plan(pipe_or_module: Any, **options: Any) -> InjectionReport:
    """Says what :func:`inject_optimized_kernels` would do with the same options, and does nothing."""
    return inject_optimized_kernels(pipe_or_module, **{**options, "dry_run": True})


def restore(pipe_or_module: Any) -> int:
    """Takes back every patch of diffkern in a pipeline or module, whoever made it.

    Afterwards the stock forwards run again, bit for bit as before, under whatever hooks there are by then.

    Args:
        pipe_or_module: A pipeline (all its components), a model, or a part of a model.

    Returns:
        How many patches were taken back; 0 if there was none.

    Raises:
        TypeError: the target is neither a pipeline nor a module.
    """
    every = None if isinstance(pipe_or_module, nn.Module) else _module_names(pipe_or_module)
    modules, _ = select_components(pipe_or_module, every)
    return sum(unpatch(module) for _, module in _walk(modules)) + restore_attention(modules)


@contextmanager
def optimized(pipe_or_module: Any, **options: Any) -> Iterator[InjectionReport]:
    """Injects for the length of a ``with`` block; takes back what it patched, and no more, at its end.

    Args:
        pipe_or_module: As in :func:`inject_optimized_kernels`.
        options: As in :func:`inject_optimized_kernels`.
    """
    report = inject_optimized_kernels(pipe_or_module, **options)
    try:
        yield report
    finally:
        report.restore()


# --- plan ----------------------------------------------------------------------------------------------


def _plan(
    target: Any,
    components: Iterable[str] | None,
    config: KernelConfig,
    provision: Provision,
    flags: Flags | None,
    verify: bool,
    report: InjectionReport,
) -> list[_Candidate]:
    modules, left_out = select_components(target, components)
    flags = usable(flags, modules, report)
    report.notes += [f"component {name!r}: {reason}" for name, reason in left_out.items()]
    candidates: list[_Candidate] = []
    seen: list[Site] = []
    replicated = {
        id(module)
        for _, parallel in _walk(modules)
        if isinstance(parallel, nn.DataParallel)
        for module in parallel.modules()
    }
    layers: set[str] = set()
    for path, module in _walk(modules):
        matched = _match(module, verify, report.numerics, flags)
        fusion = None if matched is None else matched.fusion
        layer = layer_name(module, fusion)
        rule = config.rule(path, type(module).__name__, "" if fusion is None else fusion.op, layer)
        options = provision.options(rule, fusion, None if matched is None else matched.how)
        if matched is None and not options:
            continue
        site = Site(path, full_name(type(module)), how=None if matched is None else matched.how)
        site._module = weakref.ref(module)
        seen.append(site)
        layers |= {layer} if layer else set()
        if matched is not None and fusion is None and not options:
            site.reason = matched.reason
            report.skipped.append(site)
            continue
        site.op = None if fusion is None else fusion.op
        component = modules[path.partition(".")[0]] if "" not in modules else modules[""]
        devices = _likely_devices(module, component)
        reason = _reason_to_leave(module, options, report.numerics, devices[0])
        if reason is None and id(module) in replicated:
            reason = "inside nn.DataParallel, whose replicas would run on the original's weights"
        if reason is not None:
            site.reason = reason
            report.skipped.append(site)
            continue
        candidates.append(
            _Candidate(
                module,
                site,
                options,
                options[0].fusion.likely_dtypes(module, _dtype(component)),
                # The proof of a block takes seconds on a CPU, so it waits there until the block runs there.
                devices[: 1 if isinstance(fusion, BlockFusion) else None],
            )
        )
    candidates = _drop_what_blocks_cover(_spare_what_config_leaves_alone(candidates, report), report)
    class_names = (site.class_name.rpartition(".")[2] for site in seen)
    config.check((site.path for site in seen), class_names, BLOCK_OPS, layers)
    if report.numerics == "fp8" and candidates and not any(candidate.fusion.allowance for candidate in candidates):
        report.notes.append(NO_FP8_FORM)
    already = sum(site.reason == _ALREADY for site in report.skipped)
    if already:
        report.notes.append(
            f"{already} modules were patched before and stay as they are: restore() first to change them"
        )
    return candidates


def _plan_graphs(modules: Mapping[str, nn.Module], report: InjectionReport) -> list[_Candidate]:
    """The denoisers whose steps can be captured, or at least may become so."""
    candidates = []
    for name, module in modules.items():
        if not is_denoiser(name):
            continue
        site = Site(name, full_name(type(module)), op="cuda_graph", how="option")
        site._module = weakref.ref(module)
        dtypes, devices = (_dtype(module),), _likely_devices(module, module)[:1]
        reason = _reason_to_leave(module, [_GRAPH], report.numerics, devices[0]) or hooks_inside(module)
        if reason is not None:
            site.reason = reason
            report.skipped.append(site)
            continue
        candidates.append(_Candidate(module, site, [_GRAPH], dtypes, devices))
    return candidates


_GRAPH = Option(GraphFusion(), Rule(), "option")
_ALREADY = "already patched by diffkern"
_BY_CONFIG = "left alone by config"


@dataclass(frozen=True)
class _Match:
    """How a module can be computed, or why it is left alone."""

    fusion: Fusion | None
    how: str | None
    reason: str = ""


def _match(module: nn.Module, verify: bool, numerics: str, flags: Flags | None) -> _Match | None:
    """Looks a module up among the recipes and the norms; None if it is among neither."""
    recipe = recipe_for(full_name(type(module)))
    if recipe is not None:
        recipe = recipe.exactly() if numerics == "exact" else recipe
        if recipe is not None and numerics == "fp8":
            recipe = recipe.in_8_bits() or recipe
        if recipe is None:
            return _Match(None, "recipe", "nobody computes it fused to the same bits as the stock forward")
        if fingerprint(recipe.sources()) in recipe.fingerprints:
            return _Match(BlockFusion(recipe), "recipe")
        if not verify:
            reason = f"its stock forward is not that of {recipe.versions}, and verify=False forbids to compare"
            return _Match(None, "probe", reason)
        return _Match(BlockFusion(recipe), "probe")
    loss = None if flags is None else loss_fusion(module, flags)
    if loss is not None:
        return _Match(None, "recipe", loss) if isinstance(loss, str) else _Match(loss, "recipe")
    inner = inner_recipe_for(type(module))
    if inner is not None and inner.concerns(module):
        inner = inner.exactly() if numerics == "exact" else inner
        lacking = inner.lacks(module)
        if lacking:
            return _Match(None, "recipe", lacking)
        return _Match(with_liger(InnerFusion(inner, sources=inner.sources(module)), flags), "recipe")
    matched = match(module)
    if matched is None:
        return None
    if matched.semantics is None:
        return _Match(None, matched.how, matched.reason or "")
    return _Match(with_liger(NormFusion(matched.semantics), flags), matched.how)


def _plan_attention(
    modules: Mapping[str, nn.Module], wish: str | None, config: KernelConfig, report: InjectionReport, **options: bool
) -> list[AttentionPlan]:
    if wish is None:
        return []
    policy = Policy(config.trust_remote_code, config.lock, options["strict"])
    return plan_attention(modules, wish, report, policy, **options)


def _spare_what_config_leaves_alone(candidates: list[_Candidate], report: InjectionReport) -> list[_Candidate]:
    """Leaves a block alone if config says of a part of it what the block, which computes it as well, would not do."""
    spared = {site.path: "leaves it alone" for site in report.skipped if site.reason == _BY_CONFIG}
    spared |= {c.site.path: "names a kernel for it" for c in candidates if c.options[0].names_kernel}
    kept = []
    for candidate in candidates:
        inside = next((path for path in spared if _computes(candidate, path)), None)
        if inside is None or candidate.options[0].names_kernel:
            kept.append(candidate)
        else:
            candidate.site.reason = f"{inside} is inside, and config {spared[inside]}"
            report.skipped.append(candidate.site)
    return kept


def _computes(candidate: _Candidate, path: str) -> bool:
    """Whether a fused forward does itself what the module at another path does."""
    prefix = f"{candidate.site.path}." if candidate.site.path else ""
    if isinstance(candidate.fusion, InnerFusion):
        return path in [prefix + name for name in candidate.fusion.recipe.children]
    return isinstance(candidate.fusion, BlockFusion) and path.startswith(prefix)


def _drop_what_blocks_cover(candidates: list[_Candidate], report: InjectionReport) -> list[_Candidate]:
    """Drops what a block computes itself, and what would have a turn of its own only where the block runs stock."""
    fusions = {candidate.site.path: candidate.fusion for candidate in candidates}
    for site in report.skipped:
        module = site._module() if site.reason == _ALREADY and site._module is not None else None
        state = None if module is None else patch_state(module)
        if state is not None:
            fusions[site.path] = state.fusion
    covered = [
        (f"{path}." if path else "", fusion.recipe.covers)
        for path, fusion in fusions.items()
        if isinstance(fusion, BlockFusion) and fusion.recipe.covers
    ]
    return [
        candidate
        for candidate in candidates
        if candidate.options[0].names_kernel
        or not any(candidate.site.path.startswith(path) and candidate.fusion.op in ops for path, ops in covered)
    ]


def _reason_to_leave(module: nn.Module, options: Sequence[Option], numerics: str, device: torch.device) -> str | None:
    if not options:
        return _BY_CONFIG
    if numerics == "fp8":
        reason = fp8_unavailable_reason(device)
        if reason is not None:
            return f"{reason}: use numerics='fast' or 'exact' instead of 'fp8'"
    patched = patch_state(module)
    if patched is None:
        return hooks.foreign_forward(module)
    over = options[0] is _GRAPH and not isinstance(patched.fusion, GraphFusion)
    return None if over else _ALREADY


def _walk(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yields every module once, with its path from the component's name on."""
    seen: set[int] = set()
    for name, root in modules.items():
        for path, module in root.named_modules():
            if id(module) not in seen:
                seen.add(id(module))
                yield ".".join(part for part in (name, path) if part), module


def _module_names(pipeline: Any) -> list[str] | None:
    components = getattr(pipeline, "components", None)
    if not isinstance(components, Mapping):
        return None
    return [name for name, part in components.items() if isinstance(part, nn.Module)]


def _dtype(component: nn.Module) -> torch.dtype:
    """The dtype that a component mostly has."""
    return next((p.dtype for p in component.parameters() if p.dtype in KERNEL_DTYPES), torch.float32)


def _likely_devices(module: nn.Module, component: nn.Module) -> tuple[torch.device, ...]:
    """Devices the module will probably run on, the likeliest first.

    Weights on the CPU or on meta may be offloaded, or not moved yet: then the GPU is likelier still.
    """
    tensors = itertools.chain(module.parameters(), component.parameters(), component.buffers())
    home = next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))
    if home.type == "cpu" and torch.cuda.is_available():
        return (torch.device("cuda", torch.cuda.current_device()), home)
    return (home,)


# --- verify --------------------------------------------------------------------------------------------


def _choose(candidate: _Candidate, report: InjectionReport) -> bool:
    """Takes the first way for which there is a provider; returns whether there is one."""
    site, device = candidate.site, candidate.devices[0]
    while True:
        provider = candidate.provider(device)
        site.op, site.how = candidate.fusion.op, candidate.options[0].how
        if provider == LEFT_ALONE:
            site.provider, site.reason = None, f"config leaves it alone on {device.type}, and not elsewhere"
            return True
        try:
            choice = candidate.fusion.choose(candidate.module, provider, device, candidate.dtypes)
        except NoProviderError as error:
            if candidate.refuse(str(error)):
                continue
            site.reason = "; ".join(candidate.refused)
            report._rejected.append(site)
            return False
        site.provider = choice.provider
        site.reason = "; ".join(filter(None, (*candidate.refused, choice.describe())))
        candidate.choice_is_fallback |= choice.is_fallback
        return True


def _verify(candidates: list[_Candidate], verifier: Verifier, report: InjectionReport) -> list[_Candidate]:
    kept = []
    for candidate in candidates:
        state = candidate.state
        while broken := _prove(candidate, state, verifier):
            reason = "; ".join(f"{proof.dtype} on {proof.device}: {proof.reason}" for proof in broken)
            if len(candidate.options) > 1:
                reason = f"{candidate.site.provider}: {reason}"
            if not candidate.refuse(reason):
                candidate.site.reason = "; ".join(candidate.refused)
                report._rejected.append(candidate.site)
                break
            if not _choose(candidate, report):
                break
            state.fusion, state.rule = candidate.options[0].fusion, candidate.options[0].rule
        else:
            kept.append(candidate)
            _prove_casts(candidate, state, verifier)
    return kept


def _prove(candidate: _Candidate, state: PatchState, verifier: Verifier) -> list[Measurement]:
    """Proves a module as it is, wherever it will probably run; returns the proofs that failed."""
    candidate.site.measurements.clear()
    for device, dtype in itertools.product(candidate.devices, candidate.dtypes):
        provider = candidate.provider(device)
        if provider == LEFT_ALONE:
            continue
        with torch.no_grad():
            proof = verifier.prove(candidate.module, candidate.fusion, provider, device, dtype)
        if proof is not None:
            candidate.site.measurements.append(proof)
            if proof.passed:
                state.trust(candidate.module, device, dtype)
    return [proof for proof in candidate.site.measurements if not proof.passed]


def _prove_casts(candidate: _Candidate, state: PatchState, verifier: Verifier) -> None:
    """Proves what casting the model makes of a module: a graph of ``torch.compile`` has no room for a proof."""
    for device, dtype in itertools.product(candidate.devices, sorted(KERNEL_DTYPES, key=str)):
        provider = candidate.provider(device)
        with torch.no_grad():
            cast = candidate.fusion.cast(candidate.module, dtype)
            if cast is None or provider == LEFT_ALONE:
                continue
            proof = verifier.prove(cast, candidate.fusion, provider, device, dtype)
            if proof is not None and proof.passed:
                state.trust(cast, device, dtype)


def _refuse_fallbacks(candidates: list[_Candidate], report: InjectionReport) -> None:
    left = [site for site in report.skipped if site.op is not None and site.reason not in (_ALREADY, _BY_CONFIG)]
    problems = [f"{site.path or site.class_name}: {site.reason}" for site in (*report.failed, *left)]
    problems += [
        f"{c.site.path or c.site.class_name}: served by {c.site.provider} ({c.site.reason})"
        for c in candidates
        if c.choice_is_fallback
    ]
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise InjectionError("strict injection refused, nothing was changed: " + "; ".join(problems[:5]) + more)


# --- apply, and back -----------------------------------------------------------------------------------


def _apply(candidates: list[_Candidate], routes: list[AttentionPlan]) -> list[str]:
    """Patches everything, or nothing. Returns what was done to modules besides."""
    done: list[_Candidate] = []
    try:
        for candidate in candidates:
            done.append(candidate)
            patch(candidate.module, candidate.state)
        install(routes)
        prepared = [(c.module, c.state.fusion.prepare(c.module, c.state.rule.choices())) for c in candidates]
    except BaseException:
        for candidate in reversed(done):
            take_back(candidate.module, candidate.state)
        raise
    besides = Counter((type(module).__name__, what) for module, what in prepared if what is not None)
    return [f"{count} {name}: {what}" for (name, what), count in besides.items()]


def _restore_sites(sites: Sequence[Site]) -> int:
    """Restores the modules of ``sites`` that still carry the very patch these sites speak of."""
    count = 0
    for site in sites:
        module = site._module() if site._module is not None else None
        if isinstance(site._state, Route):
            count += site._state.undo()
        elif module is not None and site._state is not None:
            count += take_back(module, site._state)
    return count
