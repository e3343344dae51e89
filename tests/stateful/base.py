"""What the rules of the state machine share; injection, restoring and inputs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from diffusers.training_utils import EMAModel
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition
from hypothesis.stateful import rule as hypothesis_rule
from torch import Tensor, nn

from tests.stateful.models import Inputs, Subject
from tests.stateful.twins import Twins, cast

Numbers = st.integers(0, 2**16)
NUMERICS = ("exact", "fast")


def rule(**arguments: Any) -> Callable[[Any], Any]:
    """A rule that writes itself into ``machine.journal``, as the call that repeats it."""

    def decorate(step: Any) -> Any:
        @functools.wraps(step)
        def recorded(self: Base, **values: Any) -> None:
            words = ", ".join(f"{name}={value!r}" for name, value in values.items())
            self.journal.append(f"state.{step.__name__}({words})")
            step(self, **values)

        return hypothesis_rule(**arguments)(recorded)

    return decorate


class Base(RuleBasedStateMachine):
    """What all rules share, and the rules that inject, restore, and change the inputs."""

    subject: Subject
    compiles = False  #: whether it tries torch.compile, which traces for seconds

    def __init__(self) -> None:
        super().__init__()
        self.twins = Twins(self.subject)
        self.dtype, self.device = torch.float32, "cpu"
        self.variant = 0
        self.time = 0
        self.inputs: dict[int, Inputs] = {}
        self.adapters: list[str] = []
        self.fused = False
        self.cache: str | None = None
        self.offloaded: Callable[[nn.Module], Any] | None = None
        self.ema: list[EMAModel] = []
        self.undo: list[Callable[[nn.Module], Any]] = []
        self.classes: dict[type, Any] = {}
        self.compiled = False
        self.quantized: set[str] = set()
        self.journal: list[str] = []

    def teardown(self) -> None:
        for kind, forward in self.classes.items():
            kind.forward = forward  # type: ignore[attr-defined]

    def arguments(self, variant: int | None = None) -> Inputs:
        """The arguments of the next call: the same tensors as in the last one but for the time, as in a pipeline."""
        variant = self.variant if variant is None else variant
        if variant not in self.inputs:
            self.inputs[variant] = cast(self.subject.arguments(variant), self.dtype, self.device)
        inputs = self.inputs[variant]
        self.time += 1
        if "timestep" in inputs:
            inputs = inputs | {"timestep": inputs["timestep"] * (1 - self.time % 10 / 16)}
        return inputs

    def run(self, model: nn.Module, inputs: Inputs) -> Any:
        context = getattr(model, "cache_context", None)
        with torch.no_grad(), context("one") if context is not None else contextlib.nullcontext():
            return model(**inputs, return_dict=False)

    @invariant()
    def both_compute_the_same(self) -> None:
        """Calls both, as they are now."""
        self.twins.loose = "hooks may skip modules" if self.cache or self.undo or self.classes else ""
        self.twins.compare(self.run, self.arguments())

    def _modules(self, number: int, *kinds: type) -> str:
        names = [
            name for name, module in self.twins.stock.named_modules() if name and isinstance(module, kinds or nn.Module)
        ]
        return names[number % len(names)]

    def _linear(self, number: int) -> str | None:
        names = [
            name
            for name, module in self.twins.stock.named_modules()
            if type(module) is nn.Linear and "lora_" not in name and type(module.weight.data) is Tensor
        ]
        return names[number % len(names)] if names else None

    def _is_plain(self) -> bool:
        return not (self.cache or self.undo or self.ema) and self.offloaded is None

    @rule()
    def again(self) -> None:
        """Nothing but the call after it; the first rule, which the simplest sequence repeats."""

    @rule(numerics=st.sampled_from(NUMERICS))
    def inject(self, numerics: str) -> None:
        """Injects the whole model."""
        self.twins.inject("", numerics)

    @rule()
    def inject_fp8(self) -> None:
        """Without a GPU that has fp8 nothing is patched, and the report says why."""
        report = self.twins.inject("", "fp8")
        assert report is None or (not report.patched and "NVIDIA GPU" in str(report))

    @rule(number=Numbers, numerics=st.sampled_from(NUMERICS))
    def inject_part(self, number: int, numerics: str) -> None:
        self.twins.inject(self._modules(number), numerics)

    @initialize(numerics=st.sampled_from(NUMERICS))
    def begin(self, numerics: str) -> None:
        """Most runs are to have patches from the beginning."""
        self.inject(numerics=numerics)

    @rule(again=st.sampled_from(NUMERICS))
    def restore(self, again: str) -> None:
        """Restores everything, and injects again: what is restored shows no more than the next call does."""
        self.twins.restore()
        self.both_compute_the_same()
        self.inject(numerics=again)

    @precondition(lambda self: self.twins.live)
    @rule(number=Numbers)
    def restore_report(self, number: int) -> None:
        self.twins.restore_report(number)
        self.both_compute_the_same()
        self.inject(numerics="exact")

    @rule(number=Numbers)
    def restore_part(self, number: int) -> None:
        self.twins.restore_part(self._modules(number))

    @rule()
    def other_inputs(self) -> None:
        self.variant = 1 - self.variant

    @precondition(lambda self: self.subject.text is not None)
    @rule()
    def write_text_through_numpy(self) -> None:
        if self.dtype is not torch.bfloat16:
            self.arguments()[self.subject.text].numpy()[...] *= -0.5  # type: ignore[index]
            self.steps(count=6)

    @rule(count=st.integers(2, 8))
    def steps(self, count: int) -> None:
        """Several calls with one text."""
        for _ in range(count):
            self.both_compute_the_same()
