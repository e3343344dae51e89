"""What other features make of a patched model: the table behind docs/compatibility.md, measured row by row."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import accelerate
import torch
from diffusers.hooks import apply_group_offloading

from diffkern import inject_optimized_kernels, plan
from diffkern.rewrite import AllowedInStrict
from tests.stateful.machine import ModelMachine
from tests.stateful.models import SUBJECTS, Subject

FUSED, SITE, STOCK, REFUSED = "fused", "that site stock", "all stock", "refused"

#: How many calls are looked at: a cache that skips blocks computes them in one of them.
CALLS = 4

Step = Callable[[ModelMachine], Any]


@dataclass(frozen=True)
class Feature:
    """A feature and how it is used.

    Attributes:
        name: As users know it.
        use: What puts it on a model; or calls the model in the way that the feature is about, if ``is_call``.
        models: Models that have it.
        is_call: Whether it is a way to call a model and not something that stays on it.
        options: Of the injection.
        gpu: Whether it needs a GPU.
    """

    name: str
    use: Step
    models: tuple[str, ...] = ("ltx", "flux")
    is_call: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    gpu: bool = False


def _path(state: ModelMachine, name: str) -> int:
    """The number under which the rules of the machine know the module whose path ends like this."""
    names = [path for path, _ in state.twins.stock.named_modules() if path]
    return next(number for number, path in enumerate(names) if path.endswith(name))


def _on(name: str, rule: Callable[..., Any], **values: Any) -> Step:
    return lambda state: rule(state, number=_path(state, name), **values)


def _nothing(state: ModelMachine) -> None:
    pass


def _offload_to_cpu(state: ModelMachine) -> None:
    state.twins.both(lambda model: accelerate.cpu_offload_with_hook(model, torch.device("cuda")))


def _stream_from_cpu(state: ModelMachine) -> None:
    devices = {"onload_device": torch.device("cuda"), "offload_device": torch.device("cpu")}
    state.twins.both(lambda model: apply_group_offloading(model, offload_type="leaf_level", use_stream=True, **devices))


_GRAPH = {"cuda_graph": True}
M = ModelMachine
FEATURES = (
    Feature("nothing else", _nothing),
    Feature("`numerics=\"exact\"`", _nothing, options={"numerics": "exact"}),
    Feature("`numerics=\"fp8\"` without a GPU", _nothing, options={"numerics": "fp8"}),
    Feature("LoRA", lambda s: s.add_lora(number=1, dora=False)),
    Feature("DoRA", lambda s: s.add_lora(number=1, dora=True)),
    Feature("LoRA, fused", lambda s: (s.add_lora(number=1, dora=False), s.fuse_lora())),
    Feature("LoRA, switched off", lambda s: (s.add_lora(number=1, dora=False), s.switch_lora(enabled=False))),
    Feature("LoRA, unloaded", lambda s: (s.add_lora(number=1, dora=False), s.unload_lora())),
    Feature("a linear layer with a quantised weight (tensor subclass)", lambda s: s.quantize(number=20, subclass=True)),
    Feature("a quantised linear layer of its own class", lambda s: s.quantize(number=20, subclass=False)),
    Feature("weights written through `.data`", lambda s: s.write_weights(number=20, part="all")),
    Feature("averaged weights swapped in (`EMAModel`)", lambda s: s.swap_in_averaged_weights()),
    Feature("`load_state_dict`", lambda s: s.load_weights(assign=False)),
    Feature("`load_state_dict(assign=True)`", lambda s: s.load_weights(assign=True)),
    Feature("`.to(torch.bfloat16)`", lambda s: s.cast(dtype=torch.bfloat16)),
    Feature("a forward hook on the norm of queries", _on("norm_q", M.add_forward_hook)),
    Feature("a forward hook on an attention", _on("attn1", M.add_forward_hook), ("ltx",)),
    Feature("a hook of accelerate on the norm of queries", _on("norm_q", M.add_accelerate_hook)),
    Feature("a hook of diffusers on the norm of queries", _on("norm_q", M.add_diffusers_hook)),
    Feature("a replaced forward of a norm", _on("norm_q", M.replace_forward, wrap=False)),
    Feature("a replaced forward of a class, of the norm of queries", _on("norm_q", M.replace_forward_of_class)),
    Feature("a replaced forward of `nn.Linear`", _on("to_q", M.replace_forward_of_class)),
    Feature("sequential offloading", lambda s: s.offload(kind="sequential")),
    Feature("group offloading by block", lambda s: s.offload(kind="block_level")),
    Feature("group offloading by leaf", lambda s: s.offload(kind="leaf_level")),
    Feature("First Block Cache", lambda s: s.enable_cache(kind="first block")),
    Feature("MagCache", lambda s: s.enable_cache(kind="mag")),
    Feature("TaylorSeer", lambda s: s.enable_cache(kind="taylor")),
    Feature("`copy.deepcopy`", lambda s: s.deep_copy()),
    Feature("`pickle`", lambda s: s.pickle()),
    Feature("autocast", lambda s: s.autocast(dtype=torch.bfloat16), is_call=True),
    Feature("gradients", lambda s: s.train(checkpointing=False, weights=True), is_call=True),
    Feature("gradient checkpointing", lambda s: s.train(checkpointing=True, weights=True), is_call=True),
    Feature("two threads at once", lambda s: s.run_in_threads(), is_call=True),
    Feature("`cuda_graph=True`", _nothing, options=_GRAPH, gpu=True),
    Feature("LoRA and `cuda_graph=True`", lambda s: s.add_lora(number=1, dora=False), options=_GRAPH, gpu=True),
    Feature("`numerics=\"fp8\"`", _nothing, options={"numerics": "fp8"}, gpu=True),
    Feature("offloading of the whole model to the CPU", _offload_to_cpu, gpu=True),
    Feature("group offloading to the CPU with a stream", _stream_from_cpu, gpu=True),
)  # fmt: skip


def machine(model: str) -> ModelMachine:
    """A machine for one model."""
    kind = type("Machine", (ModelMachine,), {"subject": SUBJECTS[model]})
    state: ModelMachine = kind()
    return state


def outcome(feature: Feature, model: str) -> str:
    """Uses a feature after and before the injection; says what runs fused then, and checks every result.

    Raises:
        AssertionError: the patched model does not compute what its twin computes.
    """
    orders = (True,) if feature.is_call or feature.name in ("`copy.deepcopy`", "`pickle`") else (True, False)
    outcomes = {inject_first: _outcome(feature, model, inject_first) for inject_first in orders}
    if len(set(outcomes.values())) == 1:
        return outcomes[True]
    return f"{outcomes[True]}; put there before the injection: {outcomes[False]}"


def _outcome(feature: Feature, model: str, inject_first: bool) -> str:
    state = machine(model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _measure(state, feature, inject_first)
    finally:
        state.teardown()


def _measure(state: ModelMachine, feature: Feature, inject_first: bool) -> str:
    # Before the feature is there: it may change classes that other models have too.
    numerics = feature.options.get("numerics", "fast")
    usual, unusable = (set(), set()) if feature.gpu else _usually_ran(state.subject, numerics)
    if feature.gpu:
        state.device = "cuda"
        state.twins.both(lambda model: model.to("cuda"))
        state.cast(dtype=torch.bfloat16)
    if not inject_first:
        feature.use(state)
    report = state.twins.inject("", **{"numerics": "fast", **feature.options})
    if report is None or not report.patched:
        return REFUSED
    state.steps(count=3)
    if inject_first and not feature.is_call:
        feature.use(state)
        state.steps(count=3)
    if not state.twins.live:  # the model is another object, which no report speaks of
        patched = sum(site.reason == "already patched by diffkern" for site in plan(state.twins.patched).skipped)
        return FUSED if patched else STOCK
    before = report.calls()
    for _ in range(1 if feature.is_call else CALLS):
        feature.use(state) if feature.is_call else state.both_compute_the_same()
    fused, others = _ran(before, report.calls())
    if not fused:
        return STOCK
    return SITE if others - unusable or not usual <= fused else FUSED


def _ran(before: dict[str, Any], after: dict[str, Any]) -> tuple[set[str], set[str]]:
    """The sites that ran fused between two counts of a report, and those of which something ran stock."""
    fused = {path for path, now in after.items() if now["fused"] > before[path]["fused"]}
    others = {
        path
        for path, now in after.items()
        if _failures(now) != _failures(before[path]) or now["stock_pieces"] != before[path]["stock_pieces"]
    }
    return fused, others


def _failures(counts: dict[str, Any]) -> dict[str, int]:
    return {why: calls for why, calls in counts["stock_reasons"].items() if not isinstance(why, AllowedInStrict)}


@functools.cache
def _usually_ran(subject: Subject, numerics: str) -> tuple[set[str], set[str]]:
    """The sites that run fused in a call of a model that has nothing else, and those that run stock there, too."""
    model = subject.model()
    report = inject_optimized_kernels(model, numerics=numerics)
    before = report.calls()
    with torch.no_grad():
        model(**subject.arguments(0))
    return _ran(before, report.calls())


def table(results: Mapping[str, Any]) -> str:
    """The table in docs/compatibility.md: a row for each feature, a column for each model."""
    models = {"ltx": "LTX-Video", "flux": "Flux"}
    lines = [f"| with | {' | '.join(models.values())} | measured on |", "|---" * (len(models) + 2) + "|"]
    for feature in FEATURES:
        row = results.get(feature.name, {})
        cells = [row.get(model, "not run yet" if model in feature.models else "-") for model in models]
        where = row.get("where", "a GPU is needed") if feature.gpu else "the CPU, by every test run"
        lines.append(f"| {feature.name} | {' | '.join(cells)} | {where} |")
    return "\n".join(lines) + "\n"
