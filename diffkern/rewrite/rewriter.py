"""Rewrites the forwards of modules: plan, bind, share between modules of one kind."""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from diffkern.matching import TABLE, NormSemantics, full_name
from diffkern.matching.genuine import in_library
from diffkern.rewrite.facts import Facts, ModuleFacts, Path, child_of, functions_of, group_norm_path, settings_of
from diffkern.rewrite.guard import Guard
from diffkern.rewrite.masked import MaskedAttentionSite
from diffkern.rewrite.plan import ENTER, JOIN, READ, STOCK, Plan, SitePlan, plan
from diffkern.rewrite.rooms import NormSite
from diffkern.rewrite.single_stream import SingleStreamSite, join, read
from diffkern.rewrite.site import FusedSite, Observer, Trained
from diffkern.rewrite.source import LOCK, Source, recompile
from diffkern.rewrite.streams import MODULATES
from diffkern.rewrite.twins import put_twins, twin_of, twins_in
from diffkern.rewrite.unrotated import UnrotatedSite
from diffkern.rewrite.verify import Recorder, SiteVerifier

#: With this set to 0 in the environment nothing is rewritten.
SWITCH = "DIFFKERN_REWRITE"

#: Layers of which nothing but their parameters decides how a site computes: their settings are read at every call.
_READ_AT_CALLS = (nn.Linear, nn.Conv2d, nn.Conv3d, nn.GroupNorm)
#: Plans by function; they hold code and no function, so that a class can go.
_PLANS: WeakKeyDictionary[Callable[..., Any], list[Plan]] = WeakKeyDictionary()
_DECLINED: WeakKeyDictionary[Callable[..., Any], str] = WeakKeyDictionary()
#: Why nothing was found for modules of a class about which the same holds.
_WITHOUT: WeakKeyDictionary[Callable[..., Any], list[tuple[ref[type], Facts, str]]] = WeakKeyDictionary()

#: The name of the route in rewritten forwards of attention.
ROUTE = "_route"
_ROUTED: WeakKeyDictionary[Callable[..., Any], tuple[CodeType, dict[str, Any]] | str] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Rewritten:
    """A forward with sites in it; it serves every module of its kind.

    Attributes:
        function: The forward, decorators and all: bind it to a module, or call it with the module first.
        plan: What was found, with the reasons for what was not.
        guard: Decides per call which sites are on.
        gains: Why calls of a size take no less time with sites in them, or "", as far as that is known.
        without_sites: What computes such calls in less time than the forward of the class; None if nothing does.
    """

    function: FunctionType
    plan: Plan
    guard: Guard
    gains: dict[Hashable, str] = field(default_factory=dict)
    without_sites: FunctionType | None = None

    @property
    def sites(self) -> tuple[FusedSite, ...]:
        """The sites, in the order of their numbers."""
        return self.guard.sites

    def source(self) -> str:
        """The rewritten text."""
        return self.plan.text


