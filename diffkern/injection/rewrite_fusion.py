"""Forwards with fused sites in them, as the injection sees them; see :mod:`diffkern.rewrite`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from diffkern.hub.rule import Rule
from diffkern.injection import notes
from diffkern.injection.patching import patches
from diffkern.injection.state import ATTRIBUTE, STOCK, PatchState, StrictModeError
from diffkern.providers import Choice, hub, requested, select
from diffkern.rewrite import AllowedInStrict, FusedSite, Rewriter, Rewritten, Trained, prove_ahead, serves_in_graphs
from diffkern.rewrite.signature import dtypes_in
from diffkern.verify.fusion import NO_TENSOR, Fusion
from diffkern.verify.measures import Measurement


@dataclass
class Rewriters:
    """The rewriters of an injection: one for all modules that are served alike, which so share functions and proofs."""

    #: ``"fast"`` or ``"exact"``; ``"fp8"`` counts as ``"fast"``, with rows of fp8 for layers that read them.
    numerics: str
    verify: bool  # whether sites are measured
    #: What computes the sites of an op where gradients are wanted, see :attr:`FusedSite.trained`.
    trained: Mapping[str, Trained] = field(default_factory=dict)
    #: Whether steps may become CUDA graphs, which decides about sites without a gain; None times none.
    replayed: bool | None = None
    _made: dict[Any, Rewriter] = field(default_factory=dict)

    def rewrite(
        self, module: nn.Module, provider: str | None = None, providers: Mapping[str, str | None] | None = None
    ) -> Rewritten | str:
        """Returns the forward of a module in which ``provider`` serves, or for some ops another; or why it has none."""
        providers = providers or {}
        key = provider, *sorted(providers.items(), key=str)
        if key not in self._made:
            off = [op for op, name in providers.items() if name == STOCK]
            numerics = "exact" if self.numerics == "exact" else "fast"
            self._made[key] = Rewriter(
                numerics, provider, self.verify, providers, off, _observe, _record, self.trained, self.replayed,
                self.numerics == "fp8", _tell,
            )  # fmt: skip
        return self._made[key].rewrite(module)


@dataclass(eq=False)
class RewriteFusion(Fusion):
    """A module whose forward is rewritten. A call is its arguments as they are; each site decides for itself."""

    rewriters: Rewriters  # those of the injection
    rewritten: Rewritten  # the forward without a provider of its own: it says which sites there are
    #: Who serves single ops in the place of the provider of the module; :data:`STOCK` for those that stay as they are
    #: written.
    providers: dict[str, str | None] = field(default_factory=dict)
    _forwards: dict[str | None, Rewritten] = field(default_factory=dict)
    _before: dict[Hashable, tuple[int, int]] = field(default_factory=dict)

    counts_itself = True
    proves_itself = True

    def __post_init__(self) -> None:
        self.replayed = self.rewriters.replayed

    @property
    @override
    def op(self) -> str:
        first, *others = self.kernel_ops or tuple(site.plan.rule.op for site in self.rewritten.sites)
        return f"{first} + {len(others)} more" if others else first

    @property
    @override
    def kernel_ops(self) -> tuple[str, ...]:
        ops = dict.fromkeys(site.plan.rule.op for site in self.rewritten.sites)
        return tuple(op for op in ops if self.providers.get(op) != STOCK)

    @override
    def computes(self, path: str) -> bool:
        children = (".".join(child) for site in self._sites() for child in site.plan.modules.values())
        return any(f"{path}.".startswith(f"{child}.") for child in children)

    @override
    def configure(self, rule_of: Callable[[str], Rule | None], serve: Callable[[Rule], Rule]) -> Rule | None:
        """Takes what a configuration says of each op; returns what then holds for the module as a whole."""
        rules = {site.plan.rule.op: rule_of(site.plan.rule.op) for site in self.rewritten.sites}
        whole = next((rule for rule in rules.values() if rule is None or any(rule.choices())), rules[next(iter(rules))])
        for op, rule in rules.items():
            if rule != whole and self.providers.get(op) != STOCK:  # whose layer is in fp8, whatever others are
                self.providers[op] = serve(rule or Rule()).otherwise
        return whole

    @property
    def is_once_in_call(self) -> bool:
        """Whether it computes something that other blocks of the model may have computed in the same call."""
        return any(site.is_once_in_call for site in self.rewritten.sites)

    # --- at every call ---------------------------------------------------------------------------------

    @override
    def primary_input(self, call: Any) -> Tensor:
        args, kwargs = call
        for part in (*args, *kwargs.values()):  # is mostly one of the first, and trees take long to take apart
            if isinstance(part, Tensor) and part.is_floating_point():
                return part
        tensors = (part for part in pytree.tree_leaves(call) if isinstance(part, Tensor))
        return next((part for part in tensors if part.is_floating_point()), NO_TENSOR)

    @property
    @override
    def without_gain(self) -> Callable[..., Any] | None:
        return self.rewritten.without_sites

    @override
    def weigh(self, module: nn.Module, call: Any, patched: Callable[..., Any]) -> str | None:
        """Says that no site gains where none did in the call before: so no result changes from one call to the next."""
        x = self.primary_input(call)
        size = x.device, x.dtype, x.numel().bit_length(), x.is_contiguous()
        forward = self._forwards.get(None) or self._forward(module, None)
        if size in forward.gains or torch.is_grad_enabled():
            return forward.gains.get(size)
        ran = sum(site.fused_calls + site.original_calls for site in forward.sites)
        idle = sum(site.idle_calls for site in forward.sites)
        ran_before, idle_before = self._before.setdefault(size, (ran, idle))
        if ran == ran_before:
            return None
        del self._before[size]
        # A site that ran as it is written for another reason, such as a hook, may run fused again.
        all_idle = ran - ran_before == idle - idle_before
        return forward.gains.setdefault(size, NO_SITE_GAINS if all_idle else "")

    @override
    def compute(self, module: nn.Module, call: Any, provider: str | None, stock: tuple[str, ...]) -> Any:
        args, kwargs = call
        return self.function(module, provider)(module, *args, **kwargs)

    @override
    def function(self, module: nn.Module, provider: str | None) -> Callable[..., Any]:
        return (self._forwards.get(provider) or self._forward(module, provider)).function

    # --- for proofs ------------------------------------------------------------------------------------

    @override
    def choose(self, module: nn.Module, provider: str | None, device: torch.device, dtype: torch.dtype) -> Choice:
        """The choice for the first op that gains something; ops that only plain PyTorch serves stay as written."""
        choices = {op: select(op, device, (dtype,), self.providers.get(op, provider)) for op in self.kernel_ops}
        name = requested(provider)
        gaining = {op: choice for op, choice in choices.items() if choice.gains}
        if gaining and (name is None or name.startswith(hub.WITH_HUB)):
            self.providers.update({op: STOCK for op in choices if op not in gaining and op not in self.providers})
        choice = next(iter((gaining or choices).values()))
        if self.rewriters.trained.keys() & choices:
            from diffkern.providers import liger  # which an inference never imports

            return liger.named(choice)
        return choice

    @override
    def prepare(self, module: nn.Module, providers: Iterable[str | None]) -> None:
        """Rewrites for every provider, which a graph of the compiler could not."""
        for provider in {None, *providers} - {STOCK}:
            self._forward(module, provider)

    @override
    def prove_ahead(
        self, module: nn.Module, provider: str | None, device: torch.device, dtype: torch.dtype
    ) -> list[Measurement]:
        rewritten = self._forward(module, provider)
        proofs = []
        for site in self._sites(rewritten):
            prove_ahead(site, module, device, dtype)
            proofs += [proof for proof in site.proofs.values() if proof.device == str(device)]
        nothing_left = len(self.refused()) == len(self._sites())
        return [proof for proof in proofs if proof.passed or nothing_left]

    @override
    def lacks_proof(self, device: torch.device, dtype: torch.dtype) -> bool:
        sites = [site for site in self._sites() if serves_in_graphs(site)]
        met = [signature for site in sites for signature in tuple(site.ways)]  # the device comes first
        known = any(device == signature[0] and dtype in dtypes_in(signature) for signature in met)
        return bool(sites) and not (known or any((device, dtype) in site.tried for site in sites))

    @override
    def refused(self) -> dict[str, str]:
        sites = [site for site in self._sites() if site.ways and not any(site.ways.values())]
        return {str(site): next(iter(site.reasons.values())) for site in sites}

    @property
    def timed_sites(self) -> list[FusedSite]:
        """The sites that ran on a GPU and were timed there: on a CPU, times say too little."""
        return [site for site in self._sites() if any(size[0].type != "cpu" for size in site.gains)]

    def _sites(self, rewritten: Rewritten | None = None) -> list[FusedSite]:
        forward = rewritten or next(iter(self._forwards.values()), self.rewritten)
        off = forward.guard.disabled
        return [site for site in forward.sites if site.plan.index not in off and not site.calls_layer]

    def _forward(self, module: nn.Module, provider: str | None) -> Rewritten:
        if provider not in self._forwards:
            found = self.rewriters.rewrite(module, provider, self.providers)
            assert isinstance(found, Rewritten), found
            self._forwards[provider] = found
        return self._forwards[provider]


#: Why a forward runs stock whose sites were timed.
NO_SITE_GAINS = "none of its parts takes less time fused"


def _observe(module: nn.Module, reason: str | None) -> None:
    """Counts the call of a site, or of a forward that runs stock as a whole, where the module's patch counts."""
    state = module.__dict__.get(ATTRIBUTE)
    if reason is None and state is not None and state.fusion.counts_itself:  # mostly
        state.add_fused()
        return
    if state is not None and not state.fusion.counts_itself:  # a graph lies over it
        state = _state_of(module)
    if state is None:  # restored by another thread
        return
    if reason is None:
        state.add_fused()
    elif state.strict and not isinstance(reason, AllowedInStrict):
        raise StrictModeError(f"{type(module).__name__} cannot run fused: {reason}")
    else:
        state.add_stock(reason)


def _record(module: nn.Module, proof: Measurement) -> None:
    """Puts a proof at first use into the report; one of gradients that fails is worth a warning."""
    state = _state_of(module)
    if state is None:  # before it is patched
        return
    if state.site is not None:
        state.site.measurements.append(proof)
    if not proof.passed and proof.gradients:
        reason = f"runs stock wherever gradients are wanted: {proof.reason}"
        if state.site is not None:
            state.site.reason = reason
        warnings.warn(f"diffkern: {type(module).__name__} {reason}", stacklevel=7)


def _tell(module: nn.Module, note: str) -> None:
    """Puts a line into the report of a module, once."""
    state = _state_of(module)
    if state is not None:
        notes.add(state.report, note)


def _state_of(module: nn.Module) -> PatchState | None:
    return next((state for state in patches(module) if state.fusion.counts_itself), None)
