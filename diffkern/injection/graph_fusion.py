"""A whole denoiser step as one CUDA graph: captured once per kind of call, replayed ever after.

A graph repeats its kernels on the addresses it was captured with. So the inputs of a call are copied to where those of
the capture lie; weights may change in place; and whatever else the recorded step depended on is compared before each
replay: modules, their patches and hooks, training mode, adapters, attention backends, the addresses of the weights,
and which copies of them in 8 bits there are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from typing_extensions import override

from diffkern.blocks import fp8, watch
from diffkern.blocks.memory import memory
from diffkern.blocks.pieces import calls_are_watched, untouched
from diffkern.injection.fusion import Fusion
from diffkern.injection.state import ATTRIBUTE
from diffkern.providers import Choice

#: Graphs that a module keeps, the most recently used ones; each holds the activations of a step.
MAX_GRAPHS = 4

#: Plain values that a graph has written into it.
_Constant = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)

#: Attributes of a layer with adapters that decide what it computes.
_ADAPTER_STATE = ("scaling", "_active_adapter", "_disable_adapters", "merged_adapters")


@dataclass(frozen=True)
class _Graph:
    """A captured step.

    Attributes:
        graph: The graph.
        inputs: The tensors it reads, in the order of the flattened arguments.
        outputs: What it writes, flattened.
        spec: How the outputs were nested.
        fingerprint: What it depends on, see :func:`fingerprint`.
        kept: Remembered tensors that it reads, kept alive.
    """

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: list[Any]
    spec: TreeSpec
    fingerprint: Hashable
    kept: list[Any]

    def replay(self, tensors: Sequence[Tensor]) -> Any:
        for static, tensor in zip(self.inputs, tensors, strict=True):
            static.copy_(tensor)
        self.graph.replay()
        # Copies: the next replay writes where this one did.
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self.outputs]
        return tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class _Call:
    """The arguments of a call, flattened."""

    leaves: list[Any]
    spec: TreeSpec

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
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
    def subject(self, call: _Call) -> Tensor:
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
        return unsafe(module)

    @override
    def stock_pieces(self, module: nn.Module, call: _Call) -> tuple[str, ...]:
        return ()

    @override
    def compute(self, module: nn.Module, call: _Call, provider: str | None, stock: tuple[str, ...]) -> Any:
        graphs: OrderedDict[Hashable, _Graph | Hashable] = memory(module).setdefault("graphs", OrderedDict())
        signature, now = call.signature, fingerprint(module)
        known = graphs.pop(signature, None)
        if isinstance(known, _Graph) and known.fingerprint == now:
            graphs[signature] = known
            watch.compare_next()
            return known.replay(call.tensors)
        if not isinstance(known, _Graph) and known == now:
            captured = _capture(module, call, now)
            graphs[signature] = captured
            return captured.replay(call.tensors)
        # Its first call, or the first after a change: proofs, caches and libraries set themselves up.
        generation = watch.generation()
        result = self.stock(module, call)
        if watch.generation() == generation:  # else the next call still has copies of weights to make
            graphs[signature] = fingerprint(module)
            while len(graphs) > MAX_GRAPHS:
                graphs.popitem(last=False)
        return result

    @override
    def stock(self, module: nn.Module, call: _Call) -> Any:
        args, kwargs = tree_unflatten(call.leaves, call.spec)
        return type(module).forward(module, *args, **kwargs)

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
    def stand_in(self, module: nn.Module, device: torch.device) -> nn.Module:
        return module

    @override
    def cast(self, module: nn.Module, dtype: torch.dtype) -> None:
        return None

    @override
    def samples(self, module: nn.Module, device: torch.device, dtype: torch.dtype, exact: bool) -> Sequence[Any]:
        return ()

    @override
    def trial(self, call: _Call) -> None:
        return None

    @override
    def misunderstood(self, module: nn.Module) -> None:
        return None

    @override
    def reference(self, module: nn.Module, call: _Call) -> Any:
        return self.stock(module, call)


def unsafe(module: nn.Module) -> str | None:
    """Why steps of ``module`` cannot be replayed as they are now, or None."""
    if module.training:
        return "it is in training mode"
    if calls_are_watched():
        return "global hooks watch the calls of all modules"
    hooked = hooks_inside(module)
    if hooked is not None:
        return hooked
    device = None
    for path, tensor in _tensors(module):
        if not tensor.is_cuda or (device is not None and tensor.device != device):
            return f"{path} is not on the GPU with the rest: offloaded weights come and go between replays"
        device = tensor.device
    return None


def hooks_inside(module: nn.Module) -> str | None:
    """Which hook a replay would pass by; those on ``module`` itself run around it."""
    for path, child in module.named_modules():
        if child is not module and not untouched(child, type(child)):
            return f"a hook sits on {path}, and a replay would not call it"
    return None


def fingerprint(module: nn.Module) -> Hashable:
    """Everything that a captured step depends on, except the contents of tensors."""
    facts: list[Hashable] = [watch.generation()]
    for child in module.modules():
        state = child.__dict__
        facts.append((id(child), child.training, id(state.get("processor")), _backend(state.get("processor"))))
        if ATTRIBUTE in state:
            facts.append((state[ATTRIBUTE], fp8.state_of(child)))
        if not type(child).__module__.startswith(("torch.", "diffusers.", "transformers.")):
            facts.append(tuple(repr(state.get(name)) for name in _ADAPTER_STATE))
    facts += [tensor.data_ptr() for _, tensor in _tensors(module)]
    return tuple(facts)


def _capture(module: nn.Module, call: _Call, now: Hashable) -> _Graph:
    """Captures one step on copies of the inputs of ``call``."""
    leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in call.leaves]
    args, kwargs = tree_unflatten(leaves, call.spec)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(call.tensors[0].device), torch.cuda.graph(graph):
        result = type(module).forward(module, *args, **kwargs)
    outputs, spec = tree_flatten(result)
    kept = [dict(memory(child)) for child in module.modules() if child is not module]
    return _Graph(graph, [leaf for leaf in leaves if isinstance(leaf, Tensor)], outputs, spec, now, kept)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _backend(processor: Any) -> str:
    return repr(getattr(processor, "_attention_backend", None))