class Rewriter:
    """Rewrites forwards for one injection. Modules of one kind share a function and its sites.

    Args:
        numerics: ``"fast"`` or ``"exact"``.
        provider: As in :mod:`diffkern.ops`.
        verify: Whether a site is measured on the first leaves of a signature.
        providers: Who serves an op instead of ``provider``.
        off: Ops whose sites stay as they are written.
        observer: Learns of each call, see :attr:`FusedSite.observer`.
        recorder: Learns of each proof, see :class:`SiteVerifier`.
        trained: Computes the sites of an op where gradients are wanted, see :attr:`FusedSite.trained`.
        replayed: What counts when sites are timed, see :func:`diffkern.verify.gain.reason_without_gain`; with None they
            are not.
        for_fp8: Whether layers of the model may read results in fp8.
        on_kept: Learns where attention keeps its mask, see :attr:`MaskedAttentionSite.on_kept`.
    """

    def __init__(
        self,
        numerics: str = "fast",
        provider: str | None = None,
        verify: bool = True,
        providers: Mapping[str, str | None] | None = None,
        off: Collection[str] = (),
        observer: Observer | None = None,
        recorder: Recorder | None = None,
        trained: Mapping[str, Trained] | None = None,
        replayed: bool | None = None,
        for_fp8: bool = False,
        on_kept: Callable[[nn.Module, str], None] | None = None,
    ) -> None:
        self._for_fp8, self._on_kept = for_fp8, on_kept
        self._verifier = SiteVerifier(numerics, verify, recorder)
        self._trained, self._replayed = trained or {}, replayed
        self._provider, self._providers = provider, providers or {}
        self._off, self._observer = off, observer
        self._kinds: dict[Any, Rewritten | str] = {}

    def rewrite(self, module: nn.Module, forward: Callable[..., Any] | None = None) -> Rewritten | str:
        """Returns the rewritten forward of a module, or the reason why it has none.

        Args:
            module: It is not changed.
            forward: The forward to rewrite; that of its class by default.
        """
        if os.environ.get(SWITCH, "1") == "0":
            return f"rewriting is off: {SWITCH}=0"
        if forward is None:
            if isinstance(TABLE.get(full_name(type(module))), NormSemantics) or group_norm_path(module):
                return "it is a norm, which is one op as a whole"
            forward = type(module).forward
        with LOCK:
            found = planned(forward, module)
            function, processor = forward, None
            if isinstance(found, str) and "processor" in module.__dict__:
                processor = module.__dict__["processor"]
                if isinstance(routed(forward), str):
                    return found
                function = type(processor).__call__
                found = planned(function, module, receiver=1)
            if isinstance(found, str):
                return found
            paths = [path for site in found.sites for path in site.modules.values()]
            kind = (forward, type(module), function, found, *[_kind_of(module, path) for path in paths])
            if kind not in self._kinds:
                bound = self._bind(function, module, found)
                if processor is not None and isinstance(bound, Rewritten):
                    bound = _in_forward(bound, forward, type(processor), function)
                self._kinds[kind] = bound
            return self._kinds[kind]

    def _bind(self, forward: Any, module: nn.Module, found: Plan) -> Rewritten | str:
        function = inspect.unwrap(forward)

        def made(plan: SitePlan) -> FusedSite:
            op = plan.rule.op
            kind = NormSite if op in MODULATES else plan.rule.site
            if self._for_fp8 and plan.read_by and op in self._off:  # since its layer computes in fp8
                kind = SingleStreamSite
            if plan.attended:
                kind = UnrotatedSite
            provider = self._providers.get(op, self._provider)
            return kind(plan, function, module, provider, self._trained.get(op), self._for_fp8)

        sites = tuple(map(made, found.sites))
        exact = self._verifier.numerics == "exact"  # is laid out as in stock
        if exact and all([site.lies_otherwise for site in sites]):
            return "numerics='exact' leaves it stock: its results would lie in memory otherwise"
        for site in sites:
            if isinstance(site, MaskedAttentionSite):
                site.shortens, site.on_kept = not exact, self._on_kept
            site.on_new_signature, site.on_gradients = self._verifier, self._verifier.prove_gradients
            site.observer = self._observer
        values = dict(found.facts.values)
        if any(child_of(module, path) is None for site in found.sites for path in site.modules.values()):
            values.update(settings_of(module))  # a method, which reads them
        guard = Guard(sites, module, found.helpers, function.__globals__, values, not (exact and found.repeats))
        off = [site for site in sites if site.plan.rule.op in self._off and not site.calls_layer]
        if exact:
            off += [site for site in sites if site.lies_otherwise]
            for site in sites:
                if isinstance(site, NormSite):
                    site.rows_around = None
        guard.disabled = {site.plan.index for site in off}
        guard.observer = self._observer
        if self._replayed is not None:
            for site in sites:
                site.on_new_size = partial(self._verifier.weigh, replayed=self._replayed, guard=guard)
        names = {ENTER: guard.enter, STOCK: function, JOIN: join, READ: read, **twins_in(function)}
        if any(site.plan.moves_calls and "convolution" in site.plan.modules for site in sites):
            guard.stock, names[STOCK] = function, guard.otherwise

            def rest(module: nn.Module) -> FunctionType | None:
                other = self.rewrite(module, forward)
                return other.function if isinstance(other, Rewritten) and other.guard is not guard else None

            guard.rewrite_rest = rest
        twin = twin_of(forward) if in_library(forward) else None
        return Rewritten(recompile(forward, found.code, names), found, guard, without_sites=twin)


