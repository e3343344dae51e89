"""A whole denoiser step as one CUDA graph, as a patch that lies over all others of a model.

A graph repeats its kernels on the addresses it was captured with. So the inputs of a call are copied to where those of
the capture lie; weights may change in place; and whatever else the recorded step depends on is compared at each call,
see :mod:`diffkern.graph.snapshot`. That takes the host a millisecond or two, in which the GPU works: a replay starts as
soon as it is known that all the memory it reads is there, and where the comparison fails its result is dropped.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves
from typing_extensions import override

from diffkern.blocks.pieces import calls_are_watched, untouched
from diffkern.cache import kept_of, memory
from diffkern.graph import ModuleSnapshot, StepCall, StepGraphs, is_constant
from diffkern.graph.capture import CaptureError, NoRoomError
from diffkern.graph.steps import FIRST_CALL
from diffkern.graph.timing import Stage, Stopwatch
from diffkern.injection import hooks, layout_fusion, notes
from diffkern.injection.patching import patch_of, patches, run_below
from diffkern.injection.rewrite_fusion import RewriteFusion
from diffkern.injection.state import ATTRIBUTE, StrictModeError
from diffkern.rewrite.span import Span, with_span
from diffkern.verify.fusion import Fusion

_log = logging.getLogger(__name__)

#: What graphs may take of the free memory where times decide and no bound was given: the VAE needs some later.
FREE_SHARE = 0.25
_UNTIMED = (Stage.WARM_UP, Stage.UNREAD, Stage.STOCK)
#: The call whose blocks a thread runs.
_in_thread = threading.local()


@dataclass(frozen=True, eq=False)
class _Blocks:
    """How the blocks of a model are captured alone."""

    forward: FunctionType  # the forward of its class, which has its blocks run by the fusion
    reason: str  # why a step as a whole is not captured
    skip: int  # how many loops over blocks stand before them
    graphs: StepGraphs = field(default_factory=StepGraphs)  # the graphs of the blocks


@dataclass(frozen=True)
class GraphFusion(Fusion):
    """A model whose forward is replayed from a CUDA graph. A call of a new kind runs as it is; the next is captured."""

    by_time: bool = False  # whether only what is measured to be faster so is replayed
    #: GiB that graphs may take on a device; None for what there is, or a share of it if times decide.
    memory: float | None = None

    op = "cuda_graph"
    is_model = True
    #: There is nothing to prove: a graph repeats the kernels of the call that it was captured from.
    proves_itself = True

    @override
    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> StepCall | None:
        if torch.compiler.is_compiling():
            return None  # a graph of the compiler holds what runs below, and not this
        return StepCall(*tree_flatten((args, dict(kwargs))))

    @override
    def primary_input(self, call: StepCall) -> Tensor:
        return call.tensors[0]

    @override
    def declines(self, module: nn.Module, call: StepCall | None) -> str | None:
        reason = "inside of torch.compile" if call is None else unfit_call(call)
        if reason is not None:
            return reason
        assert call is not None
        if not self.by_time and layout_fusion.is_undecided(module):
            return "the layout in which it computes is decided first"
        graphs, blocks = self.graphs(module), self._blocks(module)
        stage = None
        reason = graphs.failure(call) if blocks is None else None
        if reason is None and self.by_time:
            reason = unasked(module)
            if reason is None:
                stage = graphs.weigh(call)
                if stage is Stage.WARM_UP and is_compiled_inside(module) and call.trial is not None:
                    stage = call.trial.give_up("torch.compile compiles parts of it")
                if stage in _UNTIMED:
                    reason = call.trial.reason if call.trial and call.trial.reason else stage.value
                self._tell(module, call)
                if stage is Stage.STOCK and blocks is not None and call.trial is not None:
                    blocks.graphs.kinds.pop(call.trial.signature, None)
        if reason is not None:
            return reason
        device = call.tensors[0].device
        if stage is Stage.REPLAY_TIMED:
            call.stopwatch = Stopwatch(device, call.began)
        if blocks is None:
            reason = self._admit(module, graphs, call)
        if stage is Stage.TIMED and reason in (None, FIRST_CALL):
            call.stopwatch = Stopwatch(device)
            return None
        if stage is Stage.REPLAY_TIMED and reason is not None and call.trial is not None:
            call.trial.obstacle = reason
        return reason

    def _admit(self, module: nn.Module, graphs: StepGraphs, call: StepCall) -> str | None:
        """Why a call is neither replayed nor captured as things are now, or None."""
        graphs.speculate(call)
        now = graphs.snapshot(module, patches(module))
        unfit, reason = now.unfit(), unsafe(module, now)
        if unfit is not None or (reason is not None and self.by_time):  # a look at every call would cost time
            graphs.rest(unfit or reason or "")
        return reason or graphs.check_guards(call, now, _patched(now))

    @override
    def allowed_in_strict(self, module: nn.Module, call: StepCall | None) -> bool:
        """Whether it only was not captured yet, or none was asked for."""
        if self.by_time or call is None:
            return True
        return unfit_call(call) is None and call.signature in self.graphs(module).kinds

    @override
    def compute(self, module: nn.Module, call: StepCall, provider: str | None, stock: tuple[str, ...]) -> Any:
        trial, stopwatch = call.trial, call.stopwatch
        if trial is not None and trial.stage is Stage.TIMED and stopwatch is not None:
            self._count_as_stock(module, Stage.TIMED.value)
            result = self.stock(module, call)
            stopwatch.stop()
            trial.as_is.append(stopwatch)
            return result
        blocks = self._blocks(module)
        if blocks is None:
            result, reason = self._run_whole(module, call)
        else:
            outer, _in_thread.call = getattr(_in_thread, "call", None), call
            args, kwargs = call.arguments()
            try:
                result, reason = blocks.forward(module, *args, **kwargs), call.obstacle
            finally:
                _in_thread.call = outer
        if reason is not None:
            if trial is not None:
                trial.obstacle = reason
                self._tell(module, call)
            self._count_as_stock(module, reason, allowed=call.pending)
        elif trial is not None and stopwatch is not None and call.replayed:
            stopwatch.stop()
            trial.replays.append(stopwatch)
        return result

    def _run_whole(self, module: nn.Module, call: StepCall) -> tuple[Any, str | None]:
        """The result, and why it was computed as it is, if it was."""

        def forward(call: StepCall, leaves: list[Any]) -> Any:
            return run_below(module, *call.arguments(leaves), self)

        graphs = self.graphs(module)
        try:
            return graphs.run(call, module, patches(module), _patched, forward, lambda: self._limit(graphs, call)), None
        except CaptureError as error:
            reason = graphs.failure(call)
            assert reason is not None
            if (isinstance(error, NoRoomError) or not self._capture_blocks(module, reason)) and call.trial is not None:
                call.trial.give_up(reason)
        return self.stock(module, call), reason

    # --- the blocks alone, where a step as a whole cannot be captured -------------------------------------------

    def _capture_blocks(self, module: nn.Module, reason: str, skip: int = 0) -> bool:
        """Has the blocks of a model captured from now on, if its forward has such a form; returns whether it has."""
        key, state = f"blocks {self.by_time}", patch_of(module, self)
        if key in memory(module) and not skip:
            return False  # which were tried
        below = [fusion for patch in patches(module) if (fusion := patch.fusion) is not self]
        readable = all(fusion.is_model or isinstance(fusion, RewriteFusion) for fusion in below)
        forward = with_span(module, self._run_span, skip) if readable else "another forward runs in its place"
        if isinstance(forward, str):
            return False
        memory(module)[key] = _Blocks(forward, reason, skip)
        if state is not None and state.site is not None:
            state.site.reason = f"its blocks alone are captured, since a step as a whole {reason}"
        return True

    def _run_span(self, module: nn.Module, span: Span, values: dict[str, Any]) -> tuple[Any, ...]:
        """Runs the blocks of a model: from a graph, or as they are."""
        step: StepCall = _in_thread.call
        blocks = self._blocks(module)
        if blocks is None:  # dropped by another thread
            return span(module, values)
        call, moved = StepCall(*tree_flatten(((), values))), False
        # Tables that a head leaves on the CPU, which every block copies.
        for i, leaf in enumerate(call.leaves):
            if type(leaf) is Tensor and leaf.device.type == "cpu" != step.tensors[0].device.type:
                call.leaves[i], moved = leaf.to(step.tensors[0].device, non_blocking=True), True
        graphs = blocks.graphs
        reason = unfit_call(call) or graphs.failure(call) or self._admit(module, graphs, call)
        step.pending = call.signature in graphs.kinds
        if step.trial is not None:
            step.trial.signature = call.signature
        if reason is None:

            def forward(call: StepCall, leaves: list[Any]) -> Any:
                return span(module, call.arguments(leaves)[1])

            try:
                result = graphs.run(call, module, patches(module), _patched, forward, lambda: self._limit(graphs, call))
                step.replayed = call.replayed
                if not moved or call.replayed:
                    return tuple(result)
                as_is = span(module, values)
                if not _equal(result, as_is):
                    reason = "cannot be captured: its blocks compute on the CPU, where a graph would on the GPU"
                    graphs.fail(call, reason)
                    step.obstacle = reason
                    if step.trial is not None:
                        step.trial.give_up(reason)
                return as_is
            except CaptureError as error:
                reason = graphs.failure(call)
                assert reason is not None
                again = not isinstance(error, NoRoomError)
                again = again and self._capture_blocks(module, blocks.reason, blocks.skip + 1)
                if not again and not any(kind.step for kind in graphs.kinds.values()):
                    memory(module)[f"blocks {self.by_time}"] = None
                if not again and step.trial is not None:
                    step.trial.give_up(reason)
        step.obstacle = reason
        return span(module, values)

    def _blocks(self, module: nn.Module) -> _Blocks | None:
        blocks: _Blocks | None = memory(module).get(f"blocks {self.by_time}")
        return blocks

    def graphs(self, module: nn.Module) -> StepGraphs:
        """The graphs of a module, which go with its patch."""
        return kept_of(module, f"graphs {self.by_time}", StepGraphs)

    def _limit(self, graphs: StepGraphs, call: StepCall) -> int | None:
        """The memory that graphs may take, in bytes."""
        if self.memory is not None:
            return int(self.memory * 2**30)
        device = call.tensors[0].device
        return graphs.pool(device).room(device, FREE_SHARE) if self.by_time else None

    def _tell(self, module: nn.Module, call: StepCall) -> None:
        """Says once for each kind of call what its times came to, in the report and in the log."""
        trial = call.trial
        if trial is None or trial.told or not trial.reason:
            return
        state = patch_of(module, self)
        if state is None or state.site is None:
            return
        trial.told = True
        shape = "x".join(map(str, call.tensors[0].shape))
        site = state.site
        site.waiting = site.waiting and trial.stage is not Stage.REPLAY
        notes.graph_decided(state.report, site.path or type(module).__name__, shape, trial)
        _log.info("%s, input %s: %s", site.path or type(module).__name__, shape, trial.reason)

    def _count_as_stock(self, module: nn.Module, reason: str, allowed: bool = False) -> None:
        """Corrects the count of a call that was admitted, and then could not be captured, or not yet if ``allowed``.

        Raises:
            StrictModeError: the injection was strict.
        """
        state = patch_of(module, self)
        if state is None:
            return
        state.take_fused_back()
        if state.strict and not self.by_time and not allowed:
            raise StrictModeError(f"{type(module).__name__} cannot run as a CUDA graph: it {reason}")
        state.add_stock(reason)

    @override
    def stock(self, module: nn.Module, call: StepCall) -> Any:
        return run_below(module, *call.arguments(), self)


def _equal(result: Any, other: Any) -> bool:
    """Whether two nests of tensors are equal bit for bit."""
    pairs = zip(tree_leaves(result), tree_leaves(other), strict=True)
    return all(torch.equal(one, two) if isinstance(one, Tensor) else one == two for one, two in pairs)


def unfit_call(call: StepCall) -> str | None:
    """Why a call cannot be captured, whatever the module; or None."""
    tensors = call.tensors
    if not tensors or any(not tensor.is_cuda or tensor.device != tensors[0].device for tensor in tensors):
        return "its inputs are not all on one GPU"
    if any(not isinstance(leaf, Tensor) and not is_constant(leaf) for leaf in call.leaves):
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


def unasked(module: nn.Module) -> str | None:
    """Why steps of a module are only captured where that was asked for, or None."""
    if any(slot.owner is not module or slot.name != "forward" for slot in hooks.slots(module)):
        return "a hook sits on it, which may offload it"
    return "torch.distributed runs" if is_distributed() else None


def is_distributed() -> bool:
    """Whether this process is one of several that compute together."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_compiled_inside(module: nn.Module) -> bool:
    """Whether ``torch.compile`` compiles a module or a part of it, and may capture graphs of its own."""
    return any(child._compiled_call_impl is not None for child in module.modules())


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
