"""Weights are quantised, written, averaged, cast, loaded, and the model is copied."""

from __future__ import annotations

import copy
import pickle

import torch
from diffusers.training_utils import EMAModel
from hypothesis import strategies as st
from hypothesis.stateful import precondition
from torch import nn

from tests.stateful import quantized
from tests.stateful.base import Base, Numbers, rule


class WeightRules(Base):
    """Everything that changes weights, or the model as a whole."""

    @precondition(lambda self: not self.adapters and not self.ema and self.offloaded is None)
    @rule(number=Numbers, subclass=st.booleans())
    def quantize(self, number: int, subclass: bool) -> None:
        path = self._linear(number)
        if path is not None:
            step = quantized.quantize_weight if subclass else quantized.quantize_layer
            if self.twins.both(lambda model: step(model, path)):
                self.quantized.add(path)

    @precondition(lambda self: self.offloaded is None)
    @rule(number=Numbers, part=st.sampled_from(["all", "rows", "counted"]))
    def write_weights(self, number: int, part: str) -> None:
        """Writes to one linear layer through ``weight.data``, or to some of its rows, or as PyTorch counts it."""
        path = self._linear(number)
        if path is None:
            return
        self.write_weight(path, part)

    @precondition(lambda self: self.offloaded is None and self.subject.text is not None)
    @rule(number=Numbers, part=st.sampled_from(["all", "rows"]))
    def write_weights_of_text(self, number: int, part: str) -> None:
        """The same to a layer that only the text goes through."""
        paths = [path for path, _ in self.twins.stock.named_modules() if path.endswith(("attn2.to_v", "attn2.to_k"))]
        if paths:
            self.write_weight(paths[number % len(paths)], part)

    def write_weight(self, path: str, part: str) -> None:
        def write(model: nn.Module) -> None:
            weight = model.get_submodule(path).weight
            with torch.no_grad():
                rows = weight if part == "counted" else weight.data if part == "all" else weight.data[1:64]  # type: ignore[index,union-attr]
                rows.mul_(-1.5)  # type: ignore[operator,union-attr]

        self.twins.both(write)
        self.steps(count=6)

    @precondition(lambda self: not self.ema and not self.quantized and self.offloaded is None)
    @rule()
    def swap_in_averaged_weights(self) -> None:
        made: list[EMAModel] = []

        def swap(model: nn.Module) -> None:
            average = EMAModel(list(model.parameters()), decay=0.5)
            for parameter in average.shadow_params:
                if parameter.is_floating_point():
                    parameter.mul_(0.9)
            average.store(model.parameters())
            average.copy_to(model.parameters())
            made.append(average)

        if self.twins.both(swap):
            self.ema = made
        self.steps(count=6)

    @precondition(lambda self: self.ema and self.offloaded is None)
    @rule()
    def swap_out_averaged_weights(self) -> None:
        averages = iter(self.ema)
        self.twins.both(lambda model: next(averages).restore(model.parameters()))
        self.ema = []
        self.steps(count=6)

    @precondition(lambda self: self.offloaded is None and not self.ema)
    @rule(dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    def cast(self, dtype: torch.dtype) -> None:
        if self.twins.both(lambda model: model.to(dtype)):
            self.dtype = dtype
            self.inputs.clear()

    @precondition(lambda self: self.offloaded is None)
    @rule(assign=st.booleans())
    def load_weights(self, assign: bool) -> None:
        """A state dict goes out and comes back with other values."""

        def load(model: nn.Module) -> None:
            state = {
                name: value * 0.75 if name.endswith("to_v.weight") else value.clone()
                for name, value in model.state_dict().items()
            }
            model.load_state_dict(state, assign=assign)
            model.requires_grad_(False)

        self.twins.both(load)

    @precondition(lambda self: self._is_plain())
    @rule()
    def deep_copy(self) -> None:
        self.twins.replace(copy.deepcopy)

    @precondition(lambda self: self._is_plain())
    @rule()
    def pickle(self) -> None:
        """What is loaded runs stock."""
        before = self.twins.patched
        self.twins.replace(lambda model: pickle.loads(pickle.dumps(model)))
        if self.twins.patched is not before:
            self.twins.tiers.clear()
            self.both_compute_the_same()
            self.inject(numerics="exact")
