"""Rewritten methods of ComfyUI's modules: rules of :mod:`diffkern.rewrite` find in their source what can be fused."""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from diffkern.comfyui.norms import norm_kind
from diffkern.providers import NoProviderError, select
from diffkern.rewrite import FusedSite, Rewriter, Rewritten, prove_ahead
from diffkern.rewrite.facts import Path
from diffkern.rewrite.reference import clone_for_verification
from diffkern.rewrite.rules import RULES
from diffkern.rewrite.verify import SiteVerifier
from diffkern.verify.counts import CallCounts
from diffkern.verify.measures import Measurement

#: Norms with modulation, gated residuals and activations; norms of queries and keys, and the rotary embedding.
MODULATION, QK_NORM_ROPE = "modulation", "qk_norm_rope"
#: What can be switched on and off.
FAMILIES = (MODULATION, QK_NORM_ROPE)

#: Where torch keeps the hooks of a module.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: How attributes of a module begin that say how ComfyUI has loaded it, and not what it computes.
_STATE = ("_v", "_prefetch", "comfy_", "prev_comfy_", "weight_", "bias_")

#: Ops by the family that switches them.
_FAMILIES = {op: QK_NORM_ROPE if op in ("qk_norm_rope", "rope") else MODULATION for op in {rule.op for rule in RULES}}


class Patch:
    """The rewritten methods of one module; each of their sites decides for itself at every call.

    All that it knows of a module stands in it and in the sites, nothing on the module, which clones of a model share.

    Attributes:
        stock: The methods of the class that were rewritten, by name.
        counts: Calls of sites that ran fused, and stock by reason.
        measurements: The proofs that speak for it.
    """

    def __init__(self, module: nn.Module, rewriter: ComfyRewriter, rewritten: Mapping[str, Rewritten]) -> None:
        self.module = module
        self.stock = {name: getattr(type(module), name) for name in rewritten}
        self.counts = CallCounts()
        self.measurements: list[Measurement] = []
        self._rewriter, self._rewritten = rewriter, rewritten
        rewriter.patches[id(module)] = self

    def on(self, module: nn.Module) -> Patch:
        """Returns the same patch for a module of the same kind in another model."""
        patch = Patch(module, self._rewriter, self._rewritten)
        patch.counts = self.counts  # which the report reads
        return patch

    def drop(self) -> None:
        """Forgets what was made of weights: nothing, since they are read at every call."""

    @property
    def methods(self) -> dict[str, Callable[..., Any]]:
        """What stands in the place of each method."""
        return {name: self.forward if name == "forward" else partial(self.run, name) for name in self.stock}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the rewritten forward."""
        return self.run("forward", *args, **kwargs)

    def run(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Runs a rewritten method; the class's own while ComfyUI trains, or where another node has replaced that."""
        method = getattr(type(self.module), name)
        if method is self.stock[name] and not in_training():
            return self._rewritten[name].function(self.module, *args, **kwargs)
        reason = "ComfyUI is training"
        if method is not self.stock[name]:
            reason = f"its class has another {name} since it was optimized: {describe(method)}"
        if not torch.compiler.is_compiling():
            self.counts.add_stock(reason)
        return method(self.module, *args, **kwargs)

    @property
    def op(self) -> str:
        """The first op of its sites, and how many others there are."""
        first, *others = dict.fromkeys([site.plan.rule.op for site in self.sites])
        return f"{first} + {len(others)} more" if others else first

    @property
    def absorbed(self) -> tuple[Path, ...]:
        """Submodules whose forwards are part of the rewritten methods, and must stay as they are."""
        return tuple([path for rewritten in self._rewritten.values() for path, *_ in rewritten.guard.inlined])

    @property
    def sites(self) -> tuple[FusedSite, ...]:
        """The sites that may run fused."""
        of_all = [
            (site, rewritten.guard.disabled) for rewritten in self._rewritten.values() for site in rewritten.sites
        ]
        return tuple([site for site, disabled in of_all if site.plan.index not in disabled])


