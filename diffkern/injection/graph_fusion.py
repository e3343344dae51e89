"""A whole denoiser step as one CUDA graph: captured once per kind of call, replayed ever after.

A graph repeats its kernels on the addresses it was captured with. So the inputs of a call are copied to where those of
the capture lie; weights may change in place; and whatever else the recorded step depended on is compared at each call:
modules, their patches and hooks, training mode, adapters, attention backends, the addresses of the weights, and which
copies of them in 8 bits there are. That takes the host a millisecond or two, in which the GPU works: a replay starts as
soon as it is known that all the memory it reads is still there, and where the comparison fails its result is dropped.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from typing_extensions import override

from diffkern import cache
from diffkern.blocks import fp8
from diffkern.blocks.pieces import calls_are_watched, untouched
from diffkern.cache import memory
from diffkern.injection.fusion import Fusion
from diffkern.injection.state import ATTRIBUTE, patches, run_below
from diffkern.providers import Choice

#: Graphs that a module keeps, the most recently used ones; each holds the activations of a step.
MAX_GRAPHS = 4

#: Plain values that a graph has written into it.
_Constant = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)

#: Attributes of a layer with adapters that decide what it computes.
_ADAPTER_STATE = ("scaling", "_active_adapter", "_disable_adapters", "merged_adapters")
#: Where the classes are that have no adapters.
_WITHOUT_ADAPTERS = ("torch.", "diffusers.", "transformers.")

#: Compared with another one; what stands where in it is up to :func:`fingerprint`.
Fingerprint = tuple[object, ...]


class Parts:
    """The modules of a denoiser and their tensors, as one quick walk finds them before every replay.

    The iterators of :class:`torch.nn.Module` make names, and take as long as a good part of the step itself.

    Attributes:
        modules: The module itself and all those inside of it, each once.
        states: Their ``__dict__``.
        children: The modules in each of them, one after the other: a shared one as often as it is there.
        suspects: Those inside of it that have a hook or a forward of their own: all others are untouched.
        tensors: Parameters and buffers.
        foreign: The class of one that keeps its state elsewhere, as scripted and compiled modules do, or "".
    """

    def __init__(self, module: nn.Module) -> None:
        self.foreign = ""
        modules: list[nn.Module] = [module]
        states: list[dict[str, Any]] = []
        children: list[nn.Module | None] = []
        suspects: list[nn.Module] = []
        tensors: list[Tensor | None] = []
        found = {module}
        for part in modules:  # which grows meanwhile
            state = part.__dict__
            if "_modules" not in state or "training" not in state:
                self.foreign = self.foreign or type(part).__name__
                continue
            states.append(state)
            if state["_modules"]:
                children += state["_modules"].values()
                for child in state["_modules"].values():
                    if child is not None and child not in found:
                        found.add(child)
                        modules.append(child)
            if state["_parameters"]:
                tensors += state["_parameters"].values()
            if state["_buffers"]:
                tensors += state["_buffers"].values()
            if (
                "forward" in state
                or state["_forward_hooks"]
                or state["_forward_pre_hooks"]
                or state["_backward_hooks"]
                or state["_backward_pre_hooks"]
            ) and part is not module:
                suspects.append(part)
        self.modules, self.states, self.children, self.suspects = modules, states, children, suspects
        self.tensors = [tensor for tensor in tensors if tensor is not None]


@dataclass(frozen=True)
class _Graph:
    """A captured step.

    Attributes:
        graph: The graph.
        inputs: The tensors it reads, in the order of the flattened arguments.
        outputs: What it writes, flattened.
        spec: How the outputs were nested.
        fingerprint: What it depends on, see :func:`fingerprint`.
        weights: The tensors of the module, which are not kept alive, and where they lay.
        kept: What else it reads, and what holds such tensors, kept alive.
        lock: Held by a thread while it gives the GPU one replay.
        free: The end of the last replay.
    """

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: list[Any]
    spec: TreeSpec
    fingerprint: Fingerprint
    weights: tuple[list[weakref.ref[Tensor]], list[int]]
    kept: list[Any]
    lock: threading.Lock = field(default_factory=threading.Lock)
    free: torch.cuda.Event = field(default_factory=torch.cuda.Event)

    def can_run(self) -> bool:
        """Whether all the memory that it reads is there, so that a replay does no harm, whatever it gives."""
        tensors, addresses = self.weights
        try:
            return [tensor().data_ptr() for tensor in tensors] == addresses  # type: ignore[union-attr]
        except AttributeError:  # of None: one is gone
            return False

    def replay(self, tensors: Sequence[Tensor]) -> Any:
        """Has the GPU compute the step; other threads and streams wait for the inputs and outputs to be free again."""
        with self.lock, torch.cuda.device(self.inputs[0].device):
            self.free.wait()
            for static, tensor in zip(self.inputs, tensors, strict=True):
                static.copy_(tensor)
            self.graph.replay()
            # Copies: the next replay writes where this one did.
            leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self.outputs]
            self.free.record()
        return tree_unflatten(leaves, self.spec)


@dataclass
class _Call:
    """The arguments of a call, flattened.

    Attributes:
        leaves: The arguments.
        spec: How they were nested.
        parts: Those of the module that is called, once somebody has looked at them.
        started: The graph that was replayed for it, and the result, whatever becomes of it.
    """

    leaves: list[Any]
    spec: TreeSpec
    parts: Parts | None = None
    started: tuple[_Graph, Any] | None = None

    @cached_property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @cached_property
    def signature(self) -> Hashable:
        return self.spec, tuple(
            (leaf.shape, leaf.stride(), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else (type(leaf), leaf)
            for leaf in self.leaves
        )


@dataclass(frozen=True)
class GraphFusion(Fusion):
    """A model whose forward is replayed from a CUDA graph. A call of a new kind runs as it is; the next is captured."""

    @property
    @override
    def op(self) -> str:
        return "cuda_graph"

    @override
    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Call:
        return _Call(*tree_flatten((args, dict(kwargs))))

    @override
    def primary_input(self, call: _Call) -> Tensor:
        return call.tensors[0]

    @override
    def weight_dtype(self, module: nn.Module) -> None:
        return None

    @override
    def declines(self, module: nn.Module, call: _Call) -> str | None:
        if torch.compiler.is_compiling():
            return "inside of torch.compile"
        tensors = call.tensors
        if not tensors or any(not tensor.is_cuda or tensor.device != tensors[0].device for tensor in tensors):
            return "its inputs are not all on one GPU"
        if any(not isinstance(leaf, (Tensor, *_Constant)) for leaf in call.leaves):
            return "an argument is neither a tensor nor a plain value"
        if any(type(tensor) is not Tensor for tensor in tensors):
            return "an input is not a plain tensor"
        if torch.is_grad_enabled():
            return "gradients are enabled: call it under torch.no_grad()"
        if torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being captured around it"
        if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled("cuda"):
            return "autocast is on"
        known = _graphs(module).get(call.signature)
        if isinstance(known, _Graph) and known.can_run():
            call.started = known, known.replay(call.tensors)
        call.parts = Parts(module)
        return unsafe(call.parts)

    @override
    def stock_pieces(self, module: nn.Module, call: _Call) -> tuple[str, ...]:
        return ()

    @override
    def compute(self, module: nn.Module, call: _Call, provider: str | None, stock: tuple[str, ...]) -> Any:
        graphs = _graphs(module)
        if isinstance(graphs.get(call.signature), _Graph):
            cache.start_round(call.tensors[0].device)  # a replay calls no block that would
        signature, now = call.signature, fingerprint(call.parts or Parts(module))
        known = graphs.pop(signature, None)
        if isinstance(known, _Graph) and known.fingerprint == now:
            graphs[signature] = known
            started, result = call.started or (None, None)
            return result if started is known else known.replay(call.tensors)
        if not isinstance(known, _Graph) and known == now:
            captured = graphs[signature] = _capture(module, call, now)
            return captured.replay(call.tensors)
        # Its first call, or the first after a change: proofs, caches and libraries set themselves up.
        generation = cache.generation()
        result = self.stock(module, call)
        if cache.generation() == generation:  # else the next call still has copies of weights to make
            graphs[signature] = fingerprint(Parts(module))
            while len(graphs) > MAX_GRAPHS:
                graphs.popitem(last=False)
        return result

    @override
    def stock(self, module: nn.Module, call: _Call) -> Any:
        args, kwargs = tree_unflatten(call.leaves, call.spec)
        return run_below(module, args, kwargs)

    # --- there is nothing to prove: a graph repeats the kernels of the call that it was captured from -------

    @override
    def kind(self, module: nn.Module) -> Hashable:
        return id(module)

    @override
    def choose(
        self, module: nn.Module, provider: str | None, device: torch.device, dtypes: tuple[torch.dtype, ...]
    ) -> Choice:
        return Choice("cuda_graph", self.compute, ())

    @override
    def likely_dtypes(self, module: nn.Module, whole: torch.dtype) -> tuple[torch.dtype, ...]:
        return (whole,)

    @override
    def clone_for_verification(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
        return module

    @override
    def cast(self, module: nn.Module, dtype: torch.dtype) -> None:
        return None

    @override
    def samples(self, module: nn.Module, device: torch.device, dtype: torch.dtype, exact: bool) -> Sequence[Any]:
        return ()

    @override
    def first_call_sample(self, call: _Call) -> None:
        return None

    @override
    def check_semantics(self, module: nn.Module) -> None:
        return None

    @override
    def reference(self, module: nn.Module, call: _Call) -> Any:
        return self.stock(module, call)


def unsafe(parts: Parts) -> str | None:
    """Why steps of a module cannot be replayed as it is now, or None."""
    module = parts.modules[0]
    if module.training:
        return "it is in training mode"
    if calls_are_watched():
        return "global hooks watch the calls of all modules"
    if parts.foreign:
        return f"there is a {parts.foreign} in it, whose state cannot be looked at"
    # Names are found, slowly, once there is something to say.
    if not all(untouched(child, type(child)) for child in parts.suspects):
        return hooks_inside(module)
    devices = {tensor.device for tensor in parts.tensors}
    if len(devices) > 1 or any(device.type != "cuda" for device in devices):
        return f"{_elsewhere(module)} is not on the GPU with the rest: offloaded weights come and go between replays"
    return None


def hooks_inside(module: nn.Module) -> str | None:
    """Which hook a replay would pass by; those on ``module`` itself run around it."""
    for path, child in module.named_modules():
        if child is not module and not untouched(child, type(child)):
            return f"a hook sits on {path}, and a replay would not call it"
    return None


def fingerprint(parts: Parts) -> Fingerprint:
    """Everything that a captured step depends on, except the contents of tensors."""
    modules, states = parts.modules, parts.states
    adaptable = {cls for cls in set(map(type, modules)) if not cls.__module__.startswith(_WITHOUT_ADAPTERS)}
    return (
        cache.generation(),
        # Addresses alone would not do: once a module is gone, another one may get its address.
        [weakref.ref(child) for child in modules],
        [id(child) for child in parts.children],
        [(*state["_modules"],) for state in states],
        [state["training"] for state in states],
        [*patches(modules[0]), *(state.get(ATTRIBUTE) for state in states)],
        {cls: getattr(cls, "forward", None) for cls in map(type, modules)},
        [fp8.state_of(child) for child, state in zip(modules, states, strict=True) if ATTRIBUTE in state],
        [(i, *_processor(state["processor"])) for i, state in enumerate(states) if "processor" in state],
        [
            (i, *(repr(states[i].get(name)) for name in _ADAPTER_STATE))
            for i, child in enumerate(modules if adaptable else ())
            if type(child) in adaptable
        ],
        [(*state["_parameters"],) for state in states],
        [(tensor.data_ptr(), tensor.stride()) for tensor in parts.tensors],
    )


def _capture(module: nn.Module, call: _Call, now: Fingerprint) -> _Graph:
    """Captures one step on copies of the inputs of ``call``."""
    leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in call.leaves]
    args, kwargs = tree_unflatten(leaves, call.spec)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(call.tensors[0].device), torch.cuda.graph(graph):
        result = run_below(module, args, kwargs)
    outputs, spec = tree_flatten(result)
    parts = Parts(module)
    tensors = parts.tensors
    weights = [weakref.ref(tensor) for tensor in tensors], [tensor.data_ptr() for tensor in tensors]
    others = [child for child in parts.modules if child is not module]
    kept = [*[dict(memory(child)) for child in others], *map(fp8.copies_of, others)]
    kept += [state["processor"] for state in parts.states if "processor" in state]
    kept += [value for state in parts.states for value in state.values() if isinstance(value, Tensor)]
    return _Graph(graph, [leaf for leaf in leaves if isinstance(leaf, Tensor)], outputs, spec, now, weights, kept)


def _graphs(module: nn.Module) -> OrderedDict[Hashable, _Graph | Fingerprint]:
    """What is known of each kind of call, the most recent one last: a graph, or what the last call depended on."""
    graphs: OrderedDict[Hashable, _Graph | Fingerprint] = memory(module).setdefault("graphs", OrderedDict())
    return graphs


def _elsewhere(module: nn.Module) -> str:
    """The path of the first tensor that is on no GPU, or on another one than the first."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return next(path for path, tensor in named if not tensor.is_cuda or tensor.device != named[0][1].device)


def _processor(processor: Any) -> tuple[Any, ...]:
    """What a replay depends on of a processor, which itself is kept only where it takes no weak reference."""
    try:
        reference = weakref.ref(processor)
    except TypeError:
        reference = processor
    backend = repr(getattr(processor, "_attention_backend", None))
    call = type(processor).__call__ if callable(processor) else None
    return id(processor), reference, call, backend
