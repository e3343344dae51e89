"""A whole denoiser step as one CUDA graph, as a patch that lies over all others of a model.

A graph repeats its kernels on the addresses it was captured with. So the inputs of a call are copied to where those of
the capture lie; weights may change in place; and whatever else the recorded step depends on is compared at each call,
see :mod:`diffkern.graph.snapshot`. That takes the host a millisecond or two, in which the GPU works: a replay starts as
soon as it is known that all the memory it reads is there, and where the comparison fails its result is dropped.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from typing_extensions import override

from diffkern.blocks.pieces import calls_are_watched, untouched
from diffkern.cache import memory
from diffkern.graph import CONSTANTS, ModuleSnapshot, StepCall, StepGraphs
from diffkern.graph.capture import CaptureError
from diffkern.injection.fusion import Fusion
from diffkern.injection.state import ATTRIBUTE, StrictModeError, patches, run_below
from diffkern.providers import Choice


@dataclass(frozen=True)
class GraphFusion(Fusion):
    """A model whose forward is replayed from a CUDA graph. A call of a new kind runs as it is; the next is captured."""

    @property
    @override
    def op(self) -> str:
        return "cuda_graph"

    @property
    @override
    def proves_itself(self) -> bool:
        """There is nothing to prove: a graph repeats the kernels of the call that it was captured from."""
        return True

    @override
    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> StepCall:
        return StepCall(*tree_flatten((args, dict(kwargs))))

    @override
    def primary_input(self, call: StepCall) -> Tensor:
        return call.tensors[0]

    @override
    def declines(self, module: nn.Module, call: StepCall) -> str | None:
        reason = unfit_call(call)
        if reason is not None:
            return reason
        graphs = step_graphs(module)
        reason = graphs.failure(call)
        if reason is not None:
            return reason
        graphs.speculate(call)
        now = graphs.snapshot(module, patches(module))
        reason = now.unfit()
        if reason is not None:
            graphs.rest(reason)
        return unsafe(module, now) or graphs.check_guards(call, now, _patched(now))

    @override
    def allowed_in_strict(self, module: nn.Module, call: StepCall) -> bool:
        """Whether it only was not captured yet."""
        return unfit_call(call) is None and call.signature in step_graphs(module).kinds

    @override
    def compute(self, module: nn.Module, call: StepCall, provider: str | None, stock: tuple[str, ...]) -> Any:
        def forward(call: StepCall, leaves: list[Any]) -> Any:
            return run_below(module, *call.arguments(leaves))

        graphs = step_graphs(module)
        try:
            return graphs.run(call, module, patches(module), _patched, forward)
        except CaptureError:
            reason = graphs.failure(call)
            assert reason is not None
        self._count_as_stock(module, reason)
        return self.stock(module, call)

    def _count_as_stock(self, module: nn.Module, reason: str) -> None:
        """Corrects the count of a call that was admitted, and then could not be captured.

        Raises:
            StrictModeError: the injection was strict.
        """
        state = next(state for state in patches(module) if state.fusion is self)
        if state.strict:
            raise StrictModeError(f"{type(module).__name__} cannot run as a CUDA graph: it {reason}")
        state.counts.add_fused(-1)
        state.counts.add_stock(reason)

    @override
    def stock(self, module: nn.Module, call: StepCall) -> Any:
        return run_below(module, *call.arguments())

    @override
    def kind(self, module: nn.Module) -> Hashable:
        return id(module)

    @override
    def choose(
        self, module: nn.Module, provider: str | None, device: torch.device, dtypes: tuple[torch.dtype, ...]
    ) -> Choice:
        return Choice("cuda_graph", self.compute, ())


def step_graphs(module: nn.Module) -> StepGraphs:
    """The graphs of a module, which go with its patch."""
    graphs: StepGraphs = memory(module).setdefault("graphs", StepGraphs())
    return graphs


def unfit_call(call: StepCall) -> str | None:
    """Why a call cannot be captured, whatever the module; or None."""
    if torch.compiler.is_compiling():
        return "inside of torch.compile"
    tensors = call.tensors
    if not tensors or any(not tensor.is_cuda or tensor.device != tensors[0].device for tensor in tensors):
        return "its inputs are not all on one GPU"
    if any(not isinstance(leaf, (Tensor, *CONSTANTS)) for leaf in call.leaves):
        return "an argument is neither a tensor nor a plain value"
    if any(type(tensor) is not Tensor for tensor in tensors):
        return "an input is not a plain tensor"
    if torch.is_grad_enabled():
        return "gradients are enabled: call it under torch.no_grad()"
    if torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured around it"
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled("cuda"):
        return "autocast is on"
    return None


def unsafe(module: nn.Module, now: ModuleSnapshot) -> str | None:
    """Why steps of a module cannot be replayed as it is now, or None."""
    if module.training:
        return "it is in training mode"
    if calls_are_watched():
        return "global hooks watch the calls of all modules"
    for path, reference in now.hooked:
        child = reference()
        if child is not None and not untouched(child, type(child)):
            return f"a hook sits on {path}, and a replay would not call it"
    return now.unfit()


def hooks_inside(module: nn.Module) -> str | None:
    """Which hook a replay would pass by; those on ``module`` itself run around it."""
    for path, child in module.named_modules():
        if child is not module and not untouched(child, type(child)):
            return f"a hook sits on {path}, and a replay would not call it"
    return None


def _patched(now: ModuleSnapshot) -> Iterable[nn.Module]:
    """The modules that have patches: only they have derived tensors."""
    modules = (reference() for reference in now.modules)
    return [module for module in modules if module is not None and ATTRIBUTE in module.__dict__]
