"""Which steps of a module are captured, and which capture is replayed.

A call is captured if everything it depends on is as it was at the last call of its kind; before that it runs as it is,
and so do proofs, caches and libraries that set themselves up. A kind of call that cannot be captured runs as it is for
good, with a reason.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_unflatten

from diffkern import cache
from diffkern.blocks import fp8
from diffkern.graph.capture import CONSTANTS, CapturedStep, CaptureError, GraphPool, NoRoomError, capture
from diffkern.graph.snapshot import ModuleSnapshot
from diffkern.graph.timing import Stage, Stopwatch, Trial

#: Kinds of calls that a module keeps, the most recently used ones; each graph holds the activations of a step.
MAX_GRAPHS = 4
#: A kind of call before which something changed so often in a row is not captured.
MAX_CHANGES = 4
#: After so many kinds of calls that could not be captured no other one is tried.
MAX_FAILURES = 8

#: While weights come and go, or cannot be looked at, it is only seen after so many calls that they stay.
RESTING_CALLS = 16
#: Kinds of calls whose times are known.
_MAX_TRIALS = 64
#: A kind whose graph went so often to make room for others has none any more, where times decide.
_MAX_EVICTIONS = 2

#: Also where it is the first one in its thread.
FIRST_CALL = "the first call of its kind runs as it is, the next one is captured"


@dataclass
class StepCall:
    """The arguments of a call, flattened.

    Attributes:
        leaves: The arguments.
        spec: How they were nested.
        speculative: The graph that was replayed for it, and the result, before it is known whether it may be used.
        kind: What is known of calls like this one, once it is to be captured or replayed.
        began: When the host began it, in seconds.
        trial: What is known of the times of such calls, where times decide.
        stopwatch: What times this one, if it is timed.
        replayed: Whether a graph that was there before it was replayed for it.
        obstacle: Why its blocks ran as they are, where only these are captured.
        pending: Whether their next call may be captured.
    """

    leaves: list[Any]
    spec: TreeSpec
    speculative: tuple[CapturedStep, Any] | None = None
    kind: _Kind | None = None
    began: float = field(default_factory=time.perf_counter)
    trial: Trial | None = None
    stopwatch: Stopwatch | None = None
    replayed: bool = False
    obstacle: str | None = None
    pending: bool = False

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @cached_property
    def signature(self) -> Hashable:
        """Calls with the same one differ in the contents of their tensors alone."""
        return self.spec, tuple(
            (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
            if isinstance(leaf, Tensor)
            else (type(leaf), _frozen(leaf))
            for leaf in self.leaves
        )

    def arguments(self, leaves: list[Any] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as they were, or others nested like them."""
        args, kwargs = tree_unflatten(self.leaves if leaves is None else leaves, self.spec)
        return args, kwargs


def _frozen(value: Any) -> Hashable:
    """A plain value as it is compared: -0.0 is not 0.0, and sets have no hash."""
    if isinstance(value, (float, complex)):
        return repr(value)
    frozen: Hashable = frozenset(value) if isinstance(value, set) else value
    return frozen


def is_constant(leaf: Any) -> bool:
    """Whether a graph may have a value written into it: a plain value, or a set of them."""
    if isinstance(leaf, (set, frozenset)):
        return all(isinstance(value, CONSTANTS) for value in leaf)
    return isinstance(leaf, CONSTANTS)


@dataclass
class _Kind:
    """Calls of one signature.

    Attributes:
        snapshot: The state of the module at the last of them.
        derived: Its derived tensors then.
        changes: How often in a row one of the two had changed.
        step: The graph, once there is one.
    """

    snapshot: ModuleSnapshot
    derived: list[Hashable]
    changes: int = 0
    step: CapturedStep | None = None


def derived_state(patched: Iterable[nn.Module]) -> list[Hashable]:
    """Which tensors are computed ahead for a step; equal as long as they are the same ones, from unchanged sources."""
    return [cache.generation(), *map(fp8.state_of, patched)]


