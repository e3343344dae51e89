"""A state machine that does to a model what users do, in any order, and to its untouched twin the same."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import MethodType
from typing import Any

import accelerate
import accelerate.hooks
import peft
import torch
import torch._dynamo
from accelerate.hooks import add_hook_to_module, remove_hook_from_module, remove_hook_from_submodules
from diffusers import FirstBlockCacheConfig, MagCacheConfig, TaylorSeerCacheConfig
from diffusers.hooks import HookRegistry, ModelHook, apply_group_offloading
from diffusers.training_utils import EMAModel
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition
from hypothesis.stateful import rule as hypothesis_rule
from peft.utils import get_peft_model_state_dict
from torch import Tensor, nn

from tests.stateful import quantized
from tests.stateful.models import Inputs, Subject
from tests.stateful.twins import Twins, tensors, to_dtype


def rule(**arguments: Any) -> Callable[[Any], Any]:
    """A rule that writes itself into ``machine.journal``, as the call that repeats it."""

    def decorate(step: Any) -> Any:
        @functools.wraps(step)
        def recorded(self: ModelMachine, **values: Any) -> None:
            words = ", ".join(f"{name}={value!r}" for name, value in values.items())
            self.journal.append(f"state.{step.__name__}({words})")
            step(self, **values)

        return hypothesis_rule(**arguments)(recorded)

    return decorate


Numbers = st.integers(0, 2**16)
NUMERICS = ("exact", "fast")
CACHES = {
    "first block": lambda: FirstBlockCacheConfig(threshold=0.3),
    "mag": lambda: MagCacheConfig(num_inference_steps=8, mag_ratios=torch.ones(8), threshold=0.5),
    "taylor": lambda: TaylorSeerCacheConfig(cache_interval=3, disable_cache_before_step=2),
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


class ModelMachine(RuleBasedStateMachine):
    """Rules for all models; those that a model does not know do nothing, to both twins alike."""

    subject: Subject
    compiles = False  #: whether it tries torch.compile, which traces for seconds

    def __init__(self) -> None:
        super().__init__()
        self.twins = Twins(self.subject)
        self.dtype = torch.float32
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

    # --- calls -----------------------------------------------------------------------------------------

    def arguments(self, variant: int | None = None) -> Inputs:
        """The arguments of the next call: the same tensors as in the last one but for the time, as in a pipeline."""
        variant = self.variant if variant is None else variant
        if variant not in self.inputs:
            self.inputs[variant] = to_dtype(self.subject.arguments(variant), self.dtype)
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

    # --- injection -------------------------------------------------------------------------------------

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
        assert not report.patched
        assert "NVIDIA GPU" in str(report)

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

    # --- inputs ----------------------------------------------------------------------------------------

    @rule()
    def other_inputs(self) -> None:
        self.variant = 1 - self.variant

    @precondition(lambda self: self.subject.text is not None)
    @rule()
    def write_text_through_numpy(self) -> None:
        if self.dtype is not torch.bfloat16:
            self.arguments()[self.subject.text].numpy()[...] *= -0.5  # type: ignore[index]
            self.twins.wrote_unseen()
            self.steps(count=6)

    @rule(count=st.integers(2, 8))
    def steps(self, count: int) -> None:
        """Several calls with one text."""
        for _ in range(count):
            self.both_compute_the_same()

    # --- adapters --------------------------------------------------------------------------------------

    def _may_adapt(self) -> bool:
        return not self.ema and self.offloaded is None and not self.fused

    @precondition(lambda self: self._may_adapt() and len(self.adapters) < 2)
    @rule(number=Numbers, dora=st.booleans())
    def add_lora(self, number: int, dora: bool) -> None:
        name = "ab"["a" in self.adapters]
        config = peft.LoraConfig(r=2, target_modules=list(self.subject.lora), init_lora_weights=False, use_dora=dora)
        if self.twins.both(lambda model: model.add_adapter(config, adapter_name=name)):  # type: ignore[operator]
            self.adapters.append(name)
            self.twins.both(lambda model: _fill(model, name, number))

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
        self.twins.wrote_unseen()
        self.steps(count=6)

    @precondition(lambda self: self.adapters and self._may_adapt())
    @rule()
    def fuse_lora(self) -> None:
        """Merges the adapters into the weights, which writes through ``weight.data``."""
        self.twins.both(_merge)
        self.fused = True
        self.twins.wrote_unseen()
        self.steps(count=6)

    @precondition(lambda self: self.fused and not self.ema and self.offloaded is None)
    @rule()
    def unfuse_lora(self) -> None:
        self.twins.both(_unmerge)
        self.fused = False
        self.twins.wrote_unseen()
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

    # --- weights ---------------------------------------------------------------------------------------

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
        self.twins.wrote_unseen()
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
        self.twins.wrote_unseen()
        self.steps(count=6)

    @precondition(lambda self: self.ema and self.offloaded is None)
    @rule()
    def swap_out_averaged_weights(self) -> None:
        averages = iter(self.ema)
        self.twins.both(lambda model: next(averages).restore(model.parameters()))
        self.ema = []
        self.twins.wrote_unseen()
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

    # --- hooks -----------------------------------------------------------------------------------------

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

    # --- offloading and caches -------------------------------------------------------------------------

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
            self.steps(count=6)

    @precondition(lambda self: self.cache)
    @rule()
    def disable_cache(self) -> None:
        self.twins.both(lambda model: model.disable_cache())  # type: ignore[operator]
        self.cache = None

    # --- the whole model -------------------------------------------------------------------------------

    def _is_plain(self) -> bool:
        return not (self.cache or self.undo or self.ema) and self.offloaded is None

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

    # --- ways to call ----------------------------------------------------------------------------------

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


def _remove_group_offloading(model: nn.Module) -> None:
    from diffusers.hooks.group_offloading import (
        _GROUP_OFFLOADING,
        _LAYER_EXECUTION_TRACKER,
        _LAZY_PREFETCH_GROUP_OFFLOADING,
    )

    registry = HookRegistry.check_if_exists_or_initialize(model)
    for name in (_GROUP_OFFLOADING, _LAYER_EXECUTION_TRACKER, _LAZY_PREFETCH_GROUP_OFFLOADING):
        registry.remove_hook(name, recurse=True)