class ComfyRewriter:
    """Rewrites the modules of one model.

    Proofs run on copies of the norms with random weights: those of the model may be quantised, streamed, or not loaded.

    ``patches`` holds the patches by the number of their module, which they keep.
    """

    def __init__(self, numerics: str, provider: str | None, families: frozenset[str]) -> None:
        self.patches: weakref.WeakValueDictionary[int, Patch] = weakref.WeakValueDictionary()
        off = [op for op, family in _FAMILIES.items() if family not in families]
        off.append("add_norm_silu_pad")  # which gains in channels last, where ComfyUI keeps nothing
        self._provider = provider
        self._rewriter = Rewriter(numerics, provider, off=off, observer=self._count)
        self._verify = SiteVerifier(numerics, in_float64=plain_arithmetic)

    def patch(self, module: nn.Module) -> Patch | None:
        """Returns the patch of a module; None if no rule finds anything in its forward or another method."""
        found = {}
        for name in ("forward", *_other_methods(module)):
            rewritten = self._rewriter.rewrite(module, None if name == "forward" else getattr(type(module), name))
            # Beside forwards there is arithmetic of sizes and offsets that looks like glue, but calls no module.
            if isinstance(rewritten, Rewritten) and (
                name == "forward" or any(site.plan.modules for site in rewritten.sites)
            ):
                found[name] = rewritten
        # A method whose body became part of another one, or that a site calls, must stay as it is.
        used = {path[5:] for rewritten in found.values() for path in rewritten.plan.helpers if path.startswith("self.")}
        used |= {
            path[0] for rewritten in found.values() for site in rewritten.sites for path in site.plan.modules.values()
        }
        found = {name: rewritten for name, rewritten in found.items() if name not in used}
        for site in [site for rewritten in found.values() for site in rewritten.sites]:
            site.on_new_signature = self._prove
        patch = Patch(module, self, found) if found else None
        return patch if patch is not None and patch.sites else None

    def prove_ahead(self, patch: Patch, device: torch.device, dtype: torch.dtype) -> str:
        """Proves the sites of a patch for the operands that they will probably have; says why none of them may run.

        Raises:
            NoProviderError: the provider that is forced serves none of the ops.
        """
        refused: list[str] = []
        for site in patch.sites:
            try:
                select(site.plan.rule.op, device, (dtype,), self._provider)
            except NoProviderError as error:
                refused.append(str(error))
                continue
            prove_ahead(site, _bare(patch.module, site, device, dtype), device, dtype)
            if site.ways and not any(site.ways.values()):
                refused.append(f"{site}: {next(iter(site.reasons.values()))}")
        patch.measurements[:] = [p for site in patch.sites for p in site.proofs.values() if p.passed]
        return refused[0] if len(refused) == len(patch.sites) else ""

    def _prove(self, site: FusedSite, module: nn.Module, leaves: tuple[Any, ...]) -> Any:
        first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
        copy = module if first is None else _bare(module, site, first.device, first.dtype)
        way = self._verify(site, copy, leaves)
        for patch in self.patches.values() if way is not None else ():
            if site in patch.sites:
                patch.measurements.append(site.proofs[site.signature(module, leaves)])
        return way

    def _count(self, module: nn.Module, reason: str | None) -> None:
        patch = self.patches.get(id(module))
        if patch is None:  # a proof
            return
        if reason is None:
            patch.counts.add_fused()
        else:
            patch.counts.add_stock(reason)


@contextmanager
def plain_arithmetic() -> Iterator[None]:
    """Makes ComfyUI compute in plain torch ops, which take float64 as well, as it does while it trains."""
    management = _management()
    if management is None:
        yield
        return
    before = management.in_training
    management.in_training = True
    try:
        yield
    finally:
        management.in_training = before


def in_training() -> bool:
    """Whether ComfyUI is training, which needs gradients of what it computes."""
    management = _management()
    return management is not None and management.in_training


def _management() -> Any:
    """ComfyUI's module with that switch; None where no ComfyUI is running."""
    return sys.modules.get("comfy.model_management")


def describe(value: Any) -> str:
    """The full name of a function, or of the class of what is none."""
    function = getattr(value, "__func__", value)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '?')}.{name}"


def _other_methods(module: nn.Module) -> list[str]:
    """The methods, beside its forward, that the classes of a module with children define."""
    classes = [cls for cls in type(module).__mro__ if cls.__module__.partition(".")[0] != "torch"]
    names = [name for cls in classes for name, value in vars(cls).items() if isinstance(value, FunctionType)]
    if not module._modules:
        return []
    return [name for name in dict.fromkeys(names) if name != "forward" and not name.startswith("__")]


def _bare(module: nn.Module, site: FusedSite, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A copy of a module in which what a site computes has random weights, and nothing that ComfyUI put on it."""
    paths: list[Path] = list(site.plan.modules.values())
    copy = clone_for_verification(module, paths)
    for path in paths:
        parent = copy
        for name in path[:-1]:
            parent = parent._modules[name]  # type: ignore[assignment]
        child = parent._modules.get(path[-1])
        if child is not None:
            parent._modules[path[-1]] = shell(child, device, dtype)
    return copy


def shell(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Returns a copy of a small module, such as a norm, with random parameters of ``dtype`` on ``device``.

    Those of the module may be quantised, offloaded, or not loaded yet. The copy has its classes and attributes, no
    hooks, and nothing that ComfyUI put on it.
    """
    copy = type(module).__new__(type(module))
    # Low-VRAM streaming and object patches keep their state in attributes, which a new module has not.
    kept = {key: value for key, value in module.__dict__.items() if not key.startswith(_STATE) and key != "forward"}
    copy.__dict__ |= kept | {hooks: OrderedDict() for hooks in _HOOKS} | {"training": False}
    generator = torch.Generator("cpu").manual_seed(len(module._parameters))
    around = 1.0 if norm_kind(copy) is not None else 0.0
    copy.__dict__["_parameters"] = {
        name: None if parameter is None else _random(parameter, around, generator, device, dtype)
        for name, parameter in module._parameters.items()
    }
    copy.__dict__["_buffers"] = {
        name: None if buffer is None else buffer.to(device) for name, buffer in module._buffers.items()
    }
    copy.__dict__["_modules"] = {
        name: None if child is None else shell(child, device, dtype) for name, child in module._modules.items()
    }
    return copy


def _random(
    parameter: Any, around: float, generator: torch.Generator, device: torch.device, dtype: torch.dtype
) -> nn.Parameter:
    values = torch.randn(tuple(parameter.shape), generator=generator, device="cpu") * 0.2 + around
    return nn.Parameter(values.to(device=device, dtype=dtype), requires_grad=False)