@dataclass
class StepGraphs:
    """The graphs of one module.

    Attributes:
        kinds: What is known of the calls by signature, the most recent last.
        failures: Why calls of a signature are not captured.
        trials: What is known of the times of calls by signature, where times decide.
    """

    kinds: OrderedDict[Hashable, _Kind] = field(default_factory=OrderedDict)
    failures: dict[Hashable, str] = field(default_factory=dict)
    trials: OrderedDict[Hashable, Trial] = field(default_factory=OrderedDict)
    _evictions: Counter[Hashable] = field(default_factory=Counter)
    _latest: ModuleSnapshot | None = None
    _resting: tuple[int, str] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.local = field(default_factory=threading.local)
    _pools: dict[tuple[torch.device, int], GraphPool] = field(default_factory=dict)

    def pool(self, device: torch.device) -> GraphPool:
        """The memory of its graphs on the current stream of a device."""
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        return self._pools.setdefault((device, stream), GraphPool(device))

    def failure(self, call: StepCall) -> str | None:
        """Why calls like this one are not captured any more, or None."""
        if self._resting is not None:
            calls, reason = self._resting
            self._resting = (calls - 1, reason) if calls > 1 else None
            return reason
        failure = self.failures.get(call.signature)
        if failure is None and len(self.failures) >= MAX_FAILURES:
            first = next(iter(self.failures.values()))
            failure = f"{MAX_FAILURES} kinds of calls have no graph, so no more are tried: {first}"
        return failure

    def weigh(self, call: StepCall) -> Stage:
        """What a call is for where times decide: to be timed, to be replayed, or neither."""
        trial = call.trial = self.trials.setdefault(call.signature, Trial())
        self.trials.move_to_end(call.signature)
        if len(self.trials) > _MAX_TRIALS:
            self.trials.popitem(last=False)
        if self._evictions[call.signature] >= _MAX_EVICTIONS:
            trial.give_up(f"more than {MAX_GRAPHS} kinds of calls take turns")
        stage = trial.advance()
        if stage is Stage.STOCK:
            self.fail(call, trial.reason)
        return stage

    def rest(self, reason: str) -> None:
        """Has the next calls run as they are without a look at the module, which takes longer than it is worth."""
        self._resting = RESTING_CALLS, reason

    def speculate(self, call: StepCall) -> None:
        """Starts the replay of a call if that does no harm, so that the GPU works while the host compares."""
        kind = self.kinds.get(call.signature)
        if kind is not None and kind.step is not None and kind.snapshot.is_there():
            call.speculative = kind.step, kind.step.replay(call.tensors)

    def snapshot(self, module: nn.Module, patches: Iterable[object]) -> ModuleSnapshot:
        """The state of the module now; the one found last, if that holds still."""
        patches = [*patches]
        latest = self._latest
        if latest is None or not latest.is_of(patches) or not latest.holds():
            latest = ModuleSnapshot(module, patches)
            # What cannot be compared is not kept: it might hold the module itself.
            self._latest = None if latest.opaque else latest
        return latest

    def check_guards(self, call: StepCall, now: ModuleSnapshot, patched: Iterable[nn.Module]) -> str | None:
        """Why a call is neither replayed nor captured, or None; notes the state of the module for the next one."""
        # Libraries set themselves up in each thread, which a capture does not allow.
        warm, self._thread.warm = getattr(self._thread, "warm", False), True
        kind = self.kinds.get(call.signature)
        if kind is not None and kind.step is not None:
            used = [one for one in [own() for own in kind.step.caches] if one is not None]
            cache.start_round(call.tensors[0].device, used)  # a replay calls no block that would
        derived = derived_state(patched)
        if kind is None:
            reason, kind = FIRST_CALL, _Kind(now, derived)
        else:
            change = None if kind.snapshot is now else kind.snapshot.difference(now)
            changed = change or ("what is computed ahead from the weights" if kind.derived != derived else None)
            if changed is None:
                kind.snapshot = now  # of which the quick comparison is true
                call.kind = kind
                self._note(call.signature, kind)
                return None if warm or kind.step is not None else FIRST_CALL
            reason = f"{changed} changed since the last call of its kind"
            kind = _Kind(now, derived, kind.changes + (change is not None))
            if kind.changes >= MAX_CHANGES:
                reason = self.failures[call.signature] = f"{change} changes from call to call"
                self.kinds.pop(call.signature, None)
                return reason
        self._note(call.signature, kind)
        return reason

    def _note(self, signature: Hashable, kind: _Kind) -> None:
        """Makes a kind of calls the most recent one, and drops the oldest if there are too many."""
        self.kinds.pop(signature, None)
        self.kinds[signature] = kind
        while len(self.kinds) > MAX_GRAPHS:
            oldest, evicted = self.kinds.popitem(last=False)
            self._evictions[oldest] += evicted.step is not None

    def run(
        self,
        call: StepCall,
        module: nn.Module,
        patches: Iterable[object],
        patched: Callable[[ModuleSnapshot], Iterable[nn.Module]],
        forward: Callable[[StepCall, list[Any]], Any],
        limit: Callable[[], int | None] = lambda: None,
    ) -> Any:
        """Replays a call that was admitted, or captures it first.

        Args:
            call: The call.
            module: The module.
            patches: Its patches, see :class:`ModuleSnapshot`.
            patched: Finds the modules in it that have derived tensors.
            forward: Runs the step on flattened arguments.
            limit: The memory that graphs may take, in bytes; None for what there is.

        Raises:
            CaptureError: it cannot be captured, nor will calls like it be. Nothing was computed.
        """
        kind = call.kind
        assert kind is not None
        if kind.step is not None:
            call.replayed = True
            speculated, result = call.speculative or (None, None)
            return result if speculated is kind.step else kind.step.replay(call.tensors)
        with self._lock:  # two threads may meet here
            if kind.step is not None:
                return kind.step.replay(call.tensors)
            try:
                pool = self.pool(call.tensors[0].device)
                step = capture(lambda leaves: forward(call, leaves), call.leaves, pool, limit())
            except CaptureError as error:
                self.fail(call, f"cannot be captured: {error}")
                if isinstance(error, NoRoomError):  # what the pool grew by is free once no graph is left in it
                    self.kinds.clear()
                raise
            for child in module.modules():
                if child is not module:
                    step.kept.extend(cache.entries_of(child))
                    step.caches.extend(map(weakref.ref, cache.caches_of(child)))
            after = self.snapshot(module, patches)
            derived = derived_state(patched(after))
            change = kind.snapshot.difference(after)
            if change is not None:  # which replays would not do; this once it was done
                self.fail(call, f"its forward keeps state: {change}")
            elif derived == kind.derived:
                kind.snapshot, kind.step = after, step
            else:
                kind.derived = derived
            return step.replay(call.tensors)

    def fail(self, call: StepCall, reason: str) -> None:
        """Drops what is known of calls like this one, none of which is captured from now on."""
        self.failures[call.signature] = reason
        self.kinds.pop(call.signature, None)
