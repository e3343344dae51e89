"""Hooks, replaced forwards, offloading and caches."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import accelerate
import accelerate.hooks
import torch
from accelerate.hooks import add_hook_to_module, remove_hook_from_module, remove_hook_from_submodules
from diffusers import FirstBlockCacheConfig, MagCacheConfig, TaylorSeerCacheConfig
from diffusers.hooks import HookRegistry, ModelHook, apply_group_offloading
from hypothesis import strategies as st
from hypothesis.stateful import precondition
from torch import Tensor, nn

from tests.stateful.base import Base, Numbers, rule

CACHES = {
    "first block": lambda: FirstBlockCacheConfig(threshold=0.3),
    "mag": lambda: MagCacheConfig(num_inference_steps=8, mag_ratios=torch.ones(8), threshold=0.5),
    "taylor": lambda: TaylorSeerCacheConfig(
        cache_interval=3, disable_cache_before_step=2, taylor_factors_dtype=torch.float32
    ),
}


class AddOne(accelerate.hooks.ModelHook):
    """A hook of accelerate that shows."""

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return _shifted(output)


class Shift(ModelHook):
    """A hook of diffusers that shows."""

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return _shifted(output)


def _shifted(output: Any) -> Any:
    if isinstance(output, tuple):
        return (_shifted(output[0]), *output[1:])
    return output + 0.125 if isinstance(output, Tensor) else output


def _shift_output(module: nn.Module, args: Any, output: Any) -> Any:
    return _shifted(output)


def _own_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A forward of the user's making that calls that of the class."""
    return _shifted(type(self).forward(self, *args, **kwargs))


def _wrapping_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A forward of the user's making that calls the one that was there."""
    return _shifted(self._users_forward(*args, **kwargs))  # type: ignore[operator]


class HookRules(Base):
    """What sits on modules and runs around their forward."""

    def _may_hook(self) -> bool:
        return not (self.cache or self.classes) and self.offloaded is None and len(self.undo) < 3

    def _hooked(self, step: Callable[[nn.Module], Any], undo: Callable[[nn.Module], Any]) -> None:
        if self.twins.both(step):
            self.undo.append(undo)

    @precondition(lambda self: self._may_hook())
    @rule(number=Numbers)
    def add_accelerate_hook(self, number: int) -> None:
        path = self._modules(number)
        if not hasattr(self.twins.stock.get_submodule(path), "_users_forward"):
            self._hooked(
                lambda model: add_hook_to_module(model.get_submodule(path), AddOne()),
                lambda model: remove_hook_from_module(model.get_submodule(path)),
            )

    @precondition(lambda self: self._may_hook())
    @rule(number=Numbers)
    def add_diffusers_hook(self, number: int) -> None:
        path, name = self._modules(number), f"shift {len(self.undo)}"
        self._hooked(
            lambda model: HookRegistry.check_if_exists_or_initialize(model.get_submodule(path)).register_hook(
                Shift(), name
            ),
            lambda model: model.get_submodule(path)._diffusers_hook.remove_hook(name, recurse=False),  # type: ignore[operator,union-attr]
        )

    @precondition(lambda self: self._may_hook())
    @rule(number=Numbers)
    def add_forward_hook(self, number: int) -> None:
        path = self._modules(number)
        self._hooked(
            lambda model: model.get_submodule(path).register_forward_hook(_shift_output),
            lambda model: model.get_submodule(path)._forward_hooks.clear(),
        )

    @precondition(lambda self: self._may_hook())
    @rule(number=Numbers, wrap=st.booleans())
    def replace_forward(self, number: int, wrap: bool) -> None:
        path = self._modules(number)
        if "forward" in vars(self.twins.stock.get_submodule(path)):
            return

        def replace(model: nn.Module) -> None:
            module = model.get_submodule(path)
            if wrap:
                module._users_forward = module.forward  # type: ignore[assignment]
            module.forward = MethodType(_wrapping_forward if wrap else _own_forward, module)

        def back(model: nn.Module) -> None:
            module = model.get_submodule(path)
            if wrap:
                module.forward = module._users_forward  # type: ignore[method-assign,assignment]
                del module._users_forward
            else:
                del module.forward

        self._hooked(replace, back)

    @precondition(lambda self: self.undo and self.offloaded is None and not self.cache)
    @rule()
    def take_off_the_last_hook(self) -> None:
        self.twins.both(self.undo.pop())

    # A hook holds the forward that it found: what the class has afterwards is not seen through it, or only where a
    # patch lies between.
    @precondition(lambda self: not self.classes and not self.undo and not self.cache and self.offloaded is None)
    @rule(number=Numbers)
    def replace_forward_of_class(self, number: int) -> None:
        kind = type(self.twins.stock.get_submodule(self._modules(number)))
        stock = kind.forward

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return _shifted(stock(self, *args, **kwargs))

        self.classes[kind] = stock
        kind.forward = forward  # type: ignore[method-assign,assignment]

    @precondition(lambda self: self.classes)
    @rule()
    def put_forward_of_class_back(self) -> None:
        self.teardown()
        self.classes.clear()

    @precondition(lambda self: self._is_plain() and not self.classes and not self.quantized)
    @rule(kind=st.sampled_from(["sequential", "block_level", "leaf_level"]))
    def offload(self, kind: str) -> None:
        cpu = torch.device("cpu")
        if kind == "sequential":
            if self.twins.both(lambda model: accelerate.cpu_offload(model, execution_device=cpu)):
                self.offloaded = remove_hook_from_submodules
            return
        options = {"num_blocks_per_group": 1} if kind == "block_level" else {}
        if self.twins.both(
            lambda model: apply_group_offloading(
                model, onload_device=cpu, offload_device=cpu, offload_type=kind, **options
            )
        ):
            self.offloaded = _remove_group_offloading

    @precondition(lambda self: self.offloaded is not None and not self.undo and not self.cache)
    @rule()
    def take_off_offloading(self) -> None:
        assert self.offloaded is not None
        self.twins.both(self.offloaded)
        self.offloaded = None

    @precondition(lambda self: hasattr(self.twins.stock, "enable_cache") and self._is_plain() and not self.classes)
    @rule(kind=st.sampled_from(sorted(CACHES)))
    def enable_cache(self, kind: str) -> None:
        if self.twins.both(lambda model: model.enable_cache(CACHES[kind]())):  # type: ignore[operator]
            self.cache = kind
            self.twins.remember(True)
            self.steps(count=6)

    @precondition(lambda self: self.cache)
    @rule()
    def disable_cache(self) -> None:
        self.twins.both(lambda model: model.disable_cache())  # type: ignore[operator]
        self.cache = None
        self.twins.remember(False)


def _remove_group_offloading(model: nn.Module) -> None:
    from diffusers.hooks.group_offloading import (
        _GROUP_OFFLOADING,
        _LAYER_EXECUTION_TRACKER,
        _LAZY_PREFETCH_GROUP_OFFLOADING,
    )

    registry = HookRegistry.check_if_exists_or_initialize(model)
    for name in (_GROUP_OFFLOADING, _LAYER_EXECUTION_TRACKER, _LAZY_PREFETCH_GROUP_OFFLOADING):
        registry.remove_hook(name, recurse=True)
