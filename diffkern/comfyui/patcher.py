"""Object patches: the fused forwards of one clone of a model, and nothing on the model itself.

ComfyUI puts object patches on a model when a clone that has them is loaded, and takes them off for the next clone, so
that a node which is bypassed, muted or disconnected leaves nothing behind. A patch belongs to a module; a clone with
another model (for compiling, for a second GPU) gets patches for that model's modules, or its adapters would be lost.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from diffkern.cache.in_call import one_model_call
from diffkern.comfyui.fusion import ComfyFusion, prove
from diffkern.injection.counts import CallCounts
from diffkern.verify.proof import Verifier

#: Under which callbacks and wrappers of ours are known to the model patcher.
KEY = "diffkern"

#: Name of ComfyUI's WrappersMP for what runs around every call of a model.
APPLY_MODEL = "apply_model"
# Names of ComfyUI's CallbacksMP.
_ON_CLONE, ON_CLEANUP = "on_clone", "on_cleanup"

_log = logging.getLogger("diffkern")


class Patch(ABC):
    """The forward of one module, or other methods of it.

    Args:
        module: The module.
        names: Those methods.

    Attributes:
        stock: The methods that the fused ones were proven against, by name.
        counts: Calls that ran fused, and stock by reason; of the fused ones, the parts that ran stock.
    """

    def __init__(self, module: nn.Module, names: Iterable[str] = ("forward",)) -> None:
        self.module = module
        self.stock = {name: getattr(type(module), name) for name in names}
        self.counts = CallCounts()

    @property
    def fused_calls(self) -> int:
        """Calls that ran fused."""
        return self.counts.fused_calls

    @property
    def stock_calls(self) -> Counter[str]:
        """Calls that ran the stock forward, by reason."""
        return self.counts.stock_calls

    @property
    def stock_pieces(self) -> Counter[str]:
        """Of the fused calls, those in which a part ran stock, by part."""
        return self.counts.stock_pieces

    @abstractmethod
    def on(self, module: nn.Module) -> Patch:
        """Returns the same patch for a module of the same kind in another model."""

    @abstractmethod
    def run(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Runs a method fused where the guards allow it, and the class's own everywhere else."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward so."""
        return self.run("forward", *args, **kwargs)

    @property
    def methods(self) -> dict[str, Callable[..., Any]]:
        """What stands in the place of each method."""
        return {name: self.forward if name == "forward" else partial(self.run, name) for name in self.stock}

    def run_stock(self, name: str, reason: str | None, *args: Any, **kwargs: Any) -> Any:
        """Runs the class's own method, and counts that if there is a reason."""
        if reason is not None and not torch.compiler.is_compiling():
            self.counts.add_stock(reason)
        return getattr(type(self.module), name)(self.module, *args, **kwargs)

    def replaced(self, name: str) -> str | None:
        """Notices nodes that give a module another class, or its class another method, after this one ran."""
        method = getattr(type(self.module), name)
        if method is self.stock[name]:
            return None
        return f"its class has another {name} since it was optimized: {_describe(method)}"


