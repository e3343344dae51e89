"""Adapters come, change, and go."""

from __future__ import annotations

from typing import Any

import peft
import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition
from peft.utils import get_peft_model_state_dict
from torch import nn

from tests.stateful.base import Base, Numbers, rule


class AdapterRules(Base):
    """LoRA and DoRA, by the methods of diffusers and of transformers."""

    def _may_adapt(self) -> bool:
        return not self.ema and self.offloaded is None and not self.fused

    @precondition(lambda self: self._may_adapt() and len(self.adapters) < 2)
    @rule(number=Numbers, dora=st.booleans())
    def add_lora(self, number: int, dora: bool) -> None:
        name = "ab"["a" in self.adapters]
        config = peft.LoraConfig(r=2, target_modules=list(self.subject.lora), init_lora_weights=False, use_dora=dora)
        added = self.twins.both(lambda model: model.add_adapter(config, adapter_name=name))  # type: ignore[operator]
        # Where it fails, as it does with DoRA on a quantised layer, layers before that one have random adapters.
        self.twins.both(lambda model: _fill(model, name, number))
        if added:
            self.adapters.append(name)

    @precondition(lambda self: self.adapters and not self.fused)
    @rule(scale=st.sampled_from([0.0, 0.5, 1.0, 2.0]), all_of_them=st.booleans())
    def scale_lora(self, scale: float, all_of_them: bool) -> None:
        names = self.adapters if all_of_them else self.adapters[-1:]
        if hasattr(self.twins.stock, "set_adapters"):
            self.twins.both(lambda model: model.set_adapters(names, [scale] * len(names)))  # type: ignore[operator]
        else:
            self.twins.both(lambda model: model.set_adapter(names))  # type: ignore[operator]

    @precondition(lambda self: self.adapters)
    @rule(enabled=st.booleans())
    def switch_lora(self, enabled: bool) -> None:
        self.twins.both(lambda model: (model.enable_adapters if enabled else model.disable_adapters)())  # type: ignore[operator]

    @precondition(lambda self: self.adapters and self._may_adapt() and hasattr(self.twins.stock, "load_lora_adapter"))
    @rule()
    def hot_swap_lora(self) -> None:
        name = self.adapters[-1]

        def swap(model: Any) -> None:
            state = {key: value * 1.5 for key, value in get_peft_model_state_dict(model, adapter_name=name).items()}
            model.load_lora_adapter(state, adapter_name=name, prefix=None, hotswap=True)

        self.twins.both(swap)
        self.steps(count=6)

    @precondition(lambda self: self.adapters and self._may_adapt())
    @rule()
    def fuse_lora(self) -> None:
        """Merges the adapters into the weights, which writes through ``weight.data``."""
        self.twins.both(_merge)
        self.fused = True
        self.steps(count=6)

    @precondition(lambda self: self.fused and not self.ema and self.offloaded is None)
    @rule()
    def unfuse_lora(self) -> None:
        self.twins.both(_unmerge)
        self.fused = False
        self.steps(count=6)

    @precondition(lambda self: self.adapters and self._may_adapt())
    @rule()
    def delete_lora(self) -> None:
        name = self.adapters.pop()
        method = "delete_adapters" if hasattr(self.twins.stock, "delete_adapters") else "delete_adapter"
        self.twins.both(lambda model: getattr(model, method)(name))

    @precondition(lambda self: self.adapters and self._may_adapt() and hasattr(self.twins.stock, "unload_lora"))
    @rule()
    def unload_lora(self) -> None:
        self.twins.both(lambda model: model.unload_lora())  # type: ignore[operator]
        self.adapters.clear()


def _fill(model: nn.Module, adapter: str, seed: int) -> None:
    """Gives an adapter weights that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if f".{adapter}." in path or path.endswith(f".{adapter}"):
                values = torch.randn(parameter.shape, generator=generator) * 0.1
                parameter.copy_(values.abs() + 0.5 if "magnitude" in path else values)


def _layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer)]


def _merge(model: Any) -> None:
    if hasattr(model, "fuse_lora"):
        model.fuse_lora()
    else:
        for layer in _layers(model):
            layer.merge()


def _unmerge(model: Any) -> None:
    if hasattr(model, "unfuse_lora"):
        model.unfuse_lora()
    else:
        for layer in _layers(model):
            layer.unmerge()
