"""Capturing a step as a CUDA graph, and replaying it; a capture that fails leaves the device as it was.

A capture is lost for good once something in it waits for the GPU (``.item()``, a copy from the CPU): CUDA invalidates
it, and ``capture_end`` raises before it has told the allocator and the random generator that the capture is over. So
everything is told here, one by one. Left alone, memory that other streams used would never be given back, and the next
random number would raise "Offset increment outside graph capture encountered unexpectedly".
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, WeakSet

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from diffkern.cache import DerivedCache
from diffkern.providers.foreign import summary

#: Plain values that a graph has written into it.
CONSTANTS = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)

#: Replays of a graph that only its time is wanted of; the first one uploads it.
_REPLAYS_TIMED = 4

#: Characters of an error that are told.
_LONGEST = 200

#: PyTorch captures one graph at a time in a process.
_one_at_a_time = threading.Lock()
_streams: dict[torch.device, torch.cuda.Stream] = {}
#: Graphs whose capture was lost: allocators may go on asking them whether they are capturing.
_lost: list[torch.cuda.CUDAGraph] = []


class CaptureError(Exception):
    """A step cannot be captured; the message says why. Nothing was computed, and the device can be used."""


class NoRoomError(CaptureError):
    """The graph would take more memory than it may."""


@dataclass(eq=False)
class GraphPool:
    """The memory of the graphs of one module that are replayed on one stream of a device, one after the other.

    Results of a replay are copied before the next one starts, so the graphs share what they need in between. A capture
    that fails may leave its pool in a state in which no other capture should find it: so each module has its own, and
    nothing is captured in a pool any more in which a capture failed.

    Attributes:
        device: Where it is.
        lock: Held by a thread while it gives the GPU one replay.
        free: The end of the last replay.
        size: What the graphs take, in bytes.
    """

    device: torch.device | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    free: torch.cuda.Event | None = None
    size: int = 0
    _graphs: WeakSet[torch.cuda.CUDAGraph] = field(default_factory=WeakSet)
    _handle: Any = None

    def __post_init__(self) -> None:
        _pools.add(self)

    def handle(self) -> Any:
        """How PyTorch knows the pool; it frees one whose last graph went, so that the next graph begins another."""
        if not len(self._graphs):
            self._handle, self.size = None, 0
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def leave(self) -> None:
        """Has the next capture begin another pool: one failed in this."""
        self._handle = None

    def taken(self) -> int:
        """What all graphs on its device take, in bytes."""
        return self.size + sum(pool.size for pool in [*_pools] if pool is not self and pool.device == self.device)

    def add(self, graph: torch.cuda.CUDAGraph, size: int) -> None:
        """Notes a graph that was captured, and by how much the pool grew for it."""
        self._graphs.add(graph)
        self.size += size

    def room(self, device: torch.device, share: float) -> int:
        """What all graphs on a device may take if they may have this share of the memory that is free."""
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int((torch.cuda.mem_get_info(device)[0] + cached) * share)


_pools: WeakSet[GraphPool] = WeakSet()


@dataclass(frozen=True)
class CapturedStep:
    """A captured step.

    Attributes:
        graph: The graph.
        inputs: The tensors it reads, in the order of the flattened arguments.
        outputs: What it writes, flattened.
        spec: How the outputs were nested.
        pool: Where it computes.
        kept: What else it reads, kept alive.
        caches: Those that keep it, which a replay uses and does not call; not kept alive.
    """

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: list[Any]
    spec: TreeSpec
    pool: GraphPool
    kept: list[Any] = field(default_factory=list)
    caches: list[ReferenceType[DerivedCache]] = field(default_factory=list)

    def replay(self, tensors: Sequence[Tensor]) -> Any:
        """Has the GPU compute the step; other threads and streams wait for the inputs and outputs to be free again."""
        with self.pool.lock, torch.cuda.device(self.inputs[0].device):
            if self.pool.free is None:
                self.pool.free = torch.cuda.Event()
            self.pool.free.wait()
            for static, tensor in zip(self.inputs, tensors, strict=True):
                static.copy_(tensor)
            self.graph.replay()
            # Copies: the next replay writes where this one did.
            leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self.outputs]
            self.pool.free.record()
        return tree_unflatten(leaves, self.spec)


def capture(
    run: Callable[[list[Any]], Any], leaves: Sequence[Any], pool: GraphPool, limit: int | None = None
) -> CapturedStep:
    """Captures one step on copies of its inputs.

    Args:
        run: Runs the step on flattened arguments.
        leaves: The arguments, flattened: tensors on one GPU, and constants.
        pool: Where it shall compute.
        limit: Bytes that all graphs on the device may have; None for what there is.

    Raises:
        CaptureError: the step cannot be captured.
        NoRoomError: they would take more than ``limit``.
    """
    copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    inputs = [leaf for leaf in copies if isinstance(leaf, Tensor)]
    versions = [tensor._version for tensor in inputs if not tensor.is_inference()]
    on_cpu = torch.get_rng_state()
    with _one_at_a_time:
        graph, result = _capture(lambda: run(copies), inputs[0].device, pool)
    reason = None
    if versions != [tensor._version for tensor in inputs if not tensor.is_inference()]:
        reason = "its forward writes into its inputs"
    elif not torch.equal(on_cpu, torch.get_rng_state()):
        torch.set_rng_state(on_cpu)
        reason = "its forward draws random numbers on the CPU"
    outputs, spec = tree_flatten(result)
    strange = next((leaf for leaf in outputs if type(leaf) is not Tensor and not isinstance(leaf, CONSTANTS)), None)
    if strange is not None:
        reason = f"its result holds a {type(strange).__name__}, which is neither a plain tensor nor a plain value"
    elif any(isinstance(leaf, Tensor) and leaf.device != inputs[0].device for leaf in outputs):
        reason = "its result is not all on the GPU of its inputs"
    if limit is not None and (taken := pool.taken()) > limit:
        sizes = f"{taken / 2**30:.2f} GiB, and may take {limit / 2**30:.2f} GiB (graph_memory)"
        raise NoRoomError(f"CUDA graphs would take {sizes}")
    if reason is not None:
        raise CaptureError(reason)
    return CapturedStep(graph, inputs, outputs, spec, pool)


def replay_time(run: Callable[[], Any], device: torch.device) -> float | None:
    """What a GPU takes for a computation as a CUDA graph, in microseconds; None if it cannot be captured.

    Nothing is left of the graph. The computation must have run before, and what it writes to must outlive it.
    """
    if not _one_at_a_time.acquire(timeout=1.0):  # another thread captures, and may wait for a lock of this one
        return None
    try:
        graph, _ = _capture(run, device, GraphPool())
    except CaptureError:
        return None
    finally:
        _one_at_a_time.release()
    stream, took = torch.cuda.current_stream(device), float("inf")
    with torch.cuda.device(device):
        for _ in range(_REPLAYS_TIMED):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            took = min(took, start.elapsed_time(end) * 1e3)
    graph.reset()
    return took


def _capture(run: Callable[[], Any], device: torch.device, pool: GraphPool) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Captures ``run`` on a stream of its own.

    Raises:
        CaptureError: that failed. Streams, allocators and random generators are as they were before.
    """
    on_gpu, on_cpu = torch.cuda.get_rng_state(device), torch.get_rng_state()
    with torch.cuda.device(device):
        graph, handle = torch.cuda.CUDAGraph(), pool.handle()
        begun = False
        try:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()  # the pool of a graph cannot use what is cached
            reserved = torch.cuda.memory_reserved(device)
            with torch.cuda.stream(_stream(device)):
                # Other threads may go on computing.
                graph.capture_begin(pool=handle, capture_error_mode="thread_local")
                begun = True
                result = run()
                graph.capture_end()
            pool.add(graph, torch.cuda.memory_reserved(device) - reserved)
            return graph, result
        except BaseException as error:
            reason = summary(error, _LONGEST)
            if not isinstance(error, Exception):
                clean_up(graph, handle, device, begun)
                pool.leave()
                raise
        # Here the exception is gone, and with it the tensors of the frames it came through.
        clean_up(graph, handle, device, begun)
        pool.leave()
        torch.set_rng_state(on_cpu)
        if not torch.equal(on_gpu, torch.cuda.get_rng_state(device)):
            torch.cuda.set_rng_state(on_gpu, device)
    raise CaptureError(reason)