class RecipePatch(Patch):
    """The forward of a module with a recipe.

    Args:
        module: The module.
        fusion: What it computes, and how.
        provider: The provider that is forced, or None to choose.
        verifier: Proves the first call on a device that was not proven before.
        proven: Devices that are.
    """

    def __init__(
        self,
        module: nn.Module,
        fusion: ComfyFusion,
        provider: str | None,
        verifier: Verifier,
        proven: frozenset[torch.device] = frozenset(),
    ) -> None:
        super().__init__(module)
        self.fusion = fusion
        self.provider = provider
        self.verifier = verifier
        self.proven = proven
        self.revoked: str | None = None

    @override
    def on(self, module: nn.Module) -> Patch:
        return RecipePatch(module, self.fusion, self.provider, self.verifier, self.proven)

    @override
    def run(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        call = self.fusion.bind(args, kwargs)
        reason = self._refusal(call)
        if call is None or reason is not None:
            return self.run_stock(name, reason, *args, **kwargs)
        pieces = self.fusion.stock_pieces(self.module, call)
        if not torch.compiler.is_compiling():  # counters stay out of the graph
            self.counts.add_pieces(pieces)
            self.counts.add_fused()
        return self.fusion.compute(self.module, call, self.provider, pieces)

    def _refusal(self, call: Any) -> str | None:
        """Why all of a call runs stock, or None."""
        fusion = self.fusion
        reason = self.revoked or self.replaced("forward") or fusion.declines(self.module, call)
        if reason is not None or fusion.primary_input(call).device in self.proven:
            return reason
        if torch.compiler.is_compiling():
            return "not proven yet"  # proofs stay out of the graph
        return self._prove(fusion.primary_input(call).device)

    def _prove(self, device: torch.device) -> str | None:
        """Proves a device that the node did not see, such as a second GPU, at the first call there."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "not proven yet, and a proof cannot run while a CUDA graph is captured"
        proofs = prove(self.verifier, self.module, self.fusion, self.provider, device)
        self.revoked = next((proof.reason for proof in proofs if not proof.passed), None)
        if self.revoked is None:
            self.proven |= {device}
        return self.revoked


def patches_of(model: Any) -> dict[str, Patch]:
    """Returns the patches of ours that a model patcher has, by the path of the module."""
    found = {}
    for key, value in model.object_patches.items():
        owner = getattr(getattr(value, "func", value), "__self__", None)
        if isinstance(owner, Patch):
            found[key.rpartition(".")[0]] = owner
    return found


def own_modules(model: Any, path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields a module of a model and all below it, by path, as they are without the patches of any clone.

    While another clone is loaded, its patches are on the model, whole modules among them.
    """
    module = model.object_patches_backup.get(path, module)
    yield path, module
    for name, child in module.named_children():
        yield from own_modules(model, f"{path}.{name}", child)


def conflict(model: Any, path: str, module: nn.Module, names: Iterable[str] = ("forward",)) -> str | None:
    """Says what else is patched where a patch of ours would go, or None.

    ComfyUI keeps one object patch for a path, the last one, without a word.
    """
    if path in patches_of(model):
        return "already optimized by diffkern"
    for name in names:
        if (key := f"{path}.{name}") in model.object_patches:
            return f"another node patches its {name}: {_describe(model.object_patches[key])}"
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        above = ".".join(parts[:end])
        if above in model.object_patches:
            return f"another node replaces {above}: {_describe(model.object_patches[above])}"
    for name in names:
        method = model.object_patches_backup.get(f"{path}.{name}", getattr(module, name))
        if not (isinstance(method, MethodType) and method.__func__ is getattr(type(module), name)):
            return f"its {name} was replaced: {_describe(method)}"
    return None


def install(model: Any, patches: dict[str, Patch]) -> None:
    """Gives a clone of a model its patches, by path; the clone will pass them on to clones of its own."""
    for path, patch in patches.items():
        _install(model, path, patch)
    for event, callback in ((_ON_CLONE, _bind_again), (ON_CLEANUP, _tell)):
        model.remove_callbacks_with_key(event, KEY)
        model.add_callback_with_key(event, KEY, callback)
    model.remove_wrappers_with_key(APPLY_MODEL, KEY)
    model.add_wrapper_with_key(APPLY_MODEL, KEY, _as_one_call)


def _install(model: Any, path: str, patch: Patch) -> None:
    for name, method in patch.methods.items():
        model.add_object_patch(f"{path}.{name}", method)


def remove(model: Any) -> None:
    """Takes all patches of ours from a clone of a model."""
    for path, patch in patches_of(model).items():
        for name in patch.methods:
            del model.object_patches[f"{path}.{name}"]
    for event in (_ON_CLONE, ON_CLEANUP):
        model.remove_callbacks_with_key(event, KEY)
    model.remove_wrappers_with_key(APPLY_MODEL, KEY)


def _as_one_call(executor: Any, *args: Any, **kwargs: Any) -> Any:
    with one_model_call():
        return executor(*args, **kwargs)


def _bind_again(model: Any, clone: Any) -> None:
    """Called by ComfyUI for every clone: the patches of a clone with a model of its own move to that model."""
    if clone.model is model.model:
        return
    for path, patch in patches_of(clone).items():
        module = clone.model.get_submodule(path)
        for name in patch.methods:
            del clone.object_patches[f"{path}.{name}"]
        if type(module) is type(patch.module):
            _install(clone, path, patch.on(module))


def _tell(model: Any) -> None:
    """Called by ComfyUI after sampling: one line that says what ran so far."""
    patches = patches_of(model).values()
    fused, reasons = sum(patch.fused_calls for patch in patches), Counter[str]()
    for patch in patches:
        reasons.update(patch.stock_calls)
    stock = f", {reasons.total()} stock: {reasons.most_common(1)[0][0]}" if reasons else ""
    compiled = "" if fused or reasons else ", not counting those in compiled graphs"
    _log.info("diffkern: %d modules patched, %d calls fused so far%s%s", len(patches), fused, stock, compiled)


def _describe(value: Any) -> str:
    function = getattr(value, "__func__", value)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '?')}.{name}"
