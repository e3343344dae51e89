"""Object patches: the fused forwards of one clone of a model, and nothing on the model itself.

ComfyUI puts object patches on a model when a clone that has them is loaded, and takes them off for the next clone, so
that a node which is bypassed, muted or disconnected leaves nothing behind. A patch belongs to a module; a clone with
another model (for compiling, for a second GPU) gets patches for that model's modules, or its adapters would be lost.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import MethodType
from typing import Any

from torch import nn

from diffkern.cache.in_call import one_model_call
from diffkern.comfyui.rewrites import Patch, describe

#: Under which callbacks and wrappers of ours are known to the model patcher.
KEY = "diffkern"

#: Name of ComfyUI's WrappersMP for what runs around every call of a model.
APPLY_MODEL = "apply_model"
# Names of ComfyUI's CallbacksMP.
_ON_CLONE, ON_CLEANUP = "on_clone", "on_cleanup"
#: Behind these weights may be others, in the same place.
_ON_WRITES = _ON_LOAD, _ON_APPLY_HOOKS = "on_load_after", "on_apply_hooks"

_log = logging.getLogger("diffkern")


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
            return f"another node patches its {name}: {describe(model.object_patches[key])}"
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        above = ".".join(parts[:end])
        if above in model.object_patches:
            return f"another node replaces {above}: {describe(model.object_patches[above])}"
    for name in names:
        method = model.object_patches_backup.get(f"{path}.{name}", getattr(module, name))
        if not (isinstance(method, MethodType) and method.__func__ is getattr(type(module), name)):
            return f"its {name} was replaced: {describe(method)}"
    return None


def install(model: Any, patches: Mapping[str, Patch]) -> None:
    """Gives a clone of a model its patches, by path; the clone will pass them on to clones of its own."""
    for path, patch in patches.items():
        _install(model, path, patch)
    for event, callback in ((_ON_CLONE, _bind_again), (ON_CLEANUP, _tell), *((on, _forget) for on in _ON_WRITES)):
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
    for event in (_ON_CLONE, ON_CLEANUP, *_ON_WRITES):
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


def _forget(model: Any, *args: Any) -> None:
    """Called by ComfyUI where it has written weights: what was made of them is of no use any more."""
    for patch in patches_of(model).values():
        patch.drop()


def _tell(model: Any) -> None:
    """Called by ComfyUI after sampling: one line that says what ran so far, and the memory of copies is free again."""
    _forget(model)
    patches = patches_of(model).values()
    fused, reasons = sum(patch.counts.fused_calls for patch in patches), Counter[str]()
    for patch in patches:
        reasons.update(patch.counts.stock_calls)
    stock = f", {reasons.total()} stock: {reasons.most_common(1)[0][0]}" if reasons else ""
    compiled = "" if fused or reasons else ", not counting those in compiled graphs"
    _log.info("diffkern: %d modules patched, %d calls fused so far%s%s", len(patches), fused, stock, compiled)
