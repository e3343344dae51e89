"""Ways to call a model: under autocast, with gradients, compiled, from threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch._dynamo
from hypothesis import strategies as st
from hypothesis.stateful import precondition
from torch import Tensor, nn

from tests.stateful.base import Base, rule
from tests.stateful.models import Inputs
from tests.stateful.twins import tensors


class CallRules(Base):
    """Each compares one call of its kind."""

    @precondition(lambda self: not self.cache)
    @rule(dtype=st.sampled_from([torch.bfloat16, torch.float16]))
    def autocast(self, dtype: torch.dtype) -> None:
        def run(model: nn.Module, inputs: Inputs) -> Any:
            with torch.autocast("cpu", dtype):
                return self.run(model, inputs)

        self.twins.compare(run, self.arguments())

    @precondition(lambda self: not self.cache and self.offloaded is None)
    @rule(checkpointing=st.booleans(), weights=st.booleans())
    def train(self, checkpointing: bool, weights: bool) -> None:
        """Gradients of the inputs, and of the weights."""

        def run(model: Any, inputs: Inputs) -> Any:
            leaves = {name: _leaf(value) for name, value in inputs.items()}
            trained = [p for p in model.parameters() if weights and p.is_floating_point() and type(p.data) is Tensor]
            if checkpointing:
                model.enable_gradient_checkpointing() if hasattr(model, "enable_gradient_checkpointing") else (
                    model.gradient_checkpointing_enable()
                )
            model.train()
            try:
                for parameter in trained:
                    parameter.requires_grad_(True)
                result = model(**leaves, return_dict=False)
                sum(y.float().square().mean() for y in tensors(result)).backward()  # type: ignore[union-attr]
                gradients = [leaf.grad for leaf in [*tensors(leaves), *trained] if leaf.grad is not None]
                return [*tensors(result), *gradients]
            finally:
                for parameter in trained:
                    parameter.requires_grad_(False).grad = None
                model.eval()
                if checkpointing:
                    model.disable_gradient_checkpointing() if hasattr(model, "disable_gradient_checkpointing") else (
                        model.gradient_checkpointing_disable()
                    )

        self.twins.compare(run, self.arguments(), counted=not checkpointing)

    @precondition(lambda self: self._is_plain() and self.compiles and not self.compiled)
    @rule()
    def compile(self) -> None:
        def run(model: nn.Module, inputs: Inputs) -> Any:
            with torch.no_grad():
                return torch.compile(model, backend="eager")(**inputs, return_dict=False)

        self.compiled = True  # once a run: tracing takes seconds
        self.twins.compare(run, self.arguments(), counted=False)
        torch._dynamo.reset()

    @precondition(lambda self: not self.cache and self.offloaded is None)
    @rule()
    def run_in_threads(self) -> None:
        """Two threads call one model with inputs of different shapes."""

        def run(model: nn.Module, inputs: Inputs) -> Any:
            with ThreadPoolExecutor(2) as pool:
                jobs = [pool.submit(self.run, model, inputs[variant]) for variant in (0, 1, 0, 1)]
                return [job.result() for job in jobs]

        self.twins.compare(run, {variant: self.arguments(variant) for variant in (0, 1)})  # type: ignore[misc]


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.clone().requires_grad_(True)
    return {name: _leaf(part) for name, part in value.items()} if isinstance(value, dict) else value