class Route:
    """What an attention module calls in the place of its processor, which stays the object that it is.

    Args:
        cls: The class of the processor that was read.
        call: Its ``__call__``.
        rewritten: What runs instead.
        guard: Of the sites in it.
    """

    def __init__(self, cls: type, call: Callable[..., Any], rewritten: Callable[..., Any], guard: Guard) -> None:
        self._cls, self._call, self._rewritten, self._guard = cls, call, rewritten, guard

    def __call__(self, module: nn.Module, processor: Any) -> Callable[..., Any]:
        """Returns what to call in the place of a processor."""
        if type(processor) is self._cls and self._cls.__call__ is self._call:
            return partial(self._rewritten, processor)
        if self._guard.observer is not None and not torch.compiler.is_compiling():
            self._guard.observer(module, "its processor is another than when it was patched")
        called: Callable[..., Any] = processor
        return called


def routed(forward: Callable[..., Any]) -> tuple[CodeType, dict[str, Any]] | str:
    """Returns the code of a forward that asks :data:`ROUTE` for its processor, or why there is none.

    Beside it stand the twins that it calls, see :mod:`~diffkern.rewrite.twins`.
    """
    if forward not in _ROUTED:
        source = Source.of(forward)
        _ROUTED[forward] = source if isinstance(source, str) else _routed(source)
    return _ROUTED[forward]


def _routed(source: Source) -> tuple[CodeType, dict[str, Any]] | str:
    receiver, found = source.tree.args.args[0].arg, False
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"{receiver}.processor":
            route = ast.Call(ast.Name(ROUTE, ast.Load()), [ast.Name(receiver, ast.Load()), node.func], [])
            node.func, found = ast.copy_location(route, node.func), True
    if not found:
        return "it calls no processor"
    names = put_twins(source.tree, source.function)
    return source.code(ast.fix_missing_locations(source.tree), [ROUTE, *names]), twins_in(source.function)


def _in_forward(call: Rewritten, forward: Any, cls: type, called: Callable[..., Any]) -> Rewritten:
    """The forward of an attention module that runs a rewritten ``__call__`` of its processor."""
    found = routed(forward)
    assert not isinstance(found, str)
    code, twins = found
    route = Route(cls, called, call.function, call.guard)
    return replace(call, function=recompile(forward, code, {ROUTE: route, **twins}), without_sites=twin_of(forward))


def planned(forward: Callable[..., Any], module: nn.Module, receiver: int = 0) -> Plan | str:
    """Returns the plan of a forward for a module, made once for all modules about which it assumes the same.

    Args:
        forward: The function; that of a processor has the module as its second argument.
        module: The module.
        receiver: Which argument the module is.
    """
    with LOCK:
        if forward in _DECLINED:
            return _DECLINED[forward]
        for known in _PLANS.get(forward, ()):
            if known.facts.hold_for(module) and known.helpers_hold(module, inspect.unwrap(forward).__globals__):
                return known
        for cls, facts, reason in _WITHOUT.get(forward, ()):
            if cls() is type(module) and facts.hold_for(module):
                return reason
        source = Source.of(forward)
        if isinstance(source, str):
            _DECLINED[forward] = source
            return source
        arguments = source.tree.args
        names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        if len(names) <= receiver:
            return "it takes no module"
        facts = ModuleFacts(names[receiver], module)
        found = plan(source, facts)
        facts.forget_module()
        if isinstance(found, Plan):
            _PLANS.setdefault(forward, []).append(found)
        else:
            _WITHOUT.setdefault(forward, []).append((ref(type(module)), facts, found))
        return found


def _kind_of(module: nn.Module, path: Path) -> Any:
    """What decides how a callee of a site computes: a submodule, or a method with what it may read of its module."""
    child = child_of(module, path)
    if child is None:
        return tuple(settings_of(module).items())
    parameters = tuple([name for name, parameter in child._parameters.items() if parameter is not None])
    inner = tuple([_kind_of(child, (name,)) for name, part in child._modules.items() if part is not None])
    settings = () if type(child) in _READ_AT_CALLS else (*settings_of(child).items(), *functions_of(child))
    return type(child), parameters, settings, inner
