"""select -> plan -> verify -> patch -> report, and restore."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from diffkern.attention import Route
from diffkern.cache import drop
from diffkern.hub import KernelConfig
from diffkern.injection.attention import Plan as AttentionPlan
from diffkern.injection.attention import install, plan_attention, restore_attention
from diffkern.injection.components import all_components, select_components
from diffkern.injection.graph_fusion import is_distributed
from diffkern.injection.kernel_selector import KernelSelector
from diffkern.injection.patching import patch, remove_patch, unpatch
from diffkern.injection.planning import Candidate, plan_graphs, plan_layouts, plan_model_calls, plan_modules, walk
from diffkern.injection.proving import choose_provider, refuse_fallbacks, verify_candidates
from diffkern.injection.report import InjectionReport, Site
from diffkern.injection.rewrite_fusion import Rewriters
from diffkern.injection.state import LOCK, PatchState
from diffkern.verify.proof import Verifier

NUMERICS = ("exact", "fast", "fp8")


def inject_optimized_kernels(
    pipe_or_module: Any,
    *,
    components: Iterable[str] | None = None,
    numerics: str = "fast",
    config: KernelConfig | Mapping[str, Any] | None = None,
    attention: str | Sequence[str] | None = None,
    liger: bool | Mapping[str, bool] | None = None,
    cuda_graph: bool | str = "auto",
    graph_memory: float | None = None,
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
            ``"fp8"`` computes the large linear layers in fp8 (see ``docs/fp8.md`` for which), and everything else
            as ``"fast"``; it needs a GPU of compute capability 8.9, and memory for a second copy of those weights, of
            half their size.
        config: Who serves what; see :class:`diffkern.KernelConfig`.
        attention: Who computes attention: the name of a backend of diffusers, ``"cudnn_fp8"``, a kernel on the Hub
            such as ``"org/repo@revision:function"``, or ``"auto"`` for the fastest of those installed that are not
            lossy, by measurement at first use; or several names, which with ``"auto"`` are measured as well. None
            leaves it as it is. A call that the backend cannot serve (a mask, dropout, the size of its heads) runs as
            before.
        liger: Whether, and for what, the kernels of the package ``liger-kernel`` serve wherever gradients are wanted:
            True, or a dict of its flags ``rope``, ``swiglu``, ``cross_entropy``, ``fused_linear_cross_entropy`` and
            ``rms_norm``, as its own functions take them. With ``fused_linear_cross_entropy``, one of the defaults,
            the output of a language model in training has no logits, and in half precision its gradients may have 1.5
            times the error of stock's.
        cuda_graph: Whether the steps of the denoisers are captured as CUDA graphs, one for each kind of call (shapes,
            dtypes, plain arguments), and replayed. ``"auto"`` times the first calls of a kind on a GPU and captures
            them if the GPU waits for the host; a graph stays if its replays are at least 10 % faster, and the report
            says both times. With True a call of a new kind runs as it is and the second one is captured, whatever
            that gains; False forbids it.
            Anything that changes what a step does, an adapter, a hook or any plain attribute, is noticed. A step that
            cannot be captured runs as it is, and ``report.calls()`` says why. So do steps while
            gradients are enabled, weights are offloaded, or hooks sit inside of the denoiser.
        graph_memory: The memory in GiB that CUDA graphs may take on a device, beyond what the steps took before. None
            takes what there is for ``cuda_graph=True``, and at most a quarter of what is free for ``"auto"``.
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
    if cuda_graph != "auto" and not isinstance(cuda_graph, bool):
        raise TypeError(f"cuda_graph={cuda_graph!r}: expected True, False or 'auto'")
    number = isinstance(graph_memory, (int, float)) and not isinstance(graph_memory, bool)
    if graph_memory is not None and not (number and graph_memory > 0):
        raise ValueError(f"graph_memory={graph_memory!r}: expected GiB, a number above 0, or None")
    for name, value in (("verify", verify), ("strict", strict), ("dry_run", dry_run)):
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r}: expected True or False")
    with LOCK:
        started = time.perf_counter()
        report = InjectionReport(type(pipe_or_module).__name__, numerics, dry_run, verified=verify)
        modules, left_out = select_components(pipe_or_module, components)
        report.notes += [f"component {name!r}: {reason}" for name, reason in left_out.items()]
        config = KernelConfig.of(config)
        selector = KernelSelector(config, strict)
        training = None
        if liger is not None and liger is not False:
            from diffkern.injection.liger import Liger  # which nothing else imports

            training = Liger.asked_for(liger, modules, report)
        # Ranks would choose apart, and a strict injection leaves nothing stock.
        times = config.measures and verify and not strict and not is_distributed()
        trained = {} if training is None else training.trained_sites()
        rewriters = Rewriters(numerics, verify, trained, cuda_graph is not False if times else None)
        candidates = plan_modules(modules, config, selector, training, rewriters, report)
        if times:
            candidates += plan_layouts(modules, candidates, report, cuda_graph is not False)
        by_time = cuda_graph == "auto"
        if cuda_graph and (config.measures or not by_time):
            candidates += plan_graphs(modules, report, by_time=by_time, memory=graph_memory)
        candidates = [candidate for candidate in candidates if choose_provider(candidate, report)]
        candidates += plan_model_calls(modules, candidates)
        routes = plan_attention(modules, attention, config, report, verify=verify, strict=strict)
        verifier = Verifier(numerics) if verify else None
        for candidate in candidates:
            proven_by = None if candidate.fusion.proves_itself else verifier
            rule = candidate.options[0].rule
            candidate.state = PatchState(candidate.fusion, rule, proven_by, strict, numerics, candidate.is_model)
        if verifier is not None and not dry_run:
            candidates = verify_candidates(candidates, verifier, report)
        if strict:
            refuse_fallbacks(candidates, report)
        if not dry_run:
            _apply(candidates, routes)
        report._accepted += [*(route.site for route in routes), *(candidate.site for candidate in candidates)]
        for candidate in () if dry_run else candidates:
            candidate.site._state = candidate.state
            candidate.state.site, candidate.state.report = candidate.site, report._key
        report.notes += selector.describe_kernels(candidate.site.provider for candidate in candidates)
        report._undo = _restore_sites
        report.seconds = time.perf_counter() - started
    return report


def plan(pipe_or_module: Any, **options: Any) -> InjectionReport:
    """Says what :func:`inject_optimized_kernels` would do with the same options, and does nothing."""
    return inject_optimized_kernels(pipe_or_module, **{**options, "dry_run": True})


def restore(pipe_or_module: Any) -> int:
    """Takes back every patch of diffkern in a pipeline or module, of any injection.

    Afterwards the stock forwards run again, bit for bit as before, under whatever hooks there are by then.

    Args:
        pipe_or_module: A pipeline (all its components), a model, or a part of a model.

    Returns:
        How many patches were taken back; 0 if there was none.

    Raises:
        TypeError: the target is neither a pipeline nor a module.
    """
    modules = all_components(pipe_or_module)
    with LOCK:
        return sum(unpatch(module) for _, module in walk(modules)) + restore_attention(modules)


def forget(pipe_or_module: Any) -> int:
    """Drops every tensor that diffkern keeps for a pipeline or model: fp8 weights, text, rotary tables, CUDA graphs.

    Call it after a write into a weight that PyTorch does not count (``tensor.data``, NumPy, DLPack). Patches stay, and
    the next step computes everything from the tensors as they are then.

    Args:
        pipe_or_module: A pipeline (all its components), a model, or a part of a model.

    Returns:
        For how many modules something was kept.

    Raises:
        TypeError: the target is neither a pipeline nor a module.
    """
    return sum(drop(module) for _, module in walk(all_components(pipe_or_module)))


@contextmanager
def optimized(pipe_or_module: Any, **options: Any) -> Iterator[InjectionReport]:
    """Injects for the length of a ``with`` block; takes back what it patched, and no more, at its end.

    The arguments are those of :func:`inject_optimized_kernels`.
    """
    report = inject_optimized_kernels(pipe_or_module, **options)
    try:
        yield report
    finally:
        report.restore()


def _apply(candidates: list[Candidate], routes: list[AttentionPlan]) -> None:
    """Patches everything, or nothing."""
    try:
        for candidate in candidates:
            patch(candidate.module, candidate.state)
        install(routes)
        for candidate in candidates:
            candidate.state.fusion.prepare(candidate.module, candidate.state.rule.choices())
    except BaseException:
        for candidate in reversed(candidates):  # those that were not patched yet have nothing to remove
            remove_patch(candidate.module, candidate.state)
        raise


def _restore_sites(sites: Sequence[Site]) -> int:
    """Restores the modules of ``sites`` that still carry the very patch these sites speak of."""
    count = 0
    with LOCK:
        for site in sites:
            if isinstance(site._state, Route):
                count += site._state.undo()
            elif site.module is not None and isinstance(site._state, PatchState):
                count += remove_patch(site.module, site._state) and not site.waiting
    return count
