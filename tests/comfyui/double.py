"""A double of ComfyUI's model patcher: the part of its contract that patches of ours rely on, and no more.

``test_patcher.py`` runs the same tests with ComfyUI's own class where there is a checkout, so the two cannot drift
apart.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Model(nn.Module):
    """What a patcher holds: the denoiser, and the dtype that it computes in."""

    manual_cast_dtype: torch.dtype | None = None

    def __init__(self, denoiser: nn.Module) -> None:
        super().__init__()
        self.diffusion_model = denoiser

    def get_dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype


class ModelPatcher:
    """Clones share the model; object patches are on it while the clone that has them is loaded."""

    def __init__(self, model: nn.Module, load_device: torch.device, offload_device: torch.device) -> None:
        self.model = model
        self.load_device = load_device
        self.offload_device = offload_device
        self.object_patches: dict[str, Any] = {}
        self.object_patches_backup: dict[str, Any] = {}
        self.callbacks: dict[str, dict[str, list[Callable[..., Any]]]] = {}
        self.wrappers: dict[str, dict[str, list[Callable[..., Any]]]] = {}
        self.attachments: dict[str, Any] = {}

    def clone(self, model_override: Any = None) -> ModelPatcher:
        model, backup = (self.model, self.object_patches_backup) if model_override is None else (model_override, {})
        clone = ModelPatcher(model, self.load_device, self.offload_device)
        clone.object_patches = self.object_patches.copy()
        clone.object_patches_backup = backup
        clone.callbacks = {event: {key: [*own] for key, own in keys.items()} for event, keys in self.callbacks.items()}
        clone.attachments = self.attachments.copy()
        clone.wrappers = {kind: {key: [*own] for key, own in keys.items()} for kind, keys in self.wrappers.items()}
        for callback in [each for own in self.callbacks.get("on_clone", {}).values() for each in own]:
            callback(self, clone)
        return clone

    def deep_clone(self) -> ModelPatcher:
        """A clone with a model of its own, as compiling and a second GPU need it: loaded afresh, without patches."""
        pristine = copy.deepcopy(self.model)
        for module in pristine.modules():
            module.__dict__.pop("forward", None)
        return self.clone(pristine)

    def add_object_patch(self, name: str, value: Any) -> None:
        self.object_patches[name] = value

    def set_attachments(self, key: str, attachment: Any) -> None:
        self.attachments[key] = attachment

    def remove_attachments(self, key: str) -> None:
        self.attachments.pop(key, None)

    def get_attachment(self, key: str) -> Any:
        return self.attachments.get(key)

    def get_model_object(self, name: str) -> Any:
        for patches in (self.object_patches, self.object_patches_backup):
            if name in patches:
                return patches[name]
        return _get(self.model, name)

    def patch_model(self) -> None:
        for name, value in self.object_patches.items():
            old = _get(self.model, name)
            owner, _, attribute = name.rpartition(".")
            setattr(_get(self.model, owner), attribute, value)
            self.object_patches_backup.setdefault(name, old)

    def unpatch_model(self) -> None:
        for name, value in self.object_patches_backup.items():
            owner, _, attribute = name.rpartition(".")
            setattr(_get(self.model, owner), attribute, value)
        self.object_patches_backup.clear()

    def add_callback_with_key(self, event: str, key: str, callback: Callable[..., Any]) -> None:
        self.callbacks.setdefault(event, {}).setdefault(key, []).append(callback)

    def remove_callbacks_with_key(self, event: str, key: str) -> None:
        self.callbacks.get(event, {}).pop(key, None)

    def add_wrapper_with_key(self, kind: str, key: str, wrapper: Callable[..., Any]) -> None:
        self.wrappers.setdefault(kind, {}).setdefault(key, []).append(wrapper)

    def remove_wrappers_with_key(self, kind: str, key: str) -> None:
        self.wrappers.get(kind, {}).pop(key, None)

    def get_wrappers(self, kind: str, key: str) -> list[Callable[..., Any]]:
        return self.wrappers.get(kind, {}).get(key, [])


def _get(model: nn.Module, path: str) -> Any:
    value: Any = model
    for name in path.split("."):
        value = getattr(value, name)
    return value