def clean_up(graph: torch.cuda.CUDAGraph, handle: Any, device: torch.device, begun: bool) -> None:
    """Ends a capture that failed, wherever it did. Its pool is released once: other graphs may use it."""
    ended = False
    if begun:
        # Ends it, if it is valid still: an error of Python's in the middle of it.
        with contextlib.suppress(RuntimeError), torch.cuda.stream(_stream(device)):
            graph.capture_end()
        with contextlib.suppress(RuntimeError):  # raised by a graph whose capture did not end
            graph.pool()
            ended = True
    if not ended:
        for end in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            with contextlib.suppress(RuntimeError, AttributeError):
                getattr(torch._C, end)(device.index, handle)
        _lost.append(graph)
    with contextlib.suppress(RuntimeError):
        graph.reset()
    # In some versions of torch the generator only leaves its capturing mode at the end of a capture that succeeds.
    spare = torch.cuda.CUDAGraph()
    try:
        value = torch.zeros(1, device=device)
        torch.cuda.synchronize(device)
        with torch.cuda.stream(_stream(device)):
            spare.capture_begin(capture_error_mode="thread_local")
            value.add_(1)
            spare.capture_end()
        spare.reset()
    except RuntimeError as error:
        _lost.append(spare)
        reason = summary(error, _LONGEST)
        warnings.warn(f"diffkern: after a failed capture the GPU captures no more: {reason}", stacklevel=2)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def _stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
