"""Which sites are on in one call of a forward: one look at the modules that they compute in the place of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from diffkern.blocks.pieces import (
    EQUIVALENT_FORWARDS,
    GLOBAL_HOOKS,
    calls_otherwise,
    unfit_surroundings,
    untouched,
)
from diffkern.matching.genuine import OF_TORCH, is_own
from diffkern.rewrite.facts import Path, child_of, functions_of, plain_attribute, settings_test
from diffkern.rewrite.functions import global_at
from diffkern.rewrite.site import FusedSite, Observer

#: Sites by their numbers, each on (the site) or off (its original expression).
Active = Sequence[Callable[..., Any]]
# Bound once, since every call asks.
_is_traced = torch.compiler.is_dynamo_compiling

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_REGISTRIES = ("_modules", "_parameters", "_buffers")


class Guard:
    """Decides at the entry of a rewritten forward, from classes, hooks and globals alone: never from data.

    Args:
        sites: The sites of the function.
        module: A module of the kind, with the children that the sites were made for.
        helpers: Functions whose bodies are part of the rewritten source, by name; see :mod:`diffkern.rewrite.inline`.
        namespace: The globals of the function.
        values: Attributes by which branches were decided.
        for_backward: Whether a backward may follow. Not where bits must stay and two sites have a part in common, as
            two modulations of one norm: both compute it, and their gradients are added behind it and not before.
    """

    def __init__(
        self,
        sites: tuple[FusedSite, ...],
        module: nn.Module,
        helpers: Mapping[str, Callable[..., Any]],
        namespace: Mapping[str, Any],
        values: Mapping[str, object],
        for_backward: bool = True,
    ) -> None:
        self.sites, self._for_backward = sites, for_backward
        #: What runs where no site may.
        self.stock: Callable[..., Any] = type(module).forward
        #: Learns of each call that runs stock as a whole, if there is one.
        self.observer: Observer | None = None
        self._namespace = namespace
        self._values = tuple(values.items())
        self._globals = {name: function for name, function in helpers.items() if not name.startswith("self.")}
        own = {name.removeprefix("self."): function for name, function in helpers.items() if name.startswith("self.")}
        methods = {name: function for name, function in own.items() if "." not in name}
        paths = [tuple(name.split(".")[:-1]) for name in own if "." in name]
        #: Submodules whose forwards are part of the source, with their classes and the names of what they hold.
        read: list[tuple[Path, Any]] = [(path, child_of(module, path)) for path in paths]
        self.inlined = tuple([(path, type(child), tuple(child._modules)) for path, child in read])
        looped = {tuple(name.split(".")[:-1]) for name in own if name.endswith(".__iter__")}
        self._looped = tuple([(path, _classes_in(child)) for path, child in read if path in looped])
        children: dict[Path, type[nn.Module]] = {}
        self._users: dict[Path, list[int]] = {}
        for site in sites:
            for path in site.plan.modules.values():
                child = child_of(module, path)
                if child is None:
                    methods[path[0]] = getattr(type(module), path[0])
                for name, part in () if child is None else child.named_modules():  # a norm may hold another
                    inner = (*path, *filter(None, name.split(".")))
                    children[inner] = type(part)
                    self._users.setdefault(inner, []).append(site.plan.index)
        self._children = tuple(children.items())
        held = [(path, functions_of(child_of(module, path))) for path in children]  # type: ignore[arg-type]
        self._held = tuple([(path, functions) for path, functions in held if functions])
        #: What the children must be set to, as :func:`~diffkern.rewrite.facts.settings_test` writes it, and compiled.
        tests = {path: settings_test(child_of(module, path)) for path in children}  # type: ignore[arg-type]
        self._settings = {path: (text, eval(f"lambda child: {text}")) for path, text in tests.items() if text}
        self._methods = tuple(methods.items())
        self._all: Active = tuple([site.entry for site in sites])
        #: The same where nothing changed: with functions in front of sites, see :attr:`FusedSite.entries`.
        self.entries = [*self._all]
        self.disabled = set()
        #: Returns the forward for a module of which a convolution has a hook or an adapter now, or None.
        self.rewrite_rest: Callable[[nn.Module], Callable[..., Any] | None] | None = None
        self._rests: dict[Any, Callable[..., Any] | None] = {}
        #: What forwards call: the same questions as one function, which mostly answers them, and asks the guard else.
        self.enter = self._written(module)

    def __call__(self, module: nn.Module, given: Any = False) -> Active | None:
        """Returns what each site runs; None if the stock forward must run, as it must for some arguments: ``given``."""
        off = self._off(module)
        if self._rest(module, off) is not None:
            return None
        reason: str | None = given or self._unfit(module) or self._moved(off)
        if reason is not None:
            if self.observer is not None and not torch.compiler.is_compiling():
                self.observer(module, reason)
            return None
        if not off:
            return self._all
        sites = enumerate(self.sites)
        return tuple([partial(site.run_original, reason=off[i]) if i in off else site for i, site in sites])

    def otherwise(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Runs what serves a module for which no site is on: the rest of its sites, or the stock forward."""
        return (self._rest(module, self._off(module)) or self.stock)(module, *args, **kwargs)

    @property
    def disabled(self) -> set[int]:
        """Numbers of sites that are off whatever the modules are: forced, or without a gain."""
        return self._disabled

    @disabled.setter
    def disabled(self, numbers: set[int]) -> None:
        self._disabled = numbers
        for i, site in enumerate(self.sites):
            site.entries = None if i in numbers else self.entries
            self.entries[i] = partial(site.run_original, reason="") if i in numbers else site.entry

    def _off(self, module: nn.Module) -> dict[int, str]:
        """The sites that are off, with the reason."""
        off = dict.fromkeys(self.disabled, "")
        for path, cls in self._children:
            child = child_of(module, path)
            if not untouched(child, cls):
                touched = f"{'.'.join(path)} has a hook, or is another module than it was"
                off.update(dict.fromkeys([index for index in self._users[path] if index not in off], touched))
            elif path in self._settings and not self._settings[path][1](child):
                off.update(dict.fromkeys(self._users[path], f"{'.'.join(path)} is set to something else than it was"))
        for path in self._other_functions(module):
            off.update(dict.fromkeys(self._users[path], f"{'.'.join(path)} computes another function"))
        return off

    def _moved(self, off: Mapping[int, str]) -> str | None:
        """Why a site is off whose modules are called in another order: hooks and random numbers would see that."""
        return next((why for index, why in off.items() if why and self.sites[index].plan.moves_calls), None)

    def _rest(self, module: nn.Module, off: Mapping[int, str]) -> Callable[..., Any] | None:
        """The forward that calls a moved convolution where it stands; None where all is as it was, or nothing is left.

        It has a guard of its own, which decides whether it may run.
        """
        if not off or self.rewrite_rest is None or torch.compiler.is_compiling() or self._moved(off) is None:
            return None
        kind = tuple([(path, type(child_of(module, path))) for path, _ in self._children]), tuple(off)
        if kind not in self._rests:
            self._rests[kind] = self.rewrite_rest(module)
        return self._rests[kind]

    def _unfit(self, module: nn.Module) -> str | None:
        """Why no site may run in the place of what the source says."""
        reason = unfit_surroundings()
        if reason is not None:
            return reason
        if torch.is_grad_enabled() and not self._for_backward:
            return "a backward would add in another order than stock's"
        if torch._C._is_any_autocast_enabled():
            return "autocast is on, and the stock forward follows its rules"
        for name, value in self._values:
            now = plain_attribute(module, name)
            if now is not value and (now != value or type(now) is not type(value)):
                return f"its {name} is another than when it was patched"
        for name, method in self._methods:
            if name in module.__dict__ or getattr(type(module), name, None) is not method:
                return f"its method {name} was replaced"
        return self._changed_inside(module)

    def _changed_inside(self, module: nn.Module) -> str | None:
        """What was replaced of the helpers and submodules whose bodies are part of the source."""
        for path, cls, names in self.inlined:
            child: Any = child_of(module, path)
            if not untouched(child, cls) or calls_otherwise(cls) or tuple(child._modules) != names:
                return f"{'.'.join(path)} has a hook, or is another module than it was"
        for path, classes in self._looped:
            if _classes_in(child_of(module, path)) != classes:
                return f"the layers of {'.'.join(path)} are others than when it was patched"
        for name, function in self._globals.items():
            if global_at(self._namespace, name) is not function:
                return f"the function {name} was replaced"
        return None

    def _other_functions(self, module: nn.Module) -> list[Path]:
        """The children that compute another function than they did."""
        held = [(path, functions, child_of(module, path)) for path, functions in self._held]
        return [path for path, functions, child in held if child is None or functions_of(child) != functions]

    def _written(self, module: nn.Module) -> Callable[..., Active | None]:
        """Writes a function that finds out whether :meth:`_off` and :meth:`_unfit` find nothing, at half their cost.

        It calls no function that it need not: between two layers of a model, each one costs the host a microsecond.
        """
        values: dict[str, Any] = {"guard": self, "entries": self.entries, "traced": _is_traced, "torch": torch, "F": F}
        values |= {"autocast": torch._C._is_any_autocast_enabled, "Method": MethodType}
        values |= {"equivalent": EQUIVALENT_FORWARDS, "functions": self._other_functions}
        values |= {"inside": self._changed_inside}
        tests = ["traced() or given or autocast()"]
        tests += [] if self._for_backward else ["torch.is_grad_enabled()"]
        tests.append(" or ".join([f"F.{name} is not {name}" for name in OF_TORCH]))
        values |= OF_TORCH
        values |= {f"watched{i}": hooks for i, hooks in enumerate(GLOBAL_HOOKS)}
        tests.append(" or ".join([f"watched{i}" for i in range(len(GLOBAL_HOOKS))]))

        def constant(value: Any) -> str:
            values[f"v{len(values)}"] = value
            return f"v{len(values) - 1}"

        for name, value in self._values:
            registry = next((one for one in _REGISTRIES if name in module.__dict__[one]), None)
            if registry is None:
                then, kind = constant(value), constant(type(value))
                tests.append(f"(now := module.{name}) is not {then} and (type(now) is not {kind} or now != {then})")
            elif value is None:
                tests.append(f"module.{registry}[{name!r}] is not None")
            else:
                tests.append(f"(now := module.{registry}[{name!r}]) is None or hasattr(type(now), '__len__')")
        for name, method in self._methods:
            tests.append(f"{name!r} in module.__dict__ or type(module).{name} is not {constant(method)}")
        classes = {cls: constant(cls) for _, cls in self._children}
        for cls, name in classes.items():
            tests.append(f"{name}.forward is not {constant(cls.forward if is_own(cls.forward, cls) else None)}")
        for path, cls in self._children:
            child = "module" + "".join([f"._modules[{name!r}]" for name in path])
            tests.append(f"type(child := {child}) is not {classes[cls]}")
            tests.append(" or ".join(["not (state := child.__dict__)", *[f"state[{hooks!r}]" for hooks in _HOOKS]]))
            own = f"(held := state['forward']).__func__ in equivalent or held.__func__ is {classes[cls]}.forward"
            bound = "type(state['forward']) is Method and state['forward'].__self__ is child"
            tests.append(f"'forward' in state and not ({bound} and ({own}))")
            tests += [f"not ({self._settings[path][0]})"] if path in self._settings else []
        tests += ["inside(module)"] * bool(self.inlined or self._looped or self._globals)
        tests += ["functions(module)"] * bool(self._held)
        asked = [f"    if {test}: return guard(module, given)" for test in tests]
        lines = ["def enter(module, given=False):", "try:", *asked, "    return entries"]
        text = "\n ".join([*lines, "except (AttributeError, KeyError): return guard(module, given)"])
        exec(compile(text, "<guard of a forward>", "exec"), values)
        return values["enter"]  # type: ignore[no-any-return]

    def force_original(self) -> None:
        """Makes every site run its original expression, to look for a difference."""
        self.disabled = set(range(len(self.sites)))


def _classes_in(sequence: Any) -> tuple[type, ...]:
    return tuple([type(layer) for layer in sequence._modules.values()])
